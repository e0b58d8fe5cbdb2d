"""A fidelity run: every text, method and budget once, whatever happens between."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SMALL, endless, forward, prompt
from tiny_run import character_tokenizer

from qevict.bench import fidelity
from qevict.bench.cells import FULL, Cell, cells_of
from qevict.bench.corpora import Text, Wanted
from qevict.bench.fidelity import Fidelity, divergence, measure, run
from qevict.bench.fidelity_summary import summarise
from qevict.bench.protocol import Setting
from qevict.bench.results import read_records
from qevict.methods import get_method, make_cache

QEVICT, SNAPKV = get_method("qevict", **SMALL), get_method("snapkv", window=8)
STREAMING = get_method("streamingllm")
SETTING = Setting(store_dtype=torch.float32, batch=4)


def text(forced: int = 8, cue: int = 1, context: int = 80) -> Text:
    ids = prompt(context + cue + forced)[0].tolist()
    return Text(
        "prose", "x", "d", tuple(ids[:context]), tuple(ids[context : context + cue]), tuple(ids[context + cue :])
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return endless()


@pytest.fixture(scope="module")
def data(made_data: Path) -> Path:
    rows = [{"text": f" Paragraph {n} of a made-up article says that {n * n} is a square . \n"} for n in range(200)]
    (made_data / "wikitext2_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made_data


def test_a_record_says_what_every_step_lost(model: Any) -> None:
    cells = cells_of([QEVICT, SNAPKV], [0.5, 0.05])
    records = measure(model, text(), cells, SETTING, 5)
    assert [(r["method"], r["budget"]) for r in records] == [cell.key for cell in cells]
    full, loose, tight, *_ = records
    assert full["kl"] == [0.0] * 8
    assert full["same"] == "1" * 8
    assert loose["status"] == "ok"
    assert len(loose["kl"]) == len(loose["nll"]) == len(loose["same"]) == 8
    assert max(loose["kl"]) > 0
    assert 0 < loose["ratio"] <= 0.5
    assert loose["bytes"] <= loose["budget_bytes"]
    assert (tight["status"], tight["kl"], tight["ratio"]) == ("infeasible", [], None)
    assert "protected tokens" in tight["reason"]
    assert len(json.dumps(loose)) < 700, "compact"
    json.dumps(records, allow_nan=False)


def test_step_0_and_the_others_are_those_of_separate_runs(model: Any) -> None:
    whole = text()
    ids = torch.tensor([[*whole.context, *whole.cue, *whole.forced]])
    record = measure(model, whole, [Cell(SNAPKV, 0.5)], SETTING, 5)[0]
    kl = []
    caches = (make_cache(model, "full"), make_cache(model, SNAPKV, 0.5, max_new_tokens=9))
    for cache in caches:
        forward(model, cache, ids[:, :80])
    for step in range(8):
        full, own = (forward(model, cache, ids[:, 80 + step : 81 + step])[0, -1].double() for cache in caches)
        kl.append(float((full.softmax(-1) * (full.log_softmax(-1) - own.log_softmax(-1))).sum()))
    assert record["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-7)


def test_groups_of_a_small_batch_change_nothing(model: Any) -> None:
    cells = cells_of([QEVICT, SNAPKV, STREAMING], [0.5, 0.45])
    together = measure(model, text(), cells, dataclasses.replace(SETTING, batch=48), 5)
    apart = measure(model, text(), cells, dataclasses.replace(SETTING, batch=1), 5)
    for a, b in zip(together, apart, strict=True):
        assert (a["method"], a["budget"], a["bytes"]) == (b["method"], b["budget"], b["bytes"])
        assert a["kl"] == pytest.approx(b["kl"], rel=1e-2, abs=1e-6)


def test_a_hidden_cue_is_fed_to_the_compressed_cache(model: Any) -> None:
    """Another cue after the same context leaves what SnapKV kept as it was, so only its own tokens may differ."""
    agnostic = dataclasses.replace(SETTING, protocol="query-agnostic")
    cells = [FULL, Cell(SNAPKV, 0.5)]
    for setting, seen in ((SETTING, 83), (agnostic, 80)):
        record = measure(model, text(cue=4), cells, setting, 5)[1]
        assert record["prompt_tokens"] == 84
        assert record["new_tokens"] == 84 - seen + 8
        assert len(record["kl"]) == 8


def test_free_running_ends_in_agreement_and_divergence(model: Any) -> None:
    free = dataclasses.replace(text(), corpus="free", forced=())
    full, own = measure(model, free, [FULL, Cell(STREAMING, 0.2)], SETTING, 12)
    assert (full["agreement"], full["divergence"]) == (1.0, None)
    assert own["kl"] == []
    assert own["agreement"] < 1
    assert 0 <= own["divergence"] < 12


@pytest.mark.parametrize(
    ("full", "own", "place"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1], [2], 0),
    ],
)
def test_divergence(full: list[int], own: list[int], place: int | None) -> None:
    assert divergence(full, own) == place


def plan(data: Path, **changes: Any) -> Fidelity:
    wanted = Wanted(count=2, prompt=120, forced=6, data=data)
    return Fidelity(
        **{"methods": (SNAPKV,), "budgets": (0.5,), "corpora": ("prose", "free"), "wanted": wanted, "setting": SETTING}
        | changes
    )


def test_a_resumed_run_does_nothing_twice(
    model: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = character_tokenizer()
    measured: list[tuple[str, str, int]] = []

    def counted(model: Any, text: Text, cells: list[Cell], *rest: Any) -> Any:
        measured.append((text.corpus, text.id, len(cells)))
        return measure(model, text, cells, *rest)

    monkeypatch.setattr(fidelity, "measure", counted)

    class Killed(Exception):
        pass

    def kill(corpus: str, records: list[Any]) -> None:
        if len(measured) == 3:
            raise Killed

    with pytest.raises(Killed):
        run(plan(data), tmp_path, model, tokenizer, kill)
    shown: list[int] = []
    run(plan(data), tmp_path, model, tokenizer, lambda corpus, records: shown.append(len(records)))
    assert [(corpus, count) for corpus, _, count in measured] == [("prose", 2), ("prose", 2), ("free", 2), ("free", 2)]
    assert shown == [0, 0, 0, 2]
    first = list(read_records(tmp_path))
    assert len(first) == 8

    run(plan(data, methods=(SNAPKV, STREAMING)), tmp_path, model, tokenizer)
    assert [count for *_, count in measured[4:]] == [1] * 4, "only the new method"
    records = list(read_records(tmp_path))
    assert records[:8] == first
    assert len({(r["task"], r["sample"], r["method"], r["budget"]) for r in records}) == len(records) == 12
    assert {row.corpus for row in summarise(records)} == {"fidelity/prose", "fidelity/free"}
    with pytest.raises(ValueError, match="another configuration: forced"):
        run(plan(data, wanted=Wanted(count=2, prompt=120, forced=7, data=data)), tmp_path, model, tokenizer)


def test_missing_data_shows_before_anything_is_measured(model: Any, data: Path, tmp_path: Path) -> None:
    wanted = Wanted(prompt=120, forced=6, data=data, answered=("longbench/qasper",))
    with pytest.raises(ValueError, match="LongBench"):
        run(plan(data, corpora=("prose", "answers"), wanted=wanted), tmp_path / "out", model, character_tokenizer())
    assert not (tmp_path / "out").exists()
