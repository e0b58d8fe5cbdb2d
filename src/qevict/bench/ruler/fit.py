"""Fitting a sample to a token length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from qevict.bench.prompt import token_count
from qevict.bench.sample import Sample

SHORTEST = 512


@dataclass(frozen=True)
class Room:
    """The tokens that a sample may take: chat template, prompt, answer prefix and the tokens to be generated."""

    tokenizer: PreTrainedTokenizerBase
    tokens: int

    def holds(self, sample: Sample) -> bool:
        return token_count(self.tokenizer, sample) <= self.tokens

    def largest(self, build: Callable[[int], Sample], low: int = 0) -> int | None:
        """The largest size from `low` whose sample fits, or None if not even that of `low` does.

        A size must count something that takes a token at least. The sample of the size found was tried, so it fits even
        where tokens do not quite grow with every step.
        """
        return largest(lambda size: self.holds(build(size)), low, low + self.tokens)


def room(tokenizer: PreTrainedTokenizerBase, length: int | None, task: str) -> Room:
    """Room for samples of that many tokens; raises ValueError if the length is missing or below 512."""
    if length is None or length < SHORTEST:
        raise ValueError(f"{task} is generated to a length, which must be {SHORTEST} tokens at least, not {length}.")
    return Room(tokenizer, length)


def too_short(task: str, length: int) -> ValueError:
    """The error of a task whose smallest sample takes more than `length` tokens."""
    return ValueError(
        f"{length} tokens cannot hold the smallest sample of {task} with this tokenizer and its chat template: "
        "choose a greater length."
    )


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest of low..high that fits, found by doubling the step and then halving; None if `low` does not fit."""
    if not fits(low):
        return None
    good, bad, step = low, high + 1, 1
    while good + step < bad:
        if fits(good + step):
            good, step = good + step, 2 * step
        else:
            bad = good + step
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
