"""Jobs spread over a Ray cluster: one model a worker, dead workers replaced, their jobs tried again.

Workers evaluate one job at a time and return its records; the process that started the run writes them all, so that a
folder has one writer whatever the engine. Needs Ray: pip install 'qevict[ray]'.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qevict.bench.protocol import Setting
from qevict.bench.runner import ModelSpec
from qevict.bench.sweep import Job, evaluate

TRIES = 3
"""How often a job may lose its worker before the run ends: one that always kills its worker would else run for ever."""


@dataclass(frozen=True)
class RayEngine:
    """An engine for `runner.run`.

    Args:
        model: loaded by every worker; a local folder has to be there on every machine.
        workers: models at once.
        num_gpus: of a worker; may be a fraction, for workers that share a GPU. Above 0 the model goes to "cuda" unless
            the model's own device says otherwise.
        address: of an existing cluster ("auto" finds the one of this machine); None starts a local one.

    Raises:
        ValueError: if Ray is not installed.
    """

    model: ModelSpec
    workers: int = 2
    num_gpus: float = 0
    address: str | None = None

    def __post_init__(self) -> None:
        _ray()

    def evaluate(self, jobs: Iterator[Job], setting: Setting) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
        """See `sweep.evaluate`. As many jobs are under way as there are workers.

        Raises:
            ValueError: if the cluster has too few GPUs for a worker.
            RuntimeError: if a worker cannot start, or a job lost its worker too often.
        """
        ray = _ray()
        started = not ray.is_initialized()
        if started:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", **self._cluster())
        try:
            if self.num_gpus > (held := ray.cluster_resources().get("GPU", 0)):
                raise ValueError(f"a worker needs {self.num_gpus} GPUs, but the cluster has {held:g}")
            yield from self._spread(ray, jobs, setting)
        finally:
            if started:
                ray.shutdown()

    def _cluster(self) -> dict[str, Any]:
        if self.address is not None or "RAY_ADDRESS" in os.environ:
            return {"address": self.address}
        # However few cores there are, the workers asked for shall run.
        return {"num_cpus": max(os.cpu_count() or 1, self.workers * (self.model.threads or 1))}

    def _spread(self, ray: Any, jobs: Iterator[Job], setting: Setting) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
        device = self.model.device or ("cuda" if self.num_gpus else None)
        actor = ray.remote(
            num_cpus=self.model.threads or 1, num_gpus=self.num_gpus, max_restarts=-1, max_task_retries=TRIES
        )(_Worker)
        workers = [actor.remote(self.model, device, setting) for _ in range(self.workers)]
        # A worker gets its first job when it is up: a cluster may never have room for all of them.
        starting = {worker.ready.remote(): worker for worker in workers}
        under_way: dict[Any, tuple[Job, Any]] = {}
        coming = next(jobs, None)
        while under_way or coming is not None:
            (done,), _ = ray.wait([*under_way, *starting], num_returns=1)
            finished = None
            if done in starting:
                worker = starting.pop(done)
                _result(ray, done, "a worker could not start")
            else:
                job, worker = under_way.pop(done)
                finished = job, _result(ray, done, f"{job.sample.task}, sample {job.sample.id} lost its worker")
            if coming is not None:
                under_way[worker.evaluate.remote(coming)] = coming, worker
                coming = next(jobs, None)
            if finished is not None:
                yield finished


def _result(ray: Any, reference: Any, trouble: str) -> Any:
    """What a worker returned; its errors are raised as they were."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from error
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"{trouble}, after {TRIES} more tries: {error}") from error


class _Worker:
    """A model in a process of its own."""

    def __init__(self, spec: ModelSpec, device: str | None, setting: Setting) -> None:
        import torch

        torch.set_num_threads(spec.threads or 1)
        self._setting = setting
        self._model: PreTrainedModel
        self._tokenizer: PreTrainedTokenizerBase
        self._model, self._tokenizer = spec.load()
        self._model.to(device)

    def ready(self) -> None:
        """Returns when the model is loaded."""

    def evaluate(self, job: Job) -> list[dict[str, Any]]:
        """The job's records."""
        ((_, records),) = evaluate(self._model, self._tokenizer, [job], self._setting)
        return records


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError("the engine ray needs a package that is not there: pip install 'qevict[ray]'") from error
    return ray
