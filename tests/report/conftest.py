"""Folders of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from report.made import MANIFEST, Folder, samples


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes a run."""

    def write(name: str, records: list[dict[str, Any]], **manifest: Any) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "manifest.json").write_text(json.dumps({**MANIFEST, **manifest}))
        (path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
        return path

    return write


@pytest.fixture
def run(folder: Folder) -> Path:
    """Two tasks of RULER (and one at the floor), three evictors at two budgets, two quantisers."""
    lines = []
    for task, scores in {
        "ruler/vt": {"full": 4, "snapkv": 2, "tova": 1, "qevict": 3, "kivi-2": 2, "kivi-4": 3},
        "ruler/niah_single_1": {"full": 4, "snapkv": 4, "tova": 0, "qevict": 4, "kivi-2": 1, "kivi-4": 4},
        "ruler/cwe": {"full": 0, "snapkv": 0, "tova": 0, "qevict": 1, "kivi-2": 0, "kivi-4": 0},
    }.items():
        extra = {"depths": [0.5]} if "niah" in task else {}
        for method, right in scores.items():
            row = [1.0] * right + [0.0] * (4 - right)
            budgets = {"full": [None], "kivi-2": [None], "kivi-4": [None]}.get(method, [0.2, 0.1])
            for budget in budgets:
                numbers = {
                    "ratio": {"kivi-2": 0.22, "kivi-4": 0.33}.get(method, budget or 1.0),
                    "protected_share": None if budget is None else 0.05 / budget,
                    "gold_nll": 4.0 - right,
                }
                lines += samples(method, budget, row, task=task, extra=extra, **numbers)
    return folder("run", lines)
