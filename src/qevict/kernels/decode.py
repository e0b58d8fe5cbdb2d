"""Packed codes (see `qevict.codecs.packing`) to float32, for each width of codes a loop of its own.

Everything is at an address (see `simd`). Vectors of eight codes of `bits` bits take `bits` bytes, a plane of width w
among them w bytes, so no vector begins within a byte.
"""

from __future__ import annotations

from typing import no_type_check

from qevict.codecs.packing import plane_widths
from qevict.kernels.simd import (
    codes_1,
    codes_2,
    codes_4,
    codes_8,
    get_address,
    load_one,
    multiply_add,
    put_address,
    splat,
    store,
)
from qevict.kernels.tiles import BLOCK, compiled, inlined

_READ = {1: codes_1, 2: codes_2, 4: codes_4, 8: codes_8}


@no_type_check
def _reader(bits):
    """A function of where a vector's part of the first, the second and the third plane is: the codes as numbers."""
    first, second, third = (*plane_widths(bits), 1, 1)[:3]
    read_first, read_second, read_third = _READ[first], _READ[second], _READ[third]
    low, high = float(1 << first), float(1 << first + second)
    planes = len(plane_widths(bits))

    @inlined
    def read(a, b, c):
        x = read_first(a)
        if planes > 1:
            x = multiply_add(splat(low), read_second(b), x)
        if planes > 2:
            x = multiply_add(splat(high), read_third(c), x)
        return x

    return read


@no_type_check
def _channel_decoder(bits):
    read = _reader(bits)
    first, second, third = (*plane_widths(bits), 1, 1)[:3]

    @compiled
    def decode(vectors, row, tokens, scale, offset, target):
        later = row + (first * tokens + 7 >> 3)
        last = later + (second * tokens + 7 >> 3)
        for i in range(BLOCK):
            place = vectors + 8 * i
            a = get_address(place + 64 * first) + row
            b = get_address(place + 64 * second) + later
            c = get_address(place + 64 * third) + last
            p = get_address(place)
            store(target + 32 * i, multiply_add(load_one(p + scale), read(a, b, c), load_one(p + offset)))

    return decode


@no_type_check
def _row_decoder(bits):
    read = _reader(bits)
    first, second, third = (*plane_widths(bits), 1, 1)[:3]
    row_step, later, last = bits, first, first + second

    @compiled
    def decode(row, vectors, rows, start, count, scale, offset, step, target, target_step):
        for _ in range(rows):
            s, o = load_one(scale), load_one(offset)
            a = row + first * start
            b = row + later * vectors + second * start
            c = row + last * vectors + third * start
            for j in range(count):
                store(target + 32 * j, multiply_add(s, read(a, b, c), o))
                a, b, c = a + first, b + second, c + third
            row, target = row + row_step * vectors, target + target_step
            scale, offset = scale + step, offset + step

    return decode


_channel_1, _channel_2, _channel_3, _channel_4 = (_channel_decoder(bits) for bits in (1, 2, 3, 4))
_channel_5, _channel_6, _channel_7, _channel_8 = (_channel_decoder(bits) for bits in (5, 6, 7, 8))
_row_1, _row_2, _row_3, _row_4 = (_row_decoder(bits) for bits in (1, 2, 3, 4))
_row_5, _row_6, _row_7, _row_8 = (_row_decoder(bits) for bits in (5, 6, 7, 8))


@compiled
@no_type_check
def place_vector(vectors, index, window, first, parameters):
    """Note, for `decode_channel`, whose codes the `index`-th of a tile's vectors are: the window's from `first` on.

    `vectors` has room for `[9, 8]` addresses: row w is where a channel's plane of width w would begin if it began with
    the window, row 0 where its parameters stand.
    """
    put_address(vectors + 8 * index, parameters)
    for shift in range(4):
        width = 1 << shift
        put_address(vectors + 64 * width + 8 * index, window + width * (first // BLOCK))


@compiled
@no_type_check
def decode_channel(bits, vectors, row, tokens, scale, offset, target):
    """A channel of a tile's keys, code times scale plus offset.

    The last vector of a window may reach behind the row; what it makes of the bytes there belongs to nobody.

    Args:
        vectors: see `place_vector`.
        row: where the channel's packed row begins in a window, of `tokens` codes.
        scale, offset: where they are among a window's parameters.
    """
    if bits == 4:
        _channel_4(vectors, row, tokens, scale, offset, target)
    elif bits == 3:
        _channel_3(vectors, row, tokens, scale, offset, target)
    elif bits == 2:
        _channel_2(vectors, row, tokens, scale, offset, target)
    elif bits == 1:
        _channel_1(vectors, row, tokens, scale, offset, target)
    elif bits == 5:
        _channel_5(vectors, row, tokens, scale, offset, target)
    elif bits == 6:
        _channel_6(vectors, row, tokens, scale, offset, target)
    elif bits == 7:
        _channel_7(vectors, row, tokens, scale, offset, target)
    else:
        _channel_8(vectors, row, tokens, scale, offset, target)


@compiled
@no_type_check
def decode_rows(bits, row, vectors, rows, start, count, scale, offset, step, target, target_step):
    """A part of consecutive packed rows of `vectors` vectors each, code times scale plus offset.

    The part is `count` vectors from the `start`-th on. The first row has its scale and its offset at these addresses,
    the others `step` bytes further on each; their targets are `target_step` bytes apart.
    """
    if bits == 4:
        _row_4(row, vectors, rows, start, count, scale, offset, step, target, target_step)
    elif bits == 3:
        _row_3(row, vectors, rows, start, count, scale, offset, step, target, target_step)
    elif bits == 2:
        _row_2(row, vectors, rows, start, count, scale, offset, step, target, target_step)
    elif bits == 1:
        _row_1(row, vectors, rows, start, count, scale, offset, step, target, target_step)
    elif bits == 5:
        _row_5(row, vectors, rows, start, count, scale, offset, step, target, target_step)
    elif bits == 6:
        _row_6(row, vectors, rows, start, count, scale, offset, step, target, target_step)
    elif bits == 7:
        _row_7(row, vectors, rows, start, count, scale, offset, step, target, target_step)
    else:
        _row_8(row, vectors, rows, start, count, scale, offset, step, target, target_step)
