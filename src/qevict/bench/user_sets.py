"""Users' own data sets, as JSON lines with kvpress's columns.

    {"context": ..., "question": ..., "answer_prefix": ..., "answer": ..., "max_new_tokens": ..., "task": ...}

`answer` is a text, a number, or a list of such; LongBench's `answers` and `all_classes` are read too. Rows with
different `task` become different tasks. A task that bears the name of one of RULER's or LongBench's, or gsm8k, is
scored as that; any other by whether one of its answers stands in the prediction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qevict.bench import gsm8k, longbench, metrics
from qevict.bench.data import DataNotFoundError, read_rows
from qevict.bench.sample import Sample, shuffled

_RULER_ALL = ("niah", "vt", "cwe", "fwe")


@dataclass(frozen=True)
class UserTask:
    """Rows of a user's file, prompted as they are."""

    name: str
    rows: tuple[Sample, ...]
    metric: Callable[[str, Sample], float]

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """See `Task.samples`; prompts are as long as they are."""
        yield from shuffled(self.rows, self.name, seed)[:count]

    def score(self, prediction: str, sample: Sample) -> float:
        return self.metric(prediction, sample)


def user_tasks(path: Path) -> list[UserTask]:
    """The tasks in a JSON-lines file, or in all of a folder, named `jsonl/<task>` (without one: the file's name)."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise DataNotFoundError(f"There is no JSON-lines file at {path}.")
    tasks: dict[str, list[Sample]] = {}
    for file in files:
        for number, row in enumerate(read_rows(file), 1):
            kind = str(row.get("task") or file.stem)
            tasks.setdefault(kind, []).append(_sample(f"jsonl/{kind}", f"{file.stem}-{number}", row))
    return [UserTask(f"jsonl/{kind}", tuple(rows), _metric(kind)) for kind, rows in tasks.items()]


def _sample(task: str, identity: str, row: dict[str, Any]) -> Sample:
    gold = row.get("answers", row.get("answer"))
    answers = tuple(str(answer) for answer in (gold if isinstance(gold, list) else [gold]) if answer is not None)
    missing = [column for column in ("context", "question", "max_new_tokens") if column not in row]
    if missing or not answers:
        raise ValueError(f"Row {identity} has no {', '.join(missing or ['answer'])}; its columns are {sorted(row)}.")
    return Sample(
        task=task,
        id=identity,
        document=hashlib.sha256(row["context"].encode()).hexdigest()[:12],
        context=row["context"],
        question=row["question"],
        answer_prefix=row.get("answer_prefix") or "",
        answers=answers,
        max_new_tokens=int(row["max_new_tokens"]),
        extra={"all_classes": row["all_classes"]} if row.get("all_classes") else {},
    )


def _metric(kind: str) -> Callable[[str, Sample], float]:
    if kind in longbench.official_settings():
        return lambda prediction, sample: longbench.score(kind, prediction, sample)
    if kind == "gsm8k":
        return gsm8k.score
    if kind.split("_")[0] in _RULER_ALL:
        return lambda prediction, sample: metrics.string_match_all(prediction, sample.answers)
    return lambda prediction, sample: metrics.string_match_part(prediction, sample.answers)
