"""RULER's variable tracking (vt): one chain of four hops through filler.

Templates and settings: NVIDIA/RULER, scripts/data/synthetic/constants.py, variable_tracking.py and
scripts/synthetic.yaml. The worked example before the question's own text stands in the same turn, as with RULER's base
template. RULER gives it 500 tokens; below a length of 1024, where that is too much, it gets a third of the length.
Filler is counted in sentences and not in lines of five, so that lengths are met within 2 %.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from qevict.bench import metrics
from qevict.bench.ruler.fit import largest, room, too_short
from qevict.bench.ruler.haystacks import FILLER, filler_lines, hide_between_lines
from qevict.bench.sample import Sample, generator

CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
QUESTION = "Question: Find all variables that are assigned the value {query} in the text above."
ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{num_v} variables are assigned the value {query}, they are: "
)

HOPS = 4
MAX_NEW_TOKENS = 30
_EXAMPLE_TOKENS = 500
_FULL_EXAMPLE_FROM = 1024


@dataclass(frozen=True)
class VariableTask:
    """Which variables have a value, directly or by assignment from one another?"""

    name: str = "ruler/vt"

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """See `Task.samples`."""
        space = room(tokenizer, length, self.name)
        for index in range(count):
            rng = generator(self.name, seed, index)
            example = _example(tokenizer, space.tokens, rng.getrandbits(64))
            build = partial(self._build, f"{length}-{seed}-{index}", example, rng.getrandbits(64))
            size = space.largest(build)
            if size is None:
                raise too_short(self.name, space.tokens)
            yield build(size)

    def score(self, prediction: str, sample: Sample) -> float:
        return metrics.string_match_all(prediction, sample.answers)

    def _build(self, identity: str, example: str, seed: int, sentences: int) -> Sample:
        context, question, prefix, variables = _problem(random.Random(seed), sentences, letters=5)
        return Sample(self.name, identity, identity, example + context, question, prefix, variables, MAX_NEW_TOKENS)


def _problem(rng: random.Random, sentences: int, letters: int) -> tuple[str, str, str, tuple[str, ...]]:
    """Context, question, answer prefix and the chain's variables, each with so many letters."""
    variables: list[str] = []
    while len(variables) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in variables:
            variables.append(name)
    value = str(rng.randrange(10_000, 99_999))
    # The space at the end of an assignment is RULER's.
    chain = [f"VAR {variables[0]} = {value}"]
    chain += [f"VAR {variables[hop + 1]} = VAR {variables[hop]} " for hop in range(HOPS)]
    text = hide_between_lines(filler_lines(sentences), chain, rng)
    prefix = ANSWER_PREFIX.format(num_v=HOPS + 1, query=value)
    return CONTEXT.format(context=text), QUESTION.format(query=value), prefix, tuple(variables)


def _example(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> str:
    """A solved problem of as many whole lines as its share of the length holds, and the empty line after it."""
    limit = _EXAMPLE_TOKENS if length >= _FULL_EXAMPLE_FROM else length // 3
    solved: Callable[[int], str] = partial(_solved, seed)
    lines = largest(lambda n: len(tokenizer(solved(n), add_special_tokens=False).input_ids) <= limit, 0, limit)
    return solved(lines or 0)


def _solved(seed: int, lines: int) -> str:
    context, question, prefix, variables = _problem(random.Random(seed), lines * len(FILLER), letters=3)
    return f"{context}{question}{prefix} {' '.join(variables)}\n\n"
