"""Tables as the paper lays them out (tables 2, 3 and 6), before anything is said of terminals or files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from qevict.report.families import TaskName
from qevict.report.floor import Selection
from qevict.report.load import FULL, Point, Record, Section, is_qevict, percent
from qevict.report.statistics import Mean, clustered_mean, holm
from qevict.report.values import Metric, average, coverage, difference, measured, memory

Mark = Literal["", "best", "second", "clear"]


class Column(NamedTuple):
    """A column of numbers, and what it stands under."""

    family: str
    name: str


@dataclass(frozen=True)
class Entry:
    """A cell: a number with its uncertainty, or what is said in its place.

    Attributes:
        value: unscaled, for CSV; None where nothing was measured.
        text: the number as printed, or words.
        spread: "±1.2", or an interval.
        note: what restricts it, such as "7 of 10".
        mark: best or second best of its group, or an interval that is clear of 0.
        error: standard error, or low and high, for CSV.
        p: of a difference, not corrected; nan of anything else.
    """

    value: float | None
    text: str
    spread: str = ""
    note: str = ""
    mark: Mark = ""
    error: tuple[float, ...] = ()
    p: float = math.nan


@dataclass(frozen=True)
class Row:
    """A method's line."""

    label: str
    memory: str
    protected: str
    entries: list[Entry]
    emphasis: bool = False


@dataclass(frozen=True)
class Block:
    """Rows that are compared with each other, under a heading."""

    title: str
    rows: list[Row]


@dataclass(frozen=True)
class Table:
    """A whole table.

    Attributes:
        metric: what its numbers are.
        slug: for file names.
        average: which column is the average; None where there is none.
        against: the method that its numbers are differences to; "" where they are no differences.
        notes: below it.
    """

    metric: Metric
    slug: str
    title: str
    columns: list[Column]
    blocks: list[Block]
    notes: list[str] = field(default_factory=list)
    average: int | None = None
    against: str = ""

    def sliced(self, start: int, end: int) -> Table:
        """The same with some of its columns."""
        blocks = [
            replace(block, rows=[replace(row, entries=row.entries[start:end]) for row in block.rows])
            for block in self.blocks
        ]
        return replace(self, columns=self.columns[start:end], blocks=blocks, average=None)


def result_tables(section: Section, selection: Selection, metric: Metric) -> list[Table]:
    """The averaged tasks with their average; those below the floor in a table of their own."""
    made = []
    for name, tasks, averaged in (("", selection.averaged, True), ("below-floor", selection.apart, False)):
        if not tasks:
            continue
        title = f"{metric.title} — {section.title}" + ("" if averaged else " — tasks at full KV's floor, in no average")
        slug = "-".join(part for part in (section.slug, metric.key.replace("_", "-"), name) if part)
        columns = [Column(task.family, task.short) for task in tasks]
        if averaged:
            columns.append(Column("", f"Average of {len(tasks)}"))
        blocks = _result_blocks(section, tasks, averaged, metric)
        made.append(Table(metric, slug, title, columns, blocks, _notes(metric), len(tasks) if averaged else None))
    if made:
        made[0].notes.append(selection.said)
    return [
        table for table in made if any(e.value is not None for b in table.blocks for r in b.rows for e in r.entries)
    ]


def difference_table(section: Section, selection: Selection, metric: Metric, against: str) -> Table | None:
    """Paired differences to a method, on the samples that both have; None where that method is not there.

    Evictors are compared at the same budget. A quantiser, having none, is compared with each budget of the method.
    """
    references = [point for point in section.points if point.method == against]
    groups = [[task] for task in selection.averaged]
    columns = [Column(task.family, task.short) for task in selection.averaged]
    if selection.averaged:
        groups.append(selection.averaged)
        columns.append(Column("", f"Average of {len(selection.averaged)}"))
    groups += [[task] for task in selection.apart]
    columns += [Column("Full KV at the floor", task.short) for task in selection.apart]
    blocks = []
    for reference in sorted(references, key=lambda p: -(p.budget or 0)):
        rows = []
        for point in _opponents(section, reference):
            entries = [_difference_entry(section, covered, point, reference, metric) for covered in groups]
            if any(entry.value is not None for entry in entries):
                rows.append(_row(section, point, entries))
        if rows:
            blocks.append(Block(f"minus {reference.label}", rows))
    if not blocks:
        return None
    average_column = len(selection.averaged) if selection.averaged else None
    if average_column is not None:
        blocks = _corrected(blocks, average_column)
    better = "below 0 is better than" if metric.lower_is_better else "above 0 is better than"
    notes = [
        f"Method minus {against} ({metric.unit}; {better} {against}), paired by sample. In brackets the 95 % interval "
        "of a bootstrap over documents (10,000 resamples). Bold: the interval is clear of 0, whatever the number of "
        "comparisons. p of the averages is two-sided, of the same bootstrap, and corrected by Holm for all rows and "
        "budgets here. An interval without width says that all documents agree, not that more of them would."
    ]
    title = f"{metric.title}: paired differences to {against} — {section.title}"
    name = re.sub(r"[^\w.+-]+", "-", against)
    slug = f"{section.slug}-{metric.key.replace('_', '-')}-minus-{name}"
    return Table(metric, slug, title, columns, blocks, notes, average_column, against)


def _corrected(blocks: list[Block], column: int) -> list[Block]:
    """The blocks with the column's p-values in their notes, corrected for their number."""
    known = [row.entries[column].p for block in blocks for row in block.rows if not math.isnan(row.entries[column].p)]
    corrected = iter(holm(known))

    def noted(row: Row) -> Row:
        entry = row.entries[column]
        if math.isnan(entry.p):
            return row
        p = next(corrected)
        said = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
        return _with(row, column, replace(entry, note=", ".join(filter(None, (entry.note, said)))))

    return [replace(block, rows=[noted(row) for row in block.rows]) for block in blocks]


def _with(row: Row, column: int, entry: Entry) -> Row:
    """The row with another entry in a column."""
    return replace(row, entries=[*row.entries[:column], entry, *row.entries[column + 1 :]])


def _opponents(section: Section, reference: Point) -> list[Point]:
    """Who is compared with a method at a budget: everybody at that budget, and those without any."""
    budget = reference.budget
    found = section.points if budget is None else [*section.evictors(budget), *section.quantisers]
    return [point for point in found if point != reference]


def _result_blocks(section: Section, tasks: Sequence[TaskName], averaged: bool, metric: Metric) -> list[Block]:
    def rows(points: Sequence[Point], with_budget: bool = False) -> list[Row]:
        made = []
        for point in points:
            entries = [_entry(section, task, point, metric) for task in tasks]
            if averaged:
                entries.append(_average_entry(section, tasks, point, metric))
            made.append(_row(section, point, entries, with_budget))
        return made

    blocks = []
    if reference := [point for point in section.points if point.method == FULL]:
        blocks.append(Block("", rows(reference)))
    evictors = [
        Block(f"Eviction: {percent(budget)} budget", rows(section.evictors(budget))) for budget in section.budgets
    ]
    blocks += [_marked(block, metric) for block in evictors]
    if section.quantisers:
        repeated = [
            point for b in reversed(section.budgets) for point in section.evictors(b) if is_qevict(point.method)
        ]
        compared = [*rows(repeated, with_budget=True), *rows(section.quantisers)]
        blocks.append(_marked(Block("Quantization", compared), metric))
    return blocks


def _row(section: Section, point: Point, entries: list[Entry], with_budget: bool = False) -> Row:
    held = memory(section, point)
    return Row(
        point.label if with_budget else point.method,
        "–" if held.ratio is None else f"{held.ratio:.1%}",
        "–" if held.protected is None else f"{held.protected:.0%}",
        entries,
        is_qevict(point.method),
    )


def _entry(section: Section, task: TaskName, point: Point, metric: Metric) -> Entry:
    records = section.cell(task.task, point)
    values = measured(records, metric.key)
    if not values.values:
        return _unmeasured(records)
    covered = coverage(section, [task], point, metric)
    return _number(clustered_mean(values), metric, "" if covered.whole else f"{covered.have} of {covered.expected}")


def _average_entry(section: Section, tasks: Sequence[TaskName], point: Point, metric: Metric) -> Entry:
    mean = average(section, tasks, point, metric)
    if mean is None:
        return _unmeasured([record for task in tasks for record in section.cell(task.task, point)])
    return _number(mean, metric, "" if coverage(section, tasks, point, metric).whole else "partial")


def _unmeasured(records: Sequence[Record]) -> Entry:
    """Why there is no number: infeasible, refused, or not run."""
    return Entry(None, "/".join(sorted({record.status for record in records} - {"ok"})) or "–")


def _number(mean: Mean, metric: Metric, note: str) -> Entry:
    spread = "±?" if math.isnan(mean.error) else f"±{metric.text(mean.error)}"
    return Entry(mean.value, metric.text(mean.value), spread, note, error=(mean.error,))


def _difference_entry(
    section: Section, tasks: Sequence[TaskName], point: Point, reference: Point, metric: Metric
) -> Entry:
    found = difference(section, tasks, point, reference, metric)
    if found is None:
        return Entry(None, "–")
    low, high = metric.text(found.low, signed=True), metric.text(found.high, signed=True)
    spread = "one document" if math.isnan(found.low) else f"[{low}, {high}]"
    expected = sum(len(section.cell(task.task, Point(FULL, None))) for task in tasks)
    note = f"{found.samples} of {expected}" if found.samples < expected else ""
    mark: Mark = "clear" if found.excludes_zero else ""
    text = metric.text(found.value, signed=True)
    return Entry(found.value, text, spread, note, mark, (found.low, found.high), found.p)


def _marked(block: Block, metric: Metric) -> Block:
    """Best and second best among the distinct printed values of every column; cells of fewer samples stay out."""
    rows = block.rows
    for column in range(len(rows[0].entries)):
        entries = [row.entries[column] for row in rows]
        shown = [None if e.value is None or e.note else metric.shown(e.value) for e in entries]
        distinct = sorted({s for s in shown if s is not None}, reverse=not metric.lower_is_better)
        marks: dict[float | None, Mark] = dict(zip(distinct, ("best", "second"), strict=False))
        marked = [replace(e, mark=marks.get(s, "")) for e, s in zip(entries, shown, strict=True)]
        rows = [_with(row, column, entry) for row, entry in zip(rows, marked, strict=True)]
    return replace(block, rows=rows)


def _notes(metric: Metric) -> list[str]:
    direction = "lower is better" if metric.lower_is_better else "higher is better"
    return [
        f"{metric.title}; {direction}. ± is the standard error between documents. Bold: best, underlined: second best, "
        "among the distinct printed values of a group, full KV left out, and cells of fewer samples than the others. "
        "KV memory: the largest measured share of full KV's bytes. Protected: share of the budget that goes to tokens "
        "kept whatever their score. Quantizers have operating points of their own. ±0.0 says that all documents agree, "
        "not that more of them would."
    ]
