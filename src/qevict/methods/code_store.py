"""Tokens in codes, group by group, and the latest ones exactly: what quantised methods keep.

A `CodeFormat` says how a codec is used, a `CodePlan` where the tokens of a row go and what that costs, and a
`CodeStore` holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from qevict.budget import MemoryReport
from qevict.codecs import Codec, KiviCodec, MinMaxCodec, TurboQuantCodec, WindowLayout, WindowShape
from qevict.methods.decoded import Decoded
from qevict.methods.store import POSITION_BYTES, Block, Kept, RowStore, TokenBuffer, head_blocks
from qevict.methods.trail import Trail
from qevict.rope import Rope

TOKEN_POSITION_BYTES = 4
"""Bytes of a stored token position (int32)."""


class Growing:
    """Rows of numbers, in a storage with room for more; where more come than there is room for, it grows.

    Args:
        capacity: rows there is room for.
        row: shape of one.
    """

    def __init__(self, capacity: int, row: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._storage = torch.zeros(capacity, *row, dtype=dtype, device=device)
        self.used = 0

    @property
    def rows(self) -> Tensor:
        """Those in use, `[used, *row]`."""
        return self._storage[: self.used]

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows in use."""
        return self.rows.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the storage, used or not."""
        return self._storage.nbytes

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return len(self._storage)

    def resize(self, capacity: int) -> None:
        """Have room for `capacity` rows, at least those in use."""
        if capacity != self.capacity:
            resized = self._storage.new_zeros(capacity, *self._storage.shape[1:])
            resized[: self.used] = self.rows
            self._storage = resized

    def append(self, rows: Tensor) -> None:
        """Rows behind the others."""
        stop = self.used + len(rows)
        if stop > self.capacity:
            self.resize(stop)
        self._storage[self.used : stop] = rows
        self.used = stop

    def shorten(self, count: int) -> None:
        """Drop the last `count` rows."""
        self.used -= count

    def drop_first(self, count: int) -> None:
        """Drop the first `count` rows."""
        rest = self.rows[count:].clone()
        self.used -= count
        self._storage[: self.used] = rest


@dataclass(frozen=True)
class CodeFormat:
    """How a store uses a codec.

    Attributes:
        name: as users type it.
        codec: what makes the codes.
        group: tokens that are encoded together, a window of the codec.
        rotated: whether the codec is given keys as the model rotated them. If not, they are un-rotated before, and the
            positions of all tokens are stored, since tokens that were kept need not have been neighbours.

    Raises:
        ValueError: if `group` is below 1.
    """

    name: str
    codec: Codec
    group: int
    rotated: bool = True

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"a group of tokens has at least 1, not {self.group}")

    def shape(self, heads: int, head_dim: int) -> WindowShape:
        """Shape of the windows of some heads."""
        return WindowShape(heads, self.group, head_dim)


@dataclass(frozen=True)
class CodePlan:
    """Which tokens of a row are in codes, and what its storages cost.

    Whenever a forward begins, the earliest exact tokens go into codes, a group at a time, as long as `residual` tokens
    stay exact behind them; so those of an incomplete group stay, too.

    Attributes:
        format: the codec and its groups.
        residual: latest tokens that stay exact.
        growth: tokens to come that storage is reserved for.
        exact_new: whether those that come after the prompt all stay exact.

    Raises:
        ValueError: if `residual` is negative.
    """

    format: CodeFormat
    residual: int
    growth: int
    exact_new: bool

    def __post_init__(self) -> None:
        if self.residual < 0:
            raise ValueError(f"residual is {self.residual}; it has to be at least 0")

    def due(self, tokens: int) -> int:
        """Groups in codes, once so many tokens have settled."""
        return max(0, tokens - self.residual) // self.format.group

    def capacity(self, prompt: int) -> tuple[int, int]:
        """Groups in codes and exact tokens that storage is reserved for, `prompt` tokens of the prompt being kept."""
        group = self.format.group
        if self.exact_new:
            return self.due(prompt), prompt - self.due(prompt) * group + self.growth
        # A token is exact in the forward that brings it, on top of the most that is left when a forward begins.
        return self.due(prompt + self.growth), min(prompt + self.growth, self.residual + group)

    def bytes(self, heads: int, head_dim: int, dtype: torch.dtype, prompt: int) -> int:
        """Bytes that are reserved for a block of heads that keep `prompt` tokens each."""
        groups, exact = self.capacity(prompt)
        coded = groups * self.group_bytes(heads, head_dim)
        return coded + exact * self.exact_bytes(heads, head_dim, dtype) + 2 * POSITION_BYTES

    def group_bytes(self, heads: int, head_dim: int) -> int:
        """Bytes of a group in codes, its positions included where they are stored."""
        codes = self.format.codec.layout(self.format.shape(heads, head_dim)).nbytes
        return codes + self._position_bytes(heads) * self.format.group

    def exact_bytes(self, heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of an exact token, its position included where positions are stored."""
        return 2 * heads * head_dim * dtype.itemsize + self._position_bytes(heads)

    def _position_bytes(self, heads: int) -> int:
        return 0 if self.format.rotated else heads * TOKEN_POSITION_BYTES

    def kept_bytes(self, kept: Kept, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of a layer's store that keeps the given tokens of the prompt."""
        return sum(
            self.bytes(heads.stop - heads.start, head_dim, dtype, len(kept[heads.start])) for heads in head_blocks(kept)
        )


class CodeBlock:
    """Some heads that keep equally many tokens: groups in codes, then the exact ones.

    Args:
        heads: which they are.
        keys, values: of the kept tokens of the prompt; keys rotated.
        positions: of these tokens.
        rope: of the layer.
        dtype: of the exact ones.
    """

    def __init__(
        self,
        heads: slice,
        keys: Float[Tensor, "heads tokens dim"],
        values: Float[Tensor, "heads tokens dim"],
        positions: Int[Tensor, "heads tokens"],
        plan: CodePlan,
        rope: Rope,
        dtype: torch.dtype,
    ) -> None:
        count, tokens, dim = keys.shape
        self.heads, self.plan, self.rope = heads, plan, rope
        self.shape = plan.format.shape(count, dim)
        self.layout: WindowLayout = plan.format.codec.layout(self.shape)
        groups, self.room = plan.capacity(tokens)
        self.codes = Growing(groups, (self.layout.nbytes,), torch.uint8, keys.device)
        coded = plan.due(tokens) * plan.format.group
        self.positions: Growing | None = None
        if not plan.format.rotated:
            self.positions = Growing(groups * plan.format.group + self.room, (count,), torch.int32, keys.device)
            self.positions.append(positions.T.int())
        self.codes.append(self._encode(keys[:, :coded], values[:, :coded], 0))
        exact = tokens - coded
        self.tail = TokenBuffer(keys[:, coded:], values[:, coded:], max(0, self.room - exact), dtype)
        self.decoded = Decoded(dtype, kept=False)

    @property
    def coded(self) -> int:
        """Tokens in codes."""
        return self.codes.used * self.plan.format.group

    def settle(self, first_fresh: int, fresh: int) -> None:
        """The last `fresh` tokens, which follow one another from position `first_fresh` on, are here to stay."""
        if self.positions is not None and fresh:
            new = torch.arange(first_fresh, first_fresh + fresh, device=self.tail.keys.device)
            self.positions.append(new[:, None].expand(-1, self.shape.heads).int())
        if not self.plan.exact_new:
            due = self.plan.due(self.coded + self.tail.used) * self.plan.format.group - self.coded
            if due > 0:
                self.codes.append(self._encode(self.tail.keys[:, :due], self.tail.values[:, :due], self.coded))
                self.tail.drop_first(due)
        self.tail.resize(max(self.room, self.tail.used))

    def tokens(self) -> Block:
        """All tokens, decoded."""
        return Block(self.heads, *self.decoded.tokens(self.coded, self._decode, (self.tail.keys, self.tail.values)))

    def memory(self) -> MemoryReport:
        """Bytes held. What a draft takes beyond the reserved room is workspace."""
        numbers = 2 * POSITION_BYTES  # groups in codes, exact tokens
        positions = (0, 0) if self.positions is None else (self.positions.used_bytes, self.positions.reserved_bytes)
        token = self.tail.reserved_bytes // max(1, self.tail.capacity)
        beyond = max(0, self.tail.capacity - self.room) * token
        return MemoryReport(
            full=self.tail.used_bytes - max(0, self.tail.used - self.room) * token,
            codes=self.codes.used * self.layout.code_bytes,
            parameters=self.codes.used * self.layout.parameter_bytes,
            position=numbers + positions[0],
            reserved=numbers + self.codes.reserved_bytes + positions[1] + self.tail.reserved_bytes - beyond,
            workspace=beyond + self.decoded.nbytes,
        )

    def _decode(self, start: int) -> tuple[Float[Tensor, "heads tokens dim"], Float[Tensor, "heads tokens dim"]]:
        """Whole groups of tokens, of which the first is the block's token number `start`."""
        keys, values = self.plan.format.codec.decode(self.codes.rows[start // self.shape.tokens :], self.shape)
        keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (keys, values))
        if self.positions is not None:
            keys = self.rope.rotate(keys, self._positions(start, self.coded))
        return keys, values

    def _positions(self, start: int, stop: int) -> Int[Tensor, "heads tokens"]:
        assert self.positions is not None
        return self.positions.rows[start:stop].T.long()

    def _encode(
        self, keys: Float[Tensor, "heads tokens dim"], values: Float[Tensor, "heads tokens dim"], start: int
    ) -> UInt8[Tensor, "groups bytes"]:
        """Whole groups of tokens, of which the first is the block's token number `start`."""
        if self.positions is not None:
            keys = self.rope.unrotate(keys, self._positions(start, start + keys.shape[1]))
        keys, values = (x.unflatten(1, (-1, self.shape.tokens)).transpose(0, 1) for x in (keys, values))
        return self.plan.format.codec.encode(keys, values)


class CodeStore(RowStore):
    """Chosen tokens of the prompt and all later ones, in codes but for the latest.

    Heads that keep different numbers of tokens are stored ragged, each by itself.

    Args:
        keys, values: of the prompt; keys rotated.
        kept: which tokens stay, for each head.
        plan: which of them are in codes.
        first_position: of the prompt.
        rope: of the layer.
        dtype: of the exact ones.
    """

    def __init__(
        self,
        keys: Float[Tensor, "heads tokens dim"],
        values: Float[Tensor, "heads tokens dim"],
        kept: Kept,
        plan: CodePlan,
        first_position: int,
        rope: Rope,
        dtype: torch.dtype,
    ) -> None:
        self.trail = Trail(kept, keys.shape[1])
        self.next_position = first_position + keys.shape[1]
        self.rope = rope
        self.parts: list[CodeBlock] = []
        for heads in head_blocks(kept):
            index = torch.stack(kept[heads])
            chosen = index[:, :, None].expand(-1, -1, keys.shape[2])
            own = keys[heads].gather(1, chosen), values[heads].gather(1, chosen)
            self.parts.append(CodeBlock(heads, *own, first_position + index, plan, rope, dtype))

    def settle(self, coming: int) -> None:
        """Whole groups of exact tokens that are due go into codes."""
        for part in self.parts:
            part.settle(self.next_position, self.fresh)
        self.next_position += self.fresh
        self.fresh = 0

    def append(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Take in the tokens of a forward."""
        for part in self.parts:
            part.tail.append(keys[part.heads], values[part.heads])

    def blocks(self) -> Iterator[Block]:
        """One block, or one for each head where they keep different numbers of tokens."""
        for part in self.parts:
            yield part.tokens()

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """From now on decode no code twice."""
        for part in self.parts:
            part.decoded = Decoded(part.tail.keys.dtype, dtype)

    def coded(self) -> list[int]:
        """Whole groups of each head."""
        return [part.coded for part in self.parts for _ in range(part.shape.heads)]

    def undo(self, count: int) -> None:
        """Remove the last `count` tokens."""
        for part in self.parts:
            part.tail.shorten(count)
        self.fresh -= count

    def memory(self) -> MemoryReport:
        """Exact tokens count as full precision; positions and numbers of tokens are metadata."""
        return sum((part.memory() for part in self.parts), MemoryReport())

    def copy(self) -> CodeStore:
        """An independent copy; the rotary tables are shared."""
        return copy.deepcopy(self, {id(self.rope): self.rope})


FORMATS: dict[str, CodeFormat] = {
    format.name: format
    for format in (
        *(CodeFormat(f"kivi-{bits}", KiviCodec(bits, bits), group=32) for bits in (2, 4)),
        *(CodeFormat(f"turboquant-{bits}", TurboQuantCodec(bits, bits), group=16) for bits in (2, 3, 4)),
        *(CodeFormat(f"minmax-{bits}", MinMaxCodec(bits, bits), group=16, rotated=False) for bits in (2, 3, 4, 8)),
    )
}
"""Formats by name: KIVI's groups of 32 tokens; TurboQuant's tokens, 16 at a time; our windows of 16 tokens."""


def get_format(name: str) -> CodeFormat:
    """The format of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown codec {name!r}: the known ones are {', '.join(FORMATS)}; or pass a CodeFormat")
    return FORMATS[name]
