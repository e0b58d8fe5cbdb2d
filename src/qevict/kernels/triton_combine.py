"""The GPU kernel's second part: splits put together. See `triton_decode` for splits, units and rows."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from qevict.kernels.triton_decode import NOTHING

_VARYING = ["queries", "code_splits", "splits", "windows", "columns", "sink_units", "units", "since"]  # see there


@triton.jit
@no_type_check
def whole(sums, places, mask, rows, splits, SPLITS: tl.constexpr, COUNT: tl.constexpr):
    """Logarithms of some rows' sums over all splits, `[count]`; `places` is where those of the first split are."""
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
            counts = (row < rows) & (row % queries == step if APART else row % queries >= since)
            all_sums = whole(sums, head * rows * splits + row, counts, rows, splits, SPLITS, COUNT)
            for part in tl.static_range(UNITS_PER_WINDOW):
                mask = counts[:, None] & (column < columns)[None, :]
                place = (head * rows + row)[:, None] * units + (unit + part)[None, :]
                share = tl.load(unit_sums + place, mask=mask, other=NOTHING)
                result += tl.sum(tl.where(mask, tl.exp2(share - all_sums[:, None]), 0.0), 0)
    tl.store(mass + column, result / (HEADS * (rows // queries)), mask=column < columns)


@triton.jit(do_not_specialize=_VARYING)
@no_type_check
def combine(
    means, sums, unit_sums, turn_back, output, mass,
    queries, code_splits, splits, windows, columns, sink_units, units, since,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    UNITS_PER_WINDOW: tl.constexpr, APART: tl.constexpr, TURNED: tl.constexpr,
    SPLITS: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Put the splits together; programs are `[heads * rows + steps * blocks of columns, lanes]`.

    Args:
        turn_back: `[dim, dim]` what the values of code windows are multiplied with.
        output: `[lanes, heads, rows, dim]` written.
        mass: `[lanes, steps, columns]` written; as many steps as queries if `APART`, else one with their sum.
        windows: of history; behind the units of these windows are those of the sinks, then those of local windows.
        since: the first query that counts.
    """
    job, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
