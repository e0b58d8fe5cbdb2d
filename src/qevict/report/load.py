"""Runs joined: folders with `manifest.json` and `results.jsonl` become sections that a table can be made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from qevict.bench.results import MANIFEST, read_records
from qevict.report.families import TaskName, named, suite_of, suite_title

MATCHING = ("model", "dtype", "store_dtype", "scope", "seed", "first_token")
"""Manifest keys in which joined runs have to agree; protocol and length may differ and become sections."""
LIMIT = "new_tokens"
"""The manifest key in which runs of one section have to agree, too: the most tokens that were generated."""
NOTED = ("qevict", "versions", "data", "device")
"""Manifest keys in which joined runs may differ, and the report says so."""

FULL = "full"


class Point(NamedTuple):
    """A row of a table: a method at a budget, or at its own operating point (None)."""

    method: str
    budget: float | None

    @property
    def label(self) -> str:
        """`snapkv 20 %`."""
        return self.method if self.budget is None else f"{self.method} {percent(self.budget)}"


@dataclass(frozen=True)
class Record:
    """One sample × method × budget, as the runner wrote it; what does not apply is None.

    Attributes:
        score: from 0 to 1.
        gold_nll: negative log-likelihood of the gold answer in nats a token.
        agreement: share of full KV's tokens that are the same.
        ratio: the largest share of full KV's bytes that was measured.
        protected_share: share of the budget that goes to tokens kept whatever their score.
        status: "ok", "infeasible" (the budget is below the protected tokens) or "refused".
    """

    task: str
    sample: str
    document: str
    method: str
    budget: float | None
    status: str
    reason: str | None = None
    score: float | None = None
    gold_nll: float | None = None
    agreement: float | None = None
    ratio: float | None = None
    protected_share: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> Point:
        """The row that it belongs to."""
        return Point(self.method, self.budget)


@dataclass(frozen=True)
class Section:
    """What one table can hold: a benchmark under one protocol at one length."""

    suite: str
    protocol: str
    length: int | None
    settings: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def title(self) -> str:
        """Model, benchmark, length, protocol and samples, for headings and pictures."""
        length = "" if self.length is None else f", {self.length:,} tokens"
        counts = sorted({len(self.cell(task.task, Point(FULL, None))) for task in self.tasks} - {0})
        samples = "" if not counts else f", {'–'.join(map(str, sorted({counts[0], counts[-1]})))} samples a task"
        most = self.settings.get(LIMIT)
        limit = "" if most is None else f", at most {most} new tokens"
        return f"{model_name(self.settings)}, {suite_title(self.suite)}{length}, {self.protocol}{samples}{limit}"

    @property
    def slug(self) -> str:
        """For file names."""
        return "-".join(str(part) for part in (self.suite, self.length, self.protocol) if part is not None)

    @cached_property
    def tasks(self) -> list[TaskName]:
        """In the paper's order."""
        return named(record.task for record in self.records)

    @cached_property
    def cells(self) -> Mapping[tuple[str, Point], list[Record]]:
        """Records by task and row."""
        found: dict[tuple[str, Point], list[Record]] = {}
        for record in self.records:
            found.setdefault((record.task, record.point), []).append(record)
        return found

    def cell(self, task: str, point: Point) -> list[Record]:
        """The records of a table's cell."""
        return self.cells.get((task, point), [])

    @cached_property
    def rows(self) -> Mapping[Point, list[Record]]:
        """Records by row."""
        found: dict[Point, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.point, []).append(record)
        return found

    @property
    def points(self) -> list[Point]:
        """Rows, in the order in which they were run."""
        return list(self.rows)

    @property
    def budgets(self) -> list[float]:
        """Largest first."""
        return sorted({point.budget for point in self.points if point.budget is not None}, reverse=True)

    def evictors(self, budget: float) -> list[Point]:
        """Methods that kept to this budget, QEvict last, as in the paper."""
        return sorted((p for p in self.points if p.budget == budget), key=lambda p: is_qevict(p.method))

    @property
    def quantisers(self) -> list[Point]:
        """Methods with an operating point of their own."""
        return [point for point in self.points if point.budget is None and point.method != FULL]


@dataclass(frozen=True)
class Joined:
    """Runs that belong together.

    Attributes:
        settings: what they agree on.
        manifests: of each run, by folder name.
        sections: by benchmark, protocol and length.
        notes: what a reader has to know about the joining.
    """

    settings: Mapping[str, Any]
    manifests: Mapping[str, Mapping[str, Any]]
    sections: Sequence[Section]
    notes: Sequence[str]

    @property
    def model(self) -> str:
        """Its name without the folders that it lies in."""
        return model_name(self.settings)


def model_name(settings: Mapping[str, Any]) -> str:
    """The model's name without the folders that it lies in."""
    return Path(str(settings.get("model"))).name


def percent(fraction: float) -> str:
    """`20 %`, `2.5 %`."""
    return f"{100 * fraction:.4g} %"


def is_qevict(method: str) -> bool:
    """Whether it is QEvict, with whatever settings: `qevict`, `qevict-paper`, `qevict[bits=2]`."""
    name = method.partition("[")[0]
    return name == "qevict" or name.startswith("qevict-")


def join(folders: Sequence[Path]) -> Joined:
    """Read runs and join them.

    Where two runs hold the same cell, the run named first wins.

    Raises:
        ValueError: if a folder is no run, a record is damaged, or the runs differ where they have to agree.
    """
    if not folders:
        raise ValueError("name at least one folder of results")
    manifests = {str(folder): _manifest(folder) for folder in dict.fromkeys(folders)}
    _check(manifests)
    held: dict[tuple[str, str, int | None], dict[tuple[str, str, Point], Record]] = {}
    limits: dict[tuple[str, str, int | None], tuple[int | None, str]] = {}
    repeated = differing = 0
    for folder, manifest in manifests.items():
        for length, record in _records(Path(folder)):
            key = (suite_of(record.task), str(manifest.get("protocol")), length)
            section = held.setdefault(key, {})
            most, where = limits.setdefault(key, (manifest.get(LIMIT), folder))
            if most != manifest.get(LIMIT):
                raise ValueError(
                    f"{where} and {folder} cannot be joined: they differ in {LIMIT} ({most} and {manifest.get(LIMIT)})"
                )
            known = section.setdefault((record.task, record.sample, record.point), record)
            if known is not record:
                repeated += 1
                differing += known.score != record.score
    settings = {name: next(iter(manifests.values())).get(name) for name in MATCHING}
    sections = [
        Section(*key, {**settings, LIMIT: limits[key][0]}, list(records.values()))
        for key, records in sorted(held.items(), key=lambda item: _order(item[0]))
    ]
    if not sections:
        raise ValueError(f"no result in {', '.join(map(str, folders))} yet")
    notes = [
        f"the runs differ in {name}; see each run's manifest"
        for name in NOTED
        if len({_canonical(manifest.get(name)) for manifest in manifests.values()}) > 1
    ]
    if repeated:
        notes.append(
            f"{repeated} cells are in more than one run, {differing} of them with another score; the run named first "
            "counts"
        )
    return Joined(settings, manifests, sections, notes)


def _manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf8"))
    except OSError as error:
        raise ValueError(f"{folder} is no folder of results: cannot read its {MANIFEST} ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} holds no manifest")
    return manifest


def _check(manifests: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a ValueError that names the keys in which runs differ but may not."""
    (first, expected), *others = manifests.items()
    for folder, manifest in others:
        wrong = [
            f"{key} ({expected.get(key)!r} and {manifest.get(key)!r})"
            for key in MATCHING
            if expected.get(key) != manifest.get(key)
        ]
        if wrong:
            raise ValueError(f"{first} and {folder} cannot be joined: they differ in {', '.join(wrong)}")
    settings: dict[str, tuple[str, str]] = {}
    for folder, manifest in manifests.items():
        for method, chosen in _methods(manifest).items():
            known, where = settings.setdefault(method, (_canonical(chosen), folder))
            if known != _canonical(chosen):
                raise ValueError(f"{where} and {folder} cannot be joined: {method} has other settings in them")


def _methods(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    methods = manifest.get("methods") or {}
    return methods if isinstance(methods, dict) else {}


def _records(folder: Path) -> Iterator[tuple[int | None, Record]]:
    """The length and the rest of every record."""
    known = [f.name for f in fields(Record)]
    for raw in read_records(folder):
        missing = {"task", "sample", "document", "method", "budget", "status"} - raw.keys()
        if missing:
            raise ValueError(f"{folder} holds a record without {', '.join(sorted(missing))}; is it of qevict bench?")
        chosen = {name: raw[name] for name in known if raw.get(name) is not None}
        yield raw.get("length"), Record(**{"budget": None, **chosen})


def _order(key: tuple[str, str, int | None]) -> tuple[str, int, str]:
    suite, protocol, length = key
    return suite, length or 0, protocol


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
