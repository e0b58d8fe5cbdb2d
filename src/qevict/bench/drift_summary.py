"""What drift records say: one row for each task, method and budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qevict.report.statistics import Interval, Mean, Values, bootstrap_mean, clustered_mean

Record = Mapping[str, Any]
Cell = tuple[str, str, float | None]


@dataclass(frozen=True)
class DriftRow:
    """One method at one budget.

    Attributes:
        task: as records have it.
        budget: None for full KV and for methods with an operating point of their own.
        contexts: that it was asked about.
        refused: orders of conversations where the cell could not be, and the last reason.
        scores, nlls: accuracy, and negative log-likelihood of the gold answer, at each place; standard errors are
            between contexts.
        drift, nll_drift: the first place minus the last, paired by question; intervals by a bootstrap over contexts.
            A cache that forgets has a positive drift of the score, and a negative one of the likelihood.
        beyond_full, nll_beyond_full: the same minus full KV's drift on the same questions, which a model may have that
            forgets nothing.
        ratio: the largest share of full KV's bytes at any step.
    """

    task: str
    method: str
    budget: float | None
    contexts: int
    refused: int
    reason: str
    scores: tuple[Mean, ...]
    nlls: tuple[Mean, ...]
    drift: Interval | None
    nll_drift: Interval | None
    beyond_full: Interval | None
    nll_beyond_full: Interval | None
    ratio: float | None


def summarise(records: Iterable[Record]) -> list[DriftRow]:
    """Rows in the order in which methods and budgets came, task by task."""
    cells: dict[Cell, list[Record]] = {}
    for record in records:
        cells.setdefault((record["task"], record["method"], record["budget"]), []).append(record)
    tasks = list(dict.fromkeys(task for task, *_ in cells))
    return [
        _row(cell, cells[cell], cells.get((cell[0], "full", None), []))
        for cell in sorted(cells, key=lambda cell: tasks.index(cell[0]))
    ]


def _row(cell: Cell, records: Sequence[Record], full: Sequence[Record]) -> DriftRow:
    done = [record for record in records if record["status"] == "ok"]
    refused = [record for record in records if record["status"] != "ok"]
    task, method, budget = cell
    return DriftRow(
        task=task,
        method=method,
        budget=budget,
        contexts=len({_context(record) for record in done}),
        refused=len(refused),
        reason=str(refused[-1]["reason"]) if refused else "",
        scores=_by_place(done, "score"),
        nlls=_by_place(done, "gold_nll"),
        drift=_drift(task, done, "score"),
        nll_drift=_drift(task, done, "gold_nll"),
        beyond_full=None if method == "full" else _drift(task, done, "score", full),
        nll_beyond_full=None if method == "full" else _drift(task, done, "gold_nll", full),
        ratio=max((record["ratio"] for record in done), default=None),
    )


Number = Literal["score", "gold_nll"]


def _by_place(records: Sequence[Record], number: Number) -> tuple[Mean, ...]:
    places = max((len(record["turns"]) for record in records), default=0)
    return tuple(
        clustered_mean(
            Values(
                [float(record["turns"][place][number]) for record in records],
                [record["document"] for record in records],
            )
        )
        for place in range(places)
    )


def _drift(
    task: str, records: Sequence[Record], number: Number, reference: Sequence[Record] | None = None
) -> Interval | None:
    """First minus last, and, where there is a reference, minus its own; None without a question that was both."""
    drifts = _drifts(records, number)
    if reference is not None:
        others = _drifts(reference, number)
        drifts = {key: (drift - others[key][0], document) for key, (drift, document) in drifts.items() if key in others}
    if not drifts:
        return None
    values = Values([drift for drift, _ in drifts.values()], [document for _, document in drifts.values()])
    return bootstrap_mean({task: values})


def _drifts(records: Sequence[Record], number: Number) -> dict[tuple[str, int], tuple[float, str]]:
    """First minus last, and the context, of every question that was asked at both places."""
    first, last = _asked_at(records, 0, number), _asked_at(records, -1, number)
    return {key: (value - last[key][0], document) for key, (value, document) in first.items() if key in last}


def _asked_at(records: Sequence[Record], place: int, number: Number) -> dict[tuple[str, int], tuple[float, str]]:
    turns = ((record, record["turns"][place]) for record in records)
    return {(_context(record), turn["question"]): (float(turn[number]), record["document"]) for record, turn in turns}


def _context(record: Record) -> str:
    """The conversation, whatever its order."""
    return str(record["sample"]).rpartition("/")[0]
