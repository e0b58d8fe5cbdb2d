"""A run as a whole: one prefill a sample, records as promised, killed and gone on with."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import character_tokenizer, local, plan, save_data
from typer.testing import CliRunner

from qevict.bench.cells import FULL, Cell, cells_of
from qevict.bench.manifest import plain
from qevict.bench.progress import score_table
from qevict.bench.protocol import Prompt, Setting, gold_ids
from qevict.bench.results import read_records
from qevict.bench.runner import Run, run
from qevict.bench.sample import Sample
from qevict.bench.sweep import agreement
from qevict.cli import app
from qevict.compat import cache_argument
from qevict.config import Budget
from qevict.methods import Kept, LayerPrefill, Selector, get_method, make_cache

TIMED = {"seconds"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def execute(made: Run, out: Path, engine: Any = None) -> list[dict[str, Any]]:
    """Run, and read what is in the folder."""
    engine = engine or local(made)
    run(made, out, engine, engine.tokenizer)
    return list(read_records(out))


def by_key(records: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Records without the time they took."""
    kept = {(r["task"], r["sample"], r["method"], r["budget"]): {k: r[k] for k in r.keys() - TIMED} for r in records}
    assert len(kept) == len(records), "a record is there twice"
    return kept


def same(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """The same records, whatever was decoded together with what."""
    one, other = by_key(first), by_key(second)
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].pop("gold_nll") == pytest.approx(other[key].pop("gold_nll"), abs=1e-5)
        assert one[key] == other[key]


@pytest.fixture(scope="module")
def whole(base: Path) -> list[dict[str, Any]]:
    """The records of an uninterrupted run."""
    return execute(plan(base), base / "whole")


def test_a_record_is_what_that_cache_alone_gives(base: Path, whole: list[dict[str, Any]]) -> None:
    made = plan(base)
    engine = local(made)
    samples = {
        sample.id: sample
        for task in made.find_tasks()
        for sample in task.samples(engine.tokenizer, made.samples, length=None, seed=0)
    }
    assert len(whole) == len(samples) * 5
    full: dict[str, list[int]] = {}
    for record in whole:
        sample = samples[record["sample"]]
        prompt = Prompt.of(engine.tokenizer, sample, made.setting)
        cell = next(c for c in cells_of(made.methods, made.budgets) if c.key == (record["method"], record["budget"]))
        cache: Any = make_cache(
            engine.model,
            cell.method,
            Budget(fraction=cell.budget or 1.0),
            max_new_tokens=1 + sample.max_new_tokens,
            store_dtype=torch.bfloat16,
        )
        with torch.no_grad():
            engine.model.get_decoder()(torch.tensor([prompt.compressed]), **cache_argument(cache))
        output = engine.model.generate(
            torch.tensor([prompt.compressed + prompt.pending]),
            max_new_tokens=sample.max_new_tokens,
            do_sample=False,
            **cache_argument(cache),
        )
        tokens = output[0, prompt.tokens :].tolist()
        assert record["prediction"] == engine.tokenizer.decode(tokens, skip_special_tokens=True)
        assert record["new_tokens"] == len(tokens)
        full.setdefault(record["sample"], tokens)  # its record comes first
        assert record["agreement"] == agreement(full[record["sample"]], tokens)
        assert record["prompt_tokens"] == prompt.tokens
        memory = cache.memory()
        assert record["budget_bytes"] == memory.budget
        assert record["bytes"] >= memory.reserved * (record["method"] != "full")
        if record["budget"] is not None:
            assert 0 < record["ratio"] <= record["budget"]
            assert 0 < record["protected_share"] < 1
    assert len({r["prediction"] for r in whole}) > len(samples), "all methods say the same, so nothing is compared"


def test_one_prefill_a_sample(base: Path, tmp_path: Path) -> None:
    """The decoder reads a prompt once; later forwards are short."""
    made = plan(base)
    engine = local(made)
    long: list[int] = []
    engine.model.get_decoder().register_forward_pre_hook(
        lambda module, args: long.append(args[0].shape[1]) if args and args[0].shape[1] > 20 else None
    )
    records = execute(made, tmp_path, engine)
    assert sorted(long) == sorted({r["sample"]: r["prompt_tokens"] - 1 for r in records}.values())


@pytest.mark.parametrize("batch", [1, 3])
def test_results_do_not_depend_on_the_batch(base: Path, tmp_path: Path, whole: list[Any], batch: int) -> None:
    made = plan(base, setting=Setting(batch=batch))
    same(execute(made, tmp_path), whole)


def test_going_on_adds_what_is_missing(base: Path, tmp_path: Path, whole: list[Any]) -> None:
    made = plan(base)
    engine = local(made)
    first = dataclasses.replace(made, samples=2, budgets=(0.4,), methods=made.methods[1:])
    assert len(execute(first, tmp_path, engine)) == 4
    written = (tmp_path / "results.jsonl").read_bytes()
    same(execute(made, tmp_path, engine), whole)
    assert (tmp_path / "results.jsonl").read_bytes().startswith(written)
    before = (tmp_path / "results.jsonl").read_bytes()
    seen: list[int] = []
    run(made, tmp_path, engine, engine.tokenizer, lambda sample, records: seen.append(len(records)))
    assert (tmp_path / "results.jsonl").read_bytes() == before
    assert seen == [0] * 4


def test_the_question_may_be_hidden(base: Path, tmp_path: Path, whole: list[Any]) -> None:
    made = plan(base, setting=Setting(protocol="query-agnostic"))
    hidden = by_key(execute(made, tmp_path))
    seen = by_key(whole)
    assert hidden.keys() == seen.keys()
    full = [key for key in seen if key[2] == "full"]
    assert {hidden[key]["prediction"] for key in full} == {seen[key]["prediction"] for key in full}
    assert any(hidden[key]["gold_nll"] != pytest.approx(seen[key]["gold_nll"], abs=1e-4) for key in seen)


def test_an_exact_first_token(base: Path, tmp_path: Path, whole: list[Any]) -> None:
    made = plan(base, setting=Setting(first_token="exact", store_dtype=torch.float32))
    records = execute(made, tmp_path)
    assert all(r["agreement"] > 0 for r in records)
    assert any(r["agreement"] == 0 for r in whole)
    with pytest.raises(ValueError, match="only where the question is seen"):
        Setting(first_token="exact", protocol="query-agnostic")


@dataclass(frozen=True)
class Failing(Selector):
    """A method that cannot choose."""

    error: Exception
    name = "failing"

    @property
    def label(self) -> str:
        return self.name

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        raise self.error


def test_cells_that_cannot_be_are_recorded(base: Path, tmp_path: Path) -> None:
    """A budget below the protected tokens; a method that refuses the model's settings for another reason."""
    qevict, snapkv = plan(base).methods
    made = plan(base, methods=(qevict, snapkv, Failing(ValueError("not this model"))), budgets=(0.05, 0.6), samples=1)
    records = execute(made, tmp_path)
    assert {(r["method"], r["budget"]): r["status"] for r in records} == {
        ("full", None): "ok",
        (qevict.label, 0.05): "infeasible",
        (qevict.label, 0.6): "ok",
        (snapkv.label, 0.05): "infeasible",
        (snapkv.label, 0.6): "ok",
        ("failing", 0.05): "infeasible",
        ("failing", 0.6): "refused",
    }
    assert [r["reason"] for r in records if r["status"] == "refused"] == ["not this model"]
    failed = [r for r in records if r["status"] != "ok"]
    assert all(r["prediction"] is r["score"] is r["ratio"] is None and r["reason"] for r in failed)
    assert len(execute(made, tmp_path)) == len(records)
    assert score_table(records).row_count == 7


def test_programming_errors_propagate(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        execute(plan(base, methods=(Failing(ZeroDivisionError("oops")),), budgets=(0.6,), samples=1), tmp_path)
    assert list(read_records(tmp_path)) == []


def test_another_configuration_is_refused(base: Path, tmp_path: Path) -> None:
    made = dataclasses.replace(plan(base), samples=1)
    engine = local(made)
    execute(made, tmp_path, engine)
    for changed, named in [
        (dataclasses.replace(made, seed=1), "seed"),
        (dataclasses.replace(made, setting=Setting(scope="prompt")), "scope"),
        (dataclasses.replace(made, length=100), "length"),
    ]:
        with pytest.raises(ValueError, match=named):
            run(changed, tmp_path, engine, engine.tokenizer)


def test_killed_at_any_moment_it_goes_on(base: Path, tmp_path: Path, whole: list[Any]) -> None:
    """Twice killed without warning, the folder ends with the records of a run that was not."""
    made = plan(base)
    program = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from pathlib import Path
import torch
torch.set_num_threads(1)
from tiny_run import local, plan
from qevict.bench.runner import run
made = plan(Path({str(base)!r}))
engine = local(made)
run(made, Path({str(tmp_path)!r}), engine, engine.tokenizer, lambda sample, records: time.sleep(0.5 * bool(records)))
"""
    lines = tmp_path / "results.jsonl"
    for most in (5, 10):
        process = subprocess.Popen([sys.executable, "-c", program], env=os.environ)
        deadline = time.monotonic() + 120
        while not lines.exists() or lines.read_bytes().count(b"\n") < most:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert lines.read_bytes().count(b"\n") < len(whole)
    with lines.open("ab") as file:
        file.write(b'{"task": "torn')
    same(execute(made, tmp_path), whole)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_cells() -> None:
    qevict, quantized = get_method("qevict"), get_method("hf-quantized-4")
    found = [cell.key for cell in cells_of([quantized, get_method("full"), qevict], [0.2, 0.1])]
    assert found == [("full", None), ("hf-quantized-4", None), ("qevict", 0.2), ("qevict", 0.1)]
    with pytest.raises(ValueError, match="qevict: each method"):
        cells_of([qevict, get_method("qevict")], [0.2])
    with pytest.raises(ValueError, match="budget fraction is 2"):
        cells_of([qevict], [2.0])
    assert Cell(get_method("full")) == FULL


def test_agreement_is_of_full_kvs_tokens() -> None:
    assert agreement([1, 2, 3, 4], [1, 9, 3]) == 0.5
    assert agreement([1], [1, 2, 3]) == 1


@pytest.mark.parametrize(
    ("before", "answer", "expected"),
    [("It is", "me", " me"), ("Answer:\n", "me", "me"), ("It is", "me and you", " me a"), ("It is", "", "")],
)
def test_gold_answers_follow_a_space(before: str, answer: str, expected: str) -> None:
    sample = Sample("t", "0", "0", "", "", "", (answer,), max_new_tokens=5)
    tokenizer = character_tokenizer()
    assert tokenizer.decode(gold_ids(tokenizer, sample, tokenizer(before).input_ids)) == expected


def test_settings_are_the_same_in_every_process() -> None:
    described = plain(get_method("qevict", ranking=len).settings())
    assert described["ranking"] == "builtins.len"
    assert json.loads(json.dumps(described)) == described
    assert plain(torch.bfloat16) == "bfloat16"
    assert "0x" not in json.dumps(plain([object(), Setting(), {"a": (1, 2)}]))


# -- the command line --------------------------------------------------------------------------------------------------


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, words)], env={"COLUMNS": "200"})


def test_the_command(base: Path, tmp_path: Path) -> None:
    plan(base)
    out = tmp_path / "out"
    words = [f"jsonl:{base / 'letters.jsonl'}", "--model", base / "model", "--out", out, "--samples", 1]
    words += ["--methods", "qevict,full", "--budgets", "90%"]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert {(r["method"], r["budget"]) for r in read_records(out)} == {("full", None), ("qevict", 0.9)}
    assert "letters" in result.output
    assert "90 %" in result.output
    again = invoke(*words, "--seed", 1)
    assert again.exit_code == 2
    assert "seed (0 before, 1 now)" in again.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nonsense"], "There is no task 'nonsense'"),
        (["gsm8k", "--methods", "nonsense"], "no method 'nonsense'"),
        (["gsm8k", "--budgets", "24MB"], "shares of full KV"),
        (["gsm8k", "--budgets", "0.2,1.2"], "above 0 and at most 1"),
        (["gsm8k", "--first-token", "exact", "--protocol", "query-agnostic"], "only where the question is seen"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, words: list[str], says: str) -> None:
    result = invoke(*words, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert says in result.output
    assert not (tmp_path / "out").exists()


def test_missing_data_shows_at_once(base: Path, tmp_path: Path) -> None:
    plan(base)
    result = invoke("gsm8k", "--model", base / "model", "--data", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "gsm8k_test.jsonl" in result.output


def test_more_data_may_lie_beside(base: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    save_data(tmp_path / "data" / "one.jsonl", rows=1)
    made = dataclasses.replace(plan(base), tasks=(f"jsonl:{tmp_path / 'data'}",), methods=())
    engine = local(made)
    assert len(execute(made, tmp_path / "out", engine)) == 1
    save_data(tmp_path / "data" / "two.jsonl", rows=2)
    assert len(execute(made, tmp_path / "out", engine)) == 3
    save_data(tmp_path / "data" / "one.jsonl", rows=3)
    with pytest.raises(ValueError, match=r"data \(one.jsonl"):
        run(made, tmp_path / "out", engine, engine.tokenizer)


def test_samples_of_all_tasks_come_in_turn(base: Path, tmp_path: Path) -> None:
    """A run that is stopped early has something of every task."""
    plan(base)  # which makes the files
    data = [save_data(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", 3), ("b", 1), ("c", 2))]
    made = plan(base, tasks=tuple(f"jsonl:{path}" for path in data))
    names = [sample.task[-1] for sample in made.samples_of(made.find_tasks(), character_tokenizer())]
    assert "".join(names) == "abcaca"


def test_new_tokens_can_be_limited(base: Path, whole: list[dict[str, Any]], tmp_path: Path) -> None:
    made = plan(base, new_tokens=2)
    records = execute(made, tmp_path / "few")
    assert {record["new_tokens"] for record in records} <= {1, 2}
    full = {r["sample"]: r["prediction"] for r in whole if r["method"] == "full"}
    assert all(full[r["sample"]].startswith(r["prediction"]) for r in records if r["method"] == "full")
    assert execute(plan(base, new_tokens=600), tmp_path / "many")[0]["new_tokens"] == whole[0]["new_tokens"]
    with pytest.raises(ValueError, match="new_tokens"):
        execute(plan(base), tmp_path / "few")
    with pytest.raises(ValueError, match="at least 1"):
        plan(base, new_tokens=0)
