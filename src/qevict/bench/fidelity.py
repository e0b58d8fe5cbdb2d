"""Fidelity: how near a compressed cache's next-token distributions stay to full KV's, on real texts.

A text is prefilled once; full KV and every method and budget go on from there as forks, through the same tokens. The
most sensitive of the measures on a small model, which needs no right answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qevict.bench.cells import FULL, Cell, capture, cells_of
from qevict.bench.corpora import CORPORA, Text, Wanted, texts
from qevict.bench.decode import Fork, PeakMemory, decode
from qevict.bench.forced import Steps, against_full
from qevict.bench.manifest import GROWS, data_files, described, plain, software
from qevict.bench.protocol import Setting
from qevict.bench.results import ResultsFolder
from qevict.bench.runner import ModelSpec
from qevict.bench.study import KEY, build_groups
from qevict.bench.sweep import Key, agreement
from qevict.methods.base import Described, MeasuredCache

PREFIX = "fidelity/"
_DIGITS = 5
"""Significant digits of a step's numbers in a record."""


@dataclass(frozen=True)
class Fidelity:
    """Everything that decides the results.

    Attributes:
        methods: beside full KV, which is always run.
        corpora: of `CORPORA`.
        wanted: texts of each corpus.
    """

    methods: tuple[Described, ...]
    budgets: tuple[float, ...] = (0.2,)
    corpora: tuple[str, ...] = tuple(CORPORA)
    wanted: Wanted = field(default_factory=Wanted)
    model: ModelSpec = field(default_factory=ModelSpec)
    setting: Setting = field(default_factory=Setting)

    def manifest(self) -> dict[str, Any]:
        """What the results depend on."""
        cells, wanted = cells_of(self.methods, self.budgets), self.wanted
        return {
            **software(),
            "model": self.model.name,
            "device": self.model.device_type,
            "dtype": plain(self.model.dtype),
            "store_dtype": plain(self.setting.store_dtype),
            "tasks": [PREFIX + corpus for corpus in self.corpora],
            "length": wanted.prompt,
            "forced": wanted.forced,
            "answered": list(wanted.answered),
            "samples": wanted.count,
            "seed": wanted.seed,
            "methods": described(list({cell.method.label: cell.method for cell in cells}.values())),
            "budgets": list(self.budgets),
            "protocol": self.setting.protocol,
            "scope": self.setting.scope,
            "first_token": "compressed",
            "data": data_files([*self.corpora, *wanted.answered], wanted.data),
        }


Watcher = Callable[[str, list[dict[str, Any]]], None]
"""Shown a corpus and the new records of one of its texts; no records where all of them were there already."""


def run(
    plan: Fidelity,
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    watch: Watcher = lambda corpus, records: None,
) -> None:
    """Measure what the folder does not hold yet.

    Raises:
        ValueError: if the plan contradicts itself or the folder, or data is missing.
    """
    cells = cells_of(plan.methods, plan.budgets)
    for corpus in plan.corpora:  # what is missing shows now, not after hours
        next(iter(texts(corpus, tokenizer, plan.wanted)), None)
    with ResultsFolder(out, plan.manifest(), KEY, GROWS) as folder:
        for corpus in plan.corpora:
            for text in texts(corpus, tokenizer, plan.wanted):
                missing = [cell for cell in cells if (PREFIX + corpus, text.id, *cell.key) not in folder.done]
                records = measure(model, text, missing, plan.setting, plan.wanted.forced) if missing else []
                for record in records:
                    folder.append(record)
                watch(corpus, records)


def measure(
    model: PreTrainedModel, text: Text, cells: Sequence[Cell], setting: Setting, new_tokens: int
) -> list[dict[str, Any]]:
    """The records of a text's cells. Full KV runs beside them, whether or not it is one of them.

    Args:
        new_tokens: to generate where the text has no forced tokens.
    """
    compressed, pending = text.split(setting.protocol)
    trace = capture(model, compressed, [cell.method for cell in cells])
    most = len(pending) + (len(text.forced) or new_tokens)
    head = {
        "task": PREFIX + text.corpus,
        "sample": text.id,
        "document": text.document,
        "prompt_tokens": len(compressed) + len(pending),
    }
    records: dict[Key, dict[str, Any]] = {}
    others = [cell for cell in cells if not cell.is_full]
    for group in build_groups(model, trace, others, most, setting, max(1, setting.batch - 1)):
        full = next(iter(build_groups(model, trace, [FULL], most, setting, 1)))[0]
        running = [built for built in (full, *group) if built.cache is not None]
        caches = [built.cache for built in running if built.cache is not None]
        if text.forced:
            measured = [_forced(steps) for steps in against_full(model, caches[0], caches[1:], pending, text.forced)]
        else:
            measured = _free(model, caches, pending, new_tokens)
        found = dict(zip((built.cell.key for built in running), measured, strict=True))
        for built in (full, *group):
            numbers, memory = found.get(built.cell.key, (_NOTHING, None))
            records[built.cell.key] = {**head, **built.fields(memory), "new_tokens": most, **numbers}
    return [records[cell.key] for cell in cells]


_NOTHING: Mapping[str, Any] = {"kl": [], "nll": [], "same": "", "agreement": None, "divergence": None}


def _forced(steps: Steps) -> tuple[dict[str, Any], PeakMemory]:
    numbers = {
        "kl": [_rounded(value) for value in steps.kl],
        "nll": [_rounded(value) for value in steps.nll],
        "same": "".join(str(int(same)) for same in steps.same),
    }
    return {**_NOTHING, **numbers}, steps.memory


def _free(
    model: PreTrainedModel, caches: Sequence[MeasuredCache], pending: Sequence[int], new_tokens: int
) -> list[tuple[dict[str, Any], PeakMemory]]:
    """Greedy tokens of every cache against those of the first."""
    forks = [Fork(cache, list(pending), new_tokens) for cache in caches]
    for _ in decode(model, [forks], batch=len(forks)):
        pass
    full = forks[0].tokens
    return [
        (
            {**_NOTHING, "agreement": agreement(full, fork.tokens), "divergence": divergence(full, fork.tokens)},
            fork.memory,
        )
        for fork in forks
    ]


def divergence(full: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first place where two generations differ, one having ended being a difference; None if they do not."""
    shared = (index for index, (a, b) in enumerate(zip(full, tokens, strict=False)) if a != b)
    return next(shared, None if len(full) == len(tokens) else min(len(full), len(tokens)))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
