"""The GPU kernel's part for code windows: a tile of keys or values decoded. See `triton_decode` for tiles and units."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def spread(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TIMES: tl.constexpr):
    """`[rows, columns]`, each column so many times."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [ROWS, COLUMNS, TIMES]), [ROWS, COLUMNS * TIMES])


@triton.jit
@no_type_check
def load_plane(packed, place, mask, WIDTH: tl.constexpr, ACCESS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """One plane of packed codes, read in words of `ACCESS` bytes that lie at `place`: `[rows, words * codes]`."""
    CODES: tl.constexpr = 8 * ACCESS // WIDTH
    if ACCESS == 4:
        words = tl.load((packed + place).to(tl.pointer_type(tl.uint32)), mask=mask, other=0)
    elif ACCESS == 2:
        words = tl.load((packed + place).to(tl.pointer_type(tl.uint16)), mask=mask, other=0)
    else:
        words = tl.load(packed + place, mask=mask, other=0)
    shifts = (tl.arange(0, CODES) * WIDTH).to(tl.uint32)
    codes = (words.to(tl.uint32)[:, :, None] >> shifts[None, None, :]) & ((1 << WIDTH) - 1)
    return tl.reshape(codes, [ROWS, WORDS * CODES]).to(tl.int32)


@triton.jit
@no_type_check
def history_tokens(starts, unit, token, slots, UNIT: tl.constexpr, UNITS_PER_WINDOW: tl.constexpr):
    """Where tokens of a tile of windows are: slot, place in the window, and the window's position (-1: no window).

    Args:
        starts: the lane's positions of windows, by slot.
        unit: the tile's first.
        token: places in the tile.
    """
    unit = unit + token // UNIT
    slot = unit // UNITS_PER_WINDOW
    position = tl.load(starts + slot, mask=slot < slots, other=-1)
    return slot, unit % UNITS_PER_WINDOW * UNIT + token % UNIT, position


@triton.jit
@no_type_check
def add_key_plane(
    codes, rows, wider, packed, slot_bytes, starts, unit, slots, bits,
    WIDTH: tl.constexpr, ROW_TOKENS: tl.constexpr, ACCESS: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, UNITS_PER_WINDOW: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Codes, places of the next plane and bits read so far, with one plane more."""
    WORDS: tl.constexpr = BLOCK * WIDTH // (8 * ACCESS)
    first = tl.arange(0, WORDS) * (8 * ACCESS // WIDTH)
    slot, token, position = history_tokens(starts, unit, first, slots, UNIT, UNITS_PER_WINDOW)
    own = (bits & WIDTH) != 0
    mask = own[:, None] & ((position >= 0) & (token < ROW_TOKENS))[None, :]
    column = slot.to(tl.int64) * slot_bytes + token * WIDTH // 8
    read = load_plane(packed, rows[:, None] + column[None, :], mask, WIDTH, ACCESS, PAIRS, WORDS)
    rows += tl.where(own, (ROW_TOKENS * WIDTH + 7) // 8, 0)
    return codes + (read << wider[:, None]), rows, wider + tl.where(own, WIDTH, 0)


@triton.jit
@no_type_check
def value_plane(
    packed, rows, seen,
    WIDTH: tl.constexpr, ACCESS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One plane of a tile's values, `[block, channels]`; `rows` is where that of each token is."""
    WORDS: tl.constexpr = CHANNELS * WIDTH // (8 * ACCESS)
    word = tl.arange(0, WORDS)
    mask = seen[:, None] & (word * (8 * ACCESS // WIDTH) < DIM)[None, :]
    return load_plane(packed, rows[:, None] + (word * ACCESS)[None, :], mask, WIDTH, ACCESS, BLOCK, WORDS)


@triton.jit
@no_type_check
def value_codes(
    packed, rows, seen,
    BITS: tl.constexpr, ACCESS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Codes of a tile's values, `[block, channels]`; `rows` is where those of each token are."""
    codes = tl.zeros([BLOCK, CHANNELS], tl.int32)
    for plane in tl.static_range(4):
        if (BITS >> (3 - plane)) & 1:
            # The lowest bits of a code are in the widest plane, which comes first.
            read = value_plane(packed, rows, seen, 8 >> plane, ACCESS, BLOCK, DIM, CHANNELS)
            codes += read << (BITS & (16 - (16 >> plane)))
            rows += (DIM * (8 >> plane) + 7) // 8
    return codes


@triton.jit
@no_type_check
def load_halves(packed, place, mask):
    """float16 that lie at `place`, as float32."""
    return tl.load((packed + place).to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def code_keys(
    packed, slot_bytes, starts, unit, slots, key_rows, key_bits, key_ranges, key_scale, key_offset, channel, real,
    BITS: tl.constexpr, ROW_TOKENS: tl.constexpr, ACCESS: tl.constexpr, RANGES: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, UNITS_PER_WINDOW: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Some channels of a tile's keys as they were before they were turned, `[pairs, block]`.

    Args:
        key_rows, key_bits: `[dim]` of the head: where the rows of its channels are in a window, and their bits, which
            are `BITS` everywhere unless this is 0. They are read for every tile, to hold fewer registers.
        key_ranges: `[2, dim]` scales and offsets of the head, if `RANGES`; else they are in the windows, at
            `key_scale` and `key_offset`.
        channel, real: `[pairs]`, and which of them the head has.
    """
    rows = tl.load(key_rows + channel, mask=real, other=0)
    bits = tl.load(key_bits + channel, mask=real, other=0) if BITS == 0 else tl.where(real, BITS, 0)
    codes = tl.zeros([PAIRS, BLOCK], tl.int32)
    wider = tl.zeros([PAIRS], tl.int32)  # bits in wider planes, which come first
    for plane in tl.static_range(4):
        if BITS == 0 or (BITS >> (3 - plane)) & 1:
            codes, rows, wider = add_key_plane(
                codes, rows, wider, packed, slot_bytes, starts, unit, slots, bits,
                8 >> plane, ROW_TOKENS, ACCESS, BLOCK, UNIT, UNITS_PER_WINDOW, PAIRS,
            )  # fmt: skip
    if RANGES:
        scale = tl.load(key_ranges + channel, mask=real, other=0.0)[:, None]
        offset = tl.load(key_ranges + DIM + channel, mask=real, other=0.0)[:, None]
    else:
        UNITS: tl.constexpr = BLOCK // UNIT
        of = tl.arange(0, UNITS) * UNIT
        slot, _, position = history_tokens(starts, unit, of, slots, UNIT, UNITS_PER_WINDOW)
        place = 2 * channel[:, None] + (slot.to(tl.int64) * slot_bytes)[None, :]
        mask = real[:, None] & (position >= 0)[None, :]
        scale = spread(load_halves(packed, place + key_scale, mask), PAIRS, UNITS, UNIT)
        offset = spread(load_halves(packed, place + key_offset, mask), PAIRS, UNITS, UNIT)
    return codes.to(tl.float32) * scale + offset


@triton.jit
@no_type_check
def turned(keys_1, keys_2, cos, sin, position, seen, pair, TURNING: tl.constexpr):
    """Keys `[pairs, block]` turned to their positions; pairs from `TURNING` on stay."""
    angle = (position * TURNING)[None, :] + pair[:, None]
    mask = (pair < TURNING)[:, None] & seen[None, :]
    c = tl.load(cos + angle, mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    return keys_1 * c - keys_2 * s, keys_2 * c + keys_1 * s


@triton.jit
@no_type_check
def code_values(
    packed, window, line, seen, granule, levels, value_start, value_scale, value_offset,
    BITS: tl.constexpr, ACCESS: tl.constexpr, GROUPS: tl.constexpr, GRANULES: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A tile's values, `[block, channels]`; what stands behind the head's channels is arbitrary.

    Args:
        window: where each token's window is.
        line: each token's place in a window of `[heads, tokens]`.
        granule: `[granules]` the group of each stretch of channels.
    """
    ROW: tl.constexpr = (
        (BITS >> 3 & 1) * DIM
        + (BITS >> 2 & 1) * ((4 * DIM + 7) // 8)
        + (BITS >> 1 & 1) * ((2 * DIM + 7) // 8)
        + (BITS & 1) * ((DIM + 7) // 8)
    )
    TIMES: tl.constexpr = CHANNELS // GRANULES
    codes = value_codes(packed, window + value_start + line * ROW, seen, BITS, ACCESS, BLOCK, DIM, CHANNELS)
    group = (window + 2 * line * GROUPS)[:, None] + 2 * granule[None, :]
    scale = spread(load_halves(packed, group + value_scale, seen[:, None]), BLOCK, GRANULES, TIMES)
    if LEVELS:
        table = spread(granule[None, :], 1, GRANULES, TIMES) << BITS
        values = tl.load(levels + table + codes) * scale
    else:
        offset = load_halves(packed, group + value_offset, seen[:, None])
        values = codes.to(tl.float32) * scale + spread(offset, BLOCK, GRANULES, TIMES)
    return values
