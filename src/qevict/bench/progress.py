"""What a run shows while it goes on, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from qevict.bench.sample import Sample

Row = tuple[str, float | None]


class Board:
    """Progress bar and running scores on a terminal; a line a sample where there is none. A context manager.

    Args:
        total: samples of all tasks, at most.

    Attributes:
        evaluated: samples with new records.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("samples"),
            _Rate(),
            TimeElapsedColumn(),
            _Left(),
            console=console,
        )
        self._task = self._bar.add_task("reading", total=total)
        self._records: list[dict[str, Any]] = []
        self.evaluated = 0
        self._begun = time.monotonic()
        self._live = Live(console=console, refresh_per_second=2, transient=True) if console.is_terminal else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
            self._live.update(self._bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def saw(self, sample: Sample, records: list[dict[str, Any]]) -> None:
        """A sample is done; without new records it was done before."""
        self.evaluated += bool(records)
        self._records += records
        spent = time.monotonic() - self._begun
        self._bar.update(
            self._task, advance=1, description=sample.task, rate=self.evaluated / spent if self.evaluated else None
        )
        if self._live is not None:
            self._live.update(Group(self._bar, score_table(self._records)))
        elif records:
            bar = self._bar.tasks[0]
            place = f"{int(bar.completed)}/{bar.total}  {sample.task}  {sample.id}"
            pace = f"{spent / self.evaluated:.1f} s a sample, {_left(bar)} left"
            self._console.print(f"{place}  {pace}", highlight=False)


class _Rate(ProgressColumn):
    """Time a sample takes, those not counted that were there before."""

    def render(self, task: Task) -> Text:
        rate = task.fields.get("rate")
        return Text("" if not rate else f"{1 / rate:.1f} s each")


class _Left(ProgressColumn):
    """Time left at that rate."""

    def render(self, task: Task) -> Text:
        return Text(f"{_left(task)} left")


def _left(task: Task) -> str:
    rate = task.fields.get("rate")
    if not rate or task.total is None:
        return "?"
    minutes, seconds = divmod(round((task.total - task.completed) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def score_table(records: Iterable[Mapping[str, Any]]) -> Table:
    """Mean scores in percent, a row for each method and budget, a column for each task, and their mean.

    There is no mean where a task could not be run, since the other tasks' would not compare.
    """
    scores: dict[Row, dict[str, list[float]]] = {}
    reasons: dict[Row, str] = {}
    for record in records:
        row = record["method"], record["budget"]
        of_task = scores.setdefault(row, {})
        if record["score"] is None:
            reasons[row] = record["status"]
        else:
            of_task.setdefault(record["task"], []).append(record["score"])
    tasks = sorted({task for row in scores.values() for task in row})
    table = Table("method", "budget", *(task.rpartition("/")[2] for task in tasks), "mean", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for (method, budget), row_scores in scores.items():
        means = [sum(row_scores[task]) / len(row_scores[task]) if task in row_scores else None for task in tasks]
        held = [mean for mean in means if mean is not None]
        whole = len(held) == len(tasks) > 0
        overall = _percent(sum(held) / len(held)) if whole else reasons.get((method, budget), "")
        share = "" if budget is None else f"{100 * budget:.4g} %"
        table.add_row(Text(method), share, *("–" if mean is None else _percent(mean) for mean in means), overall)
    return table


def _percent(score: float) -> str:
    return f"{100 * score:.1f}"
