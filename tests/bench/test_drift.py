"""Drift: conversations as they would really go on, in balanced orders, compared question by question."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import SMALL, endless, forward, prompt

from qevict.bench import drift
from qevict.bench.cells import Cell, cells_of
from qevict.bench.conversations import Template, Wanted, answer_ids, conversations
from qevict.bench.drift import Asked, Drift, converse, hold, latin_square, run
from qevict.bench.drift_summary import DriftRow, summarise
from qevict.bench.protocol import Setting
from qevict.bench.results import read_records
from qevict.methods import get_method, make_cache
from qevict.trace import PrefillTrace

SETTING = Setting(protocol="query-agnostic", store_dtype=torch.float32)
SNAPKV = get_method("snapkv", window=8)
ASKED = [Asked(q, prompt(6, seed=10 + q)[0].tolist(), prompt(3, seed=20 + q)[0].tolist()) for q in range(3)]


# -- orders ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 12))
def test_every_question_is_at_every_place_once(size: int) -> None:
    orders = latin_square(size)
    assert len(orders) == size
    for sequence in (*orders, *zip(*orders, strict=True)):
        assert sorted(sequence) == list(range(size))


@given(st.integers(1, 6))
def test_no_question_has_a_predecessor_of_its_own(half: int) -> None:
    followed = Counter(pair for order in latin_square(2 * half) for pair in pairwise(order))
    assert set(followed.values()) == {1}
    assert len(followed) == 2 * half * (2 * half - 1)


# -- conversations -----------------------------------------------------------------------------------------------------


def test_the_whole_history_stays_in_the_cache() -> None:
    """With full KV the answers are those of a model that reads all so far anew for every token."""
    model, ids = endless(), prompt(40)
    cache = PrefillTrace.capture(model, ids).fill(make_cache(model, "full"))
    told = converse(model, [cache], ASKED, 5)[0]
    history = ids[0].tolist()
    for turn, answer, nll in zip(ASKED, told.answers, told.gold_nll, strict=True):
        history += turn.pending
        gold = forward(model, None, torch.tensor([history + turn.gold]))[0].log_softmax(dim=-1)
        likelihoods = [gold[len(history) - 1 + i, token].item() for i, token in enumerate(turn.gold)]
        assert nll == pytest.approx(-sum(likelihoods) / 3, rel=1e-4)
        assert len(answer) == 5
        for token in answer:
            assert forward(model, None, torch.tensor([history]))[0, -1].argmax().item() == token
            history.append(token)
    assert cache.get_seq_length() == len(history)


def test_together_is_as_alone() -> None:
    model = endless()
    trace = PrefillTrace.capture(model, prompt(80))
    methods = [(get_method("qevict", **SMALL), 0.5), (SNAPKV, 0.6), (get_method("full"), 1.0)]

    def made(number: int) -> Any:
        method, budget = methods[number]
        return trace.fill(make_cache(model, method, budget, max_new_tokens=3 * 11))

    together = converse(model, [made(number) for number in range(3)], ASKED, 5)
    for number, told in enumerate(together):
        alone = converse(model, [made(number)], ASKED, 5)[0]
        assert alone.answers == told.answers
        assert alone.memory == told.memory
        assert alone.gold_nll == pytest.approx(told.gold_nll, rel=1e-4)


def test_the_end_of_a_turn_comes_from_the_template() -> None:
    """An answer that ends by itself leaves its end token to the next turn's tokens."""
    model, ids = endless(), prompt(40)
    trace = PrefillTrace.capture(model, ids)
    free = converse(model, [trace.fill(make_cache(model, "full"))], ASKED[:1], 5)[0].answers[0]
    end = next(token for token in free if token != free[0])
    model.generation_config.eos_token_id = [end]
    cache = trace.fill(make_cache(model, "full"))
    answer = converse(model, [cache], ASKED[:1], 5)[0].answers[0]
    assert answer == free[: free.index(end) + 1]
    assert cache.get_seq_length() == 40 + 6 + len(answer) - 1


@pytest.fixture(scope="module")
def big(tokenizer: Any) -> Any:
    return endless(vocab_size=len(tokenizer))


@pytest.mark.parametrize("protocol", ["query-agnostic", "query-aware"])
@pytest.mark.parametrize("task", ["drift/facts", "drift/squad"])
def test_every_order_is_held_on_caches_that_announced_all_turns(
    task: str, protocol: Any, tokenizer: Any, big: Any, made_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = next(iter(conversations(task, tokenizer, Wanted(length=640, questions=2, data=made_data))))
    prefills: list[int] = []
    real = drift.capture
    monkeypatch.setattr(drift, "capture", lambda m, ids, methods: (prefills.append(len(ids)), real(m, ids, methods))[1])
    cells = cells_of([SNAPKV], [0.5, 0.01])
    setting = dataclasses.replace(SETTING, protocol=protocol)
    records = list(hold(big, tokenizer, conversation, dict.fromkeys(range(2), cells), setting))
    assert len(records) == 2 * 3
    template = Template.of(tokenizer)
    context = template.context_ids(tokenizer, conversation.context)
    for record in records:
        order = latin_square(2)[int(record["sample"].rpartition("/")[2])]
        turns = [
            template.question_ids(tokenizer, conversation.questions[index], first=place == 0)
            for place, index in enumerate(order)
        ]
        seen = len(turns[0]) - 1 if protocol == "query-aware" else 0
        assert record["prompt_tokens"] == len(context) + seen
        announced = sum(map(len, turns)) - seen + 2 * conversation.max_new_tokens
        assert record["new_tokens"] == announced
        if record["status"] == "ok":
            assert [turn["question"] for turn in record["turns"]] == order
            assert record["gold_nll"] == pytest.approx(sum(turn["gold_nll"] for turn in record["turns"]) / 2, abs=1e-5)
            assert record["budget"] is None or 0 < record["ratio"] <= record["budget"]
        else:
            assert record["budget"] == 0.01
            assert record["turns"] == []
            assert record["score"] is record["ratio"] is None
    assert [r["status"] for r in records] == ["ok", "ok", "infeasible"] * 2
    assert len(prefills) == (2 if protocol == "query-aware" else 1), "one prefill a prompt"
    json.dumps(records, allow_nan=False)


def test_a_record_scores_what_was_said(
    tokenizer: Any, big: Any, made_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = next(iter(conversations("drift/facts", tokenizer, Wanted(length=640, questions=2, data=made_data))))
    right = answer_ids(tokenizer, conversation.questions[1])
    told = drift.Told([right, right], [0.5, 1.5])
    monkeypatch.setattr(drift, "converse", lambda *args: [told])
    record = next(iter(hold(big, tokenizer, conversation, {0: [Cell(get_method("full"))]}, SETTING)))
    assert [turn["score"] for turn in record["turns"]] == [0.0, 1.0]
    assert (record["score"], record["gold_nll"]) == (0.5, 1.0)


def test_a_resumed_run_does_nothing_twice(
    tokenizer: Any, big: Any, made_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*methods: Any, count: int = 1) -> Drift:
        wanted = Wanted(count=count, length=640, questions=2, data=made_data)
        return Drift(methods, (0.5,), ("drift/facts",), wanted, setting=SETTING)

    held: list[tuple[str, ...]] = []
    real = drift.converse

    class Killed(Exception):
        pass

    def counted(model: Any, caches: list[Any], *rest: Any) -> Any:
        held.append(tuple(type(cache).__name__ for cache in caches))
        if len(held) == 2:
            raise Killed
        return real(model, caches, *rest)

    monkeypatch.setattr(drift, "converse", counted)
    with pytest.raises(Killed):
        run(plan(SNAPKV), tmp_path, big, tokenizer)
    first = list(read_records(tmp_path))
    assert [r["sample"][-2:] for r in first] == ["/0", "/0"]
    run(plan(SNAPKV), tmp_path, big, tokenizer)
    assert held[2:] == [("QEvictCache", "MethodCache")], "the second order only"
    shown: list[int] = []
    run(plan(SNAPKV, get_method("streamingllm")), tmp_path, big, tokenizer, lambda task, new: shown.append(len(new)))
    assert held[3:] == [("MethodCache",)] * 2
    assert shown == [2]
    records = list(read_records(tmp_path))
    assert records[:2] == first
    assert len({(r["sample"], r["method"], r["budget"]) for r in records}) == len(records) == 6


# -- summary -----------------------------------------------------------------------------------------------------------


def record(method: str, sample: str, *turns: tuple[int, float], **fields: Any) -> dict[str, Any]:
    """Turns are (question, score); the gold answer's likelihood is ten times the score."""
    known: dict[str, Any] = {
        "task": "drift/facts",
        "sample": sample,
        "document": sample.split("/")[0],
        "method": method,
        "budget": None if method == "full" else 0.1,
        "status": "ok",
        "reason": None,
        "ratio": 0.1,
        "turns": [{"question": q, "score": float(s), "gold_nll": 10.0 * s} for q, s in turns],
    }
    return known | fields


def rows(*records: dict[str, Any]) -> dict[str, DriftRow]:
    return {row.method: row for row in summarise(records)}


def test_questions_are_compared_with_themselves() -> None:
    """Context a: question 0 falls from 1 to 0, question 1 stays at 1. Context b: both fall from 1 to 0."""
    row = rows(
        record("snapkv", "a/0", (0, 1), (1, 1)),
        record("snapkv", "a/1", (1, 1), (0, 0)),
        record("snapkv", "b/0", (0, 1), (1, 0)),
        record("snapkv", "b/1", (1, 1), (0, 0)),
    )["snapkv"]
    assert [mean.value for mean in row.scores] == [1.0, 0.25]
    assert row.drift is not None
    assert row.drift.value == pytest.approx(0.75)
    assert row.drift.samples == 4
    assert (row.drift.low, row.drift.high) == (0.5, 1.0), "contexts are what is drawn: 0.5 and 1"
    assert row.nll_drift is not None
    assert row.nll_drift.value == pytest.approx(7.5)
    assert [mean.value for mean in row.nlls] == [10.0, 2.5]
    assert row.contexts == 2
    assert row.ratio == 0.1
    assert row.beyond_full is None, "full KV was not run"


def test_what_full_kv_drifts_is_taken_off() -> None:
    found = rows(
        record("full", "a/0", (0, 1), (1, 1)),
        record("full", "a/1", (1, 1), (0, 0)),
        record("snapkv", "a/0", (0, 1), (1, 0)),
        record("snapkv", "a/1", (1, 1), (0, 0)),
    )
    assert found["full"].drift is not None
    assert found["full"].drift.value == pytest.approx(0.5)
    assert found["full"].beyond_full is None
    snapkv = found["snapkv"]
    assert snapkv.drift is not None
    assert snapkv.beyond_full is not None
    assert snapkv.nll_beyond_full is not None
    assert snapkv.drift.value == pytest.approx(1)
    assert snapkv.beyond_full.value == pytest.approx(0.5)
    assert snapkv.nll_beyond_full.value == pytest.approx(5)
    assert math.isnan(snapkv.drift.low), "of one context no interval can be had"


def test_orders_that_are_missing_leave_their_questions_out() -> None:
    found = rows(
        record("snapkv", "a/0", (0, 1), (1, 0), (2, 0)),
        record("snapkv", "a/1", (1, 1), (2, 1), (0, 0)),
        record("h2o", "a/0", (0, 1), (1, 1), (2, 1)),
        record("tova", "a/0", status="infeasible", reason="too small", ratio=None),
    )
    assert found["snapkv"].drift is not None
    assert found["snapkv"].drift.samples == 1, "question 0 alone was first and last"
    assert found["h2o"].drift is None
    assert (found["tova"].refused, found["tova"].reason, found["tova"].scores) == (1, "too small", ())
