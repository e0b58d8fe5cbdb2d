"""From records to numbers: what is averaged, and which samples two methods share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qevict.report.families import TaskName
from qevict.report.load import FULL, Point, Record, Section
from qevict.report.statistics import Interval, Mean, Values, bootstrap_mean, clustered_mean, macro_mean

Key = Literal["score", "gold_nll", "agreement"]


@dataclass(frozen=True)
class Metric:
    """A number of every record.

    Attributes:
        key: the record's field.
        title: for headings.
        scale: what it is multiplied by where it is shown.
        digits: after the point.
        lower_is_better: in a ranking.
        unit: of differences.
    """

    key: Key
    title: str
    scale: float
    digits: int
    lower_is_better: bool
    unit: str

    def shown(self, value: float) -> float:
        """Scaled and rounded: what is equal in a table counts as equal."""
        return round(value * self.scale, self.digits) + 0.0  # no -0.0

    def text(self, value: float, signed: bool = False) -> str:
        """As it is printed."""
        return f"{self.shown(value):{'+' if signed else ''}.{self.digits}f}"


SCORE = Metric("score", "Score", 100.0, 1, False, "percentage points")
GOLD_NLL = Metric("gold_nll", "Negative log-likelihood of the gold answer, nats a token", 1.0, 3, True, "nats a token")
AGREEMENT = Metric("agreement", "Agreement with full KV's tokens, %", 100.0, 1, False, "percentage points")


class Memory(NamedTuple):
    """A row's bytes as shares: the largest measured ratio to full KV, and the mean protected share of the budget."""

    ratio: float | None
    protected: float | None


class Coverage(NamedTuple):
    """How many samples a row has of some tasks, and how many full KV has."""

    have: int
    expected: int

    @property
    def whole(self) -> bool:
        """Whether none is missing, so that the mean compares with the other rows'."""
        return self.have >= self.expected


def coverage(section: Section, tasks: Sequence[TaskName], point: Point, metric: Metric) -> Coverage:
    """Of a row."""
    have = sum(len(measured(section.cell(task.task, point), metric.key).values) for task in tasks)
    full = sum(len(measured(section.cell(task.task, Point(FULL, None)), metric.key).values) for task in tasks)
    return Coverage(have, full)


def measured(records: Sequence[Record], key: Key) -> Values:
    """The numbers that there are."""
    found = [(value, r.document) for r in records if r.status == "ok" and (value := getattr(r, key)) is not None]
    return Values([value for value, _ in found], [document for _, document in found])


def memory(section: Section, point: Point) -> Memory:
    """Over all samples of a row."""
    done = [record for record in section.rows.get(point, []) if record.status == "ok"]
    ratios = [record.ratio for record in done if record.ratio is not None]
    shares = [record.protected_share for record in done if record.protected_share is not None]
    return Memory(max(ratios, default=None), sum(shares) / len(shares) if shares else None)


def average(section: Section, tasks: Sequence[TaskName], point: Point, metric: Metric) -> Mean | None:
    """Mean over the tasks, or None where a task is missing."""
    values = [measured(section.cell(task.task, point), metric.key) for task in tasks]
    if not values or not all(value.values for value in values):
        return None
    return macro_mean([clustered_mean(value) for value in values])


def difference(
    section: Section, tasks: Sequence[TaskName], point: Point, reference: Point, metric: Metric
) -> Interval | None:
    """Point minus reference over the samples that both have, or None where they share none of a task."""
    paired: dict[str, Values] = {}
    for task in tasks:
        others = {r.sample: getattr(r, metric.key) for r in section.cell(task.task, reference) if r.status == "ok"}
        pairs = [
            (getattr(r, metric.key) - others[r.sample], r.document)
            for r in section.cell(task.task, point)
            if r.status == "ok" and getattr(r, metric.key) is not None and others.get(r.sample) is not None
        ]
        if not pairs:
            return None
        paired[task.task] = Values([value for value, _ in pairs], [document for _, document in pairs])
    return bootstrap_mean(paired) if paired else None
