"""Moving windows between the tiers: carries out a routing decision on an arena.

A window that keeps its form keeps its slot, unless its region gets smaller than that: what enters a region, and what
can not stay where it was, takes the slots that others left. Codes are copied byte for byte; only windows that never had
codes are quantized (write-once).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
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
    f, c, max_codes = arena.full_used, arena.code_used, arena.plan.max_codes
    to_full, fresh = tier == FULL, (tier == QUANTIZED) & ~pool.has_codes
    holder = _holders(arena, pool)
    held = _gathered(tier, holder)
    full = _Placement.of(to_full[:, :f], to_full[:, f:], arena.plan.max_full)
    codes = _Placement.of(held != EVICTED, fresh, max_codes)
    source = _Source(arena, pool, aged, codec, rope, first_position)
    # Everything is read before anything is written: the regions may overlap where the old ones were.
    full_data, code_data = source.full_precision(full), source.packed(codes)

    full_window = full.applied(pool.window[:, :f], pool.window[:, f:], EMPTY)
    full_state = full.applied(pool.score[:, :f], pool.score[:, f:], 0.0)
    numbers = arena.code_windows().flip(1)[:, :c]
    code_window = codes.applied(torch.where(held == FULL, dormant(numbers), numbers), pool.window, EMPTY)
    code_state = codes.applied(_gathered(pool.score, holder), pool.score, 0.0)

    arena.full.clear()
    arena.codes.clear()
    arena.full_used, arena.code_used = full.used, codes.used
    arena.full_slots()[full.lane, full.target] = full_data
    arena.code_slots()[codes.lane, max_codes - 1 - codes.target] = code_data
    arena.full.window[:, : full.used], arena.full.state[:, : full.used] = full_window, full_state
    inner = max_codes - codes.used
    arena.codes.window[:, inner:], arena.codes.state[:, inner:] = code_window.flip(1), code_state.flip(1)
    counts = (
        to_full & pool.in_codes,
        fresh,
        (tier == QUANTIZED) & pool.has_codes & ~pool.in_codes,
        (tier == EVICTED) & (pool.window >= 0),
    )
    return [Moves(*lane) for lane in torch.stack([moved.sum(dim=1) for moved in counts], dim=1).tolist()]


@dataclass(frozen=True, eq=False)
class _Placement:
    """Which places of a region change. Places are counted from the outer end of the arena, where the region begins.

    Attributes:
        used: the most places that any lane takes now.
        stays: `[lanes, width]` places whose window stays where it is.
        lane, target: lanes and places that get another window.
        origin: where from: below `width` a place of the region, from there on the columns that arrive.
    """

    used: int
    stays: Bool[Tensor, "lanes width"]
    lane: Int[Tensor, " moved"]
    target: Int[Tensor, " moved"]
    origin: Int[Tensor, " moved"]

    @classmethod
    def of(cls, remains: Bool[Tensor, "lanes places"], arrives: Bool[Tensor, "lanes columns"], most: int) -> _Placement:
        """The placement with the fewest moves that leaves no place empty between used ones.

        Args:
            remains: which of the region's windows remain in it.
            arrives: which columns come to it.
            most: places that there are.
        """
        count = remains.sum(dim=1) + arrives.sum(dim=1)
        used = int(count.max()) if len(count) else 0
        if used > most:
            raise AssertionError(f"routing chose {used} windows for {most} slots")
        width = max(used, remains.shape[1])
        remains = _filled(remains, width, False)
        inside = torch.arange(width, device=count.device) < count[:, None]
        # A lane has as many places to be filled as windows that move, and both are listed lane by lane.
        lane, origin = torch.cat([remains & ~inside, arrives], dim=1).nonzero(as_tuple=True)
        _, target = (inside & ~remains).nonzero(as_tuple=True)
        return cls(used, remains & inside, lane, target, origin)

    @property
    def width(self) -> int:
        """Places before or after, whichever are more."""
        return self.stays.shape[1]

    def applied(
        self, region: Shaped[Tensor, "lanes places"], arriving: Shaped[Tensor, "lanes columns"], empty: int | float
    ) -> Shaped[Tensor, "lanes used"]:
        """Something known of every window, in the places after the moves."""
        joined = torch.cat([_filled(region, self.width, empty), arriving], dim=1)
        after = joined[:, : self.width].masked_fill(~self.stays, empty)
        after[self.lane, self.target] = joined[self.lane, self.origin]
        return after[:, : self.used]


class _Source:
    """Reads the windows that move in the form that they are to have."""

    def __init__(
        self,
        arena: Arena,
        pool: Candidates,
        aged: Aged,
        codec: Codec | None,
        rope: Rope,
        first_position: Int[Tensor, " lanes"],
    ) -> None:
        self.arena, self.aged, self.codec, self.rope = arena, aged, codec, rope
        self.window, self.first_position = pool.window, first_position
        self.shape = WindowShape(arena.heads, arena.plan.window, arena.head_dim)
        self.first_code, self.first_aged = arena.full_used, arena.full_used + arena.code_used

    def full_precision(self, placed: _Placement) -> Tensor:
        """Keys (rotated) and values, `[moved, 2, heads, tokens, dim]`; codes are dequantized."""
        shape = (len(placed.lane), 2, self.shape.heads, self.shape.tokens, self.shape.head_dim)
        data = torch.empty(shape, dtype=self.arena.dtype, device=placed.lane.device)
        # The region's places are the first columns.
        beyond = placed.width - self.first_code
        column = torch.where(placed.origin < placed.width, placed.origin, placed.origin - beyond)
        for own, lane, columns in self._chosen(placed.lane, column, 0, self.first_code):
            data[own] = self.arena.full_slots()[lane, columns]
        for own, lane, columns in self._chosen(placed.lane, column, self.first_code, self.first_aged):
            slot = columns - self.first_aged + self.arena.plan.max_codes
            keys, values = self._decoded(lane, self.arena.code_slots()[lane, slot])
            keys = self.rope.rotate(keys, self._positions(lane, columns))
            data[own] = torch.stack([keys, values], dim=1).to(data.dtype)
        for own, lane, columns in self._chosen(placed.lane, column, self.first_aged):
            data[own] = torch.stack(self._aged(lane, columns), dim=1)
        return data

    def packed(self, placed: _Placement) -> Tensor:
        """Codes, `[moved, bytes]`: those in the ledger as they are, windows without any quantized now."""
        shape = (len(placed.lane), self.arena.plan.code_bytes)
        data = torch.empty(shape, dtype=torch.uint8, device=placed.lane.device)
        column = placed.origin - placed.width
        for own, lane, columns in self._chosen(placed.lane, column, -placed.width, 0):
            place = columns + placed.width
            data[own] = self.arena.code_slots()[lane, self.arena.plan.max_codes - 1 - place]
        for own, lane, columns in self._chosen(placed.lane, column, 0, self.first_code):
            keys, values = self.arena.full_slots()[lane, columns].unbind(dim=1)
            data[own] = self._encoded(lane, columns, keys, values)
        for own, lane, columns in self._chosen(placed.lane, column, self.first_aged):
            data[own] = self._encoded(lane, columns, *self._aged(lane, columns))
        return data

    @staticmethod
    def _chosen(
        lane: Int[Tensor, " moved"], column: Int[Tensor, " moved"], first: int, stop: int | None = None
    ) -> Iterator[tuple[Bool[Tensor, " moved"], Tensor, Tensor]]:
        """Which of the columns are between two, with their lanes; nothing where there are none."""
        own = column >= first if stop is None else (column >= first) & (column < stop)
        if bool(own.any()):
            yield own, lane[own], column[own]

    def _aged(self, lane: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of aged windows, rounded to the storage dtype: what a full slot would hold."""
        index = column - self.first_aged
        return self.aged.keys[lane, index].to(self.arena.dtype), self.aged.values[lane, index].to(self.arena.dtype)

    def _encoded(self, lane: Tensor, column: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys = self.rope.unrotate(keys, self._positions(lane, column))
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

    def _positions(
        self, lane: Int[Tensor, " chosen"], column: Int[Tensor, " chosen"]
    ) -> Int[Tensor, "chosen 1 tokens"]:
        """Positions of the tokens of the windows in the pool's columns."""
        start = self.first_position[lane] + self.window[lane, column].long() * self.shape.tokens
        return (start[:, None] + torch.arange(self.shape.tokens, device=lane.device))[:, None]


def _holders(arena: Arena, pool: Candidates) -> Int[Tensor, "lanes places"]:
    """The pool's column of the window in each place of the code region; -1 where there is none.

    A dormant window's column is its full slot.
    """
    f, c = arena.full_used, arena.code_used
    marks = arena.codes.window.flip(1)[:, :c]
    column = torch.arange(f + c - 1, f - 1, -1, device=marks.device).expand_as(marks)
    if f and bool((marks < EMPTY).any()):
        match = dormant(marks)[:, :, None] == pool.window[:, None, :f]
        column = torch.where(marks < EMPTY, match.byte().argmax(dim=2), column)
    return column.masked_fill(marks == EMPTY, -1)


def _gathered(values: Tensor, column: Int[Tensor, "lanes slots"]) -> Tensor:
    """Values of the columns; zero or False where there is no column."""
    return values.gather(1, column.clamp(min=0)).masked_fill(column < 0, 0)


def _filled(values: Shaped[Tensor, "lanes columns"], width: int, empty: int | float) -> Shaped[Tensor, "lanes width"]:
    """At least as many columns, filled up with something."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=empty)
