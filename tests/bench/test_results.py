"""Nothing twice, nothing lost, nothing mixed up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qevict.bench import results
from qevict.bench.results import RECORDS, ResultsFolder, larger, latest, read_records, united

KEY = ("task", "sample")
MANIFEST = {"model": "m", "seed": 0, "samples": 2, "tasks": ["a"], "methods": {"full": {}}, "platform": "here"}
GROWS = {"samples": larger, "tasks": united, "methods": united, "platform": latest}


def opened(path: Path, **changes: Any) -> ResultsFolder:
    return ResultsFolder(path, {**MANIFEST, **changes}, KEY, GROWS)


def record(sample: str, **fields: Any) -> dict[str, Any]:
    return {"task": "a", "sample": sample, **fields}


def test_what_is_written_is_done_and_read_again(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "folder") as folder:
        folder.append(record("0", text="zwei\nZeilen \u2028 – 3"))
        folder.append(record("1", score=None))
        assert folder.done == {("a", "0"), ("a", "1")}
        with pytest.raises(ValueError, match="has a record of"):
            folder.append(record("1"))
    with opened(tmp_path / "new" / "folder") as folder:
        assert folder.done == {("a", "0"), ("a", "1")}
    assert [r["sample"] for r in read_records(tmp_path / "new" / "folder")] == ["0", "1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(cut=st.integers(0, 120))
def test_a_torn_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    """Wherever the file ends, whole records stay and the rest is run again."""
    path = tmp_path / RECORDS
    path.unlink(missing_ok=True)
    with opened(tmp_path) as folder:
        for sample in "012":
            folder.append(record(sample, text="é" * 8))
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    left = path.read_bytes().count(b"\n")
    assert len(list(read_records(tmp_path))) == left
    with opened(tmp_path) as folder:
        assert folder.done == {("a", sample) for sample in "012"[:left]}
        for sample in "012"[left:]:
            folder.append(record(sample, text="é" * 8))
    assert path.read_bytes() == whole


def test_a_line_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text('{"task": "a", "sample": "0"}\n{"task": \n{"task": "a", "sample": "2"}\n')
    with pytest.raises(ValueError, match="line 2 of"), opened(tmp_path):
        pass


def test_another_configuration_is_refused_and_named(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    before = (tmp_path / "manifest.json").read_text()
    with pytest.raises(ValueError, match=r'seed \(0 before, 1 now\); store \(null before, "bf16" now\)') as caught:
        opened(tmp_path, seed=1, store="bf16").__enter__()
    assert "model" not in str(caught.value)
    with pytest.raises(ValueError, match="methods"):
        opened(tmp_path, methods={"full": {"window": 3}}).__enter__()
    assert (tmp_path / "manifest.json").read_text() == before
    with opened(tmp_path):
        pass


def test_what_may_grow_grows(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with opened(tmp_path, samples=1, tasks=["b"], methods={"snapkv": {"window": 8}}, platform="there"):
        pass
    assert json.loads((tmp_path / "manifest.json").read_text()) == {
        **MANIFEST,
        "tasks": ["a", "b"],
        "methods": {"full": {}, "snapkv": {"window": 8}},
        "platform": "there",
    }


def test_two_runs_cannot_write_at_once(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ValueError, match="another run is writing"):
        opened(tmp_path).__enter__()
    with opened(tmp_path):
        pass


def test_a_killed_writer_leaves_whole_records_and_no_lock(tmp_path: Path) -> None:
    program = f"""
import runpy
from pathlib import Path
ResultsFolder = runpy.run_path({results.__file__!r})["ResultsFolder"]  # without torch, which takes seconds to import
with ResultsFolder(Path({str(tmp_path)!r}), {{"seed": 0}}, ("n",)) as folder:
    n = max((key[0] for key in folder.done), default=-1)
    while True:
        n += 1
        folder.append({{"n": n, "text": "x" * 5000}})
"""
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", program])
        before = (tmp_path / RECORDS).stat().st_size if (tmp_path / RECORDS).exists() else 0
        deadline = time.monotonic() + 60
        while not (tmp_path / RECORDS).exists() or (tmp_path / RECORDS).stat().st_size <= before + 20_000:
            assert process.poll() is None, "the writer stopped by itself"
            assert time.monotonic() < deadline, "the writer does not write"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    numbers = [r["n"] for r in read_records(tmp_path)]
    assert numbers == list(range(len(numbers)))
    with ResultsFolder(tmp_path, {"seed": 0}, ("n",)) as folder:
        assert len(folder.done) == len(numbers)
