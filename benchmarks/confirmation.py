"""Two wordings of RULER put together: macro averages over its tasks, paired with full KV and with the default.

    python benchmarks/confirmation.py runs/confirmation --rounds 3

The folder is one of `qevict bench`, with tasks of `ruler` and `reworded` under one protocol and at one length. Averages
cover the tasks that reports average. `--rounds` takes that many samples of each task and wording, the first ones, so
that a run that was stopped has equally many of each. Methods are compared at the same budget, those without one at
the largest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qevict.report.families import TaskName
from qevict.report.floor import select
from qevict.report.load import FULL, Point, Record, Section, join
from qevict.report.statistics import Interval, holm
from qevict.report.values import GOLD_NLL, SCORE, average, difference, memory

OWN = "qevict"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, help="samples of each task and wording; all if left out")
    args = parser.parse_args()
    sections = sorted(join([args.folder]).sections, key=lambda section: section.suite != "ruler")
    if len({(section.protocol, section.length) for section in sections}) != 1:
        parser.error(f"{args.folder} has several protocols or lengths; give a folder with one of each")
    merged = replace(sections[0], records=[r for section in sections for r in first(section, args.rounds)])
    show(merged, select(sections[0]).averaged)


def first(section: Section, rounds: int | None) -> Iterator[Record]:
    """The records of each task's first samples, those of another wording as more samples of RULER's task."""
    for task in section.tasks:
        met = [record.sample for record in section.cell(task.task, Point(FULL, None))]
        chosen = set(met if rounds is None else sorted(met, key=lambda sample: int(sample.rpartition("-")[2]))[:rounds])
        for record in section.records:
            if record.task == task.task and record.sample in chosen:
                names = {name: f"{section.suite}/{getattr(record, name)}" for name in ("sample", "document")}
                yield replace(record, task=f"ruler/{task.task.partition('/')[2]}", **names)


def show(section: Section, tasks: list[TaskName]) -> None:
    """Print the table."""
    full = Point(FULL, None)
    base = average(section, tasks, full, SCORE)
    if base is None:
        raise SystemExit("full KV is missing for a task")
    points = [point for point in section.points if point != full]
    compared: dict[Point, Interval] = {}
    for budget in section.budgets:
        own = Point(OWN, budget)
        for point in [*section.evictors(budget), *(section.quantisers if budget == section.budgets[0] else ())]:
            found = difference(section, tasks, point, own, SCORE)
            if found is not None and point != own:
                compared[point] = found
    p = dict(zip(compared, holm([interval.p for interval in compared.values()]), strict=True))

    table = Table(
        title=f"{len(tasks)} tasks, {base.samples} samples; full KV {100 * base.value:.1f} ± {100 * base.error:.1f}"
    )
    for heading in ("method", "bytes", "score", "of full KV", "minus qevict", "p (Holm)", "gold NLL"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=heading != "method")
    for point in sorted(points, key=lambda point: -(point.budget or 1)):
        mean, nll = (average(section, tasks, point, metric) for metric in (SCORE, GOLD_NLL))
        if mean is None:
            table.add_row(escape(point.label), "–", "infeasible")
            continue
        lost = difference(section, tasks, point, full, SCORE)
        table.add_row(
            escape(point.label),
            f"{memory(section, point).ratio or 0:.1%}",
            f"{100 * mean.value:.1f} ± {100 * mean.error:.1f}",
            "" if lost is None else share(lost, base.value),
            signed(compared[point]) if point in compared else "",
            f"{p[point]:.3f}" if point in p else "",
            "" if nll is None else f"{nll.value:.2f} ± {nll.error:.2f}",
        )
    Console(width=150).print(table)


def share(lost: Interval, full: float) -> str:
    """Score as a share of full KV's; the interval is that of the paired difference, full KV's mean taken as it is."""
    return f"{1 + lost.value / full:.0%} [{1 + lost.low / full:.0%}, {1 + lost.high / full:.0%}]"


def signed(interval: Interval) -> str:
    """A difference in percentage points."""
    return f"{100 * interval.value:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


if __name__ == "__main__":
    main()
