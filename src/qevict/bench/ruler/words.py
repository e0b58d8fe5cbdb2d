"""RULER's aggregation tasks: common words (cwe) and frequent coded words (fwe).

Templates and settings: NVIDIA/RULER, scripts/data/synthetic/constants.py, common_words_extraction.py,
freq_words_extraction.py and scripts/synthetic.yaml. Differences: sizes are found for each sample, a word at a time;
cwe's worked example stands in the same turn as the question, as with RULER's base template. RULER itself makes cwe
smaller below 4096 tokens; below 1024, where the smaller one may not fit either, there is no worked example and a common
word stands four times instead of six. fwe needs no change down to 512; what its rounded frequencies leave free is
filled with more of its dots, so that lengths are met within 2 %.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from qevict.bench import metrics
from qevict.bench.ruler.fit import room, too_short
from qevict.bench.ruler.wording import FREQUENT_WORDS, Wording
from qevict.bench.ruler.wordlists import all_words, hyphenated_pair
from qevict.bench.sample import Sample, generator

COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
)
COMMON_QUESTION = "Question: What are the 10 most common words in the above list?"
COMMON_ANSWER_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON_MAX_NEW_TOKENS = 120
COMMON_WORDS = 10

FREQUENT_MAX_NEW_TOKENS = 50

_ZETA_2 = math.pi**2 / 6  # the normaliser of the benchmark's Zipf distribution, whose exponent is 2
_LETTERS = 6
_FEWEST_DRAWS = 73  # from here on the fourth coded word is always more frequent than the fifth


@dataclass(frozen=True)
class _Repeats:
    """How often a common word and another one stand in a list."""

    common: int
    uncommon: int


@dataclass(frozen=True)
class CommonWordsTask:
    """Which ten words of a list are the most common?"""

    name: str = "ruler/cwe"

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """See `Task.samples`."""
        space = room(tokenizer, length, self.name)
        for index in range(count):
            rng = generator(self.name, seed, index)
            example, repeats = _by_length(space.tokens, rng)
            build = partial(self._build, f"{length}-{seed}-{index}", example, repeats, rng.getrandbits(64))
            size = space.largest(build, low=1)
            if size is None:
                raise too_short(self.name, space.tokens)
            yield build(size)

    def score(self, prediction: str, sample: Sample) -> float:
        return metrics.string_match_all(prediction, sample.answers)

    def _build(self, identity: str, example: str, repeats: _Repeats, seed: int, uncommon: int) -> Sample:
        listed, common = _word_list(random.Random(seed), uncommon, repeats)
        return Sample(
            task=self.name,
            id=identity,
            document=identity,
            context=example + COMMON_CONTEXT.format(context=listed),
            question=COMMON_QUESTION,
            answer_prefix=COMMON_ANSWER_PREFIX,
            answers=tuple(common),
            max_new_tokens=COMMON_MAX_NEW_TOKENS,
        )


@dataclass(frozen=True)
class FrequentWordsTask:
    """Which three coded words are the most frequent? The most frequent of all are dots, which do not count."""

    wording: Wording = FREQUENT_WORDS

    @property
    def name(self) -> str:
        """Suite and task."""
        return f"{self.wording.suite}/fwe"

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """See `Task.samples`."""
        space = room(tokenizer, length, self.name)
        vocabulary = (space.tokens - FREQUENT_MAX_NEW_TOKENS) // 50
        for index in range(count):
            key = generator(self.name, seed, index).getrandbits(64)
            build = partial(self._build, f"{length}-{seed}-{index}", vocabulary, key)
            size = space.largest(build, low=_FEWEST_DRAWS)
            if size is None:
                raise too_short(self.name, space.tokens)
            # One draw more may add several words at once; dots take what is left.
            yield build(size, space.largest(partial(build, size)) or 0)

    def score(self, prediction: str, sample: Sample) -> float:
        return metrics.string_match_all(prediction, sample.answers)

    def _build(self, identity: str, vocabulary: int, seed: int, draws: int, more_dots: int = 0) -> Sample:
        rng = random.Random(seed)
        ranked = ["..."]
        while len(ranked) < vocabulary:
            word = "".join(rng.choices(string.ascii_lowercase, k=_LETTERS))
            if word not in ranked:
                ranked.append(word)
        text = [word for rank, word in enumerate(ranked, 1) for _ in range(int(draws / (rank**2 * _ZETA_2)))]
        text += ranked[:1] * more_dots
        rng.shuffle(text)
        return Sample(
            task=self.name,
            id=identity,
            document=identity,
            context=self.wording.context.format(context=" ".join(text)),
            question=self.wording.question,
            answer_prefix=self.wording.answer_prefix,
            answers=tuple(ranked[1:4]),
            max_new_tokens=FREQUENT_MAX_NEW_TOKENS,
        )


def _by_length(length: int, rng: random.Random) -> tuple[str, _Repeats]:
    """The worked example with the line break after it, and how often words stand in the list itself."""
    if length < 1024:
        return "", _Repeats(4, 1)
    if length < 4096:
        return _example(rng, 10, _Repeats(3, 1)), _Repeats(6, 1)
    return _example(rng, 30, _Repeats(10, 3)), _Repeats(30, 3)


def _example(rng: random.Random, uncommon: int, repeats: _Repeats) -> str:
    listed, common = _word_list(rng, uncommon, repeats)
    return f"{COMMON_CONTEXT.format(context=listed)}{COMMON_QUESTION}{COMMON_ANSWER_PREFIX} {_numbered(common)}\n"


def _word_list(rng: random.Random, uncommon: int, repeats: _Repeats) -> tuple[str, list[str]]:
    """A numbered list in which ten words are common and so many others are not; and the ten."""
    words = list(all_words())
    rng.shuffle(words)
    # Very long contexts want more words than there are (RULER then takes another list, which is not at hand).
    missing = COMMON_WORDS + uncommon - len(words)
    words += [hyphenated_pair(rng) for _ in range(missing)]
    common = words[:COMMON_WORDS]
    listed = common * repeats.common + words[COMMON_WORDS : COMMON_WORDS + uncommon] * repeats.uncommon
    rng.shuffle(listed)
    return _numbered(listed), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
