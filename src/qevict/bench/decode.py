"""Greedy decoding and teacher forcing of forks: caches of any methods, decoded together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from qevict.bench.forks import copies, fork_forward
from qevict.budget import MemoryReport
from qevict.methods.base import MeasuredCache

FORCED_CHUNK = 16
"""Tokens of a forward where gold answers are forced; the same whatever is decoded together, since caches may route or
compress between two forwards."""


@dataclass
class PeakMemory:
    """The most that a cache held at any step.

    Attributes:
        ratio: of reserved bytes to full KV's.
        bytes: reserved.
        budget: what they are limited to; None where there is no limit.
    """

    ratio: float = 0.0
    bytes: int = 0
    budget: int | None = None

    def see(self, report: MemoryReport) -> None:
        """Take in what a cache holds now."""
        self.ratio = max(self.ratio, report.ratio)
        self.bytes = max(self.bytes, report.reserved)
        self.budget = report.budget


@dataclass(eq=False)
class Fork:
    """A cache that has read its prompt, and what is generated from it.

    Attributes:
        cache: of batch 1.
        pending: tokens to be fed next; the first are the prompt's that the cache has not read.
        limit: most tokens to generate.
        finished: whether generation may end behind the tokens so far.
        tokens: generated; an end-of-sequence token is the last of them.
        memory: the most held, from the first step on.
        seconds: its share of the time of the forwards that it took part in.
    """

    cache: MeasuredCache
    pending: list[int]
    limit: int
    finished: Callable[[list[int]], bool] = lambda tokens: False
    tokens: list[int] = field(default_factory=list)
    memory: PeakMemory = field(default_factory=PeakMemory)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.pending or self.limit < 1:
            raise ValueError("a fork needs a token to feed and at least one token to generate")
        self.memory.see(self.cache.memory())

    def is_done(self, ends: frozenset[int]) -> bool:
        """Whether nothing more is to be generated; `ends` are the end-of-sequence tokens."""
        if not self.tokens:
            return False
        return self.tokens[-1] in ends or len(self.tokens) >= self.limit or self.finished(self.tokens)


def decode(model: PreTrainedModel, groups: Iterable[Sequence[Fork]], batch: int = 48) -> Iterator[Fork]:
    """Decode forks greedily, many at once; yields each when it is done.

    Args:
        groups: of at most `batch` forks. Each is taken in as a whole as soon as it has room beside what is still being
            decoded; only then is the next one asked for.
        batch: most rows of a forward.

    Raises:
        ValueError: if a group is larger than `batch`.
    """
    ends = end_tokens(model)
    waiting = _at_most(batch, groups)
    coming = next(waiting, None)
    active: list[Fork] = []
    while active or coming is not None:
        while coming is not None and len(active) + len(coming) <= batch:
            active.extend(coming)
            coming = next(waiting, None)
        _step(model, [fork for fork in active if not fork.is_done(ends)])
        done = {fork for fork in active if fork.is_done(ends)}
        yield from (fork for fork in active if fork in done)
        active = [fork for fork in active if fork not in done]


def _at_most(batch: int, groups: Iterable[Sequence[Fork]]) -> Iterator[Sequence[Fork]]:
    for group in groups:
        if len(group) > batch:
            raise ValueError(f"a group of {len(group)} forks is larger than a batch of {batch} rows")
        yield group


def _step(model: PreTrainedModel, forks: Sequence[Fork]) -> None:
    """Feed what is pending to every fork, and choose the next token."""
    of_length: dict[int, list[Fork]] = {}
    for fork in forks:
        of_length.setdefault(len(fork.pending), []).append(fork)
    for together in of_length.values():
        start = time.perf_counter()
        tokens = torch.tensor([fork.pending for fork in together])
        chosen = fork_forward(model, [fork.cache for fork in together], tokens)[:, -1].argmax(dim=-1).tolist()
        for fork, token in zip(together, chosen, strict=True):
            fork.memory.see(fork.cache.memory())
            fork.tokens.append(token)
            fork.pending = [token]
        spent = time.perf_counter() - start
        for fork in together:
            fork.seconds += spent / len(together)


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a generation."""
    settings = model.generation_config
    ends = None if settings is None else settings.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def force(
    model: PreTrainedModel, caches: Sequence[MeasuredCache], tokens: Int[Tensor, "rows tokens"], chunk: int
) -> Iterator[Float[Tensor, "rows chunk vocabulary"]]:
    """Feed given tokens, `chunk` a forward (the last may be fewer); yields the logits of each forward."""
    for part in tokens.split(chunk, dim=1):
        yield fork_forward(model, caches, part, last_only=False)


def forced_nll(
    model: PreTrainedModel, caches: Sequence[MeasuredCache], pending: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """Mean negative log-likelihood a token of an answer, for each cache; the caches stay as they were.

    Args:
        pending: tokens to be fed before it, in one forward.
        answer: at least one token; fed in forwards of `FORCED_CHUNK` tokens.
    """
    forced = copies(caches)
    rows = len(forced)
    gold = torch.tensor(answer, device=model.device)
    first = fork_forward(model, forced, torch.tensor([list(pending)] * rows))
    total = _nll(first, gold[:1])
    if len(gold) > 1:
        start = 1
        for logits in force(model, forced, gold[None, :-1].expand(rows, -1), FORCED_CHUNK):
            total += _nll(logits, gold[start : start + logits.shape[1]])
            start += logits.shape[1]
    return (total / len(gold)).tolist()


def _nll(logits: Float[Tensor, "rows tokens vocabulary"], gold: Int[Tensor, " tokens"]) -> Float[Tensor, " rows"]:
    # Row by row: logits of a large vocabulary are the largest tensors here.
    return torch.stack(
        [torch.nn.functional.cross_entropy(row.float(), gold, reduction="sum").double() for row in logits]
    )
