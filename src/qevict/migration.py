"""Moving windows between the tiers: carries out a routing decision on an arena.

The regions are rebuilt in chronological order, so no slot is ever left empty between used ones. Codes are copied byte
for byte; only windows that never had codes are quantized (write-once).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qevict.arena import EMPTY, Arena, dormant
from qevict.codecs import Codec, FittedCodec, WindowShape
from qevict.rope import Rope
from qevict.routing import EVICTED, FULL, QUANTIZED, Candidates


class Aged(NamedTuple):
    """Windows that leave the recent region at this event; the same ones in every lane.

    Attributes:
        window: window numbers.
        keys, values: their tokens, keys rotated.
        state: their ranking states.
    """

    window: Int[Tensor, " windows"]
    keys: Float[Tensor, "lanes windows heads tokens dim"]
    values: Float[Tensor, "lanes windows heads tokens dim"]
    state: Float[Tensor, "lanes windows"]


class Moves(NamedTuple):
    """How many windows moved: counts of the ledger's events.

    Attributes:
        promoted: from codes to full precision.
        quantized: to codes for the first time.
        reactivated: to codes that were dormant.
        evicted: given up.
    """

    promoted: int = 0
    quantized: int = 0
    reactivated: int = 0
    evicted: int = 0

    def __add__(self, other: tuple[int, ...]) -> Moves:  # type: ignore[override]
        return Moves(*(a + b for a, b in zip(self, other, strict=True)))


def candidates(arena: Arena, aged: Aged) -> Candidates:
    """The candidate pool (Eq. 4): columns are the used full slots, the used code slots, then the aged windows."""
    full, codes = arena.full, arena.codes
    f, c = arena.full_used, arena.code_used
    last = slice(codes.window.shape[1] - c, None)
    lanes = full.window.shape[0]
    active = arena.active_codes()[:, last]
    absent = torch.zeros(lanes, len(aged.window), dtype=torch.bool, device=active.device)
    return Candidates(
        window=torch.cat(
            [
                full.window[:, :f],
                torch.where(active, codes.window[:, last], EMPTY),
                aged.window.to(torch.int32).expand(lanes, -1),
            ],
            dim=1,
        ),
        score=torch.cat([full.state[:, :f], codes.state[:, last], aged.state], dim=1),
        in_codes=torch.cat([torch.zeros_like(full.window[:, :f], dtype=torch.bool), active, absent], dim=1),
        has_codes=torch.cat([arena.promoted()[:, :f], active, absent], dim=1),
    )


def carry_out(
    arena: Arena,
    pool: Candidates,
    tier: Int[Tensor, "lanes columns"],
    aged: Aged,
    codec: Codec | None,
    rope: Rope,
    first_position: Int[Tensor, " lanes"],
) -> list[Moves]:
    """Give every candidate its new state.

    Args:
        pool, tier: what `candidates` returned and what routing made of it.
        codec: None where there can be no codes.
        first_position: position of the first token of window 0 in each lane.

    Returns:
        What moved in each lane.
    """
    to_full, to_codes = tier == FULL, tier == QUANTIZED
    fresh = to_codes & ~pool.has_codes
    full_window, full_column = _compact(pool.window, to_full, arena.plan.max_full, left=True)
    code_window, code_column = _compact(
        pool.window, to_codes | (to_full & pool.has_codes), arena.plan.max_codes, left=False
    )
    source = _Source(arena, aged, codec, rope, first_position)
    # Everything is read before anything is written: the regions may overlap where the old ones were.
    full_data = source.full_precision(full_window, full_column)
    code_data = source.packed(code_window, code_column, _gathered(fresh, code_column))

    arena.full.clear()
    arena.codes.clear()
    arena.full_used, arena.code_used = full_window.shape[1], code_window.shape[1]
    start = arena.plan.max_codes - arena.code_used
    lane, slot = _where(full_column >= 0)
    arena.full_slots()[lane, slot] = full_data[lane, slot]
    lane, slot = _where(code_column >= 0)
    arena.code_slots()[lane, start + slot] = code_data[lane, slot]
    arena.full.window[:, : arena.full_used] = full_window
    arena.full.state[:, : arena.full_used] = _gathered(pool.score, full_column)
    asleep = _gathered(to_full, code_column)
    arena.codes.window[:, start:] = torch.where(asleep, dormant(code_window), code_window)
    arena.codes.state[:, start:] = _gathered(pool.score, code_column)
    counts = (
        to_full & pool.in_codes,
        fresh,
        to_codes & pool.has_codes & ~pool.in_codes,
        (tier == EVICTED) & (pool.window >= 0),
    )
    return [Moves(*lane) for lane in torch.stack([moved.sum(dim=1) for moved in counts], dim=1).tolist()]


class _Source:
    """Reads candidate windows, by their column in the pool, in the form that they are to have."""

    def __init__(
        self, arena: Arena, aged: Aged, codec: Codec | None, rope: Rope, first_position: Int[Tensor, " lanes"]
    ) -> None:
        self.arena, self.aged, self.codec, self.rope, self.first_position = arena, aged, codec, rope, first_position
        self.shape = WindowShape(arena.heads, arena.plan.window, arena.head_dim)
        self.first_code, self.first_aged = arena.full_used, arena.full_used + arena.code_used
        used = slice(arena.plan.max_codes - arena.code_used, None)
        self.code_slots, self.code_windows = arena.code_slots()[:, used], arena.code_windows()[:, used]

    def full_precision(self, window: Int[Tensor, "lanes slots"], column: Int[Tensor, "lanes slots"]) -> Tensor:
        """Keys (rotated) and values, `[lanes, slots, 2, heads, tokens, dim]`; codes are dequantized."""
        shape = (*window.shape, 2, self.shape.heads, self.shape.tokens, self.shape.head_dim)
        data = torch.empty(shape, dtype=self.arena.dtype, device=window.device)
        lane, slot = _where((column >= 0) & (column < self.first_code))
        data[lane, slot] = self.arena.full_slots()[lane, column[lane, slot]]
        lane, slot = _where((column >= self.first_code) & (column < self.first_aged))
        keys, values = self._decoded(lane, self.code_slots[lane, column[lane, slot] - self.first_code])
        keys = self.rope.rotate(keys, self._positions(window[lane, slot], lane))
        data[lane, slot] = torch.stack([keys, values], dim=1).to(data.dtype)
        lane, slot = _where(column >= self.first_aged)
        data[lane, slot] = torch.stack(self._aged(lane, column[lane, slot]), dim=1)
        return data

    def packed(
        self,
        window: Int[Tensor, "lanes slots"],
        column: Int[Tensor, "lanes slots"],
        fresh: Bool[Tensor, "lanes slots"],
    ) -> Tensor:
        """Codes, `[lanes, slots, bytes]`: those in the ledger as they are, `fresh` windows quantized now."""
        data = torch.empty(*window.shape, self.arena.plan.code_bytes, dtype=torch.uint8, device=window.device)
        lane, slot = _where((column >= 0) & ~fresh)
        if len(lane):
            # A dormant window's column is its full slot, so its codes are found by their number.
            match = self.code_windows[lane] == window[lane, slot][:, None]
            data[lane, slot] = self.code_slots[lane, match.byte().argmax(dim=1)]
        lane, slot = _where(fresh & (column < self.first_code))
        keys, values = self.arena.full_slots()[lane, column[lane, slot]].unbind(dim=1)
        data[lane, slot] = self._encoded(window[lane, slot], lane, keys, values)
        lane, slot = _where(fresh & (column >= self.first_aged))
        data[lane, slot] = self._encoded(window[lane, slot], lane, *self._aged(lane, column[lane, slot]))
        return data

    def _aged(self, lane: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of aged windows, rounded to the storage dtype: what a full slot would hold."""
        index = column - self.first_aged
        return self.aged.keys[lane, index].to(self.arena.dtype), self.aged.values[lane, index].to(self.arena.dtype)

    def _encoded(self, window: Tensor, lane: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys = self.rope.unrotate(keys, self._positions(window, lane))
        packed = torch.empty(len(lane), self.arena.plan.code_bytes, dtype=torch.uint8, device=lane.device)
        for codec, own in self._codecs(lane):
            packed[own] = codec.encode(keys[own][None], values[own][None])[0]
        return packed

    def _decoded(self, lane: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        shape = (2, len(lane), self.shape.heads, self.shape.tokens, self.shape.head_dim)
        keys, values = torch.empty(shape, device=lane.device)
        for codec, own in self._codecs(lane):
            (keys[own],), (values[own],) = codec.decode(packed[own][None], self.shape)
        return keys, values

    def _codecs(self, lane: Int[Tensor, " chosen"]) -> Iterator[tuple[Codec, Tensor | slice]]:
        """Codecs of windows of these lanes, and which they are: one for all, or each lane's where it is fitted."""
        if self.codec is None or not len(lane):
            return
        if not isinstance(self.codec, FittedCodec) or len(self.arena.data) == 1:
            yield self.codec, slice(None)
            return
        for one in lane.unique():
            yield self.codec.take(one[None]), lane == one

    def _positions(self, window: Int[Tensor, " chosen"], lane: Int[Tensor, " chosen"]) -> Tensor:
        """Positions `[chosen, 1, tokens]` of the windows' tokens."""
        start = self.first_position[lane] + window.long() * self.shape.tokens
        return (start[:, None] + torch.arange(self.shape.tokens, device=window.device))[:, None]


def _compact(
    window: Int[Tensor, "lanes columns"], chosen: Bool[Tensor, "lanes columns"], most: int, left: bool
) -> tuple[Int[Tensor, "lanes slots"], Int[Tensor, "lanes slots"]]:
    """Chronological slots of the chosen windows: their numbers and their columns, -1 in the slots left over.

    Lanes with fewer windows than others are filled up at the end (`left`) or at the start.
    """
    count = chosen.sum(dim=1)
    used = int(count.max()) if len(count) else 0
    if used > most:
        raise AssertionError(f"routing chose {used} windows for {most} slots")
    last = torch.iinfo(window.dtype).max
    order = window.masked_fill(~chosen, last).argsort(dim=1, stable=True)[:, :used]
    slot = torch.arange(used, device=window.device)
    if not left:
        # Shift each lane's windows to the end of its row.
        shifted = slot - (used - count[:, None])
        order = order.gather(1, shifted.clamp(min=0))
        valid = shifted >= 0
    else:
        valid = slot < count[:, None]
    numbers = window.gather(1, order).masked_fill(~valid, EMPTY)
    return numbers, order.masked_fill(~valid, -1)


def _gathered(values: Tensor, column: Int[Tensor, "lanes slots"]) -> Tensor:
    """Values of the columns; zero or False where there is no column."""
    return values.gather(1, column.clamp(min=0)).masked_fill(column < 0, 0)


def _where(mask: Bool[Tensor, "lanes slots"]) -> tuple[Tensor, ...]:
    """Lanes and slots of the true places."""
    return mask.nonzero(as_tuple=True)
