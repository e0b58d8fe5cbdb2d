"""Decode attention on the CPU: one pass over all tiers where they lie, in a few microseconds of Python a call."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from qevict.codecs import Codec, MinMaxCodec, WindowShape
from qevict.kernels.compiled import CALL, PAST, attend_items, combine, make_rooms, rounded
from qevict.kernels.decode import LEVEL_BITS, VALUE_BITS
from qevict.kernels.formats import MOST_QUERIES, CodeFormat, format_of, is_known
from qevict.kernels.pool import Pool
from qevict.kernels.reference import Attended, History, TierView
from qevict.kernels.simd import BFLOAT16, FLOAT16, FLOAT32
from qevict.kernels.tiles import BLOCK, LINE, TILE
from qevict.rope import Rope

_DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_ITEM_TOKENS = 512
_SHARE = 1 << 19
"""Numbers of keys and values that are worth another thread, which costs some 40 microseconds."""

_log = logging.getLogger("qevict")
_pool = Pool()


class Reading(NamedTuple):
    """How the kernel reads a codec's windows of one shape: `CodeFormat` as it finds it in memory.

    Attributes:
        layout: see `_layout`.
        groups: `[groups, 2]` first channels and sizes of the groups of a token's value.
        key_ranges, levels: see `CodeFormat`; levels in rows of 16.
    """

    described: CodeFormat
    layout: NDArray[np.int64]
    groups: NDArray[np.int64]
    key_ranges: NDArray[np.float32] | None
    levels: NDArray[np.float32] | None


class Prepared(NamedTuple):
    """What the kernel needs to know of a history; the history keeps the memory alive."""

    past: NDArray[Any]
    code_slots: NDArray[np.int64]
    full_slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    reading: Reading
    windows_per_item: int
    tile_row: int
    items: int
    rope_tables: tuple[Tensor, Tensor]


_prepared: WeakKeyDictionary[History, Prepared | None] = WeakKeyDictionary()
_readings: WeakKeyDictionary[Codec, dict[tuple[WindowShape, str, int], Reading | None]] = WeakKeyDictionary()
_no_codec = MinMaxCodec()


def attend(
    query: Float[Tensor, "lanes heads group queries dim"], view: TierView, scaling: float, count_last: int | None = None
) -> Attended | None:
    """As `reference.attend`; None where this kernel does not know the codec, the shape or the dtype, or gradients."""
    lanes, heads, group, queries, dim = query.shape
    stored, new = view.stored_keys, view.new_keys
    if query.device.type != "cpu" or queries > MOST_QUERIES or dim % BLOCK:
        return None
    if any(t.dtype not in _DTYPES or t.stride(-1) != 1 for t in (query, stored, new, view.new_values)):
        return None
    if query.requires_grad or new.requires_grad or view.new_values.requires_grad:
        return None
    history = view.history
    prepared = _prepared[history] if history in _prepared else _prepare(history)
    if prepared is None:
        return None

    local, window, most = stored.shape[2] + new.shape[2], history.full_keys.shape[3], prepared.windows_per_item
    local_windows = -(-max(0, local - view.sinks) // window)
    local_items = max(1, -(-local_windows // most))
    call = _call(query, view, scaling, count_last, local_items)
    items, rows = lanes * (prepared.items + local_items), group * queries
    results = _aligned((items, heads, rows, rounded(dim + 2 + rounded(most, BLOCK), LINE // 4)))
    slots = prepared.code_slots.shape[1] + prepared.full_slots.shape[1]
    threads = min(torch.get_num_threads(), items, 1 + 2 * lanes * heads * dim * (local + slots * window) // _SHARE)
    bounds = [items * i // threads for i in range(threads + 1)]
    tables = (prepared.past, call, prepared.code_slots, prepared.full_slots)

    exact = rounded(view.sinks + most * window + BLOCK, LINE // 4)
    row = max(exact, prepared.tile_row)

    def attend_share(first: int, last: int) -> None:
        size = _room(heads, rows, row, dim, window, len(prepared.reading.groups))
        attend_items(
            *tables,
            prepared.positions,
            prepared.reading.layout,
            prepared.reading.groups,
            np.empty(size, np.uint8),
            row,
            np.empty((2 + 2 * heads, exact), np.int64),
            first,
            last,
            results,
        )

    columns = history.full_keys.shape[1] + history.packed.shape[1] + local_windows
    output, turn_back = np.zeros((lanes, heads, rows, dim), np.float32), prepared.reading.described.turn_back
    decoded = output if turn_back is None else np.zeros_like(output)
    mass = np.zeros((lanes, queries if count_last is None else 1, columns), np.float32)
    with _told():
        if threads == 1:
            attend_share(0, items)
        else:
            _pool.run([partial(attend_share, first, last) for first, last in pairwise(bounds)])
        combine(*tables, results, output, decoded, mass)
    attended = torch.from_numpy(output).view(query.shape)
    if turn_back is not None:
        attended += (torch.from_numpy(decoded) @ turn_back).view(query.shape)
    return Attended(attended if query.dtype == torch.float32 else attended.to(query.dtype), torch.from_numpy(mass))


@functools.lru_cache(maxsize=64)
def _room(heads: int, rows: int, row: int, dim: int, window: int, groups: int) -> int:
    """Bytes of working memory that a share needs."""
    return make_rooms(0, heads, rows, row, dim, window, groups, 0).end + LINE


def _aligned(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Zeros that begin with a cache line."""
    memory = np.zeros(math.prod(shape) + LINE // 4, np.float32)
    start = -memory.ctypes.data % LINE // 4
    return memory[start : start + math.prod(shape)].reshape(shape)


def _call(query: Tensor, view: TierView, scaling: float, count_last: int | None, local_items: int) -> NDArray[Any]:
    stored, new, new_values = view.stored_keys, view.new_keys, view.new_values
    size, stored_size, new_size = query.itemsize, stored.itemsize, new.itemsize
    lane, head, group, token, _ = query.stride()
    stored_lane, stored_head, _, _ = stored.stride()
    keys_lane, keys_head, keys_token, _ = new.stride()
    values_lane, values_head, values_token, _ = new_values.stride()
    fields = (
        *(query.data_ptr(), size * lane, size * head, size * group, size * token, _DTYPES[query.dtype]),
        *(query.shape[2], query.shape[3], local_items, stored.data_ptr(), view.stored_values.data_ptr()),
        *(stored_size * stored_lane, stored_size * stored_head, stored.shape[2], _DTYPES[stored.dtype]),
        *(new.data_ptr(), new_size * keys_lane, new_size * keys_head, new_size * keys_token),
        *(new_values.data_ptr(), new_size * values_lane, new_size * values_head, new_size * values_token),
        *(new.shape[2], _DTYPES[new.dtype], view.sinks, -1 if count_last is None else count_last),
        scaling,
    )
    return np.array([fields], CALL)


def _prepare(history: History) -> Prepared | None:
    full, packed, rope = history.full_keys, history.packed, history.rope
    _, _, heads, window, dim = full.shape
    codec = history.codec or _no_codec
    reading = _reading(codec, WindowShape(heads, window, dim), rope) if is_known(codec) else None
    if reading is None or full.dtype not in _DTYPES:
        _prepared[history] = None
        return None
    described = reading.described
    unit = min(TILE, -(-window // BLOCK) * BLOCK)
    units_per_window = -(-window // TILE)
    most = max(1, _ITEM_TOKENS // TILE * (TILE // unit) // units_per_window)
    code_slots, full_slots = _slots(history.code_present), _slots(history.full_present)
    positions = history.code_positions.gather(1, code_slots.clamp(min=0)) if code_slots.numel() else code_slots
    cos, sin = rope.padded_tables(int(positions.max()) + window if positions.numel() else 0)
    lane, slot, head, _, _ = full.stride()
    code_items, full_items = -(-code_slots.shape[1] // most), -(-full_slots.shape[1] // most)
    fields = (
        *(heads, dim, window, unit, units_per_window, most),
        *(packed.data_ptr(), packed.stride(0), packed.stride(1), code_items, full_items),
        *(packed.shape[1], full.shape[1], full.data_ptr(), history.full_values.data_ptr()),
        *(full.itemsize * lane, full.itemsize * slot, full.itemsize * head, _DTYPES[full.dtype]),
        *(cos.data_ptr(), sin.data_ptr(), 4 * cos.shape[1], rope.rotary_dim // 2),
        *(described.key_scale, described.key_offset, _address(reading.key_ranges)),
        *(described.value_codes, described.value_bits, described.value_scale, described.value_offset),
        _address(reading.levels),
    )
    prepared = Prepared(
        np.array([fields], PAST),
        code_slots.numpy(),
        full_slots.numpy(),
        positions.numpy(),
        reading,
        most,
        -(-most * units_per_window // (TILE // unit)) * TILE,
        code_items + full_items,
        (cos, sin),
    )
    _prepared[history] = prepared
    return prepared


def _reading(codec: Codec, shape: WindowShape, rope: Rope) -> Reading | None:
    """How windows of the codec are read; None if the kernel cannot. Made once, as it is the same at every event."""
    readings, key = _readings.setdefault(codec, {}), (shape, rope.layout, rope.rotary_dim)
    if key not in readings:
        described = format_of(codec, shape)
        readings[key] = None
        if described is not None and _readable(described, shape.tokens):
            sizes = np.array(described.value_groups)
            readings[key] = Reading(
                described,
                _layout(described, rope),
                np.stack([sizes.cumsum() - sizes, sizes], axis=1),
                None if described.key_ranges is None else described.key_ranges.numpy(),
                None if described.levels is None else _sixteen(described.levels),
            )
    return readings[key]


def _readable(described: CodeFormat, window: int) -> bool:
    """Whether the kernel has what decodes such windows.

    It reads up to 63 bytes behind a row of keys, and 3 behind the values: all formats have something there.
    """
    widths = VALUE_BITS if described.levels is None else LEVEL_BITS
    whole_vectors = all(size % BLOCK == 0 for size in described.value_groups)
    return described.value_bits in widths and whole_vectors and described.row_tokens == window


def _sixteen(levels: Tensor) -> NDArray[np.float32]:
    """Rows of 16, as the kernel finds them."""
    return np.ascontiguousarray(torch.nn.functional.pad(levels, (0, 16 - levels.shape[1])).numpy())


def _layout(described: CodeFormat, rope: Rope) -> NDArray[np.int64]:
    """`[lanes or 1, heads, dim, 4]` channel, offset, bits and pair of keys in the order in which they are decoded.

    Channels that turn together are four places apart: four first ones, then the four second ones. Pairs with the same
    bits are neighbours, as they are decoded together; those that do not turn come last.
    """
    key_rows, key_bits = described.key_rows.numpy(), described.key_bits
    bits = np.full(key_rows.shape, key_bits) if isinstance(key_bits, int) else key_bits.numpy()
    *lanes, dim = bits.shape
    if rope.layout == "interleaved":
        pairs = np.arange(dim).reshape(-1, 2)
    else:
        turning, other = np.split(np.arange(dim), [rope.rotary_dim])
        pairs = np.concatenate([turning.reshape(2, -1).T, other.reshape(-1, 2)])
    still = np.arange(dim // 2) >= rope.rotary_dim // 2
    pair = np.lexsort((bits[..., pairs[:, 1]], bits[..., pairs[:, 0]], np.broadcast_to(still, (*lanes, dim // 2))))
    channel = pairs[pair].reshape(*lanes, -1, 4, 2).swapaxes(-1, -2).reshape(bits.shape)
    pair = np.repeat(pair.reshape(*lanes, -1, 1, 4), 2, axis=-2).reshape(bits.shape)
    rows, widths = (np.take_along_axis(part, channel, axis=-1) for part in (key_rows, bits))
    return np.ascontiguousarray(np.stack([channel, rows, widths, pair], axis=-1))


def _address(array: NDArray[np.float32] | None) -> int:
    return 0 if array is None else array.ctypes.data


def _slots(present: Tensor) -> Tensor:
    """The slots that hold something, in every lane first those; -1 fills up lanes that have fewer."""
    lanes, slots = present.shape
    index = torch.arange(slots).expand(lanes, -1)
    ordered = index.masked_fill(~present, slots).sort(dim=1).values
    most = int(present.sum(dim=1).max()) if present.numel() else 0
    return ordered[:, :most].masked_fill(ordered[:, :most] == slots, -1).contiguous()


_compiled = False


@contextmanager
def _told() -> Iterator[None]:
    """Say what takes so long when the kernel is compiled, once on a machine."""
    global _compiled
    if _compiled:
        yield
        return
    timer = threading.Timer(3.0, _log.warning, ["compiling the CPU kernel; its code is kept for the next time"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _compiled = True
