"""A benchmark run: tasks × samples × methods × budgets on a model, into a folder that a killed run goes on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qevict.bench.cells import cells_of
from qevict.bench.manifest import GROWS, data_files, described, software
from qevict.bench.protocol import Setting
from qevict.bench.results import ResultsFolder
from qevict.bench.sample import Sample, Task
from qevict.bench.sweep import Job, evaluate
from qevict.bench.tasks import find_tasks
from qevict.methods.base import Described
from qevict.models import load, resolve

KEY = ("task", "sample", "method", "budget")
"""Fields that tell the records of a run apart."""


@dataclass(frozen=True)
class ModelSpec:
    """How to get the model.

    Attributes:
        name: as for `qevict.models.load`.
        dtype: of weights and computation.
        device: None for the CPU.
        threads: of torch; None leaves them as they are.
    """

    name: str = "smollm2-135m"
    dtype: torch.dtype = torch.float32
    device: str | None = None
    threads: int | None = None

    @property
    def device_type(self) -> str:
        """`cpu`, `cuda`, ...: which numbers of the same kind are alike."""
        return torch.device(self.device or "cpu").type

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model and its tokenizer."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return load(self.name, self.dtype, self.device)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer alone."""
        return AutoTokenizer.from_pretrained(resolve(self.name), padding_side="left")


@dataclass(frozen=True)
class Run:
    """Everything that decides the results.

    Attributes:
        tasks: specs as `find_tasks` takes them.
        methods: beside full KV, which is always run.
        budgets: fractions of full KV.
        samples: of each task, at most.
        length: of prompts, in tokens; see `Task.samples`.
        new_tokens: at most so many are generated, whatever the tasks' own limits; None for these alone. Gold answers
            are cut to it, too.
        data: the folder of the benchmarks' data; see `find_tasks`.
    """

    tasks: tuple[str, ...]
    methods: tuple[Described, ...]
    budgets: tuple[float, ...] = (0.2,)
    model: ModelSpec = field(default_factory=ModelSpec)
    samples: int = 10
    length: int | None = None
    new_tokens: int | None = None
    seed: int = 0
    setting: Setting = field(default_factory=Setting)
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.new_tokens is not None and self.new_tokens < 1:
            raise ValueError(f"new_tokens is {self.new_tokens}; at least 1 has to be generated")

    def find_tasks(self) -> list[Task]:
        """The tasks, each once."""
        found = [task for spec in self.tasks for task in find_tasks(spec, self.data)]
        return list({task.name: task for task in found}.values())

    def samples_of(self, tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase) -> Iterator[Sample]:
        """The tasks' samples in turn: the first of each, then the second of each, and so on, so that a run that is
        stopped early has something of every task."""
        series = [task.samples(tokenizer, self.samples, length=self.length, seed=self.seed) for task in tasks]
        for together in zip_longest(*series):
            for sample in together:
                if sample is not None:
                    yield self._limited(sample)

    def _limited(self, sample: Sample) -> Sample:
        if self.new_tokens is None or sample.max_new_tokens <= self.new_tokens:
            return sample
        return dataclasses.replace(sample, max_new_tokens=self.new_tokens)

    def manifest(self) -> dict[str, Any]:
        """What the results depend on."""
        setting, cells = self.setting, cells_of(self.methods, self.budgets)
        return {
            **software(),
            "model": self.model.name,
            "device": self.model.device_type,
            "dtype": _name(self.model.dtype),
            "store_dtype": _name(setting.store_dtype),
            "tasks": [task.name for task in self.find_tasks()],
            "length": self.length,
            "new_tokens": self.new_tokens,
            "samples": self.samples,
            "seed": self.seed,
            "methods": described(list({cell.method.label: cell.method for cell in cells}.values())),
            "budgets": list(self.budgets),
            "protocol": setting.protocol,
            "scope": setting.scope,
            "first_token": setting.first_token,
            "data": data_files(self.tasks, self.data),
        }


@runtime_checkable
class Engine(Protocol):
    """Where jobs are evaluated."""

    def evaluate(self, jobs: Iterator[Job], setting: Setting) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
        """See `sweep.evaluate`."""
        ...


@dataclass(frozen=True)
class LocalEngine:
    """This process."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def evaluate(self, jobs: Iterator[Job], setting: Setting) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
        """See `sweep.evaluate`."""
        return evaluate(self.model, self.tokenizer, jobs, setting)


Watcher = Callable[[Sample, list[dict[str, Any]]], None]
"""Shown a sample and its new records; no records where all of them were there already."""


def run(
    plan: Run,
    out: Path,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    watch: Watcher = lambda sample, records: None,
) -> None:
    """Run what the folder does not hold yet.

    Raises:
        ValueError: if the plan contradicts itself or the folder, or a task's data is missing.
    """
    cells = cells_of(plan.methods, plan.budgets)
    tasks = {task.name: task for task in plan.find_tasks()}
    for task in tasks.values():  # what is missing shows now, not after hours
        next(iter(task.samples(tokenizer, 1, length=plan.length, seed=plan.seed)), None)
    with ResultsFolder(out, plan.manifest(), KEY, GROWS) as folder:

        def jobs() -> Iterator[Job]:
            for sample in plan.samples_of(list(tasks.values()), tokenizer):
                wanted = tuple(cell for cell in cells if (sample.task, sample.id, *cell.key) not in folder.done)
                if wanted:
                    yield Job(sample, wanted)
                else:
                    watch(sample, [])

        for job, records in engine.evaluate(jobs(), plan.setting):
            task = tasks[job.sample.task]
            for record in records:
                said = record["prediction"]
                record["length"] = plan.length
                record["score"] = None if said is None else task.score(said, job.sample)
                folder.append(record)
            watch(job.sample, records)


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
