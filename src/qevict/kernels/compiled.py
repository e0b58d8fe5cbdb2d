"""The CPU kernel: a share of the attention of a forward, and the shares put together.

The tokens of a lane are divided into *items*: so many code windows, full windows or local windows each. An item attends
by itself, with its own maximum, and leaves the sum of its weights, its weighted values and its window masses; `combine`
brings the items of a lane to one maximum. Which thread does which items changes nothing.

A *row* is one query of one query head. Rows of results are `[items, heads, rows, dim + 2 + windows]`: the weighted
values, the maximum, the sum of the weights, and the masses of the item's windows, with room for whole vectors of these.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple, no_type_check

import numpy as np
from numba import njit

from qevict.kernels.codes import attend_codes
from qevict.kernels.exact import attend_exact, place_full, place_local
from qevict.kernels.simd import add, get, load, multiply, multiply_add, put, splat, store
from qevict.kernels.tiles import BLOCK, LINE, NOTHING, TILE, compiled, convert, inlined

PAST = np.dtype(
    [(name, np.int64) for name in ("heads", "dim", "window", "unit", "units_per_window", "windows_per_item")]
    + [(name, np.int64) for name in ("packed", "packed_lane", "packed_slot", "code_items", "full_items")]
    + [(name, np.int64) for name in ("code_columns", "full_columns", "full_keys", "full_values")]
    + [(name, np.int64) for name in ("full_lane", "full_slot", "full_head", "full_dtype")]
    + [(name, np.int64) for name in ("cos", "sin", "turns", "pairs")]
    + [(name, np.int64) for name in ("key_scale", "key_offset", "key_ranges")]
    + [(name, np.int64) for name in ("value_codes", "value_bits", "value_scale", "value_offset", "levels")]
)
"""What the kernel has to know of a `History`: sizes, addresses, and strides and offsets in bytes."""

CALL = np.dtype(
    [(name, np.int64) for name in ("query", "query_lane", "query_head", "query_group", "query_token", "query_dtype")]
    + [(name, np.int64) for name in ("group", "queries", "local_items", "stored_keys", "stored_values")]
    + [(name, np.int64) for name in ("stored_lane", "stored_head", "stored", "stored_dtype")]
    + [(name, np.int64) for name in ("new_keys", "new_keys_lane", "new_keys_head", "new_keys_token")]
    + [(name, np.int64) for name in ("new_values", "new_values_lane", "new_values_head", "new_values_token")]
    + [(name, np.int64) for name in ("new", "new_dtype", "sinks", "count_last")]
    + [("scaling", np.float64)]
)
"""The same of a query and of the local tokens. `count_last` is -1 where the masses of every query are wanted."""


class Rooms(NamedTuple):
    """Addresses of a share's working memory, and of the results.

    Attributes:
        query: `[heads, rows, dim]` float32, scaled.
        blocked: the same with the channels in the order in which keys are decoded.
        logits: `[heads, rows, row]` float32 of one item; then its weights.
        row: places in a row of logits.
        cos, sin: `[pairs, 64]` float32.
        ranges: `[units, 2, dim]` float32, scales and offsets of a tile's keys.
        keys: `[8, 64]` float32.
        vectors: `[5, 8]` addresses, see `decode.place_vector`.
        halves: eight float16.
        ungrouped: `[window, groups]` float32, scales or offsets of a window's values as they are stored.
        scales: `[groups, row]` float32, a head's of an item.
        scaled: `[rows, groups, row]` float32, weights times scales.
        values: `[8, dim]` float32.
        results: see above.
    """

    query: int
    blocked: int
    logits: int
    row: int
    cos: int
    sin: int
    ranges: int
    keys: int
    vectors: int
    halves: int
    ungrouped: int
    scales: int
    scaled: int
    values: int
    results: int
    end: int


@inlined
@no_type_check
def rounded(count, size):
    """The next multiple of a size."""
    return -(-count // size) * size


@no_type_check
def make_rooms(start, heads, rows, row, dim, window, groups, results):
    """Rooms from the first whole cache line behind an address on; each begins with one. See `Rooms`."""
    padded, pairs = rounded(window, BLOCK), rounded(dim // 2, BLOCK)
    query = rounded(start, LINE)
    blocked = query + rounded(4 * heads * rows * dim, LINE)
    logits = blocked + rounded(4 * heads * rows * dim, LINE)
    cos = logits + rounded(4 * heads * rows * row, LINE)
    sin = cos + 4 * TILE * pairs
    ranges = sin + 4 * TILE * pairs
    keys = ranges + 8 * dim * BLOCK
    vectors = keys + 4 * TILE * BLOCK
    halves = vectors + 40 * BLOCK
    ungrouped = halves + LINE
    scales = ungrouped + rounded(4 * padded * groups, LINE)
    scaled = scales + 4 * groups * row
    values = scaled + 4 * rows * groups * row
    end = values + 4 * BLOCK * dim
    return Rooms(
        query, blocked, logits, row, cos, sin, ranges, keys, vectors, halves, ungrouped, scales, scaled, values,
        results, end,
    )  # fmt: skip


rooms_at = compiled(make_rooms)


@compiled
@no_type_check
def read_queries(past, call, lane, layout, rooms):
    """The lane's queries, scaled, in both orders."""
    rows, dim = call.group * call.queries, past.dim
    for head in range(past.heads):
        for row in range(rows):
            source = call.query + lane * call.query_lane + head * call.query_head
            source += row // call.queries * call.query_group + row % call.queries * call.query_token
            place = 4 * (head * rows + row) * dim
            query, blocked = rooms.query + place, rooms.blocked + place
            convert(source, call.query_dtype, dim, query)
            for channel in range(dim):
                put(query + 4 * channel, np.float32(get(query + 4 * channel) * call.scaling))
            for place in range(dim):
                put(blocked + 4 * place, get(query + 4 * layout[min(lane, layout.shape[0] - 1), head, place, 0]))


@compiled
@no_type_check
def chosen(slots, lane, index, count):
    """First and last (excluded) of the windows of an item; -1 fills up lanes that have fewer than others."""
    first = index * count
    stop = first
    while stop < min(first + count, slots.shape[1]) and slots[lane, stop] >= 0:
        stop += 1
    return first, stop


@compiled
@no_type_check
def attend_item(past, call, item, code_slots, full_slots, positions, layout, groups, tables, rooms, results):
    """Attend one item: code windows come first, then full windows, then local ones."""
    items = past.code_items + past.full_items + call.local_items
    lane, index = item // items, item % items
    rows, most = call.group * call.queries, past.windows_per_item
    for head in range(past.heads):
        for row in range(rows):
            results[item, head, row, past.dim] = NOTHING
    if index < past.code_items:
        first, stop = chosen(code_slots, lane, index, most)
        if first < stop:
            attend_codes(past, lane, first, stop, code_slots, positions, layout, groups, rooms, rows, item, results)
        return
    index -= past.code_items
    if index < past.full_items:
        first, stop = chosen(full_slots, lane, index, most)
        place_full(past, lane, first, stop, full_slots, tables, rooms, rows)
        tokens = (stop - first) * past.window
    else:
        index -= past.full_items
        windows = most * past.window
        start = 0 if index == 0 else call.sinks + index * windows  # the first has the sinks, too
        stop = min(call.stored + call.new, call.sinks + (index + 1) * windows)
        place_local(past, call, lane, start, stop, index * most, tables, rooms, rows)
        tokens = stop - start
    if tokens:
        attend_exact(past, tokens, tables, rooms, rows, item, results)


@compiled
@no_type_check
def column_of(past, item, window, lane, code_slots, full_slots):
    """The column of the masses that a window of an item belongs to; -1 if there is no such window."""
    most = past.windows_per_item
    if item < past.code_items:
        window += item * most
        missing = window >= code_slots.shape[1] or code_slots[lane, window] < 0
        return -1 if missing else past.full_columns + code_slots[lane, window]
    item -= past.code_items
    if item < past.full_items:
        window += item * most
        return -1 if window >= full_slots.shape[1] else full_slots[lane, window]
    return past.full_columns + past.code_columns + (item - past.full_items) * most + window


@compiled
@no_type_check
def weigh_items(items, first, row, size, whole_at):
    """Turn the maxima of a row's items into what their results count for.

    Args:
        row: address of the row in the results of item 0; those of the next are `size` bytes apart.
        whole_at: where its maximum is, and behind it the sum of its weights; bytes from the row's start.
    """
    highest = NOTHING
    for item in range(first, first + items):
        highest = max(highest, get(row + item * size + whole_at))
    whole = np.float32(0)
    for item in range(first, first + items):
        place = row + item * size + whole_at
        put(place, np.exp(get(place) - highest))
        whole += get(place) * get(place + 4)
    for item in range(first, first + items):
        place = row + item * size + whole_at
        put(place, get(place) / whole)


@compiled
@no_type_check
def combine_lane(past, call, lane, code_slots, full_slots, results, output, decoded, mass):
    """Bring the items of a lane to one maximum for each row, and add them to its outputs and masses."""
    items = past.code_items + past.full_items + call.local_items
    first, rows, maximum = lane * items, call.group * call.queries, 4 * past.dim
    row_size = 4 * results.shape[3]
    head_size = rows * row_size
    size = past.heads * head_size
    for head in range(past.heads):
        for row in range(rows):
            place = results.ctypes.data + head * head_size + row * row_size
            weigh_items(items, first, place, size, maximum)
            target = maximum * ((lane * past.heads + head) * rows + row)
            for item in range(items):
                source = place + (first + item) * size
                factor = splat(get(source + maximum))
                into = target + (decoded.ctypes.data if item < past.code_items else output.ctypes.data)
                for i in range(0, maximum, 4 * BLOCK):
                    store(into + i, multiply_add(factor, load(source + i), load(into + i)))
    heads = np.float32(past.heads * call.group)
    for step in range(mass.shape[1]):
        # The tokens whose masses the step has, of every head.
        start = step if call.count_last < 0 else max(0, call.queries - call.count_last)
        stop = step + 1 if call.count_last < 0 else call.queries
        for item in range(items if start < stop else 0):
            source = results.ctypes.data + (first + item) * size
            shares = source + start * row_size + maximum + 8  # the first of these rows takes in the others
            for head in range(past.heads):
                for row in range(rows):
                    if start <= row % call.queries < stop:
                        place = source + head * head_size + row * row_size + maximum
                        share = splat(get(place) / heads)
                        add_shares(place + 8, share, past.windows_per_item, shares)
            for window in range(past.windows_per_item):
                column = column_of(past, item, window, lane, code_slots, full_slots)
                if column < 0 or column >= mass.shape[2]:
                    break
                mass[lane, step, column] = get(shares + 4 * window)


@compiled
@no_type_check
def add_shares(masses, share, count, sums):
    """Add a row's masses to sums; those that are its own become the share of them."""
    for i in range(0, 4 * count, 4 * BLOCK):
        own = multiply(share, load(masses + i))
        store(sums + i, own if masses == sums else add(own, load(sums + i)))


@no_type_check
def kept(function):
    """`function` compiled, its code kept on disk: beside this file, or in the user's cache."""
    options = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither place can be written
        return njit(**options)(function)


@no_type_check
def _entries(version):
    """The two functions that are called from Python.

    Numba keeps compiled code on disk for each source file, bytecode and closure, but does not see when a file changes
    that was imported. `version` stands in the closure, so that code compiled from other sources is not taken.
    """

    @kept
    def attend_items(
        pasts, calls, code_slots, full_slots, positions, layout, groups, memory, row, tables, first, last, results
    ):
        """Attend items `first` to `last`, each into its place in the results, which come as zeros."""
        past, call, _ = pasts[0], calls[0], version
        start, rows = memory.ctypes.data, call.group * call.queries
        rooms = rooms_at(start, past.heads, rows, row, past.dim, past.window, groups.shape[0], results.ctypes.data)
        # What no token has written is read all the same, with weights of zero.
        for place in range(rooms.halves, rooms.end, 4):
            put(place, 0.0)
        # Pairs of channels that do not turn; those that share a vector with others are in the tables.
        for place in range(4 * TILE * rounded(past.pairs, BLOCK), 2 * TILE * past.dim, 4):
            put(rooms.cos + place, 1.0)
            put(rooms.sin + place, 0.0)
        items = past.code_items + past.full_items + call.local_items
        lane = -1
        for item in range(first, last):
            if item // items != lane:
                lane = item // items
                read_queries(past, call, lane, layout, rooms)
            attend_item(past, call, item, code_slots, full_slots, positions, layout, groups, tables, rooms, results)

    @kept
    def combine(pasts, calls, code_slots, full_slots, results, output, decoded, mass):
        """Put the items of every lane together, those of code windows into `decoded`; all three come as zeros."""
        past, call, _ = pasts[0], calls[0], version
        for lane in range(output.shape[0]):
            combine_lane(past, call, lane, code_slots, full_slots, results, output, decoded, mass)

    return attend_items, combine


_SOURCES = ("simd.py", "tiles.py", "decode.py", "codes.py", "exact.py", "compiled.py")
attend_items, combine = _entries(
    hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _SOURCES)).hexdigest()
)
