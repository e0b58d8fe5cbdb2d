"""What compression does to the next-token distribution, against separate runs and sums in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.driver import endless, forward, full_cache, prompt
from qevict.bench.forced import against_full, compare, divergence, log_probabilities
from qevict.methods import make_cache
from qevict.trace import PrefillTrace

PROMPT, PENDING, FORCED = 180, 3, 12
METHODS = {"qevict": 0.5, "snapkv": 0.6, "streamingllm": 0.3, "kivi-2": 1.0}


def slow_distributions(model: Any, cache: Any, ids: torch.Tensor) -> list[list[float]]:
    """The probabilities of every forced token: prompt, pending tokens, then one at a time, in a run of its own."""
    forward(model, cache, ids[:, :PROMPT])
    logits = [forward(model, cache, ids[:, PROMPT : PROMPT + PENDING])[0, -1]]
    logits += [forward(model, cache, ids[:, i : i + 1])[0, -1] for i in range(PROMPT + PENDING, ids.shape[1] - 1)]
    found = []
    for row in logits:
        weights = [math.exp(x - max(row.tolist())) for x in row.tolist()]
        found.append([weight / math.fsum(weights) for weight in weights])
    return found


def slow_kl(reference: list[float], other: list[float]) -> float:
    return math.fsum(p * (math.log(p) - math.log(q)) for p, q in zip(reference, other, strict=True))


def test_against_two_separate_runs_without_forks() -> None:
    model, ids = endless(), prompt(PROMPT + PENDING + FORCED)
    fed = PENDING + FORCED - 1
    trace = PrefillTrace.capture(model, ids[:, :PROMPT])
    caches = [trace.fill(make_cache(model, name, at, max_new_tokens=fed)) for name, at in METHODS.items()]
    pending, forced = ids[0, PROMPT : PROMPT + PENDING].tolist(), ids[0, PROMPT + PENDING :].tolist()
    full, *measured = against_full(model, trace.fill(make_cache(model, "full")), caches, pending, forced)

    expected_full = slow_distributions(model, full_cache(model), ids)
    assert full.kl == [0] * FORCED
    assert all(full.same)
    assert full.nll == pytest.approx([-math.log(p[token]) for p, token in zip(expected_full, forced, strict=True)])
    for (name, at), steps in zip(METHODS.items(), measured, strict=True):
        expected = slow_distributions(model, make_cache(model, name, at, max_new_tokens=fed), ids)
        wanted = [slow_kl(reference, other) for reference, other in zip(expected_full, expected, strict=True)]
        assert len(steps.kl) == FORCED
        assert steps.kl == pytest.approx(wanted, rel=1e-3, abs=1e-6), name
        assert max(steps.kl) > 1e-4, "a cache that loses nothing shows nothing"
        assert steps.nll == pytest.approx(
            [-math.log(p[token]) for p, token in zip(expected, forced, strict=True)], 1e-3
        )
        assert steps.same == [p.index(max(p)) == q.index(max(q)) for p, q in zip(expected_full, expected, strict=True)]
        assert 0 < steps.memory.ratio <= at


def test_step_0_is_the_first_token_of_the_compressed_cache() -> None:
    """The trace's own logits, which no compression touches, are in no step."""
    model, ids = endless(), prompt(PROMPT + 2)
    trace = PrefillTrace.capture(model, ids[:, :PROMPT])
    cache = trace.fill(make_cache(model, "streamingllm", 0.2, max_new_tokens=2))
    pending, forced = ids[0, PROMPT : PROMPT + 1].tolist(), ids[0, PROMPT + 1 :].tolist()
    full, steps = against_full(model, trace.fill(make_cache(model, "full")), [cache], pending, forced)
    assert len(steps.kl) == len(full.kl) == 1
    assert steps.kl[0] > 1e-3
    assert cache.get_seq_length() == PROMPT + 1, "the last forced token is scored and not fed"


def test_hand_worked() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]).log()
    (kl, nll, same), (other_kl, other_nll, other_same) = compare(logits, token=0)
    assert (kl, same, other_same) == (0.0, True, False)
    assert nll == pytest.approx(math.log(2))
    assert other_nll == pytest.approx(math.log(4))
    # 1/2 ln(2) + 1/4 ln(1) + 1/4 ln(1/2)
    assert other_kl == pytest.approx(math.log(2) / 4)


def test_tokens_that_are_excluded_add_nothing() -> None:
    reference, other = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.5, 0.25, 0.25]).log()
    assert divergence(reference, other) == pytest.approx(math.log(2) / 2)
    assert divergence(other, reference) == math.inf


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=6), st.floats(-1e-4, 1e-4))
def test_small_differences_survive(row: list[float], change: float) -> None:
    """Log-probabilities in float32 would drown a divergence of 1e-9 in their rounding."""
    logits = torch.tensor(row, dtype=torch.float64)
    moved = logits.clone()
    moved[0] += change
    kl = divergence(log_probabilities(logits), log_probabilities(moved))
    p = logits.softmax(dim=-1)[0].item()
    assert kl == pytest.approx(change**2 / 2 * p * (1 - p), rel=1e-3, abs=1e-14)
