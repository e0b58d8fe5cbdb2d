"""Samples × cells: one exact prefill a sample, a fork for each cell, all of them decoded together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qevict.bench.cells import FULL, Cell, Failure, build, capture, protected_share
from qevict.bench.decode import Fork, decode, forced_nll
from qevict.bench.protocol import Prompt, Setting
from qevict.bench.sample import Sample
from qevict.methods.base import MeasuredCache
from qevict.trace import PrefillTrace

Key = tuple[str, float | None]


@dataclass(frozen=True)
class Job:
    """A sample, and the cells that are wanted of it."""

    sample: Sample
    cells: tuple[Cell, ...]


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, jobs: Iterable[Job], setting: Setting
) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
    """Evaluate jobs; yields each with its records, one a cell, when its last fork is done.

    Forks of several samples may be decoded together, so a job may overtake another. Jobs are asked for one by one, as
    there is room. Full KV is run with every job, since agreement is measured against it, but recorded only if wanted.
    Records lack what only the task knows: the score.

    Raises:
        ValueError: if a sample cannot be run under the protocol.
    """
    owners: dict[Fork, _Evaluation] = {}

    def groups() -> Iterator[list[Fork]]:
        for job in jobs:
            evaluation = _Evaluation(model, tokenizer, job, setting)
            for group in evaluation.groups():
                owners.update(dict.fromkeys(group, evaluation))
                yield group

    for fork in decode(model, groups(), setting.batch):
        evaluation = owners.pop(fork)
        evaluation.open -= 1
        if evaluation.built and not evaluation.open:
            yield evaluation.job, evaluation.records()


class _Evaluation:
    """A job on its way: what has come of its cells so far."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job, setting: Setting) -> None:
        self.model, self.tokenizer, self.job, self.setting = model, tokenizer, job, setting
        self.prompt = Prompt.of(tokenizer, job.sample, setting)
        self.forks: dict[Key, Fork] = {}
        self.failures: dict[Key, Failure] = {}
        self.gold_nll: dict[Key, float | None] = {}
        self.protected: dict[Key, float | None] = {}
        self.built = False
        self.open = 0

    def groups(self) -> Iterator[list[Fork]]:
        """The forks, full KV's first, in groups that fit a batch. When the last comes, every cell has been tried."""
        cells = [FULL, *(cell for cell in self.job.cells if not cell.is_full)]
        trace = capture(self.model, self.prompt.compressed, [cell.method for cell in cells])
        first = self._exact_token(trace) if self.setting.first_token == "exact" else []
        group: dict[Key, Fork] = {}
        for cell in cells:
            fork = self._fork(cell, trace, first)
            if fork is None:
                continue
            if len(group) == self.setting.batch:
                yield self._started(group)
                group = {}
            group[cell.key] = fork
        self.built = True
        yield self._started(group)

    def records(self) -> list[dict[str, Any]]:
        """A record for each of the job's cells."""
        return [self._record(cell.key) for cell in self.job.cells]

    def _exact_token(self, trace: PrefillTrace) -> list[int]:
        # Models may scale or cap their logits, but never change their order.
        chosen: list[int] = self.model.get_output_embeddings()(trace.last_hidden).argmax(dim=-1).tolist()
        return chosen

    def _fork(self, cell: Cell, trace: PrefillTrace, first: list[int]) -> Fork | None:
        begun = time.perf_counter()
        new_tokens = len(self.prompt.pending) + self.job.sample.max_new_tokens
        scope, dtype = self.setting.scope, self.setting.store_dtype
        cache = build(self.model, trace, cell, new_tokens, scope=scope, store_dtype=dtype)
        if isinstance(cache, Failure):
            self.failures[cell.key] = cache
            return None
        self.protected[cell.key] = protected_share(cache)
        return Fork(
            cache,
            self.prompt.pending or list(first),
            self.job.sample.max_new_tokens,
            self._finished,
            tokens=list(first),
            seconds=time.perf_counter() - begun,
        )

    def _started(self, group: dict[Key, Fork]) -> list[Fork]:
        """The forks of a group, whose gold answers have been forced."""
        caches = [fork.cache for fork in group.values()]
        self.gold_nll |= dict(zip(group, self._gold_nll(caches), strict=True))
        self.forks |= group
        self.open += len(group)
        return list(group.values())

    def _gold_nll(self, caches: Sequence[MeasuredCache]) -> list[float] | list[None]:
        pending, answer = self.prompt.pending, self.prompt.gold
        if not pending:  # the first token comes from the exact prefill and says nothing of a cache: fed, not scored
            pending, answer = answer[:1], answer[1:]
        return forced_nll(self.model, caches, pending, answer) if answer else [None] * len(caches)

    def _finished(self, tokens: list[int]) -> bool:
        sample = self.job.sample
        return bool(sample.stop) and sample.finished(self._text(tokens))

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _record(self, key: Key) -> dict[str, Any]:
        sample = self.job.sample
        method, budget = key
        fork, failure = self.forks.get(key), self.failures.get(key)
        return {
            "task": sample.task,
            "sample": sample.id,
            "document": sample.document,
            "prompt_tokens": self.prompt.tokens,
            "method": method,
            "budget": budget,
            "status": "ok" if failure is None else failure.status,
            "reason": None if failure is None else failure.reason,
            "prediction": None if fork is None else self._text(fork.tokens),
            "gold_nll": _rounded(self.gold_nll.get(key), 6),
            "agreement": None if fork is None else agreement(self.forks[FULL.key].tokens, fork.tokens),
            "ratio": None if fork is None else _rounded(fork.memory.ratio, 6),
            "bytes": None if fork is None else fork.memory.bytes,
            "budget_bytes": None if fork is None else fork.memory.budget,
            "protected_share": _rounded(self.protected.get(key), 6),
            "new_tokens": None if fork is None else len(fork.tokens),
            "seconds": None if fork is None else _rounded(fork.seconds, 3),
            "extra": dict(sample.extra),
        }


def agreement(full: Sequence[int], tokens: Sequence[int]) -> float:
    """Share of full KV's tokens, its end included, that are the same at the same place."""
    return round(sum(a == b for a, b in zip(full, tokens, strict=False)) / len(full), 6)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
