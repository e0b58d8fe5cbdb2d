"""The GPU kernel: a share of the tokens attended by itself. `triton_combine` puts the shares together.

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
    scaling, query_1, query_2, keys_1, keys_2, seen, unit_sums, unit_mask, highest, total, mean,
    ROWS: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights of a tile's tokens, and what the tiles before come to beside them; the units' sums are written."""
    logits = tl.dot(query_1, keys_1, input_precision=PRECISION)
    logits = tl.dot(query_2, keys_2, logits, input_precision=PRECISION)
    logits = tl.where(seen, logits * scaling, NOTHING)
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


# Numbers that change from step to step: no variant is compiled for those of them that are 1 or multiples of 16.
_VARYING = [
    *("stored", "new", "sinks", "queries", "full_slots", "code_slots", "tiles", "splits", "units"),
    *("stored_lane", "stored_head", "new_keys_lane", "new_keys_head", "new_values_lane", "new_values_head"),
]


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
    query_1 = tl.load(query + first[None, :], mask=asked, other=0.0).to(tl.float32)
    query_2 = tl.load(query + second[None, :], mask=asked, other=0.0).to(tl.float32)

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
                scaling, query_1, query_2, keys_1, keys_2, seen[None, :], unit_sums + full_units + at, own,
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
                scaling, query_1, query_2, keys_1, keys_2, seen[None, :], unit_sums + at, own,
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
                scaling, query_1, query_2, keys_1, keys_2, seen, unit_sums + full_units + code_units + at, own,
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
    written = (row < rows)[:, None] & (channel < DIM)[None, :]
    tl.store(means + result[:, None] * DIM + channel[None, :], mean, mask=written)
    tl.store(sums + result, logarithm(total, highest), mask=row < rows)
