"""What a run's results depend on, as its folder's manifest says it; and which of it may change in a folder."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qevict import __version__
from qevict.bench.data import data_folder
from qevict.bench.results import Growth, larger, latest, united
from qevict.methods.base import Described

FORMAT = 1
GROWS: Mapping[str, Growth] = {
    "tasks": united,
    "samples": larger,
    "methods": united,
    "budgets": united,
    "data": united,
    "platform": latest,
}
"""A folder may get more tasks, samples, methods and budgets, and more data files may lie beside those that were there;
its results may come from several machines."""

_VERSIONS = ("torch", "transformers", "numpy", "numba", "optimum-quanto")
_DATA = (".json", ".jsonl", ".txt")


def software() -> dict[str, Any]:
    """The fields that say what ran: versions, and the machine."""
    return {
        "format": FORMAT,
        "qevict": __version__,
        "versions": {"python": platform.python_version(), **{n: v for n in _VERSIONS if (v := _version(n))}},
        "platform": f"{platform.platform()}, {platform.processor() or platform.machine()}",
    }


def described(methods: Sequence[Described]) -> dict[str, dict[str, Any]]:
    """All settings of the methods, by their labels."""
    return {method.label: {name: plain(value) for name, value in method.settings().items()} for method in methods}


def data_files(specs: Sequence[str], data: Path | None) -> dict[str, int]:
    """Names and bytes of the files that tasks may read: those of the data folder, and users' own."""
    own = [Path(spec.removeprefix("jsonl:")) for spec in specs if spec.startswith("jsonl:")]
    folder = data_folder(data) if len(own) < len(specs) else None
    roots = [root for root in (folder, *own) if root is not None]
    return {
        str(file.relative_to(root.parent if root.is_file() else root)): file.stat().st_size
        for root in roots
        for file in sorted([root] if root.is_file() else root.rglob("*"))
        if file.is_file() and file.suffix in _DATA
    }


def plain(value: Any) -> Any:
    """A setting as JSON has it, the same in every process: objects by their class and fields, functions by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type(value).__name__


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
