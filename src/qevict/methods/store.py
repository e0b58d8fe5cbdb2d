"""What a row keeps in one layer: `RowStore`, and the store of exact tokens that most eviction methods use.

A forward's tokens can be undone until the next one: whatever a store does to make room or to compress, it does in
`settle`, at the start of the next forward.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qevict.budget import MemoryReport
from qevict.methods.trail import Trail

Kept = list[Int[Tensor, " _"]]
"""Ascending token indices for each KV head; their number may differ from head to head."""

POSITION_BYTES = 8
"""Bytes charged for a number that a store holds beside its tensors: a row's first position, a head's token count."""

_OBSERVED = 128  # queries whose weights are shown at a time, so that no new x tokens matrix of every head is held


class Block(NamedTuple):
    """Heads that keep equally many tokens: keys (rotated) and values in the order of the tokens, the new ones last."""

    heads: slice
    keys: Float[Tensor, "heads tokens dim"]
    values: Float[Tensor, "heads tokens dim"]


class RowStore(ABC):
    """What one row keeps in one layer."""

    observes: ClassVar[bool] = False
    """Whether `observe` wants the attention weights of every forward."""

    fresh: int = 0
    """Tokens of the last forward, which can still be undone."""

    trail: Trail | None = None
    """Which tokens each head reaches; None where nobody asked, or where the store cannot say."""

    @abstractmethod
    def settle(self, coming: int) -> None:
        """The tokens so far are here to stay: compress or evict what is due, and make room for `coming` more."""

    @abstractmethod
    def append(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Take in the tokens of a forward."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Everything that attention reaches, every head in exactly one block, in the order of the heads."""

    @abstractmethod
    def undo(self, count: int) -> None:
        """Remove the last `count` tokens, at most `fresh`."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """Bytes held: Eq. 8's terms and `reserved`, without the row's first position."""

    def keep_decoded(self, dtype: torch.dtype) -> None:  # noqa: B027  (exact stores have nothing to do)
        """From now on hold what codes decode to, in `dtype`, as workspace, and decode none of them twice."""

    def coded(self) -> list[int]:
        """How many tokens of each head, the first ones that it holds, are in codes; empty where none ever are."""
        return []

    def observe(self, heads: slice, weights: Float[Tensor, "heads group some tokens"]) -> None:
        """Shown the attention weights of a block, if `observes`: of all new tokens, in order, some at a time."""
        raise NotImplementedError(f"{type(self).__name__} observes no weights")

    def attend(
        self,
        query: Float[Tensor, "heads group new dim"],
        keys: Float[Tensor, "heads new dim"],
        values: Float[Tensor, "heads new dim"],
        scaling: float,
    ) -> Float[Tensor, "heads group new dim"]:
        """Attention of new tokens over everything kept and themselves, causally; takes them in."""
        self.settle(keys.shape[1])
        self.append(keys, values)
        self.fresh = keys.shape[1]
        if self.trail is not None:
            self.trail.append(self.fresh)
        # Every block by itself, in the order of its heads.
        outputs = [self._attend_block(query[block.heads], block, scaling) for block in self.blocks()]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_block(
        self, query: Float[Tensor, "heads group new dim"], block: Block, scaling: float
    ) -> Float[Tensor, "heads group new dim"]:
        if not self.observes:
            return _attend(query, block, scaling)
        outputs = []
        for start in range(0, query.shape[2], _OBSERVED):
            output, weights = _attend_observed(query, slice(start, start + _OBSERVED), block, scaling)
            outputs.append(output)
            self.observe(block.heads, weights)
        return torch.cat(outputs, dim=2)

    def copy(self) -> RowStore:
        """An independent copy."""
        return copy.deepcopy(self)


def _attend(
    query: Float[Tensor, "heads group new dim"], block: Block, scaling: float
) -> Float[Tensor, "heads group new dim"]:
    heads, group, new, dim = query.shape
    keys, values = block.keys.to(query.dtype), block.values.to(query.dtype)
    mask = None if new == 1 else _causal(slice(0, new), new, keys).repeat(group, 1)
    # The query heads of a group are folded into the queries, so that the keys need no copy for each of them.
    folded = query.reshape(1, heads, group * new, dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, keys[None], values[None], attn_mask=mask, scale=scaling
    )
    return output.view(heads, group, new, dim)


def _attend_observed(
    query: Float[Tensor, "heads group new dim"], some: slice, block: Block, scaling: float
) -> tuple[Float[Tensor, "heads group some dim"], Float[Tensor, "heads group some tokens"]]:
    """Attention of some of the new tokens, and its weights in float32."""
    keys, values = block.keys.float(), block.values.float()
    logits = torch.einsum("hgqd,htd->hgqt", query[:, :, some].float(), keys) * scaling
    weights = logits.masked_fill(~_causal(some, query.shape[2], keys), -torch.inf).softmax(dim=-1)
    return torch.einsum("hgqt,htd->hgqd", weights, values).to(query.dtype), weights


def _causal(some: slice, new: int, keys: Float[Tensor, "heads tokens dim"]) -> Bool[Tensor, "some tokens"]:
    """Which keys some of the `new` last tokens may see."""
    place = torch.arange(keys.shape[1], device=keys.device)
    return place <= place[keys.shape[1] - new :][some, None]


class TokenBuffer:
    """Exact tokens of some heads, in order, with room for more.

    Args:
        keys, values: the tokens to begin with.
        room: how many more there will be. Later tokens that pass it make the buffer grow.
        dtype: they are stored in.
    """

    def __init__(
        self,
        keys: Float[Tensor, "heads tokens dim"],
        values: Float[Tensor, "heads tokens dim"],
        room: int,
        dtype: torch.dtype,
    ) -> None:
        heads, self.used, dim = keys.shape
        self._storage = torch.zeros(2, heads, self.used + room, dim, dtype=dtype, device=keys.device)
        self._storage[0, :, : self.used] = keys
        self._storage[1, :, : self.used] = values

    @property
    def keys(self) -> Float[Tensor, "heads tokens dim"]:
        """Keys in use, rotated."""
        return self._storage[0, :, : self.used]

    @property
    def values(self) -> Float[Tensor, "heads tokens dim"]:
        """Values in use."""
        return self._storage[1, :, : self.used]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the storage, used or not."""
        return self._storage.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens in use."""
        return self.keys.nbytes + self.values.nbytes

    def append(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Tokens behind the others."""
        stop = self.used + keys.shape[1]
        if stop > self.capacity:
            self.resize(stop)
        self._storage[0, :, self.used : stop] = keys
        self._storage[1, :, self.used : stop] = values
        self.used = stop

    @property
    def capacity(self) -> int:
        """How many tokens the storage has room for."""
        return self._storage.shape[2]

    def resize(self, capacity: int) -> None:
        """Have room for `capacity` tokens, at least those in use."""
        if capacity != self.capacity:
            resized = self._storage.new_zeros(*self._storage.shape[:2], capacity, self._storage.shape[3])
            resized[:, :, : self.used] = self._storage[:, :, : self.used]
            self._storage = resized

    def shorten(self, count: int) -> None:
        """Drop the last `count` tokens."""
        self.used -= count

    def drop_first(self, count: int) -> None:
        """Drop the first `count` tokens."""
        rest = self._storage[:, :, count : self.used].clone()
        self.used -= count
        self._storage[:, :, : self.used] = rest

    def take(self, index: Int[Tensor, "heads kept"]) -> None:
        """Keep the given tokens of each head, in the given order."""
        # Whole tokens are copied by their place among the storage's rows, many times faster than gathering elements.
        first = torch.arange(2 * len(index), device=index.device) * self.capacity
        rows = (first.view(2, -1, 1) + index).flatten()
        rest = self._storage.flatten(0, 2).index_select(0, rows)
        self.used = index.shape[1]
        self._storage[:, :, : self.used] = rest.view(*self._storage.shape[:2], self.used, -1)


class ExactStore(RowStore):
    """Chosen tokens of the prompt and all later ones, exactly.

    Heads that keep different numbers of tokens are stored ragged: each takes the bytes of its own tokens.

    Args:
        keys, values: of the prompt; keys rotated.
        kept: which tokens stay, for each head.
        growth: tokens to come that storage is reserved for.
        dtype: they are stored in.
    """

    def __init__(
        self,
        keys: Float[Tensor, "heads tokens dim"],
        values: Float[Tensor, "heads tokens dim"],
        kept: Kept,
        growth: int,
        dtype: torch.dtype,
    ) -> None:
        self.trail = Trail(kept, keys.shape[1])
        self.buffers: list[tuple[slice, TokenBuffer]] = []
        for heads in head_blocks(kept):
            index = torch.stack(kept[heads])[:, :, None].expand(-1, -1, keys.shape[2])
            chosen = keys[heads].gather(1, index), values[heads].gather(1, index)
            self.buffers.append((heads, TokenBuffer(*chosen, growth, dtype)))

    def settle(self, coming: int) -> None:
        """Nothing is due."""
        self.fresh = 0

    def append(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Take in the tokens of a forward."""
        for heads, buffer in self.buffers:
            buffer.append(keys[heads], values[heads])

    def blocks(self) -> Iterator[Block]:
        """One block, or one for each head where they keep different numbers of tokens."""
        for heads, buffer in self.buffers:
            yield Block(heads, buffer.keys, buffer.values)

    def undo(self, count: int) -> None:
        """Remove the last `count` tokens."""
        for _, buffer in self.buffers:
            buffer.shorten(count)
        self.fresh -= count

    def memory(self) -> MemoryReport:
        """All tokens count as full precision; the number of tokens of each block is metadata."""
        numbers = POSITION_BYTES * len(self.buffers)
        return MemoryReport(
            full=sum(buffer.used_bytes for _, buffer in self.buffers),
            position=numbers,
            reserved=numbers + sum(buffer.reserved_bytes for _, buffer in self.buffers),
        )


def head_blocks(kept: Kept) -> list[slice]:
    """All heads together where they keep equally many tokens, else each by itself."""
    if len({len(index) for index in kept}) == 1:
        return [slice(0, len(kept))]
    return [slice(head, head + 1) for head in range(len(kept))]
