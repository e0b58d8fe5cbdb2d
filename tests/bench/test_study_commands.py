"""`qevict bench fidelity` and `qevict bench drift` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import save_model
from typer.testing import CliRunner, Result

from qevict.bench.results import read_records
from qevict.bench.study_commands import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(made_data: Path) -> Path:
    rows = [{"text": f" Paragraph {n} of a made-up article says that {n * n} is a square . \n"} for n in range(200)]
    (made_data / "wikitext2_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made_data


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_fidelity(model: Path, data: Path, tmp_path: Path) -> None:
    command = ["fidelity", "--model", model, "--data", data, "--methods", "snapkv", "--budgets", "60%"]
    command += ["--prompt", 150, "--forced", 5, "--texts", 1, "--corpora", "prose,free", "--out", tmp_path / "out"]
    first = bench(*command, "--markdown")
    assert first.exit_code == 0, first.output
    assert "### fidelity/prose" in first.output
    assert "| snapkv 60 % |" in first.output
    assert "| streamingllm 60 % |" in first.output, "what a claim needs is run unasked"
    records = list(read_records(tmp_path / "out"))
    assert len(records) == 2 * 3
    assert {len(record["kl"]) for record in records if record["task"] == "fidelity/prose"} == {5}
    again = bench(*command)
    assert again.exit_code == 0, again.output
    assert list(read_records(tmp_path / "out")) == records
    other = bench(*command, "--seed", 1)
    assert other.exit_code == 2
    assert "another configuration: seed" in other.output.replace("\n", " ")


def test_drift(model: Path, data: Path, tmp_path: Path) -> None:
    """Without a chat template; tokens are characters."""
    command = ["drift", "--model", model, "--data", data, "--methods", "snapkv,kivi-2", "--budgets", 0.6]
    command += ["--tasks", "drift/facts", "--length", 1200, "--questions", 2, "--contexts", 1, "--out", tmp_path]
    done = bench(*command, "--scope", "prompt", "--markdown")
    assert done.exit_code == 0, done.output
    assert "score at 2" in done.output
    records = list(read_records(tmp_path))
    assert len(records) == 2 * 3
    assert all(len(record["turns"]) == 2 for record in records if record["status"] == "ok")
    assert {r["method"] for r in records if r["status"] == "ok"} >= {"full", "snapkv"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fidelity", "--corpora", "verse"], "no corpus 'verse'"),
        (["fidelity", "--methods", "magic"], "no method 'magic'"),
        (["drift", "--budgets", "512tokens"], "takes shares of full KV"),
        (["drift", "--tasks", "drift/verse"], "no task 'drift/verse'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, model: Path, data: Path, tmp_path: Path) -> None:
    result = bench(*arguments, "--model", model, "--data", data, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
