"""Packed codes (see `qevict.codecs.packing`) to float32, for each width of codes a loop of its own.

Everything is at an address (see `simd`). Vectors of eight codes of `bits` bits take `bits` bytes, a plane of width w
among them w bytes, so no vector begins within a byte.
"""

from __future__ import annotations

from typing import no_type_check

from qevict.codecs.packing import plane_widths
from qevict.kernels.simd import (
    as_numbers,
    as_numbers_wide,
    codes,
    get_int,
    level_of_8,
    level_of_16,
    level_wide,
    load_one,
    load_one_wide,
    multiply_add,
    multiply_add_wide,
    put_int,
    store,
    store_wide,
    wide_codes,
)
from qevict.kernels.tiles import BLOCK, compiled

ENTRY = 32
"""Bytes of what is known of a channel, see `decode_channels`."""
VALUE_BITS = (2, 3, 4, 8)
"""Widths of values that are numbers."""
LEVEL_BITS = (1, 2, 3, 4)
"""Widths of values that are levels of a table."""


# -- keys --------------------------------------------------------------------------------------------------------------


@compiled
@no_type_check
def place_vector(vectors, i, window, first, ranges):
    """Note, for `decode_channels`, that the `i`-th vector of a tile is the window's tokens from `first` on.

    `vectors` has room for `[5, 8]` addresses: row w is where a channel's plane of width 2**w would begin if it began
    with the window, and the last row where the window's scales and offsets are.
    """
    for w in range(4):
        put_int(vectors + 64 * w + 8 * i, window + (first >> 3 << w))
    put_int(vectors + 256 + 8 * i, ranges)


@no_type_check
def _channel_decoder(bits, span):
    """For tiles in which each `span` vectors are of one window; two are decoded as one."""
    read, load_range = (wide_codes[bits], load_one_wide) if span == 2 else (codes[bits], load_one)
    number, fused, put_down = (
        (as_numbers_wide, multiply_add_wide, store_wide) if span == 2 else (as_numbers, multiply_add, store)
    )
    first, second, third = (*plane_widths(bits), 1, 1)[:3]
    first_row, second_row, third_row = (64 * (width.bit_length() - 1) for width in (first, second, third))

    @compiled
    def decode(entries, count, vectors, tokens, scales, offsets, target):
        for entry in range(entries, entries + ENTRY * count, ENTRY):
            scale, row = scales + 4 * get_int(entry), get_int(entry + 8)
            offset, later = scale + offsets, row + (first * tokens + 7 >> 3)
            last = later + (second * tokens + 7 >> 3)
            for place in range(vectors, vectors + 64, 8 * span):
                a, b = get_int(place + first_row) + row, get_int(place + second_row) + later
                c, ranges = get_int(place + third_row) + last, get_int(place + 256)
                s, o = load_range(ranges + scale), load_range(ranges + offset)
                put_down(target, fused(s, number(read(a, b, c)), o))
                target += 4 * BLOCK * span

    return decode


_single_1, _single_2, _single_3, _single_4 = (_channel_decoder(bits, 1) for bits in (1, 2, 3, 4))
_single_5, _single_6, _single_7, _single_8 = (_channel_decoder(bits, 1) for bits in (5, 6, 7, 8))
_double_1, _double_2, _double_3, _double_4 = (_channel_decoder(bits, 2) for bits in (1, 2, 3, 4))
_double_5, _double_6, _double_7, _double_8 = (_channel_decoder(bits, 2) for bits in (5, 6, 7, 8))


@compiled
@no_type_check
def decode_channels(bits, span, entries, count, vectors, tokens, scales, offsets, target):
    """Channels of a tile's keys, code times scale plus offset, 64 tokens each.

    The last vector of a window may reach behind its row; what it makes of the bytes there belongs to nobody.

    Args:
        bits: of the codes of all of these channels, 0 to 8; without any, a key is the offset.
        span: 2 if windows have a whole number of pairs of vectors, else 1.
        entries, count: which channels: the number, and where the packed row begins in a window, in every `ENTRY` bytes.
        vectors: see `place_vector`.
        tokens: of a window.
        scales, offsets: where scales are among those of a window, and offsets are from the scales on.
    """
    if bits == 0:
        for entry in range(entries, entries + ENTRY * count, ENTRY):
            offset = scales + offsets + 4 * get_int(entry)
            for place in range(vectors + 256, vectors + 320, 8):
                store(target, load_one(get_int(place) + offset))
                target += 4 * BLOCK
    elif span == 1:
        if bits == 4:
            _single_4(entries, count, vectors, tokens, scales, offsets, target)
        elif bits == 3:
            _single_3(entries, count, vectors, tokens, scales, offsets, target)
        elif bits == 2:
            _single_2(entries, count, vectors, tokens, scales, offsets, target)
        elif bits == 1:
            _single_1(entries, count, vectors, tokens, scales, offsets, target)
        elif bits == 5:
            _single_5(entries, count, vectors, tokens, scales, offsets, target)
        elif bits == 6:
            _single_6(entries, count, vectors, tokens, scales, offsets, target)
        elif bits == 7:
            _single_7(entries, count, vectors, tokens, scales, offsets, target)
        else:
            _single_8(entries, count, vectors, tokens, scales, offsets, target)
    elif bits == 4:
        _double_4(entries, count, vectors, tokens, scales, offsets, target)
    elif bits == 3:
        _double_3(entries, count, vectors, tokens, scales, offsets, target)
    elif bits == 2:
        _double_2(entries, count, vectors, tokens, scales, offsets, target)
    elif bits == 1:
        _double_1(entries, count, vectors, tokens, scales, offsets, target)
    elif bits == 5:
        _double_5(entries, count, vectors, tokens, scales, offsets, target)
    elif bits == 6:
        _double_6(entries, count, vectors, tokens, scales, offsets, target)
    elif bits == 7:
        _double_7(entries, count, vectors, tokens, scales, offsets, target)
    else:
        _double_8(entries, count, vectors, tokens, scales, offsets, target)


# -- values ------------------------------------------------------------------------------------------------------------


@no_type_check
def _row_decoder(bits):
    read = codes[bits]
    first, second, third = (*plane_widths(bits), 1, 1)[:3]

    @compiled
    def decode(row, vectors, rows, target):
        for _ in range(rows):
            a, b, c = row, row + first * vectors, row + (first + second) * vectors
            for _ in range(vectors):
                store(target, as_numbers(read(a, b, c)))
                a, b, c, target = a + first, b + second, c + third, target + 4 * BLOCK
            row += bits * vectors

    return decode


@no_type_check
def _level_decoder(bits):
    read, read_two, level = codes[bits], wide_codes[bits], level_of_16 if bits == 4 else level_of_8
    first, second = (*plane_widths(bits), 1)[:2]

    @compiled
    def decode(row, vectors, rows, start, count, table, target):
        for _ in range(rows):
            a, b = row + first * start, row + first * vectors + second * start
            place, end = target + 4 * BLOCK * start, target + 4 * BLOCK * (start + count)
            while place + 4 * BLOCK < end:
                store_wide(place, level_wide(read_two(a, b, b), table))
                a, b, place = a + 2 * first, b + 2 * second, place + 8 * BLOCK
            if place < end:
                store(place, level(read(a, b, b), table))
            row, target = row + bits * vectors, target + 4 * BLOCK * vectors

    return decode


_row_2, _row_3, _row_4, _row_8 = (_row_decoder(bits) for bits in VALUE_BITS)
_level_1, _level_2, _level_3, _level_4 = (_level_decoder(bits) for bits in LEVEL_BITS)


@compiled
@no_type_check
def decode_rows(bits, row, vectors, rows, target):
    """Consecutive packed rows of `vectors` vectors, as the numbers that their codes are."""
    if bits == 4:
        _row_4(row, vectors, rows, target)
    elif bits == 3:
        _row_3(row, vectors, rows, target)
    elif bits == 2:
        _row_2(row, vectors, rows, target)
    else:
        _row_8(row, vectors, rows, target)


@compiled
@no_type_check
def decode_levels(bits, row, vectors, rows, start, count, table, target):
    """Of such rows `count` vectors from the `start`-th on, as those of the 16 float32 of a table that codes say."""
    if bits == 4:
        _level_4(row, vectors, rows, start, count, table, target)
    elif bits == 3:
        _level_3(row, vectors, rows, start, count, table, target)
    elif bits == 2:
        _level_2(row, vectors, rows, start, count, table, target)
    else:
        _level_1(row, vectors, rows, start, count, table, target)
