"""From bytes to capacities (Eq. 3), and what is really held (Eq. 8).

A *lane* is what is ranked and stored together: one batch row of one layer, or with granularity "kv_head" one KV head of
it. Every lane of a row has the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from qevict.codecs import Codec, PromptCodec, WindowShape
from qevict.config import Budget, QEvictConfig
from qevict.geometry import KVGeometry

SCORE_BYTES = 8
"""Bytes of a window's score: its ranking state and the mass since the last event, float32 each."""
SLOT_BYTES = 4 + SCORE_BYTES
"""Bytes of metadata of a slot: its window number (int32), from which the positions follow, and its score."""
LANE_BYTES = 8
"""Bytes of a lane's own metadata: the position of its first token (int64)."""
COVERED = 0.95
"""Share of the windows that have to have a place before a codec of more bits is taken; evidence in docs/results.md."""
_ALIGNMENT = 4  # a lane's arena is viewed in elements of up to four bytes; windows are multiples of it in either form


class InfeasibleBudgetError(ValueError):
    """A budget that cannot hold what a method must keep."""


@dataclass(frozen=True)
class TierPlan:
    """Capacities of one lane, derived from its share of the budget.

    Attributes:
        codec: what windows are quantized with.
        tokens: S, the tokens that the budget was derived from; None where the budget is absolute and S unknown.
        prompt: tokens that may ever age where everything after them is to be exact (scope "prompt"); None otherwise.
        budget_bytes: the lane's share of the budget.
        token_bytes: bytes of one full-precision token in the lane.
        sink_tokens, recent_tokens: the protected region between routing events at its smallest.
        protected_slots: tokens that the protected storage has room for (the recent region's growth included).
        charged_tokens: tokens of the protected region that the budget was charged with.
        recent_windows: windows that the protected storage can touch, each with a score.
        full_bytes, code_bytes: bytes of one window in either form, without its metadata.
        max_full, max_codes: slots of either kind. For "split" these are K_f and, dormant extras aside, K_q.
        full_capacity, code_capacity: K_f and K_q of Eq. 3, metadata included in M_f and M_q.
        arena_bytes: bytes that full slots (from the front) and code slots (from the back) share.
        fitted_bytes: bytes of the parameters of a codec that is fitted to the lane.
    """

    codec: Codec | PromptCodec
    tokens: int | None
    prompt: int | None
    budget_bytes: int
    token_bytes: int
    sink_tokens: int
    recent_tokens: int
    protected_slots: int
    charged_tokens: int
    recent_windows: int
    full_bytes: int
    code_bytes: int
    max_full: int
    max_codes: int
    full_capacity: int
    code_capacity: int
    arena_bytes: int
    fitted_bytes: int = 0

    @property
    def history_bytes(self) -> int:
        """B_hist: what the charged part of the protected region leaves of the budget."""
        cost = protected_bytes(self.charged_tokens, self.sink_tokens, self.token_bytes, self.window)
        return self.budget_bytes - cost - self.fitted_bytes

    @property
    def window(self) -> int:
        """Omega."""
        return self.full_bytes // self.token_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the lane's storages take, used or not."""
        return (
            LANE_BYTES
            + self.protected_slots * self.token_bytes
            + self.recent_windows * SCORE_BYTES
            + (self.max_full + self.max_codes) * SLOT_BYTES
            + self.arena_bytes
            + self.fitted_bytes
        )


def protected_bytes(tokens: int, sink_tokens: int, token_bytes: int, window: int) -> int:
    """Bytes of `tokens` protected tokens, the scores of the windows among them, and the lane's own metadata."""
    return LANE_BYTES + tokens * token_bytes + _windows(tokens - sink_tokens, window) * SCORE_BYTES


def plan_tiers(
    config: QEvictConfig,
    geometry: KVGeometry,
    tokens: int | None,
    prompt: int = 0,
    codec: Codec | PromptCodec | None = None,
) -> TierPlan:
    """The capacities of every lane of a row.

    Args:
        tokens: S, prompt plus announced new tokens of the row, padding left out; None if it is not known, which an
            absolute budget allows.
        prompt: those of the prompt; only a budget of scope "prompt" asks.
        codec: what windows are quantized with already; None lets the plan choose among the configuration's.

    Raises:
        ValueError: if the budget is a fraction and `tokens` is None.
        InfeasibleBudgetError: if it cannot hold the protected tokens.
    """
    lanes = geometry.kv_heads if config.granularity == "kv_head" else 1
    heads = geometry.kv_heads // lanes
    token_bytes = geometry.token_bytes // lanes
    window, sinks = config.window_size, config.sink_tokens
    limit = config.limit
    budget = row_bytes(limit, geometry, tokens, prompt) // (geometry.layers * lanes)

    recent = config.recent_tokens
    if isinstance(recent, float):
        recent = max(1, int(recent * budget) // token_bytes)
    slots, charged = _protected_slots(config, recent, tokens, prompt)
    codecs, shape = [codec] if codec else list(config.codecs()), WindowShape(heads, window, geometry.head_dim)
    quantizes = config.quantized_fraction > 0 and (tokens is None or tokens > slots)
    fitted = max(codec.fitted_bytes(shape) if isinstance(codec, PromptCodec) else 0 for codec in codecs) * quantizes
    cost = protected_bytes(charged, sinks, token_bytes, window)
    if cost + fitted > budget:
        scale = geometry.layers * lanes
        beside = f" beside {fitted * scale:,} bytes of the codec's parameters" if fitted else ""
        raise InfeasibleBudgetError(
            f"a budget of {budget * scale:,} bytes cannot hold the {charged} protected tokens (sinks, recent tokens "
            f"and their growth between routing events), which take {cost * scale:,} bytes{beside}; raise the "
            "budget or lower sink_tokens, recent_tokens, window_size or routing_interval"
        )

    ageable = prompt if limit.scope == "prompt" else tokens
    windows = None if ageable is None else max(0, ageable - recent - sinks) // window
    history = budget - cost - fitted
    chosen, room = _choose(config, codecs, shape, history, window * token_bytes, windows)
    return TierPlan(
        codec=chosen,
        tokens=tokens,
        prompt=prompt if limit.scope == "prompt" else None,
        budget_bytes=budget,
        token_bytes=token_bytes,
        sink_tokens=sinks,
        recent_tokens=recent,
        protected_slots=slots,
        charged_tokens=charged,
        recent_windows=_windows(slots - sinks, window),
        full_bytes=window * token_bytes,
        fitted_bytes=fitted if room.max_codes else 0,
        **room._asdict(),
    )


def _protected_slots(config: QEvictConfig, recent: int, tokens: int | None, prompt: int) -> tuple[int, int]:
    """Tokens that the protected storage has room for, and those that the budget is charged with."""
    # After an event the recent region holds up to window - 1 tokens of a window that is not complete, and until the
    # next event is carried out (at the start of an update) another `interval` tokens arrive.
    charged = config.sink_tokens + recent
    slots = charged + config.window_size - 1
    if config.limit.scope == "prompt":
        assert tokens is not None  # by row_bytes
        slots, charged = slots + tokens - prompt, charged + tokens - prompt
    else:
        slots += config.interval
    if config.reserve_growth:
        charged = slots
    if tokens is not None and tokens <= charged:
        slots = charged = tokens
    return slots, charged


class _Room(NamedTuple):
    """What the history bytes hold with one codec; attributes as in `TierPlan`."""

    code_bytes: int
    max_full: int
    max_codes: int
    full_capacity: int
    code_capacity: int
    arena_bytes: int


def _choose(
    config: QEvictConfig,
    codecs: Iterable[Codec | PromptCodec],
    shape: WindowShape,
    history: int,
    full_bytes: int,
    windows: int | None,
) -> tuple[Codec | PromptCodec, _Room]:
    """The first codec with which `COVERED` of the windows have a place, or the last: coverage first, then bits."""
    for codec in codecs:
        room = _room(config, codec.layout(shape).nbytes, history, full_bytes)
        if windows is not None and room.full_capacity + room.code_capacity >= COVERED * windows:
            break
    return codec, room


def _room(config: QEvictConfig, code_bytes: int, history: int, full_bytes: int) -> _Room:
    q = config.quantized_fraction
    full_capacity = int((1 - q) * history / (full_bytes + SLOT_BYTES))
    code_capacity = int(q * history / (code_bytes + SLOT_BYTES))
    if config.allocation == "split":
        max_full = full_capacity
        # Dormant extras belong to promoted windows, of which there are at most K_f (and none without a code tier).
        extra = full_capacity if config.dormant == "extra" and code_capacity else 0
        max_codes = code_capacity + extra
        arena = max_full * full_bytes + max_codes * code_bytes
    else:
        # Codes that are no smaller than the window itself (tiny windows) would never be worth a slot.
        max_codes = code_capacity if code_bytes < full_bytes else 0
        max_full = history // (full_bytes + SLOT_BYTES)
        arena = max(0, history - (max_full + max_codes) * SLOT_BYTES) // _ALIGNMENT * _ALIGNMENT
        max_full, max_codes = min(max_full, arena // full_bytes), min(max_codes, arena // code_bytes)
    return _Room(code_bytes, max_full, max_codes, full_capacity, code_capacity, arena)


def row_bytes(limit: Budget, geometry: KVGeometry, tokens: int | None, prompt: int = 0) -> int:
    """The budget of one row in bytes.

    Args:
        tokens, prompt: as for `plan_tiers`.

    Raises:
        ValueError: if the budget is a fraction and `tokens` is None.
    """
    if limit.bytes is not None:
        return limit.bytes
    if limit.tokens is not None:
        return geometry.full_bytes(limit.tokens)
    assert limit.fraction is not None
    if tokens is None:
        raise ValueError(
            f"a budget of {limit} is a share of prompt + new tokens, so max_new_tokens= has to be given; or give an "
            "absolute budget, Budget(bytes=...) or Budget(tokens=...)"
        )
    if limit.scope == "prompt":
        return int(limit.fraction * geometry.full_bytes(prompt)) + geometry.full_bytes(tokens - prompt)
    return int(limit.fraction * geometry.full_bytes(tokens))


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache, from the storages that it really holds.

    The first seven are Eq. 8's terms: what is in use now. All are bytes of all layers and rows together.

    Attributes:
        sink, recent: protected tokens (M_sink, M_recent).
        full: windows in full precision (M_FP), promoted ones included.
        codes: packed codes (M_Q), dormant ones included.
        parameters: their scales and offsets (M_quant-meta), and what methods keep sparse beside them.
        position: window numbers, from which positions follow (M_position).
        ledger: ranking states and masses (M_ledger).
        reserved: sum of the storages, used or not. This is what a budget limits.
        budget: what it is limited to; None where there is no limit.
        full_kv: what an uncompressed cache of S tokens would take (Eq. 7).
        unmanaged: layers that keep Transformers' own cache (sliding windows); outside the budget.
        workspace: kept outside the budget: rotary tables, and tokens of a draft that is not accepted yet.
    """

    sink: int = 0
    recent: int = 0
    full: int = 0
    codes: int = 0
    parameters: int = 0
    position: int = 0
    ledger: int = 0
    reserved: int = 0
    budget: int | None = None
    full_kv: int = 0
    unmanaged: int = 0
    workspace: int = 0

    @property
    def used(self) -> int:
        """M_QEvict (Eq. 8): the sum of the terms in use."""
        return self.sink + self.recent + self.full + self.codes + self.parameters + self.position + self.ledger

    @property
    def ratio(self) -> float:
        """Reserved bytes as a share of full KV's: the measured compression ratio."""
        return self.reserved / self.full_kv if self.full_kv else 0.0

    @property
    def overshoot(self) -> int:
        """Bytes by which the reserved storages exceed the budget; 0 under the default policy."""
        return 0 if self.budget is None else max(0, self.reserved - self.budget)

    def __add__(self, other: MemoryReport) -> MemoryReport:
        # Field by field: benchmarks add thousands of reports a second, and a loop over the fields takes twice as long.
        budget = None if self.budget is None and other.budget is None else (self.budget or 0) + (other.budget or 0)
        return MemoryReport(
            sink=self.sink + other.sink,
            recent=self.recent + other.recent,
            full=self.full + other.full,
            codes=self.codes + other.codes,
            parameters=self.parameters + other.parameters,
            position=self.position + other.position,
            ledger=self.ledger + other.ledger,
            reserved=self.reserved + other.reserved,
            budget=budget,
            full_kv=self.full_kv + other.full_kv,
            unmanaged=self.unmanaged + other.unmanaged,
            workspace=self.workspace + other.workspace,
        )


def _windows(tokens: int, window: int) -> int:
    return -(-max(0, tokens) // window)
