"""RULER's eight needle tasks: single 1-3, multi-key 1-3, multi-value, multi-query.

Templates and settings: NVIDIA/RULER, scripts/data/synthetic/constants.py and scripts/synthetic.yaml. Differences: the
size of the haystack is found for each sample (RULER finds it once); filler is counted in sentences and not in lines of
five, and what the last whole line of keys and values leaves free is filled up with filler, so that lengths are met
within 2 %; keys and values of one sample are all different.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from qevict.bench import metrics
from qevict.bench.ruler.fit import room, too_short
from qevict.bench.ruler.haystacks import essay_words, filler_lines, hide_between_lines, hide_in_essay
from qevict.bench.ruler.wording import NEEDLES, NEEDLES_REWORDED, Wording
from qevict.bench.ruler.wordlists import hyphenated_pair
from qevict.bench.sample import Sample, generator

Kind = Literal["words", "numbers", "uuids"]

MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class NeedleTask:
    """Find what belongs to one key or several, hidden in a haystack.

    Attributes:
        haystack: lines of filler, an essay (the same beginning for every sample, as in RULER), or lines like needles.
        keys, values: what keys and values are.
        key_count, value_count: needles hidden: so many keys, with so many values each.
        query_count: how many of the keys are asked for.
        data: the data folder, needed for essays.
        wording: RULER's own, or another.
    """

    task: str
    haystack: Literal["filler", "essay", "needles"]
    keys: Kind = "words"
    values: Kind = "numbers"
    key_count: int = 1
    value_count: int = 1
    query_count: int = 1
    data: Path | None = None
    wording: Wording = NEEDLES

    @property
    def name(self) -> str:
        """Suite and task, such as `ruler/niah_single_1`."""
        return f"{self.wording.suite}/{self.task}"

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """See `Task.samples`; `extra["depths"]` says how deep in the context each answer lies, from 0 to 1."""
        space = room(tokenizer, length, self.name)
        essay = essay_words(self.data) if self.haystack == "essay" else ()
        for index in range(count):
            identity = f"{length}-{seed}-{index}"
            build = partial(self._build, identity, generator(self.name, seed, index).getrandbits(64), essay)
            size = space.largest(build)
            if size is None:
                raise too_short(self.name, space.tokens)
            if self.haystack == "needles":
                # A line of keys and values may be many tokens; sentences of filler take what is left.
                yield build(size, space.largest(partial(build, size)) or 0)
            else:
                yield build(size)

    def score(self, prediction: str, sample: Sample) -> float:
        return metrics.string_match_all(prediction, sample.answers)

    def _build(self, identity: str, seed: int, essay: tuple[str, ...], size: int, topping: int = 0) -> Sample:
        rng = random.Random(seed)
        fresh = _Fresh(rng)
        needles = {
            key: [fresh(self.values) for _ in range(self.value_count)]
            for key in [fresh(self.keys) for _ in range(self.key_count)]
        }
        asked = rng.sample(list(needles), self.query_count)
        statements = [self._needle(key, value) for key, values in needles.items() for value in values]
        rng.shuffle(statements)
        context = self._hide(statements, essay, size, topping, fresh)

        answers = tuple(value for key in asked for value in needles[key])
        positions = [context.index(self._needle(key, value)) for key in asked for value in needles[key]]
        depths = [position / len(context) for position in positions]
        query = f"{', '.join(asked[:-1])}, and {asked[-1]}" if len(asked) > 1 else asked[0]
        wording = self.wording.for_number(len(answers))
        before, question, prefix = (
            template.format(kind=self.values if len(answers) > 1 else self.values[:-1], context=context, query=query)
            for template in (wording.context, wording.question, wording.answer_prefix)
        )
        return Sample(
            self.name, identity, identity, before, question, prefix, answers, MAX_NEW_TOKENS, {"depths": depths}
        )

    def _hide(self, statements: list[str], essay: tuple[str, ...], size: int, topping: int, fresh: _Fresh) -> str:
        if self.haystack == "essay":
            return hide_in_essay(essay, size, statements, fresh.rng)
        if self.haystack == "filler":
            return hide_between_lines(filler_lines(size), statements, fresh.rng)
        lines = [self._needle(fresh(self.keys), fresh(self.values)) for _ in range(size)]
        return "\n".join([hide_between_lines(lines, statements, fresh.rng), *filler_lines(topping)])

    def _needle(self, key: str, value: str) -> str:
        return self.wording.needle.format(kind=self.values, key=key, value=value)


class _Fresh:
    """Words, numbers and uuids, none of them twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def __call__(self, kind: Kind) -> str:
        while (item := self._draw(kind)) in self._used:
            pass
        self._used.add(item)
        return item

    def _draw(self, kind: Kind) -> str:
        if kind == "words":
            return hyphenated_pair(self.rng)
        if kind == "numbers":
            return str(self.rng.randint(1_000_000, 9_999_999))
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))


def needle_tasks(data: Path | None) -> list[NeedleTask]:
    """The eight of the benchmark."""
    return [
        NeedleTask("niah_single_1", "filler"),
        NeedleTask("niah_single_2", "essay", data=data),
        NeedleTask("niah_single_3", "essay", values="uuids", data=data),
        NeedleTask("niah_multikey_1", "essay", key_count=4, data=data),
        NeedleTask("niah_multikey_2", "needles"),
        NeedleTask("niah_multikey_3", "needles", keys="uuids", values="uuids"),
        NeedleTask("niah_multivalue", "essay", value_count=4, data=data),
        NeedleTask("niah_multiquery", "essay", key_count=4, query_count=4, data=data),
    ]


def reworded_needle_tasks(data: Path | None) -> list[NeedleTask]:
    """The same tasks in other words."""
    return [replace(task, wording=NEEDLES_REWORDED) for task in needle_tasks(data)]
