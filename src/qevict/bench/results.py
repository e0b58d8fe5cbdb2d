"""A folder of results that survives being killed: one manifest, one line a record, one writer.

    with ResultsFolder(path, manifest, key=("task", "sample")) as folder:
        if ("ruler/vt", "0") not in folder.done:
            folder.append({"task": "ruler/vt", "sample": "0", "score": 1.0})

Killed at any moment, the folder holds whole records but for the end of the last line, which the next run cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

MANIFEST = "manifest.json"
RECORDS = "results.jsonl"
_LOCK = ".lock"

Record = Mapping[str, Any]
Key = tuple[Any, ...]
Growth = Callable[[Any, Any], Any]
"""What becomes of a manifest's field: `(earlier, now) -> both`; raises ValueError where they contradict each other."""


def same(earlier: Any, now: Any) -> Any:
    """Nothing but what was there before."""
    if earlier != now:
        raise ValueError(f"{_short(earlier)} before, {_short(now)} now")
    return now


def united(earlier: Any, now: Any) -> Any:
    """Lists and mappings may get new entries; those of a mapping that were there may not change."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        for name in earlier.keys() & now.keys():
            if earlier[name] != now[name]:
                raise ValueError(f"{name}: {_short(earlier[name])} before, {_short(now[name])} now")
        return {**earlier, **now}
    return [*earlier, *(entry for entry in now if entry not in earlier)]


def larger(earlier: Any, now: Any) -> Any:
    """The larger number."""
    return max(earlier, now)


def latest(earlier: Any, now: Any) -> Any:
    """Whatever it is now; what does not decide the results."""
    return now


class ResultsFolder:
    """The results of one configuration, open for writing; a context manager that locks out other runs.

    Args:
        path: the folder; made if it is not there.
        manifest: the configuration, ready for JSON. It has to be that of the folder, but for the fields in `grows`.
        key: the fields that say which records are the same; none is written twice.
        grows: how fields of the manifest may differ from what they were: `united`, `larger` or `latest`.

    Attributes:
        manifest: of the folder, this run's included.
        done: keys of the records that are there.
    """

    def __init__(
        self, path: Path, manifest: Record, key: Sequence[str], grows: Mapping[str, Growth] | None = None
    ) -> None:
        self.path, self._key, self._grows = path, tuple(key), dict(grows or {})
        self.manifest: dict[str, Any] = json.loads(json.dumps(manifest))
        self.done: set[Key] = set()
        self._lock = FileLock(path / _LOCK)
        self._file = -1

    def __enter__(self) -> ResultsFolder:
        """Lock, check the manifest, repair the last line, and read what is done.

        Raises:
            ValueError: if another run writes here, the folder is of another configuration, or a record is damaged.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"another run is writing to {self.path}; wait for it, or take another folder") from error
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close and unlock."""
        os.close(self._file)
        self._lock.release()

    def append(self, record: Record) -> None:
        """Write a record, whole and at once.

        Raises:
            ValueError: if it is there already.
            OSError: if it could not be written whole.
        """
        key = self._key_of(record)
        if key in self.done:
            raise ValueError(f"{self.path} has a record of {key} already")
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(f"a record could not be written whole to {self.path / RECORDS}: is the disk full?")
        self.done.add(key)

    def _open(self) -> None:
        self.manifest = _merged(self.path, self.manifest, self._grows)
        _replace(self.path / MANIFEST, json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n")
        _cut_torn_line(self.path / RECORDS)
        self.done = {self._key_of(record) for record in read_records(self.path)}
        self._file = os.open(self.path / RECORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def _key_of(self, record: Record) -> Key:
        return tuple(record[name] for name in self._key)


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of a folder, also while a run writes to it: a line without its end is left out.

    Raises:
        ValueError: if a line is damaged.
    """
    path = folder / RECORDS
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is damaged ({error}); take it out to have it run again"
            ) from error
        yield record


def _merged(folder: Path, manifest: dict[str, Any], grows: Mapping[str, Growth]) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        return manifest
    earlier = json.loads(path.read_text(encoding="utf8"))
    merged: dict[str, Any] = {}
    differing = []
    for name in {**earlier, **manifest}:
        known = name in earlier and name in manifest
        growth = grows.get(name, same) if known else same
        merged[name], problem = _grown(growth, earlier.get(name), manifest.get(name))
        if problem:
            differing.append(f"{name} ({problem})")
    if differing:
        raise ValueError(
            f"{folder} holds results of another configuration: {'; '.join(differing)}. Take another folder; in this "
            f"one only {', '.join(grows)} may change"
        )
    return merged


def _grown(growth: Growth, earlier: Any, now: Any) -> tuple[Any, str]:
    """The field for both, or what contradicts."""
    try:
        return growth(earlier, now), ""
    except ValueError as error:
        return None, str(error)


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last end of a line: a record that was being written when its run was killed."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is never there in part."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf8")
    os.replace(draft, path)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
