"""Which tasks make a benchmark, in the order and under the names of the paper's tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_RULER = {
    "Aggregation": {"cwe": "CWE", "fwe": "FWE"},
    "Needle": {
        "niah_multikey_1": "MK-1",
        "niah_multikey_2": "MK-2",
        "niah_multikey_3": "MK-3",
        "niah_multiquery": "MQ",
        "niah_multivalue": "MV",
        "niah_single_1": "S-1",
        "niah_single_2": "S-2",
        "niah_single_3": "S-3",
    },
    "Question answering": {"qa_1": "QA-1", "qa_2": "QA-2"},
    "Tracking": {"vt": "VT"},
}
_LONGBENCH = {
    "Single-doc QA": {"narrativeqa": "Nar.QA", "qasper": "Qasper", "multifieldqa_en": "Mul.QA"},
    "Multi-doc QA": {"hotpotqa": "Hot.QA", "2wikimqa": "2Wi.QA", "musique": "Musique"},
    "Summarization": {"gov_report": "Gov.Re.", "qmsum": "QMSum", "multi_news": "M.News"},
    "Few-shot": {"trec": "TREC", "triviaqa": "Tri.QA", "samsum": "SAMSum"},
    "Synthetic": {"passage_count": "P.Count", "passage_retrieval_en": "P.Retr."},
}
_SUITES = {
    "ruler": ("RULER", _RULER),
    "reworded": ("RULER in other words", _RULER),
    "longbench": ("LongBench", _LONGBENCH),
}
_TITLES = {"gsm8k": "GSM8K, 8-shot", "gsm8k-zero-shot": "GSM8K, zero-shot", "jsonl": "User's set"}


class TaskName(NamedTuple):
    """A task as a table shows it.

    Attributes:
        task: as recorded, such as `ruler/vt`.
        suite: its benchmark, `ruler`.
        family: what it is grouped under; "" where a benchmark has no families.
        short: the column's heading.
    """

    task: str
    suite: str
    family: str
    short: str


def suite_title(suite: str) -> str:
    """A benchmark's name for people."""
    return _SUITES[suite][0] if suite in _SUITES else _TITLES.get(suite, suite)


def suite_of(task: str) -> str:
    """The benchmark that a task belongs to."""
    return task.partition("/")[0]


def named(tasks: Iterable[str]) -> list[TaskName]:
    """The tasks in the paper's order; those that it does not have follow in the order of their names."""
    given = sorted(set(tasks), key=lambda task: (_place(task), task))
    return [_name(task) for task in given]


def longbench_paper_tasks() -> tuple[str, ...]:
    """The twelve of the paper's tables 3 and 6."""
    return tuple(f"longbench/{task}" for family, tasks in _LONGBENCH.items() if family != "Synthetic" for task in tasks)


def _name(task: str) -> TaskName:
    suite, _, rest = task.partition("/")
    for family, tasks in _SUITES.get(suite, ("", {}))[1].items():
        if rest in tasks:
            return TaskName(task, suite, family, tasks[rest])
    return TaskName(task, suite, "", rest or suite_title(suite))


def _place(task: str) -> int:
    suite, _, rest = task.partition("/")
    order = [name for tasks in _SUITES.get(suite, ("", {}))[1].values() for name in tasks]
    return order.index(rest) if rest in order else len(order)
