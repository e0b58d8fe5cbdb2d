"""Small tables of what fidelity and drift found, for the terminal and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from qevict.bench.drift_summary import DriftRow
from qevict.bench.fidelity_summary import CLAIM_FACTOR, WEAKEST, FidelityRow, Measured
from qevict.report.statistics import Interval, Mean

NO_CLAIM = "no claim"
_NONE = "–"


@dataclass(frozen=True)
class Sheet:
    """A table as text; the first column names its rows.

    Attributes:
        notes: what a reader has to know.
    """

    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    def rich(self) -> Table:
        """For the terminal."""
        table = Table(
            title=self.title, title_justify="left", caption="\n".join(self.notes), caption_justify="left", box=None
        )
        for number, head in enumerate(self.heads):
            table.add_column(Text(head), justify="right" if number else "left")
        for line in self.lines:
            table.add_row(*map(Text, line))
        return table

    def markdown(self) -> str:
        """A heading, the table and its notes."""
        rule = ["---", *["---:"] * (len(self.heads) - 1)]
        rows = ["| " + " | ".join(line) + " |" for line in (self.heads, rule, *self.lines)]
        notes = [part for note in self.notes for part in ("", note)]
        return "\n".join([f"### {self.title}", "", *rows, *notes, ""])


def fidelity_sheets(rows: Iterable[FidelityRow]) -> list[Sheet]:
    """A table for each corpus."""
    corpora: dict[str, list[FidelityRow]] = {}
    for row in rows:
        corpora.setdefault(row.corpus, []).append(row)
    return [_free(name, of) if any(row.agreement for row in of) else _forced(name, of) for name, of in corpora.items()]


def _forced(corpus: str, rows: Sequence[FidelityRow]) -> Sheet:
    lines = [
        (
            row_label(row.method, row.budget),
            _share(row.ratio),
            *(_refusal(row.refused, 7) if not row.texts else _numbers(row)),
            {True: "yes", False: NO_CLAIM, None: _NONE}[row.claim],
        )
        for row in rows
    ]
    notes = [
        "KL(full KV || method) of the next token in nats, step 0 (the first token after compression) apart; ± standard "
        "errors between texts; perplexity beside full KV's on the same texts.",
        *_partial((row.method, row.budget, row.refused) for row in rows if row.texts),
    ]
    if any(row.claim is False for row in rows):
        notes.append(
            f"{NO_CLAIM}: {WEAKEST} comes within {CLAIM_FACTOR - 1:.0%} of the best method's mean KL, so the corpus "
            "tells nothing about methods at this budget."
        )
    heads = ("method", "bytes", "KL", "median", "p99", "step 0", "same top-1", "perplexity", "full KV's", "claim")
    return Sheet(corpus, heads, tuple(lines), tuple(notes))


def _numbers(row: FidelityRow) -> tuple[str, ...]:
    return (
        _measured(row.kl),
        _number(row.kl_median),
        _number(row.kl_p99),
        _measured(row.first_kl),
        _percent(row.same),
        _measured(row.perplexity),
        _number(row.full_perplexity.value if row.full_perplexity else None),
    )


def _free(corpus: str, rows: Sequence[FidelityRow]) -> Sheet:
    lines = [
        (
            row_label(row.method, row.budget),
            _share(row.ratio),
            *(_refusal(row.refused, 2) if not row.texts else (_percent(row.agreement), _place(row.divergence))),
        )
        for row in rows
    ]
    notes = [
        "Greedy tokens against full KV's: the share that is the same at the same place, and the median place of the "
        "first that differs.",
        *_partial((row.method, row.budget, row.refused) for row in rows if row.texts),
    ]
    return Sheet(corpus, ("method", "bytes", "agreement", "first difference"), tuple(lines), tuple(notes))


def drift_sheets(rows: Iterable[DriftRow]) -> list[Sheet]:
    """A table for each task."""
    tasks: dict[str, list[DriftRow]] = {}
    for row in rows:
        tasks.setdefault(row.task, []).append(row)
    return [_drift(task, of) for task, of in tasks.items()]


def _drift(task: str, rows: Sequence[DriftRow]) -> Sheet:
    places = max((len(row.scores) for row in rows), default=0)
    lines = [
        (
            row_label(row.method, row.budget),
            _share(row.ratio),
            *(_refusal(row.refused, 2 * places + 4) if not row.contexts else _by_place(row)),
        )
        for row in rows
    ]
    heads = (
        "method",
        "bytes",
        *(f"score at {place + 1}" for place in range(places)),
        "drift",
        "beyond full KV",
        *(f"NLL at {place + 1}" for place in range(places)),
        "NLL drift",
        "NLL beyond full KV",
    )
    notes = [
        "Scores in %, negative log-likelihood of the gold answer in nats a token, by the place of the question. Drift "
        "is the first place minus the last, paired by question, with 95 % intervals by a bootstrap over contexts; a "
        "cache that forgets has a positive drift of the score and a negative one of the NLL.",
        *_partial((row.method, row.budget, row.refused) for row in rows if row.contexts),
    ]
    return Sheet(task, heads, tuple(lines), tuple(notes))


def _by_place(row: DriftRow) -> tuple[str, ...]:
    return (
        *(_mean(mean, 100.0, 1) for mean in row.scores),
        _interval(row.drift, 100.0, 1),
        _interval(row.beyond_full, 100.0, 1),
        *(_mean(mean, 1.0, 3) for mean in row.nlls),
        _interval(row.nll_drift, 1.0, 3),
        _interval(row.nll_beyond_full, 1.0, 3),
    )


def row_label(method: str, budget: float | None) -> str:
    """What tables call a method at a budget."""
    return method if budget is None else f"{method} {100 * budget:.4g} %"


def _share(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.1%}"


def _refusal(refused: int, columns: int) -> tuple[str, ...]:
    """In place of a row's numbers."""
    return (f"could not be ({refused}×)", *[_NONE] * (columns - 1))


def _partial(cells: Iterable[tuple[str, float | None, int]]) -> list[str]:
    refused = [f"{row_label(method, budget)} ({count})" for method, budget, count in cells if count]
    return [f"Not possible on some texts, left out there: {', '.join(refused)}."] if refused else []


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3g}"


def _measured(measured: Measured | None) -> str:
    if measured is None:
        return _NONE
    return _number(measured.value) if math.isnan(measured.error) else f"{measured.value:.3g} ± {measured.error:.2g}"


def _percent(measured: Measured | None) -> str:
    return _NONE if measured is None else f"{100 * measured.value:.1f} %"


def _place(divergence: float | None) -> str:
    return _NONE if divergence is None else "never" if math.isinf(divergence) else f"{divergence:.0f}"


def _mean(mean: Mean, scale: float, digits: int) -> str:
    shown = f"{scale * mean.value:.{digits}f}"
    return shown if math.isnan(mean.error) else f"{shown} ± {scale * mean.error:.{digits}f}"


def _interval(interval: Interval | None, scale: float, digits: int) -> str:
    if interval is None:
        return _NONE
    value, low, high = (f"{scale * number:+.{digits}f}" for number in interval[:3])
    return value if math.isnan(interval.low) else f"{value} [{low}, {high}]"
