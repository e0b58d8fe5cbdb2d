"""The paper's ablations (appendices G, J and K): one setting varied, everything else as it is, on several measures.

The base is the paper's configuration at matched bytes (`qevict-paper`), or this project's default (`qevict`). The paper
runs them at 5 % of full KV on four LongBench tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qevict.bench import fidelity
from qevict.bench.corpora import Wanted
from qevict.bench.fidelity import Fidelity
from qevict.bench.results import read_records
from qevict.bench.runner import LocalEngine, ModelSpec, Run, run
from qevict.diagnostics.tables import Table
from qevict.methods.qevict import QEvict
from qevict.methods.registry import get_method
from qevict.report.statistics import Mean, Values, clustered_mean

SETTINGS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "window": ("window_size", (4, 8, 16, 32)),  # table 11
    "fraction": ("quantized_fraction", (0.1, 0.3, 0.5, 0.7, 0.9)),  # table 12
    "bits": ("bits", (2, 4)),  # table 13
    # Table 17, lambda = 0.99, p = 3; and the default's.
    "ranking": ("ranking", ("cumulative", "decayed", "decayed:0.5", "p-norm", "key-norm")),
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
        new_tokens: at most so many are generated, whatever a task's own limit; None for that alone.
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
    new_tokens: int | None = None
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
        field, values = SETTINGS[self.name]
        return [replace(self._base.with_settings(**{field: value}), preset=f"{field}={value}") for value in values]

    @property
    def compared_with(self) -> str:
        """Label of the variant that has the base's own value, or of the first one where none has."""
        field, values = SETTINGS[self.name]
        own = getattr(self._base.config, field)
        return self.variants()[values.index(own) if own in values else 0].label

    @property
    def _base(self) -> QEvict:
        base = get_method(self.base)
        if not isinstance(base, QEvict):
            raise ValueError(f"an ablation starts from qevict or qevict-paper, not from {self.base}")
        return base


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
                samples=ablation.samples,
                length=ablation.length,
                new_tokens=ablation.new_tokens,
                seed=ablation.seed,
                data=ablation.data,
            )
            engine = LocalEngine(model, tokenizer)
            run(task_plan, out / measure, engine, tokenizer, lambda sample, records: saw(f"{sample.task} {sample.id}"))
    return table(ablation, out)


class _Point(NamedTuple):
    document: str
    value: float


_Samples = dict[str, _Point]
_Column = dict[tuple[str, float], _Samples]
"""Values by method and budget, then by sample."""


def table(ablation: Ablation, out: Path) -> Table:
    """One row for each value and budget, one column for each measure.

    The row of the base's own value has a mean and its standard error between documents; every other row has a mean and,
    in brackets, its difference from that one on the samples that both have, with the standard error of the difference.
    """
    columns, failed = dict[str, _Column](), dict[tuple[str, float], str]()
    for measure in ablation.measures:
        records = [record for record in read_records(out / measure) if record["budget"] is not None]
        failed |= {(record["method"], record["budget"]): record["status"] for record in records}
        for title, samples in _columns(measure, records).items():
            columns[title] = samples
    compared = ablation.compared_with
    rows = []
    for budget in ablation.budgets:
        for label in (method.label for method in ablation.variants()):
            cells = [
                _cell(column.get((label, budget)), {} if label == compared else column.get((compared, budget), {}))
                or failed.get((label, budget), "–")
                for column in columns.values()
            ]
            rows.append((f"{label.removeprefix('qevict-')}, {100 * budget:g} %", *cells))
    title = f"{ablation.name}, from {ablation.base}; in brackets: difference from {compared.removeprefix('qevict-')}"
    return Table(f"Ablation: {title}", (ablation.name, *columns), rows)


def _columns(measure: str, records: Iterable[Mapping[str, Any]]) -> dict[str, _Column]:
    """Mean KL of a text behind its first step; scores in per cent and the gold answers' NLL, of RULER's tasks in one
    column, of LongBench's in one each."""
    columns: dict[str, _Column] = {}
    for record in records:
        if record["status"] != "ok":
            continue
        task = record["task"]
        if measure == FIDELITY:
            later = record["kl"][1:]
            values = {f"KL, {task.removeprefix(fidelity.PREFIX)}": math.fsum(later) / len(later) if later else None}
        else:
            name, score = RULER if measure == RULER else task, record["score"]
            values = {
                f"{name}, %": None if score is None else 100 * score,
                f"{name}, gold NLL": record["gold_nll"],
            }
        for title, value in values.items():
            if value is not None:
                cell = columns.setdefault(title, {}).setdefault((record["method"], record["budget"]), {})
                cell[f"{task}/{record['sample']}"] = _Point(f"{task}/{record['document']}", value)
    return columns


def _cell(samples: _Samples | None, compared: _Samples) -> str:
    if not samples:
        return ""
    mean = _mean(samples)
    digits = 1 if abs(mean.value) >= 10 else 3
    shared = {
        name: _Point(document, value - compared[name].value)
        for name, (document, value) in samples.items()
        if name in compared
    }
    if not shared:
        return f"{mean.value:.{digits}f}" + _error(mean, digits)
    change = _mean(shared)
    return f"{mean.value:.{digits}f} ({change.value:+.{digits}f}{_error(change, digits)})"


def _mean(samples: _Samples) -> Mean:
    return clustered_mean(Values([one.value for one in samples.values()], [one.document for one in samples.values()]))


def _error(mean: Mean, digits: int) -> str:
    return "" if math.isnan(mean.error) else f" ± {mean.error:.{digits}f}"
