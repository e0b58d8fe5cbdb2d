"""From names to tasks; users' own sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qevict.bench import DataNotFoundError, Task, find_tasks, token_count


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(**columns: Any) -> dict[str, Any]:
    """A row in kvpress's columns; those given replace, and None leaves one out."""
    whole = {
        "context": "C",
        "question": "Q?",
        "answer_prefix": "A:",
        "answer": ["x", "y"],
        "max_new_tokens": 9,
        "task": "mine",
    }
    return {name: value for name, value in (whole | columns).items() if value is not None}


def test_names_and_groups(made_data: Path) -> None:
    assert len(find_tasks("ruler", made_data)) == 13
    assert len(find_tasks("longbench", made_data)) == 14
    for name in "ruler/vt", "longbench/qasper", "gsm8k", "gsm8k-zero-shot":
        (task,) = find_tasks(name, made_data)
        assert task.name == name
        assert isinstance(task, Task)


def test_the_environment_names_the_data_folder(
    made_data: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QEVICT_DATA", str(made_data))
    assert len(list(find_tasks("gsm8k")[0].samples(tokenizer, 2, length=None, seed=0))) == 2


def test_unknown_names_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no task 'rule'.*longbench/qasper"):
        find_tasks("rule", tmp_path)
    with pytest.raises(DataNotFoundError, match="does not exist"):
        find_tasks("ruler", tmp_path / "nowhere")


def test_a_users_set_is_prompted_as_it_is(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "set.jsonl", row(), row(context="C", answer="z"), row(context="D", answer=7))
    (task,) = find_tasks(f"jsonl:{file}")
    assert task.name == "jsonl/mine"
    samples = sorted(task.samples(tokenizer, 10, length=None, seed=0), key=lambda sample: sample.id)
    first, second, third = samples
    assert (first.context, first.question, first.answer_prefix, first.max_new_tokens) == ("C", "Q?", "A:", 9)
    assert (first.answers, second.answers, third.answers) == (("x", "y"), ("z",), ("7",))
    assert first.document == second.document != third.document
    assert len({sample.id for sample in samples}) == 3
    assert task.score("It is Y.", first) == 1
    assert token_count(tokenizer, first) > 9


def test_a_folder_holds_several_tasks(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", row(task="niah_single_1"), row(task="qa_1"))
    write(tmp_path / "b.jsonl", row(task=None, answer_prefix=None), row(task="qa_1"))
    tasks = find_tasks(f"jsonl:{tmp_path}")
    assert [task.name for task in tasks] == ["jsonl/niah_single_1", "jsonl/qa_1", "jsonl/b"]


@pytest.mark.parametrize(
    ("kind", "columns", "prediction", "score"),
    [
        ("niah_multivalue", {}, "x", 0.5),
        ("vt", {}, "x and y", 1),
        ("qa_1", {}, "x", 1),
        ("anything", {}, "x", 1),
        ("qasper", {"answer": ["red house"]}, "the red", 2 * (1 / 2) / (1 + 1 / 2)),
        ("trec", {"answer": None, "answers": ["City"], "all_classes": ["City", "Date"]}, "City, Date", 0.5),
        ("gsm8k", {"answer": 1000}, "1,000.0", 1),
    ],
)
def test_a_users_task_is_scored_by_its_name(
    tmp_path: Path, tokenizer: Any, kind: str, columns: dict[str, Any], prediction: str, score: float
) -> None:
    (task,) = find_tasks(f"jsonl:{write(tmp_path / 'set.jsonl', row(task=kind, **columns))}")
    (sample,) = task.samples(tokenizer, 1, length=None, seed=0)
    assert task.score(prediction, sample) == pytest.approx(score)


def test_what_is_wrong_with_a_users_set_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"nothing\.jsonl"):
        find_tasks(f"jsonl:{tmp_path / 'nothing.jsonl'}")
    with pytest.raises(DataNotFoundError, match="no JSON-lines file"):
        find_tasks(f"jsonl:{tmp_path}")
    with pytest.raises(ValueError, match=r"set-2 has no question, max_new_tokens; its columns are \['answer"):
        find_tasks(f"jsonl:{write(tmp_path / 'set.jsonl', row(), row(question=None, max_new_tokens=None))}")
    with pytest.raises(ValueError, match="set-1 has no answer"):
        find_tasks(f"jsonl:{write(tmp_path / 'set.jsonl', row(answer=[]))}")
    (tmp_path / "set.jsonl").write_text(json.dumps(row()) + '\n{"context": "torn')
    with pytest.raises(ValueError, match=r"line 2 of .*set.jsonl is not JSON"):
        find_tasks(f"jsonl:{tmp_path / 'set.jsonl'}")
