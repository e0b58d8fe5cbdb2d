"""The kernel's part for exact tokens: full windows in the arena, the stored local tokens, the new ones."""

from __future__ import annotations

from typing import no_type_check

from qevict.kernels.simd import FLOAT32, get, put
from qevict.kernels.tiles import BLOCK, NOTHING, add_values, compiled, convert, product, softmax


@compiled
@no_type_check
def attend_exact(past, tokens, tables, rooms, rows, item, results):
    """Attend the tokens that `place_full` or `place_local` put into `tables`.

    Logits that are NOTHING beforehand stay so: the row does not see the token.
    """
    dim, heads = past.dim, past.heads
    padded = (tokens + BLOCK - 1) // BLOCK * BLOCK
    for head in range(heads):
        logits = rooms.logits + 4 * head * rows * rooms.row
        for token in range(tokens):
            key = tables[2 + 2 * head, token]
            if tables[0, token] != FLOAT32:
                convert(key, tables[0, token], dim, rooms.values)
                key = rooms.values
            for row in range(rows):
                place = logits + 4 * (row * rooms.row + token)
                if get(place) != NOTHING:
                    put(place, product(rooms.query + 4 * (head * rows + row) * dim, key, dim))
        for row in range(rows):
            weights = logits + 4 * row * rooms.row
            results[item, head, row, dim] = softmax(weights, padded)
            whole = 0.0
            for token in range(tokens):
                weight = get(weights + 4 * token)
                whole += weight
                if tables[1, token] >= 0:
                    results[item, head, row, dim + 2 + tables[1, token]] += weight
            results[item, head, row, dim + 1] = whole
        for first in range(0, tokens, BLOCK):
            for i in range(BLOCK):
                token = min(first + i, tokens - 1)  # those behind the last have no weight
                convert(tables[3 + 2 * head, token], tables[0, token], dim, rooms.values + 4 * dim * i)
            outputs = rooms.results + 4 * (item * heads + head) * rows * results.shape[3]
            weights, outputs_row = logits + 4 * first, 4 * results.shape[3]
            add_values(weights, 4 * rooms.row, rooms.values, 4 * dim, dim, rows, outputs, outputs_row)


@compiled
@no_type_check
def place_full(past, lane, first, stop, slots, tables, rooms, rows):
    """Where the tokens of the lane's full windows `first` to `stop` are; all of them are seen.

    Args:
        tables: `[2 + 2 * heads, tokens]`: each token's dtype, its window among those of the item (-1: none), and for
            each head where its key and its value are.
    """
    size = 4 if past.full_dtype == FLOAT32 else 2
    for index in range(first, stop):
        for i in range(past.window):
            token = (index - first) * past.window + i
            tables[0, token], tables[1, token] = past.full_dtype, index - first
            for head in range(past.heads):
                place = lane * past.full_lane + slots[lane, index] * past.full_slot + head * past.full_head
                place += i * past.dim * size
                tables[2 + 2 * head, token] = past.full_keys + place
                tables[3 + 2 * head, token] = past.full_values + place
    for row in range(past.heads * rows):
        show(rooms.logits + 4 * row * rooms.row, (stop - first) * past.window, (stop - first) * past.window)


@compiled
@no_type_check
def place_local(past, call, lane, start, stop, first_window, tables, rooms, rows):
    """The same of local tokens `start` to `stop`; a query sees the new tokens up to its own."""
    size = 4 if call.stored_dtype == FLOAT32 else 2
    for local in range(start, stop):
        token, new = local - start, local - call.stored
        tables[0, token] = call.stored_dtype if new < 0 else call.new_dtype
        tables[1, token] = (local - call.sinks) // past.window - first_window if local >= call.sinks else -1
        for head in range(past.heads):
            if new < 0:
                place = lane * call.stored_lane + head * call.stored_head + local * past.dim * size
                tables[2 + 2 * head, token] = call.stored_keys + place
                tables[3 + 2 * head, token] = call.stored_values + place
            else:
                place = lane * call.new_keys_lane + head * call.new_keys_head + new * call.new_keys_token
                tables[2 + 2 * head, token] = call.new_keys + place
                place = lane * call.new_values_lane + head * call.new_values_head + new * call.new_values_token
                tables[3 + 2 * head, token] = call.new_values + place
    for head in range(past.heads):
        for row in range(rows):
            seen = call.stored + row % call.queries + 1 - start
            show(rooms.logits + 4 * (head * rows + row) * rooms.row, seen, stop - start)


@compiled
@no_type_check
def show(logits, seen, tokens):
    """Logits of 0 where a row sees a token, of NOTHING behind, up to a whole vector."""
    for token in range((tokens + BLOCK - 1) // BLOCK * BLOCK):
        put(logits + 4 * token, 0.0 if token < min(seen, tokens) else NOTHING)
