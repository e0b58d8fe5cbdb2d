"""The GPU kernel: a share of the tokens attended by itself (`attend_split`), and the shares put together (`combine`).

The tokens of a lane stand in *units*: a window, rounded up to a power of two of tokens, or a tile's worth of a larger
window. A *tile* is `BLOCK` tokens, so some units; a *split* is some tiles of code windows, of full windows, or of the
sinks and local windows. A program attends one split for the query heads of one KV head, whose keys and values are so
decoded once. It leaves the weighted mean of the values, and instead of sums of weights their logarithms, of the split
and of each unit: what has such a sum can be put together with any other without a common maximum.

Logits and these logarithms are to the base 2, since a GPU has that exponential in hardware; `scaling` sees to it. A
*row* is one query of one query head: `group * queries` of them, in this order. All arithmetic is float32.

The two channels of a rotary pair stand in two tensors, so that keys are turned without being taken apart. Channels that
do not turn make pairs as well.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from qevict.kernels.triton_codes import code_keys, code_values, history_tokens, turned

NOTHING = tl.constexpr(-1e30)
"""The logit of what is not seen; finite, so that no arithmetic with it makes a NaN."""


@triton.jit
@no_type_check
def add_tile(
    query_1,
    query_2,
    keys_1,
    keys_2,
    seen,
    unit_sums,
    unit_mask,
    highest,
    total,
    mean,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weights of a tile's tokens, and what the tiles before come to beside them; the units' sums are written."""
    logits = tl.dot(query_1, keys_1, input_precision=PRECISION)
    logits = tl.dot(query_2, keys_2, logits, input_precision=PRECISION)
    logits = tl.where(seen, logits, NOTHING)
    higher = tl.maximum(highest, tl.max(logits, 1))
    weights = tl.where(seen, tl.exp2(logits - higher[:, None]), 0.0)
    sums = tl.sum(tl.reshape(weights, [ROWS, UNITS, UNIT]), 2)
    tl.store(unit_sums, logarithm(sums, higher[:, None]), mask=unit_mask)
    shrunk = tl.exp2(highest - higher)
    return weights, higher, total * shrunk + tl.sum(sums, 1), mean * shrunk[:, None]


@triton.jit
@no_type_check
def logarithm(sums, highest):
    """Of sums of weights that were taken beside a maximum; `NOTHING` for none."""
    return tl.where(sums > 0, highest + tl.log2(tl.where(sums > 0, sums, 1.0)), NOTHING)


_VARYING = [
    *("stored", "new", "sinks", "queries", "full_slots", "code_slots", "tiles", "splits", "units"),
    *("stored_lane", "stored_head", "new_keys_lane", "new_keys_head", "new_values_lane", "new_values_head"),
]
"""Numbers that change from step to step: no variant is compiled for those of them that are multiples of 16."""


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def attend_split(
    query, stored_keys, stored_values, new_keys, new_values, full_keys, full_values, packed, starts, cos, sin,
    key_rows, key_bits, key_ranges, levels, value_groups, means, sums, unit_sums,
    scaling,
    query_lane, query_head, query_group, query_token,
    stored_lane, stored_head, stored_token,
    new_keys_lane, new_keys_head, new_keys_token, new_values_lane, new_values_head, new_values_token,
    full_lane, full_slot, packed_lane, packed_slot, key_lane,
    key_scale, key_offset, value_start, value_scale, value_offset,
    stored, new, sinks, queries, full_slots, code_slots, tiles, splits, units,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr,
    TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_TOKENS: tl.constexpr, KEY_ACCESS: tl.constexpr, KEY_RANGES: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_ACCESS: tl.constexpr, VALUE_GROUPS: tl.constexpr, GRANULES: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Attend one split; programs are `[lanes * heads, splits, blocks of rows]`.

    Args:
        starts: `[lanes, full_slots + code_slots]` positions of windows; -1 where a slot holds none, or none to be seen.
        key_rows, key_bits: `[1 or lanes, heads, dim]`, see `CodeFormat`; `key_lane` numbers apart.
        key_ranges, levels: see `CodeFormat`.
        value_groups: `[granules]` the group of each stretch of channels.
        means: `[lanes, heads, splits, rows, dim]` written: weighted means of the values.
        sums: `[lanes, heads, splits, rows]` written: logarithms of the sums of weights.
        unit_sums: `[lanes, heads, rows, units]` written: the same of full windows, code windows, sinks, local windows.
        scaling: factor on the logits, times log2(e).
        tiles: of a split.
    """
    UNITS: tl.constexpr = BLOCK // UNIT
    UNITS_PER_WINDOW: tl.constexpr = (WINDOW + UNIT - 1) // UNIT
    lane, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    split = tl.program_id(1)
    rows = GROUP * queries
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    token, unit, channel = tl.arange(0, BLOCK), tl.arange(0, UNITS), tl.arange(0, CHANNELS)
    pair = tl.arange(0, PAIRS)
    paired = pair < DIM // 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first = tl.where(pair < TURNING, pair, 2 * pair)
        second = tl.where(pair < TURNING, pair + TURNING, 2 * pair + 1)

    query += lane * query_lane + head * query_head
    query += (row // queries * query_group + row % queries * query_token)[:, None]
    asked = (row < rows)[:, None] & paired[None, :]
    query_1 = tl.load(query + first[None, :], mask=asked, other=0.0).to(tl.float32) * scaling
    query_2 = tl.load(query + second[None, :], mask=asked, other=0.0).to(tl.float32) * scaling

    highest = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, CHANNELS], tl.float32)
    unit_sums += ((lane * HEADS + head) * rows + row)[:, None] * units + unit[None, :]
    full_units, code_units = full_slots * UNITS_PER_WINDOW, code_slots * UNITS_PER_WINDOW
    code_tiles, full_tiles = tl.cdiv(code_units, UNITS), tl.cdiv(full_units, UNITS)
    code_splits, full_splits = tl.cdiv(code_tiles, tiles), tl.cdiv(full_tiles, tiles)
    starts += lane * (full_slots + code_slots)

    if split < code_splits:
        starts += full_slots
        packed += lane * packed_lane
        key_rows += lane * key_lane + head * DIM
        key_bits += lane * key_lane + head * DIM
        key_ranges += (lane * HEADS + head) * 2 * DIM
        key_scale += 2 * head * DIM
        key_offset += 2 * head * DIM
        granule = tl.load(value_groups + tl.arange(0, GRANULES))
        for tile in range(split * tiles, tl.minimum((split + 1) * tiles, code_tiles)):
            at = tile * UNITS
            slot, place, position = history_tokens(starts, at, token, code_slots, UNIT, UNITS_PER_WINDOW)
            seen = (position >= 0) & (place < WINDOW)
            keys_1 = code_keys(
                packed, packed_slot, starts, at, code_slots, key_rows, key_bits, key_ranges, key_scale, key_offset,
                first, paired,
                KEY_BITS, KEY_TOKENS, KEY_ACCESS, KEY_RANGES, DIM, BLOCK, UNIT, UNITS_PER_WINDOW, PAIRS,
            )  # fmt: skip
            keys_2 = code_keys(
                packed, packed_slot, starts, at, code_slots, key_rows, key_bits, key_ranges, key_scale, key_offset,
                second, paired,
                KEY_BITS, KEY_TOKENS, KEY_ACCESS, KEY_RANGES, DIM, BLOCK, UNIT, UNITS_PER_WINDOW, PAIRS,
            )  # fmt: skip
            if TURNING > 0:
                keys_1, keys_2 = turned(keys_1, keys_2, cos, sin, position + place, seen, pair, TURNING)
            own = (row < rows)[:, None] & (at + unit < code_units)[None, :]
            weights, highest, total, mean = add_tile(
                query_1, query_2, keys_1, keys_2, seen[None, :], unit_sums + full_units + at, own,
                highest, total, mean, ROWS, UNITS, UNIT, PRECISION,
            )  # fmt: skip
            values = code_values(
                packed, slot.to(tl.int64) * packed_slot, head * WINDOW + place, seen, granule, levels,
                value_start, value_scale, value_offset,
                VALUE_BITS, VALUE_ACCESS, VALUE_GROUPS, GRANULES, LEVELS, BLOCK, DIM, CHANNELS,
            )  # fmt: skip
            mean = tl.dot(weights, values, mean, input_precision=PRECISION)
    elif split < code_splits + full_splits:
        start = (split - code_splits) * tiles
        for tile in range(start, tl.minimum(start + tiles, full_tiles)):
            at = tile * UNITS
            slot, place, position = history_tokens(starts, at, token, full_slots, UNIT, UNITS_PER_WINDOW)
            seen = (position >= 0) & (place < WINDOW)
            line = lane * full_lane + slot.to(tl.int64) * full_slot + (head * WINDOW + place) * DIM
            mask = paired[:, None] & seen[None, :]
            keys_1 = tl.load(full_keys + line[None, :] + first[:, None], mask=mask, other=0.0).to(tl.float32)
            keys_2 = tl.load(full_keys + line[None, :] + second[:, None], mask=mask, other=0.0).to(tl.float32)
            own = (row < rows)[:, None] & (at + unit < full_units)[None, :]
            weights, highest, total, mean = add_tile(
                query_1, query_2, keys_1, keys_2, seen[None, :], unit_sums + at, own,
                highest, total, mean, ROWS, UNITS, UNIT, PRECISION,
            )  # fmt: skip
            mask = seen[:, None] & (channel < DIM)[None, :]
            values = tl.load(full_values + line[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
            mean = tl.dot(weights, values, mean, input_precision=PRECISION)
    else:
        stored_keys += lane * stored_lane + head * stored_head
        stored_values += lane * stored_lane + head * stored_head
        new_keys += lane * new_keys_lane + head * new_keys_head
        new_values += lane * new_values_lane + head * new_values_head
        sink_units = tl.cdiv(sinks, UNIT)
        local_units = units - full_units - code_units
        start = (split - code_splits - full_splits) * tiles
        for tile in range(start, tl.minimum(start + tiles, tl.cdiv(local_units, UNITS))):
            at = tile * UNITS
            of = at + token // UNIT - sink_units  # the unit, among those of windows
            place = of % UNITS_PER_WINDOW * UNIT + token % UNIT
            index = tl.where(of < 0, at * UNIT + token, sinks + of // UNITS_PER_WINDOW * WINDOW + place)
            exists = tl.where(of < 0, index < sinks, (place < WINDOW) & (index < stored + new))
            old, fresh = exists & (index < stored), exists & (index >= stored)
            line, next_line = index * stored_token, (index - stored) * new_keys_token
            mask, next_mask = paired[:, None] & old[None, :], paired[:, None] & fresh[None, :]
            keys_1 = tl.load(stored_keys + line[None, :] + first[:, None], mask=mask, other=0.0).to(tl.float32)
            keys_2 = tl.load(stored_keys + line[None, :] + second[:, None], mask=mask, other=0.0).to(tl.float32)
            keys_1 += tl.load(new_keys + next_line[None, :] + first[:, None], mask=next_mask, other=0.0).to(tl.float32)
            keys_2 += tl.load(new_keys + next_line[None, :] + second[:, None], mask=next_mask, other=0.0).to(tl.float32)
            last = stored + new - queries + row % queries
            seen = exists[None, :] & (index[None, :] <= last[:, None])
            own = (row < rows)[:, None] & (at + unit < local_units)[None, :]
            weights, highest, total, mean = add_tile(
                query_1, query_2, keys_1, keys_2, seen, unit_sums + full_units + code_units + at, own,
                highest, total, mean, ROWS, UNITS, UNIT, PRECISION,
            )  # fmt: skip
            next_line = (index - stored) * new_values_token
            mask, next_mask = old[:, None] & (channel < DIM)[None, :], fresh[:, None] & (channel < DIM)[None, :]
            values = tl.load(stored_values + line[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
            values += tl.load(new_values + next_line[:, None] + channel[None, :], mask=next_mask, other=0.0).to(
                tl.float32
            )
            mean = tl.dot(weights, values, mean, input_precision=PRECISION)

    result = ((lane * HEADS + head) * splits + split) * rows + row
    mean = mean / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(means + result[:, None] * DIM + channel[None, :], mean, mask=(row < rows)[:, None] & (channel < DIM)[None, :])
    tl.store(sums + result, logarithm(total, highest), mask=row < rows)


@triton.jit
@no_type_check
def whole(sums, places, mask, rows, splits, SPLITS: tl.constexpr, COUNT: tl.constexpr):
    """Logarithms of the sums over all splits of some rows, `[count]`; `places` is where those of the first split are."""
    highest = tl.full([COUNT], NOTHING, tl.float32)
    total = tl.zeros([COUNT], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        seen = mask[:, None] & (split < splits)[None, :]
        part = tl.load(sums + places[:, None] + (split * rows)[None, :], mask=seen, other=NOTHING)
        higher = tl.maximum(highest, tl.max(part, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(part - higher[:, None]), 1)
        highest = higher
    return highest + tl.log2(total)


@triton.jit
@no_type_check
def joined(means, sums, all_sums, first, stop, rows, channel, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Some channels of a row, from the splits `first` to `stop`."""
    result = tl.zeros(channel.shape, tl.float32)
    for start in range(first, stop, SPLITS):
        split = start + tl.arange(0, SPLITS)
        share = tl.load(sums + split * rows, mask=split < stop, other=NOTHING)
        mask = (split < stop)[:, None] & (channel < DIM)[None, :]
        part = tl.load(means + (split * rows * DIM)[:, None] + channel[None, :], mask=mask, other=0.0)
        result += tl.sum(part * tl.exp2(share - all_sums)[:, None], 0)
    return result


@triton.jit
@no_type_check
def combine_row(
    means, sums, turn_back, output, first, rows, code_splits, splits,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The output of the row of which the first split is at `first`."""
    one = tl.arange(0, 1)
    all_sums = tl.sum(whole(sums, first + one, one == 0, rows, splits, SPLITS, 1), 0)
    channel = tl.arange(0, CHANNELS)
    sums += first
    means += first * DIM
    result = joined(means, sums, all_sums, code_splits if TURNED else 0, splits, rows, channel, DIM, SPLITS)
    if TURNED:
        for start in range(0, DIM, 16):
            some = start + tl.arange(0, 16)
            part = joined(means, sums, all_sums, 0, code_splits, rows, some, DIM, SPLITS)
            mask = (some < DIM)[:, None] & (channel < DIM)[None, :]
            turn = tl.load(turn_back + some[:, None] * DIM + channel[None, :], mask=mask, other=0.0)
            result += tl.sum(part[:, None] * turn, 0)
    tl.store(output + channel, result.to(output.dtype.element_ty), mask=channel < DIM)


@triton.jit
@no_type_check
def combine_columns(
    sums, unit_sums, mass, column, step, queries, rows, splits, windows, columns, sink_units, units, since,
    HEADS: tl.constexpr, UNITS_PER_WINDOW: tl.constexpr, APART: tl.constexpr,
    SPLITS: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some masses of a lane, which are means over `HEADS` and the rows of a query."""
    unit = column * UNITS_PER_WINDOW + tl.where(column < windows, 0, sink_units)
    result = tl.zeros([COLUMNS], tl.float32)
    for head in range(HEADS):
        for start in range(0, rows, COUNT):
            row = start + tl.arange(0, COUNT)
            if APART:
                counts = (row < rows) & (row % queries == step)
            else:
                counts = (row < rows) & (row % queries >= since)
            all_sums = whole(sums, head * rows * splits + row, counts, rows, splits, SPLITS, COUNT)
            for part in tl.static_range(UNITS_PER_WINDOW):
                mask = counts[:, None] & (column < columns)[None, :]
                place = (head * rows + row)[:, None] * units + (unit + part)[None, :]
                share = tl.load(unit_sums + place, mask=mask, other=NOTHING)
                result += tl.sum(tl.where(mask, tl.exp2(share - all_sums[:, None]), 0.0), 0)
    tl.store(mass + column, result * queries / (HEADS * rows), mask=column < columns)


@triton.jit(do_not_specialize=["queries", "code_splits", "splits", "windows", "columns", "sink_units", "units", "since"])
@no_type_check
def combine(
    means, sums, unit_sums, turn_back, output, mass,
    queries, code_splits, splits, windows, columns, sink_units, units, since,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    UNITS_PER_WINDOW: tl.constexpr, APART: tl.constexpr, TURNED: tl.constexpr,
    SPLITS: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Put the splits together; programs are `[lanes, heads * rows + steps * blocks of columns]`.

    Args:
        turn_back: `[dim, dim]` what the values of code windows are multiplied with.
        output: `[lanes, heads, rows, dim]` written.
        mass: `[lanes, steps, columns]` written; as many steps as queries if `APART`, else one with their sum.
        windows: of history; behind the units of these windows are those of the sinks, then those of local windows.
        since: the first query that counts.
    """
    lane, job = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = GROUP * queries
    if job < HEADS * rows:
        head = lane * HEADS + job // rows
        combine_row(
            means, sums, turn_back, output + (head * rows + job % rows) * DIM, head * splits * rows + job % rows, rows,
            code_splits, splits, DIM, CHANNELS, TURNED, SPLITS,
        )  # fmt: skip
    else:
        job -= HEADS * rows
        blocks = tl.cdiv(columns, COLUMNS)
        step, column = job // blocks, job % blocks * COLUMNS + tl.arange(0, COLUMNS)
        steps = queries if APART else 1
        combine_columns(
            sums + lane * HEADS * rows * splits, unit_sums + lane * HEADS * rows * units,
            mass + (lane * steps + step) * columns, column, step, queries, rows, splits, windows, columns, sink_units,
            units, since, HEADS, UNITS_PER_WINDOW, APART, SPLITS, COUNT, COLUMNS,
        )  # fmt: skip
