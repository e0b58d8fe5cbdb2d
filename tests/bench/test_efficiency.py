"""`qevict bench efficiency` on a tiny random model: every candidate is measured, and what is derived is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_run import save_model
from transformers import DynamicCache
from typer.testing import CliRunner

from qevict.bench.best_full import BestFullCache
from qevict.bench.efficiency import BEST, FULL, Candidate, Speed, measure, peak_bytes, step_ratio
from qevict.bench.efficiency_commands import app
from qevict.compat import cache_argument
from tiny import tiny_model


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_full_kv_in_place_is_full_kv(family: str) -> None:
    """With and without query heads that share KV heads; a draft of several tokens among single ones."""
    model = tiny_model(family)
    caches = BestFullCache(model, 40), DynamicCache(config=model.config)
    for tokens in (20, 1, 1, 5, 1):
        ids = torch.randint(3, 60, (2, tokens))
        with torch.no_grad():
            ours, theirs = (model(ids, **cache_argument(cache)).logits for cache in caches)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_every_candidate_takes_every_step() -> None:
    model, ids = tiny_model("llama"), torch.randint(3, 60, (2, 80))
    small = "qevict[window_size=8;recent_tokens=8"
    names = [f"{small}]", f"{small};prompt_scorer=reconstruction]"]
    candidates = [Candidate(FULL), Candidate(BEST), *(Candidate(name, 0.5) for name in names)]
    speeds = measure(model, ids, candidates, new_tokens=18, rounds=2)
    assert list(speeds) == [FULL, BEST, *(f"{name} 50 %" for name in names)]
    for speed in speeds.values():
        assert len(speed.steps) == 17
        assert len(speed.first) == 2
    ours = speeds[candidates[2].label]
    assert set(ours.routing) == {"scores", "ranking", "migration"}
    assert sum(ours.routing.values()) < sum(ours.steps)
    assert not speeds[FULL].routing


def test_equation_10() -> None:
    speed = Speed(first=[3.0, 2.0, 1.0], steps=[0.5, 1.5, 1.0], routing={})
    assert speed.ttft == 2.0
    assert speed.tpot == 1.0
    assert speed.throughput(batch=4) == 4 * 4 / 5.0
    full = Speed(first=[1.0], steps=[1.0, 1.0, 1.0], routing={})
    assert step_ratio(speed, full)[1] == 1.0


def test_the_command_prints_a_table_and_writes_numbers(tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "numbers.json"
    command = ["efficiency", "--model", model, "--methods", "qevict,snapkv", "--budgets", "60%", "--contexts", "200"]
    command += ["--new-tokens", 4, "--rounds", 1, "--no-memory", "--out", out]
    result = CliRunner().invoke(app, [*map(str, command)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "TPOT" in result.output
    numbers = json.loads(out.read_text())
    assert [one["method"] for one in numbers] == [FULL, BEST, "qevict 60 %", "snapkv 60 %"]
    assert all(one["tpot"] > 0 and one["context"] == 200 for one in numbers)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    model, text = save_model(tmp_path / "model"), tmp_path / "short.txt"
    text.write_text("Hardly anything.")
    command = ["efficiency", "--model", str(model), "--text", str(text), "--contexts", "100"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert "give a longer --text" in result.output


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_of_a_small_budget() -> None:
    """What is warmed up has to be long enough for the budget, too."""
    ids = torch.randint(3, 60, (1, 600))
    peak = peak_bytes(lambda: (tiny_model("llama"), None), ids, Candidate("qevict[window_size=8]", 0.2), 4, None)
    assert peak >= 0
