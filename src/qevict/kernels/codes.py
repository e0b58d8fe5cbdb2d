"""The kernel's part for code windows. See `tiles` for what is done within a tile, and `compiled` for items and rows.

A *unit* is what a tile holds of a window: its tokens, rounded up to whole vectors. A tile has as many units as fit; a
window of more than 64 tokens is several units. Logits and weights of an item stand tile by tile.
"""

from __future__ import annotations

from typing import no_type_check

from qevict.kernels import simd
from qevict.kernels.decode import decode_channel, decode_rows, place_vector
from qevict.kernels.simd import FLOAT16, add, copy_2, get_address, load, prefetch, put, put_address, store
from qevict.kernels.tiles import (
    BLOCK,
    NOTHING,
    TILE,
    add_products,
    add_values,
    compiled,
    convert,
    rotate,
    softmax,
)


@compiled
@no_type_check
def attend_codes(past, lane, first, stop, slots, positions, layout, rooms, rows, item, results):
    """Attend the lane's code windows `first` to `stop`, in the order of `slots`."""
    in_tile = TILE // past.unit
    units = (stop - first) * past.units_per_window
    tiles = (units + in_tile - 1) // in_tile
    for tile in range(tiles):
        key_tile(past, lane, first, tile, min(in_tile, units - tile * in_tile), slots, positions, layout, rooms, rows)
    for head in range(past.heads):
        for row in range(rows):
            weights = rooms.logits + 4 * (head * rows + row) * rooms.row
            highest = softmax(weights, tiles * TILE)
            whole = 0.0
            for u in range(units):
                place = weights + 4 * (u // in_tile * TILE + u % in_tile * past.unit)
                x = load(place)
                for i in range(4 * BLOCK, 4 * past.unit, 4 * BLOCK):
                    x = add(x, load(place + i))
                share = simd.total(x)
                results[item, head, row, past.dim + 2 + u // past.units_per_window] += share
                whole += share
            results[item, head, row, past.dim] = highest
            results[item, head, row, past.dim + 1] = whole
    for index in range(first, stop):
        window = past.packed + lane * past.packed_lane + slots[lane, index] * past.packed_slot
        add_window_values(past, window, (index - first) * past.units_per_window, rooms, rows, item, results)


@compiled
@no_type_check
def key_tile(past, lane, first, tile, present, slots, positions, layout, rooms, rows):
    """The logits of one tile, which has `present` units."""
    dim, size = past.dim, 4 * past.unit
    fetch_next(past, lane, first, tile, slots)
    vectors = past.unit // BLOCK
    for u in range(TILE // past.unit):
        # Places of a tile that no unit takes are filled with the first one's, so that whatever is there can be read.
        index, start = unit_of(past, first, tile, u if u < present else 0)
        window = past.packed + lane * past.packed_lane + slots[lane, index] * past.packed_slot
        for i in range(vectors):
            parameters = rooms.parameters + 8 * dim * (u if u < present else 0)
            place_vector(rooms.vectors, u * vectors + i, window, start + BLOCK * i, parameters)
        if u >= present:
            continue
        put_address(rooms.bases + 8 * u, window)
        position = 4 * (positions[lane, index] + start)
        for pair in range(past.pairs):
            source, target = pair * past.positions + position, 4 * pair * TILE + u * size
            for i in range(0, size, 4 * BLOCK):
                store(rooms.cos + target + i, load(past.cos + source + i))
                store(rooms.sin + target + i, load(past.sin + source + i))
    for head in range(past.heads):
        for u in range(present):
            window, target = get_address(rooms.bases + 8 * u), rooms.parameters + 8 * dim * u
            convert(window + past.key_scale + 2 * head * dim, FLOAT16, dim, target)
            convert(window + past.key_offset + 2 * head * dim, FLOAT16, dim, target + 4 * dim)
        logits = rooms.logits + 4 * (head * rows * rooms.row + tile * TILE)
        for row in range(rows):
            for i in range(0, 4 * TILE, 4 * BLOCK):
                store(logits + 4 * row * rooms.row + i, simd.splat(0.0))
        for block in range(dim // BLOCK):
            decode_keys(past, head, block, layout, rooms)
            for row in range(rows):
                query = rooms.blocked + 4 * ((head * rows + row) * dim + BLOCK * block)
                add_products(query, rooms.keys, logits + 4 * row * rooms.row)
        hide_rest(past, first, tile, present, rooms, rows, logits)


@compiled
@no_type_check
def decode_keys(past, head, block, layout, rooms):
    """Eight channels of a tile's keys, `layout[head]` telling which: four, and the four that turn with them."""
    for i in range(BLOCK):
        place = BLOCK * block + i
        channel, row, bits = layout[head, place, 0], layout[head, place, 1], layout[head, place, 2]
        target = rooms.keys + 4 * TILE * i
        decode_channel(bits, rooms.vectors, row, past.window, 4 * channel, 4 * (past.dim + channel), target)
    for i in range(4):
        pair = 4 * block + i
        if pair < past.pairs:
            keys, turn = rooms.keys + 4 * TILE * i, 4 * TILE * pair
            rotate(keys, keys + 16 * TILE, rooms.cos + turn, rooms.sin + turn)


@compiled
@no_type_check
def fetch_next(past, lane, first, tile, slots):
    """Have the windows of the next tile brought near: their parts are read in no order that a processor foresees."""
    after, _ = unit_of(past, first, tile + 1, 0)
    count = max(1, TILE // past.unit)
    for index in range(after, min(after + count, slots.shape[1])):
        if slots[lane, index] >= 0:
            window = past.packed + lane * past.packed_lane + slots[lane, index] * past.packed_slot
            for place in range(window, window + past.packed_slot, 64):
                prefetch(place)


@compiled
@no_type_check
def unit_of(past, first, tile, u):
    """The window that a unit belongs to, among the lane's, and the first of its tokens in the unit."""
    unit = tile * (TILE // past.unit) + u
    return first + unit // past.units_per_window, unit % past.units_per_window * TILE


@compiled
@no_type_check
def hide_rest(past, first, tile, present, rooms, rows, logits):
    """Nothing is seen of places in a tile that no token has."""
    for u in range(present):
        _, start = unit_of(past, first, tile, u)
        for token in range(u * past.unit + min(past.unit, past.window - start), (u + 1) * past.unit):
            for row in range(rows):
                put(logits + 4 * (row * rooms.row + token), NOTHING)
    for token in range(present * past.unit, TILE):
        for row in range(rows):
            put(logits + 4 * (row * rooms.row + token), NOTHING)


@compiled
@no_type_check
def add_window_values(past, window, unit, rooms, rows, item, results):
    """Add the weighted values of a window, whose first unit is the item's `unit`, to the outputs of all rows."""
    dim, group, bits, in_tile = past.dim, past.value_group, past.value_bits, TILE // past.unit
    groups = (dim + group - 1) // group
    count = past.window * groups
    padded = (count + BLOCK - 1) // BLOCK * BLOCK
    row_bytes = dim * bits >> 3  # whole bytes in every plane, as there are whole vectors of channels
    for head in range(past.heads):
        scales, offsets = rooms.scales, rooms.scales + 4 * padded
        parameters = 2 * head * count
        read_halves(window + past.value_scale + parameters, count, rooms.halves, scales)
        read_halves(window + past.value_offset + parameters, count, rooms.halves, offsets)
        for first in range(0, past.window, BLOCK):
            tokens = min(BLOCK, past.window - first)  # what is left in `values` of others has no weight
            packed = window + past.value_codes + (head * past.window + first) * row_bytes
            for start in range(0, dim, group):
                place = 4 * (first * groups + start // group)
                vectors, target = min(group, dim - start) // BLOCK, rooms.values + 4 * start
                decode_rows(
                    bits, packed, dim // BLOCK, tokens, start // BLOCK, vectors,
                    scales + place, offsets + place, 4 * groups, target, 4 * dim,
                )  # fmt: skip
            u = unit + first // TILE
            place = u // in_tile * TILE + u % in_tile * past.unit + first % TILE
            for row in range(rows):
                weights = rooms.logits + 4 * ((head * rows + row) * rooms.row + place)
                output = rooms.results + 4 * ((item * past.heads + head) * rows + row) * results.shape[3]
                add_values(weights, rooms.values, dim, output)


@compiled
@no_type_check
def read_halves(source, count, spare, target):
    """`count` float16 as float32, without reading behind the last."""
    whole = count // BLOCK * BLOCK
    convert(source, FLOAT16, whole, target)
    if whole < count:
        for i in range(count - whole):
            copy_2(source + 2 * (whole + i), spare + 2 * i)
        convert(spare, FLOAT16, BLOCK, target + 4 * whole)
