"""The command line as a user types it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qevict import QEvictConfig
from qevict.cli import app
from qevict.demo import document, questions, run
from qevict.needle import FILLER, Needle, hide
from tiny import tiny_config

LLAMA_8B = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


def invoke(*words: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin, env={"COLUMNS": "200"})


def row(output: str, name: str) -> list[str]:
    """Cells of a table's row."""
    line = next(line for line in output.splitlines() if re.match(rf"\W*{name} ", line))
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def test_plan_of_the_papers_diagnostics() -> None:
    result = invoke("plan", *LLAMA_8B, "--context", "768", "--budget", "20%", "--paper", "diagnostics")
    assert result.exit_code == 0
    assert row(result.output, "full")[1] == str(7 * 8)
    assert row(result.output, "low-bit")[1] == str(28 * 8)
    assert row(result.output, "full KV")[3] == "100.66 MB"
    assert "pass the budget" in result.output


def test_plan_from_a_config_alone(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    result = invoke("plan", "--model", tmp_path, "--context", "4096", "--budget", "0.3")
    assert result.exit_code == 0, result.output
    kept, evicted = row(result.output, "kept"), row(result.output, "evicted")
    assert int(kept[1].replace(",", "")) + int(evicted[1].replace(",", "")) == 4096
    assert "pass the budget" not in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "--context", "100"], "give either --model, or all of"),
        (["plan", *LLAMA_8B, "--context", "100", "--budget", "lots"], "write 0.2, 20%"),
        (["plan", *LLAMA_8B, "--context", "100", "--budget", "10tokens"], "cannot hold the 52 protected tokens"),
        (["plan", *LLAMA_8B, "--context", "100", "--budget", "1.0"], "nothing to plan"),
        (["plan", *LLAMA_8B, "--context", "100", "--bits", "9"], "from 0.5 to 8, not 9"),
        (["generate", "hello", "--budget", "0"], "above 0 and at most 1"),
        (["generate", "hello", "--file", "x.txt"], "not both"),
        (["generate", "--file", "/no/such/file"], "cannot read /no/such/file"),
        (["generate", "hello", "--model", "/"], "no model"),
        (["generate", "hello", "--method", "snapkw"], "there is no method 'snapkw'"),
        (["generate", "hello", "--method", "snapkv", "--set", "window"], "written NAME=VALUE"),
        (["generate", "hello", "--method", "snapkv", "--set", "colour=1"], "has no setting 'colour'"),
        (["generate", "hello", "--method", "snapkv", "--bits", "2"], "has no setting 'bits'"),
        (["generate", "hello", "--method", "snapkv", "--paper", "ruler"], "has settings for qevict"),
        (["methods", "--method", "snapkw"], "there is no method 'snapkw'"),
        (["methods", "--match", "10tokens"], "give a share of full KV's bytes"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words: list[str], says: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_generate_answers_a_question_about_standard_input(smollm2: tuple[Any, Any]) -> None:
    text = "The keeper of the lighthouse is called Ines Halvard. " + "The sea is grey and cold. " * 30
    question = "What is the name of the keeper of the lighthouse?"
    result = invoke("generate", "--question", question, "--budget", "60%", "-n", "14", stdin=text)
    assert result.exit_code == 0, result.output
    assert "Halvard" in result.stdout
    shown = " ".join(result.output.split())
    assert "full KV" in shown
    assert "= 60.0%" in shown
    assert "kept" in shown
    full = invoke("generate", "--question", question, "--method", "full", "-n", "14", stdin=text)
    assert "Halvard" in full.stdout
    assert "= 100.0%" in " ".join(full.output.split())
    other = invoke(
        "generate", "--question", question, "--method", "snapkv", "--set", "window=16", "-b", "60%", stdin=text
    )
    assert other.exit_code == 0, other.output
    assert "kept" in " ".join(other.output.split())
    refused = invoke("generate", "--question", question, "--method", "kivi-2", "--budget", "60%", stdin=text)
    assert refused.exit_code == 2
    assert "takes no budget" in " ".join(refused.output.split())


def test_methods_are_listed_with_the_columns_of_table_1() -> None:
    result = invoke("methods")
    assert result.exit_code == 0, result.output
    for name, marks in (("snapkv", "✓✗✗✗"), ("kivi-2", "✗✓✗✗"), ("qevict", "✓✓✓✓"), ("full", "✗✗✗✗")):
        assert row(result.output, name)[2] == " ".join(marks)


def test_what_meets_a_ratio_is_measured(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    names = ["qevict", "snapkv", "kivi-4", "kvquant-4", "full"]
    options = [word for name in names for word in ("--method", name)]
    result = invoke("methods", "--match", "30%", "--model", tmp_path, *options, "-c", "500", "-n", "16")
    assert result.exit_code == 0, result.output
    for name in ("qevict", "snapkv"):
        assert 0.27 < float(row(result.output, name)[1].rstrip("%")) / 100 <= 0.3
    assert "kivi-2" in row(result.output, "kivi-4")[2]  # four bits are too many
    assert float(row(result.output, "kivi-4")[1].rstrip("%")) <= 30
    assert row(result.output, "full")[2] == "is not compressed"


def test_the_demo_hides_a_needle_in_a_real_document_and_asks_for_it(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    needle = Needle.random(seed=3)
    text = document(tokenizer, 400, needle)
    assert text.count(needle.sentence) == 1
    assert "AssertionError" in text
    configs = {"full": QEvictConfig(budget=1.0), "half": QEvictConfig(budget=0.5)}
    results = list(run(model, tokenizer, configs, tokens=400, max_new_tokens=8))
    assert [name for name, _, _ in results] == ["full"] * len(questions(needle)) + ["half"] * len(questions(needle))
    for _, question, result in results[:2]:
        assert question.expected in result.text
    assert all(result.memory.ratio <= 0.5 for name, _, result in results if name == "half")


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_hidden_needle_stands_once_between_whole_lines(depth: float) -> None:
    needle = Needle.random(seed=1)
    lines = hide("\n".join([FILLER] * 10), needle, depth).splitlines()
    assert lines.count(needle.sentence) == 1
    assert lines.count(FILLER) == 10
    assert Needle.random(seed=1) == needle
    assert needle.found(f"it is {needle.number}.")
    assert not needle.found("it is 123")
