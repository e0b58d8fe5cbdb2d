"""What fidelity records say, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qevict.bench.fidelity_summary import FidelityRow, perplexity, summarise
from qevict.report.statistics import Values


def record(method: str, text: str, kl: list[float], **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "task": "fidelity/prose",
        "sample": text,
        "document": text,
        "method": method,
        "budget": None if method == "full" else 0.2,
        "status": "ok",
        "reason": None,
        "kl": [float(value) for value in kl],
        "nll": [1.0] * len(kl),
        "same": "1" * len(kl),
        "agreement": None,
        "divergence": None,
        "ratio": 0.2,
    }
    return known | {name: [float(x) for x in value] if name == "nll" else value for name, value in fields.items()}


def rows(*records: dict[str, Any]) -> dict[tuple[str, float | None], FidelityRow]:
    return {(row.method, row.budget): row for row in summarise(records)}


def test_perplexity_and_its_standard_error() -> None:
    """Mean 2, deviations -1, 0, 1: variance 1 with n - 1, so the mean's error is 1/sqrt(3), times e^2."""
    found = perplexity(Values([1.0, 2.0, 3.0], ["0", "1", "2"]))
    assert found.value == pytest.approx(math.e**2)
    assert found.error == pytest.approx(math.e**2 / math.sqrt(3))


def test_tokens_of_one_text_are_not_independent() -> None:
    """Two texts with means 1 and 3: the error is that of two numbers, whatever their lengths: sqrt(2 · 2 · 16) / 8."""
    found = perplexity(Values([1.0] * 4 + [3.0] * 4, ["a"] * 4 + ["b"] * 4))
    assert found.error == pytest.approx(math.e**2 * math.sqrt(2 * (4**2 + 4**2)) / 8)
    assert math.isnan(perplexity(Values([1.0, 2.0], ["a", "a"])).error)


def test_step_0_stands_apart() -> None:
    row = rows(
        record("full", "a", [0, 0, 0], nll=[1, 1, 1]),
        record("full", "b", [0, 0, 0], nll=[3, 3, 3]),
        record("snapkv", "a", [9, 0.1, 0.3], nll=[2, 2, 2], same="011", ratio=0.19),
        record("snapkv", "b", [7, 0.5, 0.7], nll=[4, 4, 4], same="110"),
    )["snapkv", 0.2]
    assert row.first_kl is not None
    assert row.kl is not None
    assert row.first_kl.value == pytest.approx(8)
    assert row.first_kl.error == pytest.approx(1)  # of 7 and 9
    assert row.kl.value == pytest.approx(0.4)
    assert row.kl_median == pytest.approx(0.4)
    assert row.kl_p99 == pytest.approx(0.7 - 0.03 * 0.2)  # of 0.1, 0.3, 0.5, 0.7
    assert row.steps == 6
    assert row.texts == 2
    assert row.same is not None
    assert row.same.value == pytest.approx(4 / 6)
    assert row.perplexity is not None
    assert row.full_perplexity is not None
    assert row.perplexity.value == pytest.approx(math.e**3)
    assert row.full_perplexity.value == pytest.approx(math.e**2)
    assert row.ratio == 0.2


def test_full_kv_is_compared_on_the_texts_that_a_method_has() -> None:
    row = rows(
        record("full", "a", [0, 0], nll=[1, 1]),
        record("full", "b", [0, 0], nll=[3, 3]),
        record("snapkv", "a", [], status="infeasible", reason="too small", ratio=None, nll=[], same=""),
        record("snapkv", "b", [0.1, 0.1], nll=[4, 4]),
    )["snapkv", 0.2]
    assert row.full_perplexity is not None
    assert row.full_perplexity.value == pytest.approx(math.e**3)
    assert (row.texts, row.refused, row.reason) == (1, 1, "too small")


@pytest.mark.parametrize(("streaming", "claim"), [(0.119, False), (0.121, True), (0.05, False)])
def test_where_the_weakest_method_is_near_the_best_nothing_is_claimed(streaming: float, claim: bool) -> None:
    found = rows(
        record("full", "a", [0, 0]),
        record("streamingllm", "a", [5, streaming]),  # step 0 does not count
        record("snapkv", "a", [0, 0.1]),
        record("h2o", "a", [0, 0.4]),
    )
    assert {row.claim for key, row in found.items() if key[0] != "full"} == {claim}
    assert found["full", None].claim is None


def test_claims_are_made_budget_by_budget_on_shared_texts() -> None:
    found = rows(
        record("streamingllm", "a", [0, 1.0]),
        record("streamingllm", "b", [0, 9.0]),
        record("snapkv", "a", [0, 0.9]),  # within 20 % on the text that both have
        record("streamingllm", "a", [0, 1.0], budget=0.1),
        record("snapkv", "a", [0, 0.5], budget=0.1),
        record("hf-quantized-4", "a", [0, 0.5], budget=None),
    )
    assert found["snapkv", 0.2].claim is False
    assert found["snapkv", 0.1].claim is True
    assert found["hf-quantized-4", None].claim is None, "without the weakest method nothing is known"


def test_free_running() -> None:
    free = {"kl": [], "nll": [], "same": ""}
    row = rows(
        record("snapkv", "a", **free, agreement=1.0, divergence=None),
        record("snapkv", "b", **free, agreement=0.5, divergence=7),
        record("snapkv", "c", **free, agreement=0.3, divergence=3),
    )["snapkv", 0.2]
    assert row.agreement is not None
    assert row.agreement.value == pytest.approx(0.6)
    assert row.divergence == 7
    assert row.kl is row.perplexity is row.claim is None
    assert rows(record("snapkv", "a", **free, agreement=1.0))["snapkv", 0.2].divergence == math.inf


def test_rows_come_corpus_by_corpus() -> None:
    found = summarise(
        [
            record("full", "a", [0, 0]),
            record("full", "x", [0, 0], task="fidelity/copy"),
            record("snapkv", "a", [0, 0]),
        ]
    )
    assert [(row.corpus, row.method) for row in found] == [
        ("fidelity/prose", "full"),
        ("fidelity/prose", "snapkv"),
        ("fidelity/copy", "full"),
    ]
    assert summarise([]) == []
