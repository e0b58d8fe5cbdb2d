"""Methods that go on evicting while tokens are generated: a fixed number of tokens, with or without scores.

A forward's tokens and what they say of the others stay pending until the next forward, so that they can be undone.
A new token always has room: a full store gives up one at the start of the forward. Several tokens at once may be a
draft, for which no more is given up; those without room lie beyond the budget until the next forward (or, of a long
text, until the end of its own), reported as workspace, as in QEvict's own tiers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.budget import InfeasibleBudgetError, MemoryReport
from qevict.methods.base import Allowance, LayerPrefill, Selector
from qevict.methods.store import POSITION_BYTES, Block, Kept, RowStore, TokenBuffer
from qevict.methods.trail import Trail

SCORE_BYTES = 8
"""Bytes charged for a token's score: the settled one, and what the last token says of it; float32 each."""


@dataclass(frozen=True)
class DecodeSelector(Selector):
    """A selector that evicts generated tokens, too, so that its budget need not pay for them beforehand.

    With a budget of scope "prompt", whose generated tokens are all to stay, it selects from the prompt alone.
    """

    @abstractmethod
    def score_rows(self, heads: int) -> int:
        """Scores that a token has."""

    def extra_bytes(self, allowance: Allowance) -> int:
        """What else a row takes in a layer."""
        return 0

    def protected_bytes(self, allowance: Allowance) -> int:
        """New tokens are scored like others, unless all of them are to stay."""
        return super().protected_bytes(allowance if allowance.exact_new else replace(allowance, new_tokens=0))

    @abstractmethod
    def store(self, prefill: LayerPrefill, capacity: int, allowance: Allowance) -> RowStore:
        """Storage of at most `capacity` tokens of each head, the best of the prompt in it."""

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """As many tokens as the budget holds, now and later."""
        if allowance.bytes is None or allowance.exact_new:
            return super().compress(prefills, allowance)
        fixed = 2 * POSITION_BYTES + self.extra_bytes(allowance)
        token = allowance.token_bytes + SCORE_BYTES * self.score_rows(allowance.geometry.kv_heads)
        capacity = (allowance.bytes - fixed) // token
        if capacity <= self.least_tokens:
            raise InfeasibleBudgetError(
                f"{self.label} keeps at least {self.least_tokens} tokens beside a new one, but the budget holds "
                f"{max(0, capacity)} in all; raise the budget"
            )
        return [self.store(prefill, capacity, allowance) for prefill in prefills]


class EvictingStore(RowStore):
    """At most `capacity` tokens, equally many of each head. A subclass says which stay.

    Args:
        prefill: the prompt.
        kept: which of its tokens stay, equally many of each head.
        capacity: tokens of a head.
        allowance: of the layer. Where the new tokens are announced, no more room is reserved than for them.
    """

    def __init__(self, prefill: LayerPrefill, kept: Kept, capacity: int, allowance: Allowance) -> None:
        index = torch.stack(kept)[:, :, None].expand(-1, -1, prefill.keys.shape[2])
        held = index.shape[1]
        self.trail = Trail(kept, prefill.tokens)
        self.capacity = capacity
        self.slots = capacity if allowance.new_tokens is None else min(capacity, held + allowance.new_tokens)
        keys, values = prefill.keys.gather(1, index), prefill.values.gather(1, index)
        self.buffer = TokenBuffer(keys, values, self.slots - held, allowance.dtype)

    @abstractmethod
    def choose(self, tokens: int) -> Int[Tensor, "heads tokens"]:
        """Which of the tokens in the buffer stay; ascending."""

    def settle(self, coming: int) -> None:
        """Make room for one new token, if any comes; give back what lay beyond the budget."""
        most = self.capacity - min(coming, 1)
        if self.buffer.used > most:
            self.evict(self.choose(most))
        if self.slots > self.capacity:
            self._resize(self.capacity)
        self.fresh = 0

    def evict(self, kept: Int[Tensor, "heads kept"]) -> None:
        """Keep the given tokens."""
        self.buffer.take(kept)
        if self.trail is not None:
            self.trail.take(kept)

    def append(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Take in the tokens of a forward."""
        needed = self.buffer.used + keys.shape[1]
        if needed > self.slots:
            self._resize(max(needed, self.capacity))
        self.buffer.append(keys, values)

    def blocks(self) -> Iterator[Block]:
        """All heads together."""
        yield Block(slice(0, self.buffer.keys.shape[0]), self.buffer.keys, self.buffer.values)

    def undo(self, count: int) -> None:
        """Remove the last `count` tokens."""
        self.buffer.shorten(count)
        self.fresh -= count

    def memory(self) -> MemoryReport:
        """Tokens count as full precision; the number of tokens is metadata, what passes the capacity workspace."""
        charged = self.buffer.reserved_bytes * min(self.slots, self.capacity) // self.slots
        return MemoryReport(
            full=min(self.buffer.used_bytes, charged),
            position=POSITION_BYTES,
            reserved=charged + POSITION_BYTES,
            workspace=self.buffer.reserved_bytes - charged,
        )

    def _resize(self, slots: int) -> None:
        keys, values = self.buffer.keys, self.buffer.values
        self.buffer = TokenBuffer(keys, values, slots - keys.shape[1], keys.dtype)
        self.slots = slots


class ScoredStore(EvictingStore):
    """An `EvictingStore` whose tokens have scores from the attention of every forward.

    Args:
        scores: of the kept tokens, one row for each head or one for all.
    """

    observes: ClassVar[bool] = True

    def __init__(
        self,
        prefill: LayerPrefill,
        kept: Kept,
        capacity: int,
        allowance: Allowance,
        scores: Float[Tensor, "rows kept"],
    ) -> None:
        super().__init__(prefill, kept, capacity, allowance)
        self.scores = scores
        self.pending: list[Float[Tensor, "rows some tokens"]] = []

    @abstractmethod
    def read(self, weights: Float[Tensor, "heads group some tokens"]) -> Float[Tensor, "rows some tokens"]:
        """What some new tokens' attention says of all tokens, a row for each head or one for all."""

    @abstractmethod
    def merge(
        self, scores: Float[Tensor, "rows settled"], pending: Float[Tensor, "rows new tokens"]
    ) -> Float[Tensor, "rows tokens"]:
        """The scores after a forward, whose tokens had none."""

    def observe(self, heads: slice, weights: Float[Tensor, "heads group some tokens"]) -> None:
        """Keep what the new tokens say until they are settled."""
        self.pending.append(self.read(weights))

    def settle(self, coming: int) -> None:
        """Score the last forward's tokens, then make room."""
        if self.pending:
            new = torch.cat(self.pending, dim=1)[:, : self.fresh, : self.buffer.used]
            self.pending = []
            if self.fresh:
                self.scores = self.merge(self.scores, new)
        super().settle(coming)

    def evict(self, kept: Int[Tensor, "heads kept"]) -> None:
        """Keep the given tokens and their scores."""
        super().evict(kept)
        self.scores = self.scores.gather(1, kept[: self.scores.shape[0]])

    def memory(self) -> MemoryReport:
        """The scores are the ledger, reserved for every token; what a draft says is workspace."""
        slots = min(self.slots, self.capacity)
        reserved = SCORE_BYTES * self.scores.shape[0] * slots
        held = self.scores.nbytes + sum(block.nbytes for block in self.pending)
        return super().memory() + MemoryReport(
            ledger=min(held, reserved), reserved=reserved, workspace=max(0, held - reserved)
        )
