"""A benchmark run: tasks × samples × methods × budgets on a model, into a folder that a killed run goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
        data: the folder of the benchmarks' data; see `find_tasks`.
    """

    tasks: tuple[str, ...]
    methods: tuple[Described, ...]
    budgets: tuple[float, ...] = (0.2,)
    model: ModelSpec = field(default_factory=ModelSpec)
    samples: int = 10
    length: int | None = None
    seed: int = 0
    setting: Setting = field(default_factory=Setting)
    data: Path | None = None

    def find_tasks(self) -> list[Task]:
        """The tasks, each once."""
        found = [task for spec in self.tasks for task in find_tasks(spec, self.data)]
        return list({task.name: task for task in found}.values())

    def manifest(self) -> dict[str, Any]:
        """What the results depend on."""
        setting, cells = self.setting, cells_of(self.methods, self.budgets)
        return {
            **software(),
            "model": self.model.name,
            "dtype": _name(self.model.dtype),
            "store_dtype": _name(setting.store_dtype),
            "tasks": [task.name for task in self.find_tasks()],
            "length": self.length,
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
            for task in tasks.values():
                for sample in task.samples(tokenizer, plan.samples, length=plan.length, seed=plan.seed):
                    wanted = tuple(cell for cell in cells if (task.name, sample.id, *cell.key) not in folder.done)
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
