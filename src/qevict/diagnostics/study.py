"""A study: the same conditions on several articles, in a folder that can be taken up again after a stop.

study.json                     settings that all articles share
article-00/trace/              its reference trace
article-00/NAME.safetensors    what each condition kept
article-00/summary.json        all metrics, by condition
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from qevict.diagnostics.articles import Article
from qevict.diagnostics.conditions import Condition
from qevict.diagnostics.policy import PolicyTrace
from qevict.diagnostics.recording import record_policies
from qevict.diagnostics.reference import record_reference, trace_header
from qevict.diagnostics.summary import Summary, summarise
from qevict.diagnostics.trace import Trace

_SETTINGS, _SUMMARY = "study.json", "summary.json"
Report = Callable[[str, int], None]
"""Told what is being done for an article, and how many decode steps of it are done."""


@dataclass(frozen=True)
class StudySettings:
    """What all articles of a study share.

    Attributes:
        model: its name.
        prefill, new: tokens of the prompt and decode steps.
        forced: whether the article's own continuation is fed, rather than what the model generates.
        interval: tokens between two looks at methods without routing events.
        store_dtype: of full-precision storage.
    """

    model: str
    prefill: int
    new: int
    forced: bool = False
    interval: int = 8
    store_dtype: str = "bfloat16"


@dataclass(frozen=True)
class Study:
    """A study's folder."""

    folder: Path
    settings: StudySettings

    @classmethod
    def at(cls, folder: Path, settings: StudySettings) -> Study:
        """The study of these settings in a folder, begun there or taken up.

        Raises:
            ValueError: if the folder holds a study of other settings.
        """
        path = folder / _SETTINGS
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            differing = [name for name, value in asdict(settings).items() if found.get(name) != value]
            if differing:
                raise ValueError(f"{folder} holds a study with another {', '.join(differing)}; choose another --out")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(settings), indent=1), encoding="utf-8")
        return cls(folder, settings)

    @classmethod
    def open(cls, folder: Path) -> Study:
        """The study in a folder.

        Raises:
            ValueError: if there is none.
        """
        path = folder / _SETTINGS
        if not path.is_file():
            raise ValueError(f"{folder} holds no study; `qevict diagnose --out {folder}` makes one")
        return cls(folder, StudySettings(**json.loads(path.read_text(encoding="utf-8"))))

    def article(self, index: int) -> Path:
        """Folder of an article."""
        return self.folder / f"article-{index:02}"

    def trace(self, index: int) -> Trace:
        """Reference trace of an article."""
        return Trace.open(self.article(index) / "trace")

    def policies(self, index: int) -> dict[str, PolicyTrace]:
        """What each condition kept of an article."""
        paths = sorted(self.article(index).glob("*.safetensors"))
        loaded = [PolicyTrace.load(path) for path in paths]
        return {policy.header.name: policy for policy in loaded}

    def summaries(self) -> list[dict[str, Summary]]:
        """The metrics of every article that is done, in order; what has no value is nan."""
        paths = sorted(self.folder.glob(f"article-*/{_SUMMARY}"))
        return [json.loads(path.read_text(encoding="utf-8"), object_hook=_with_nan) for path in paths]

    def run(
        self,
        model: PreTrainedModel,
        found: Sequence[Article],
        conditions: Sequence[Condition],
        *,
        keep_traces: bool = True,
        report: Report = lambda what, done: None,
    ) -> dict[str, str]:
        """Trace the articles and force the conditions on them; what is in the folder already is not done again.

        Args:
            keep_traces: whether to keep the reference traces of all articles; the first article's stays in any case.

        Returns:
            Conditions that were infeasible, and why.
        """
        infeasible: dict[str, str] = {}
        for index, article in enumerate(found):
            infeasible |= self._article(model, index, article, conditions, report)
            if index and not keep_traces:
                shutil.rmtree(self.article(index) / "trace", ignore_errors=True)
        return infeasible

    def _article(
        self, model: PreTrainedModel, index: int, article: Article, conditions: Sequence[Condition], report: Report
    ) -> dict[str, str]:
        folder, settings = self.article(index), self.settings
        summary_path = folder / _SUMMARY
        done = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else {}
        missing = [condition for condition in conditions if condition.name not in done]
        if not missing:
            return {}
        dtype = getattr(torch, settings.store_dtype)
        queries = [condition.method.observed_queries for condition in conditions]
        trace = self._reference(model, index, article, dtype, report, {32, *(n for n in queries if n)})
        policies, infeasible = record_policies(
            model,
            trace,
            missing,
            interval=settings.interval,
            store_dtype=dtype,
            progress=lambda step: report(f"{article.title}: {len(missing)} conditions", step),
        )
        for name, policy in policies.items():
            policy.save(folder / f"{_file_name(name)}.safetensors")
        made = done | summarise(trace, policies)
        summary_path.write_text(json.dumps(_without_nan(made)), encoding="utf-8")
        return infeasible

    def _reference(
        self,
        model: PreTrainedModel,
        index: int,
        article: Article,
        dtype: torch.dtype,
        report: Report,
        prompt_queries: set[int],
    ) -> Trace:
        settings, folder = self.settings, self.article(index) / "trace"
        prompt = article.tokens[: settings.prefill]
        try:
            trace = Trace.open(folder)
        except ValueError:
            header = trace_header(
                model,
                prompt,
                settings.new,
                title=article.title,
                name=settings.model,
                forced=settings.forced,
                prompt_queries=prompt_queries,
            )
            continuation = article.tokens[settings.prefill : settings.prefill + settings.new]
            return record_reference(
                model,
                header,
                folder,
                continuation=continuation if settings.forced else None,
                store_dtype=dtype,
                progress=lambda step: report(f"{article.title}: reference", step),
            )
        if trace.header.tokens[: settings.prefill] != prompt:
            raise ValueError(f"{folder} is a trace of another text ({trace.header.title}); choose another --out")
        return trace


def _file_name(condition: str) -> str:
    return "".join(char if char.isalnum() or char in "-+." else "_" for char in condition)


def _without_nan(value: Any) -> Any:
    """JSON has no nan."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _with_nan(read: dict[str, Any]) -> dict[str, Any]:
    return {
        key: math.nan
        if value is None
        else [math.nan if item is None else item for item in value]
        if isinstance(value, list)
        else value
        for key, value in read.items()
    }
