"""Decode attention on a GPU: what the Triton kernel is told of a view."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from qevict.codecs import MinMaxCodec, WindowShape
from qevict.codecs.packing import packed_size, plane_widths
from qevict.kernels.formats import MOST_QUERIES, CodeFormat, format_of
from qevict.kernels.reference import Attended, History, TierView

_MOST_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 32  # tokens of a tile: with twice as many, decoding a tile takes more registers than there are
_MOST_ROWS = 32  # of a program of `attend_split`
_SPLITS = 64  # of a lane's tokens at most, but for one more of each kind
_COLUMNS = 32  # of masses in a program of `combine`

_log = logging.getLogger("qevict")


class Prepared(NamedTuple):
    """What the kernel needs to know of a history.

    Attributes:
        values: arguments and constants of `attend_split`, by name.
        unit: tokens of a unit, see `triton_decode`.
        turn_back: see `CodeFormat`.
    """

    values: dict[str, Any]
    unit: int
    turn_back: Tensor | None


_prepared: WeakKeyDictionary[History, Prepared | None] = WeakKeyDictionary()


def attend(
    query: Float[Tensor, "lanes heads group queries dim"], view: TierView, scaling: float, count_last: int | None = None
) -> Attended | None:
    """As `reference.attend`; None where this kernel does not know the codec, the shape or the dtype, or gradients.

    The device is waited for when a history is new, and never else.
    """
    lanes, heads, group, queries, dim = query.shape
    stored, new, new_values, history = view.stored_keys, view.new_keys, view.new_values, view.history
    if queries > MOST_QUERIES or dim > _MOST_DIM or dim % 2:
        return None
    if any(t.dtype not in _DTYPES or t.stride(-1) != 1 for t in (query, stored, new, new_values)):
        return None
    if query.requires_grad or new.requires_grad or new_values.requires_grad or not has_triton():
        return None
    prepared = _prepared[history] if history in _prepared else _prepare(history)
    if prepared is None:
        return None
    from qevict.kernels.triton_combine import combine
    from qevict.kernels.triton_decode import attend_split

    rows, window, unit = group * queries, history.full_keys.shape[3], prepared.unit
    full, codes, per_window = history.full_keys.shape[1], history.packed.shape[1], -(-window // unit)
    local_windows = -(-max(0, stored.shape[2] + new.shape[2] - view.sinks) // window)
    sink_units = -(-view.sinks // unit)
    units = (codes * per_window, full * per_window, sink_units + local_windows * per_window)
    tiles = [-(-count * unit // _BLOCK) for count in units]
    row_block = min(_MOST_ROWS, max(16, _power_of_two(rows)))
    row_blocks = -(-rows // row_block)
    share = max(1, sum(tiles) * lanes * heads * row_blocks // _programs(query.device), -(-sum(tiles) // _SPLITS))
    splits = [-(-count // share) for count in tiles]
    columns, steps = full + codes + local_windows, queries if count_last is None else 1

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    means, sums = room(lanes, heads, sum(splits), rows, dim), room(lanes, heads, sum(splits), rows)
    unit_sums, mass = room(lanes, heads, rows, sum(units)), room(lanes, steps, columns)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    turn_back = prepared.turn_back
    with torch.cuda.device_of(query):  # a model may lie on several devices
        launch(
            attend_split, (lanes * heads, sum(splits), row_blocks),
            query=query, stored_keys=stored, stored_values=view.stored_values, new_keys=new, new_values=new_values,
            means=means, sums=sums, unit_sums=unit_sums, scaling=scaling * math.log2(math.e),
            stored=stored.shape[2], new=new.shape[2], sinks=view.sinks, queries=queries,
            tiles=share, splits=sum(splits), units=sum(units), GROUP=group, ROWS=row_block,
            # Tensor cores round to 11 bits, which is what 16-bit queries have; three such products make nearly 24.
            PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
            **_strides("query", query, "lane", "head", "group", "token"),
            **_strides("stored", stored, "lane", "head", "token"),
            **_strides("new_keys", new, "lane", "head", "token"),
            **_strides("new_values", new_values, "lane", "head", "token"),
            **prepared.values, num_warps=4, num_stages=1,
        )  # fmt: skip
        launch(
            combine, (heads * rows + steps * -(-columns // _COLUMNS), lanes, 1),
            means=means, sums=sums, unit_sums=unit_sums, turn_back=means if turn_back is None else turn_back,
            output=output, mass=mass, queries=queries, code_splits=splits[0], splits=sum(splits), windows=full + codes,
            columns=columns, sink_units=sink_units, units=sum(units),
            since=0 if count_last is None else queries - count_last,
            HEADS=heads, GROUP=group, DIM=dim, CHANNELS=prepared.values["CHANNELS"], UNITS_PER_WINDOW=per_window,
            APART=count_last is None, TURNED=turn_back is not None, SPLITS=32, COUNT=row_block, COLUMNS=_COLUMNS,
        )  # fmt: skip
    return Attended(output, mass)


def launch(kernel: Any, grid: tuple[int, int, int], **values: Any) -> None:
    """Start a kernel on its arguments, constants and options."""
    kernel[grid](**values)


@functools.cache
def has_triton() -> bool:
    """Whether there is a Triton that can compile the kernel (3.2 ends the process); says so once if not."""
    try:
        import triton
    except ImportError:
        found = "none"
    else:
        found = triton.__version__
        if tuple(map(int, found.split(".")[:2])) >= (3, 3):
            return True
    _log.warning("the GPU kernel needs Triton 3.3 or newer, found %s: plain PyTorch attends, which is slow", found)
    return False


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs keep the device busy."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _prepare(history: History) -> Prepared | None:
    full, packed, rope, device = history.full_keys, history.packed, history.rope, history.packed.device
    _, _, heads, window, dim = full.shape
    described = format_of(history.codec or MinMaxCodec(), WindowShape(heads, window, dim))
    if described is None or full.dtype not in _DTYPES:
        _prepared[history] = None
        return None
    code_starts = history.code_positions.masked_fill(~history.code_present, -1)
    starts = torch.cat([history.full_present.int() - 1, code_starts.int()], dim=1)
    cos, sin = rope.tables(int(code_starts.max()) + window if code_starts.numel() else 0, device)
    rows, bits, ranges, levels = described.key_rows, described.key_bits, described.key_ranges, described.levels
    key_access, value_access = _accesses(described, packed, dim)
    channels, unit = max(16, _power_of_two(dim)), min(_BLOCK, max(8, _power_of_two(window)))
    granule, groups = _granules(described.value_groups, channels)
    none = torch.empty(0, device=device)
    values: dict[str, Any] = {
        "full_keys": full, "full_values": history.full_values, "packed": packed, "starts": starts,
        "cos": cos, "sin": sin, "key_rows": rows.int().to(device),
        "key_bits": starts if isinstance(bits, int) else bits.int().to(device),
        "key_ranges": none if ranges is None else ranges.to(device),
        "levels": none if levels is None else levels.to(device),
        "value_groups": torch.tensor(groups, dtype=torch.int32, device=device),
        "key_lane": rows.stride(0) if len(rows) > 1 else 0,
        "key_scale": described.key_scale, "key_offset": described.key_offset, "value_start": described.value_codes,
        "value_scale": described.value_scale, "value_offset": described.value_offset,
        "full_slots": full.shape[1], "code_slots": packed.shape[1],
        **_strides("full", full, "lane", "slot"), **_strides("packed", packed, "lane", "slot"),
        "HEADS": heads, "DIM": dim, "WINDOW": window, "BLOCK": _BLOCK, "UNIT": unit,
        "PAIRS": max(16, channels // 2), "CHANNELS": channels,
        "TURNING": rope.rotary_dim // 2, "INTERLEAVED": rope.layout == "interleaved",
        "KEY_BITS": bits if isinstance(bits, int) else 0, "KEY_TOKENS": described.row_tokens, "KEY_ACCESS": key_access,
        "KEY_RANGES": ranges is not None, "VALUE_BITS": described.value_bits, "VALUE_ACCESS": value_access,
        "VALUE_GROUPS": len(described.value_groups), "GRANULES": channels // granule, "LEVELS": levels is not None,
    }  # fmt: skip
    turn_back = None if described.turn_back is None else described.turn_back.to(device)
    prepared = _prepared[history] = Prepared(values, unit, turn_back)
    return prepared


def _accesses(described: CodeFormat, packed: Tensor, dim: int) -> tuple[int, int]:
    """Bytes, 1, 2 or 4, in which planes of keys and of values can be read: sections start at multiples of 4.

    Rows follow one another in a section, and planes in a row.
    """
    most = math.gcd(4, packed.data_ptr(), *packed.stride()[:2])
    bits, tokens = described.key_bits, described.row_tokens
    widths = plane_widths(bits) if isinstance(bits, int) else (1, 2, 4, 8)
    key_sizes = [packed_size(tokens, width) for width in widths]
    value_sizes = [packed_size(dim, width) for width in plane_widths(described.value_bits)]
    return math.gcd(most, *key_sizes), math.gcd(most, *value_sizes)


def _granules(groups: tuple[int, ...], channels: int) -> tuple[int, list[int]]:
    """A power of two of channels that all groups are made of, and the group of each such stretch of a padded head."""
    if len(groups) == 1:
        return channels, [0]
    size = math.gcd(channels, *groups)
    of = [index for index, group in enumerate(groups) for _ in range(group // size)]
    return size, of + [0] * (channels // size - len(of))


def _strides(name: str, tensor: Tensor, *dimensions: str) -> dict[str, int]:
    return {f"{name}_{dimension}": stride for dimension, stride in zip(dimensions, tensor.stride(), strict=False)}


def _power_of_two(count: int) -> int:
    """The next one, from 1 on."""
    return 1 << (count - 1).bit_length()
