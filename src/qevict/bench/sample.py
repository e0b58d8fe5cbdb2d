"""What a benchmark consists of: samples, and tasks that make and score them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    Attributes:
        task: the task's name, such as `ruler/niah_single_1`.
        id: unique within the task; the same for the same seed and length.
        document: what clustered statistics group by: the article, or the id where samples share none.
        context: what comes before the question and may be compressed before the question is seen; may be empty.
        question: the rest of the user's turn; nothing stands between the two.
        answer_prefix: how the assistant's answer begins.
        answers: gold answers; whether one or all of them are wanted is the task's.
        max_new_tokens: how much the benchmark lets a model generate.
        extra: what else a metric or a report needs, ready for JSON (`all_classes`, `depths`).
        chat: whether the chat template is applied; LongBench's few-shot tasks go without.
        stop: strings at which the answer ends; see `finished`.
    """

    task: str
    id: str
    document: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    chat: bool = True
    stop: tuple[str, ...] = ()

    def finished(self, text: str) -> bool:
        """Whether what follows `text`, generated so far, cannot change the score, so that generation may end."""
        said = text.lstrip("\n")
        return any(stop in said for stop in self.stop)


@runtime_checkable
class Task(Protocol):
    """A benchmark's task."""

    @property
    def name(self) -> str: ...

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """At most `count` samples: fewer where the data set has fewer.

        Args:
            length: in tokens of `tokenizer`. RULER's tasks are generated to it and need it; LongBench's prompts are cut
                to it; prompts of other tasks are as long as they are, whatever it says.
            seed: the only source of randomness. In data sets it gives the order, so two seeds may share samples.

        Raises:
            DataNotFoundError: a ValueError, if a file is missing; the message says which, and where to get it.
            ValueError: if the length is too small for the task.
        """
        ...

    def score(self, prediction: str, sample: Sample) -> float:
        """From 0 to 1, by the benchmark's own metric; also cuts the prediction where the benchmark cuts it."""
        ...


def shuffled(rows: Sequence[T], *key: object) -> list[T]:
    """The rows in an order that depends on the key alone."""
    order = list(rows)
    generator(*key).shuffle(order)
    return order


def generator(*key: object) -> random.Random:
    """A random generator of its own for each key, the same on every machine."""
    return random.Random("/".join(map(str, key)))
