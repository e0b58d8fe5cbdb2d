"""Which tasks an average covers: those that the uncompressed model can do at all.

A task at whose floor full KV already sits says nothing of compression. The tasks are chosen on development seeds and
frozen in `floor.json`, for each model by name, so that no reported run chooses its own; reworded tasks are those of
their originals. A benchmark none of whose tasks
is listed is not decided yet: then the run itself decides, and the report says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

from qevict.report.families import TaskName
from qevict.report.load import FULL, Point, Section, model_name
from qevict.report.statistics import clustered_mean
from qevict.report.values import measured


@dataclass(frozen=True)
class Selection:
    """The tasks that averages cover, those that they leave out, and how they were chosen."""

    averaged: list[TaskName]
    apart: list[TaskName]
    said: str


def select(section: Section) -> Selection:
    """The section's tasks, parted."""
    data = json.loads((files("qevict.report") / "floor.json").read_text(encoding="utf8"))
    threshold = float(data["threshold"])
    frozen = set(data["tasks"].get(model_name(section.settings), ()))
    if any(task.task in frozen for task in section.tasks):
        chosen, how = frozen, "frozen list for this model, from development seeds"
    else:
        chosen = {task.task for task in section.tasks if _full_score(section, task.task) >= threshold}
        how = "selected on this run"
    averaged = [task for task in section.tasks if task.task in chosen]
    names = ", ".join(task.short for task in averaged) or "none"
    said = f"Averages cover the tasks where full KV scores at least {threshold:.0%} ({how}): {names}."
    return Selection(averaged, [task for task in section.tasks if task.task not in chosen], said)


def _full_score(section: Section, task: str) -> float:
    values = measured(section.cell(task, Point(FULL, None)), "score")
    return clustered_mean(values).value if values.values else 0.0
