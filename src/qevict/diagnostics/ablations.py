"""The paper's ablations (appendices G, J and K): one setting varied, everything else as it is, on several measures.

The base is the paper's configuration at matched bytes (`qevict-paper`), or this project's default (`qevict`). The paper
runs them at 5 % of full KV on four LongBench tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qevict.bench import fidelity
from qevict.bench.corpora import Wanted
from qevict.bench.fidelity import Fidelity
from qevict.bench.fidelity_summary import summarise
from qevict.bench.results import read_records
from qevict.bench.runner import LocalEngine, ModelSpec, Run, run
from qevict.diagnostics.tables import Table
from qevict.methods.qevict import QEvict
from qevict.methods.registry import get_method
from qevict.report.statistics import Values, clustered_mean

SETTINGS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "window": ("window_size", (4, 8, 16, 32)),  # table 11
    "fraction": ("quantized_fraction", (0.1, 0.3, 0.5, 0.7, 0.9)),  # table 12
    "bits": ("bits", (2, 4)),  # table 13
    "ranking": ("ranking", ("cumulative", "decayed", "p-norm", "key-norm")),  # table 17; lambda = 0.99, p = 3
    "promotion": ("promotion", (True, False)),  # appendix K
    "score-steps": ("score_steps", ("every", "event")),  # Eq. 1 against the one query that the paper's kernel sees
}
"""Which setting an ablation varies, and over what."""

FIDELITY, RULER, LONGBENCH = "fidelity", "ruler", "longbench"
LONGBENCH_TASKS = ("longbench/narrativeqa", "longbench/musique", "longbench/qmsum", "longbench/triviaqa")
"""Appendix G's: one task of each family."""
CORPORA = ("prose", "copy")
"""Texts of the fidelity measure: what comes next anyway, and what has to be looked up."""


@dataclass(frozen=True)
class Ablation:
    """What is varied, and on what it is measured.

    Attributes:
        name: of `SETTINGS`.
        base: `qevict-paper` or `qevict`.
        budgets: shares of full KV.
        measures: of FIDELITY, RULER and LONGBENCH.
        texts, prompt, forced: of the fidelity measure: how many, and how many tokens before and after compression.
        samples, length: of each task, and tokens of RULER's prompts (LongBench's are cut to it).
        data: folder of the benchmarks' data.
    """

    name: str
    base: str = "qevict-paper"
    budgets: tuple[float, ...] = (0.05,)
    measures: tuple[str, ...] = (FIDELITY, RULER)
    texts: int = 4
    prompt: int = 1024
    forced: int = 128
    samples: int = 5
    length: int = 1024
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.name not in SETTINGS:
            raise ValueError(f"there is no ablation {self.name!r}; there are {', '.join(SETTINGS)}")
        if unknown := [m for m in self.measures if m not in (FIDELITY, RULER, LONGBENCH)]:
            raise ValueError(f"cannot measure {', '.join(unknown)}; there are {FIDELITY}, {RULER} and {LONGBENCH}")

    def variants(self) -> list[QEvict]:
        """The base with each value of the setting, named by it.

        Raises:
            ValueError: if the base is not QEvict.
        """
        base = get_method(self.base)
        if not isinstance(base, QEvict):
            raise ValueError(f"an ablation starts from qevict or qevict-paper, not from {self.base}")
        field, values = SETTINGS[self.name]
        return [replace(base.with_settings(**{field: value}), preset=f"{field}={value}") for value in values]


def carry_out(
    ablation: Ablation,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: ModelSpec,
    out: Path,
    saw: Callable[[str], None] = lambda what: None,
) -> Table:
    """Measure what the folder does not hold yet, and the table of all it holds.

    Args:
        saw: told what was measured.
    """
    methods = tuple(ablation.variants())
    if FIDELITY in ablation.measures:
        wanted = Wanted(
            ablation.texts, ablation.prompt, ablation.forced, ablation.seed, ablation.data, answered=(RULER,)
        )
        plan = Fidelity(methods, ablation.budgets, CORPORA, wanted, spec)
        fidelity.run(plan, out / FIDELITY, model, tokenizer, lambda corpus, records: saw(corpus))
    for measure, tasks in ((RULER, (RULER,)), (LONGBENCH, LONGBENCH_TASKS)):
        if measure in ablation.measures:
            task_plan = Run(
                tasks,
                methods,
                ablation.budgets,
                spec,
                ablation.samples,
                ablation.length,
                ablation.seed,
                data=ablation.data,
            )
            engine = LocalEngine(model, tokenizer)
            run(task_plan, out / measure, engine, tokenizer, lambda sample, records: saw(f"{sample.task} {sample.id}"))
    return table(ablation, out)


def table(ablation: Ablation, out: Path) -> Table:
    """One row for each value and budget, one column for each measure; standard errors between documents."""
    labels = [method.label for method in ablation.variants()]
    columns: dict[str, dict[tuple[str, float], str]] = {}
    if FIDELITY in ablation.measures:
        for row in summarise(read_records(out / FIDELITY)):
            if row.kl is not None and row.budget is not None:
                corpus = row.corpus.removeprefix(fidelity.PREFIX)
                columns.setdefault(f"KL, {corpus}", {})[row.method, row.budget] = _cell(*row.kl)
    for measure in (RULER, LONGBENCH):
        if measure in ablation.measures:
            columns |= _scores(measure, read_records(out / measure))
    rows = [
        (
            f"{label.removeprefix('qevict-')}, {100 * budget:g} %",
            *(cells.get((label, budget), "–") for cells in columns.values()),
        )
        for budget in ablation.budgets
        for label in labels
    ]
    title = f"{ablation.name}, from {ablation.base}"
    return Table(f"Ablation: {title}", (ablation.name, *columns), rows)


def _scores(measure: str, records: Iterable[Mapping[str, Any]]) -> dict[str, dict[tuple[str, float], str]]:
    """Scores in per cent: RULER's mean over tasks in one column, LongBench's tasks in one each; gold NLL beside."""
    found: dict[str, dict[tuple[str, float], list[Mapping[str, Any]]]] = {}
    for record in records:
        if record["status"] == "ok" and record["budget"] is not None:
            name = record["task"] if measure == LONGBENCH else RULER
            found.setdefault(name, {}).setdefault((record["method"], record["budget"]), []).append(record)
    columns = {}
    for name, cells in found.items():
        for field, title, scale in (("score", f"{name}, %", 100.0), ("gold_nll", f"{name}, gold NLL", 1.0)):
            columns[title] = {key: _mean(rows, field, scale) for key, rows in cells.items()}
    return columns


def _mean(records: Sequence[Mapping[str, Any]], field: str, scale: float) -> str:
    known = [record for record in records if record[field] is not None]
    if not known:
        return "–"
    documents = [f"{record['task']}/{record['document']}" for record in known]
    mean = clustered_mean(Values([scale * record[field] for record in known], documents))
    return _cell(mean.value, mean.error)


def _cell(value: float, error: float) -> str:
    digits = 1 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")
