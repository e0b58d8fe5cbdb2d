"""The same records from a cluster of two workers, one of which is killed on the way."""

from __future__ import annotations

import builtins
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_runner import execute, same
from tiny_run import local, plan, save_data

from qevict.bench.ray_engine import RayEngine
from qevict.bench.results import read_records
from qevict.bench.runner import run


def worker_processes(parent: int) -> list[int]:
    """Process ids of Ray's workers that hold a model, all below one process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1]), name
    below = {parent}
    while grown := {pid for pid, (above, _) in parents.items() if above in below} - below:
        below |= grown
    return [pid for pid in below if parents.get(pid, (0, ""))[1].startswith("ray::_Worker")]


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_worker_may_die(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("ray")
    if not Path("/proc/self/stat").exists():
        pytest.skip("finding the workers' processes needs Linux")
    base = tmp_path_factory.mktemp("run")
    made = plan(base, budgets=(0.4,))
    save_data(base / "letters.jsonl", rows=8)
    alone = execute(made, tmp_path / "local", local(made))

    killed: list[int] = []

    def watch(sample: Any, records: list[Any]) -> None:
        if not killed and (found := worker_processes(os.getpid())):
            killed.append(found[0])
            os.kill(found[0], signal.SIGKILL)

    run(made, tmp_path / "ray", RayEngine(made.model, workers=2), made.model.load_tokenizer(), watch)
    assert killed, "no worker was found"
    same(list(read_records(tmp_path / "ray")), alone)


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match="pip install 'qevict\\[ray\\]'"):
        RayEngine(plan(tmp_path).model)
