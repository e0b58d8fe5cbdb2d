"""The kernel's part for code windows. See `tiles` for what is done within a tile, and `compiled` for items and rows.

A *unit* is what a tile holds of a window: its tokens, rounded up to whole vectors. A tile has as many units as fit; a
window of more than 64 tokens is several units. Logits and weights of an item stand tile by tile.
"""

from __future__ import annotations

from typing import no_type_check

from qevict.kernels import simd
from qevict.kernels.decode import ENTRY, decode_channels, decode_levels, decode_rows, place_vector
from qevict.kernels.simd import FLOAT16, add, copy_2, get, load, prefetch, put, splat, store, transpose
from qevict.kernels.tiles import (
    BLOCK,
    NOTHING,
    TILE,
    add_products,
    add_values,
    compiled,
    convert,
    product,
    scale_weights,
    softmax,
)


@compiled
@no_type_check
def attend_codes(past, lane, first, stop, slots, positions, layout, groups, rooms, rows, item, results):
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
    for head in range(past.heads):
        outputs = rooms.results + 4 * (item * past.heads + head) * rows * results.shape[3]
        add_code_values(past, lane, first, stop, head, slots, groups, rooms, rows, outputs, 4 * results.shape[3])


@compiled
@no_type_check
def key_tile(past, lane, first, tile, present, slots, positions, layout, rooms, rows):
    """The logits of one tile, which has `present` units."""
    dim = past.dim
    fetch_next(past, lane, first, tile, slots, positions)
    vectors = past.unit // BLOCK
    for i in range(BLOCK):
        # Places of a tile that no unit takes are read as the first one's, whatever becomes of it.
        u = i // vectors if i // vectors < present else 0
        index, start = unit_of(past, first, tile, u)
        window = past.packed + lane * past.packed_lane + slots[lane, index] * past.packed_slot
        ranges = rooms.ranges + 8 * dim * u
        if past.key_ranges:  # the lane's, for all of its windows
            ranges = past.key_ranges + 8 * lane * past.heads * dim
        place_vector(rooms.vectors, i, window, start + BLOCK * (i % vectors), ranges)
    for u in range(present):
        index, start = unit_of(past, first, tile, u)
        source, tokens = past.turns * (positions[lane, index] + start), min(past.unit, past.window - start)
        for pair in range(0, past.pairs, BLOCK):
            for token in range(0, tokens, BLOCK):
                place, target = source + past.turns * token + 4 * pair, 4 * (pair * TILE + u * past.unit + token)
                transpose(past.cos + place, past.turns, rooms.cos + target, 4 * TILE)
                transpose(past.sin + place, past.turns, rooms.sin + target, 4 * TILE)
    for head in range(past.heads):
        if not past.key_ranges:
            for u in range(present):
                index, _ = unit_of(past, first, tile, u)
                window = past.packed + lane * past.packed_lane + slots[lane, index] * past.packed_slot
                convert(window + past.key_scale + 2 * head * dim, FLOAT16, dim, rooms.ranges + 8 * dim * u)
                convert(window + past.key_offset + 2 * head * dim, FLOAT16, dim, rooms.ranges + 8 * dim * u + 4 * dim)
        logits = rooms.logits + 4 * (head * rows * rooms.row + tile * TILE)
        for row in range(rows):
            for i in range(0, 4 * TILE, 4 * BLOCK):
                store(logits + 4 * row * rooms.row + i, splat(0.0))
        own = min(lane, layout.shape[0] - 1)
        for block in range(dim // BLOCK):
            turns = decode_keys(past, own, head, block, layout, rooms)
            queries = rooms.blocked + 4 * (head * rows * dim + BLOCK * block)
            add_products(rooms.keys, turns, rooms.cos, rooms.sin, queries, 4 * dim, rows, logits, 4 * rooms.row)
        hide_rest(past, first, tile, present, rooms, rows, logits)


@compiled
@no_type_check
def decode_keys(past, lane, head, block, layout, rooms):
    """Eight channels of a tile's keys, `layout[lane, head]` telling which: four, and the four that turn with them.

    Returns where the cosines and sines of the four are among those of a tile.
    """
    span = 1 if past.unit % (2 * BLOCK) else 2
    scales = 8 * head * past.dim if past.key_ranges else 0
    start, i = BLOCK * block, 0
    entries = layout.ctypes.data + ENTRY * ((lane * past.heads + head) * past.dim + start)
    while i < BLOCK:
        bits, stop = layout[lane, head, start + i, 2], i + 1
        while stop < BLOCK and layout[lane, head, start + stop, 2] == bits:
            stop += 1
        decode_channels(
            bits, span, entries + ENTRY * i, stop - i, rooms.vectors, past.window, scales, 4 * past.dim,
            rooms.keys + 4 * TILE * i,
        )  # fmt: skip
        i = stop
    first = layout[lane, head, start, 3], layout[lane, head, start + 1, 3]
    last = layout[lane, head, start + 2, 3], layout[lane, head, start + 3, 3]
    return 4 * TILE * first[0], 4 * TILE * first[1], 4 * TILE * last[0], 4 * TILE * last[1]


@compiled
@no_type_check
def fetch_next(past, lane, first, tile, slots, positions):
    """Have the windows of the next tile brought near: their parts are read in no order that a processor foresees."""
    after, _ = unit_of(past, first, tile + 1, 0)
    count = max(1, TILE // past.unit)
    for index in range(after, min(after + count, slots.shape[1])):
        if slots[lane, index] >= 0:
            window = past.packed + lane * past.packed_lane + slots[lane, index] * past.packed_slot
            for place in range(window, window + past.packed_slot, 64):
                prefetch(place)
            turns = past.turns * positions[lane, index]
            for place in range(turns, turns + past.turns * past.window, 64):
                prefetch(past.cos + place)
                prefetch(past.sin + place)


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
def add_code_values(past, lane, first, stop, head, slots, groups, rooms, rows, outputs, output_row):
    """Add the weighted values of the lane's windows `first` to `stop` to a head's outputs, one for each row.

    The scales of tokens go into the weights, and the offsets into one number for all windows.

    Args:
        outputs: that of the first row; the next are `output_row` bytes apart.
    """
    dim, count, in_tile = past.dim, groups.shape[0], TILE // past.unit
    units = (stop - first) * past.units_per_window
    padded = (units + in_tile - 1) // in_tile * TILE
    lane_weights = rooms.logits + 4 * head * rows * rooms.row
    read_ranges(past, lane, first, stop, past.value_scale, head, slots, count, rooms)
    for row in range(rows):
        for group in range(count):
            scaled = rooms.scaled + 4 * (row * count + group) * rooms.row
            scale_weights(lane_weights + 4 * row * rooms.row, rooms.scales + 4 * group * rooms.row, padded, scaled)
    if past.value_offset >= 0:
        read_ranges(past, lane, first, stop, past.value_offset, head, slots, count, rooms)
        for row in range(rows):
            for group in range(count):
                offsets = rooms.scales + 4 * group * rooms.row
                shift = splat(product(lane_weights + 4 * row * rooms.row, offsets, padded))
                start = outputs + row * output_row + 4 * groups[group, 0]
                for place in range(start, start + 4 * groups[group, 1], 4 * BLOCK):
                    store(place, add(load(place), shift))
    row_bytes = dim * past.value_bits >> 3  # whole bytes in every plane, as there are whole vectors of channels
    for index in range(first, stop):
        window = past.packed + lane * past.packed_lane + slots[lane, index] * past.packed_slot + past.value_codes
        for token in range(0, past.window, BLOCK):
            tokens = min(BLOCK, past.window - token)  # what is left in `values` of others has no weight
            packed = window + (head * past.window + token) * row_bytes
            if past.levels:
                for group in range(count):
                    start, vectors = groups[group, 0] // BLOCK, groups[group, 1] // BLOCK
                    table = past.levels + 64 * group
                    decode_levels(past.value_bits, packed, dim // BLOCK, tokens, start, vectors, table, rooms.values)
            else:
                decode_rows(past.value_bits, packed, dim // BLOCK, tokens, rooms.values)
            scaled = rooms.scaled + 4 * place_of(past, index - first, token)
            for group in range(count):
                weights, start = scaled + 4 * group * rooms.row, 4 * groups[group, 0]
                add_values(
                    weights, 4 * count * rooms.row, rooms.values + start, 4 * dim, groups[group, 1],
                    rows, outputs + start, output_row,
                )  # fmt: skip


@compiled
@no_type_check
def place_of(past, index, token):
    """Where the logit or weight of a token of an item's window is in a row of them; those of a unit follow it."""
    in_tile, unit = TILE // past.unit, index * past.units_per_window + token // TILE
    return unit // in_tile * TILE + unit % in_tile * past.unit + token % TILE


@compiled
@no_type_check
def read_ranges(past, lane, first, stop, place, head, slots, groups, rooms):
    """The windows' float16 `[heads, tokens, groups]` at `place`, a head's, as float32 where its weights are in a row.

    `rooms.scales` has a row for each group.
    """
    count = past.window * groups
    for index in range(first, stop):
        window = past.packed + lane * past.packed_lane + slots[lane, index] * past.packed_slot
        target = rooms.scales + 4 * place_of(past, index - first, 0)
        if groups == 1:
            read_halves(window + place + 2 * head * count, count, rooms.halves, target)
            continue
        read_halves(window + place + 2 * head * count, count, rooms.halves, rooms.ungrouped)
        for token in range(past.window):
            for group in range(groups):
                put(target + 4 * (group * rooms.row + token), get(rooms.ungrouped + 4 * (token * groups + group)))


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
