"""From a name to tasks."""

from __future__ import annotations

from pathlib import Path

from qevict.bench.data import data_folder
from qevict.bench.gsm8k import gsm8k_tasks
from qevict.bench.longbench import longbench_tasks
from qevict.bench.ruler import reworded_tasks, ruler_tasks
from qevict.bench.sample import Task
from qevict.bench.user_sets import user_tasks

_USER_SET = "jsonl:"


def find_tasks(spec: str, data: Path | None = None) -> list[Task]:
    """The tasks of that name.

    Args:
        spec: a benchmark (`ruler`, `longbench`; `reworded` for RULER in other words), one of its tasks
            (`ruler/niah_single_1`), `gsm8k`, `gsm8k-zero-shot`, or `jsonl:PATH` for a file or folder with kvpress's
            columns.
        data: the folder of the benchmarks' data; without it the environment variable QEVICT_DATA names one. Tasks read
            it when they make samples, so a missing file shows then.

    Raises:
        ValueError: if there is no such task, or no such folder.
    """
    if spec.startswith(_USER_SET):
        return list(user_tasks(Path(spec.removeprefix(_USER_SET))))
    folder = data_folder(data)
    known: list[Task] = [*ruler_tasks(folder), *reworded_tasks(folder), *longbench_tasks(folder), *gsm8k_tasks(folder)]
    found = [task for task in known if task.name == spec or task.name.startswith(f"{spec}/")]
    if not found:
        names = ", ".join(task.name for task in known)
        raise ValueError(f"There is no task {spec!r}: name ruler, reworded, longbench, {names}, or {_USER_SET}PATH.")
    return found
