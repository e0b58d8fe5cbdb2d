"""Eqs. 12-15 against their direct transcription, and on traces with known answers."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import Case, cases
from torch import Tensor

from qevict.diagnostics.mass import (
    SHARES,
    cumulative_scores,
    events_apart,
    future_missed_mass,
    selection_churn,
    tier_mass,
)
from qevict.diagnostics.policy import LOCAL, SINK
from qevict.routing import EVICTED, FULL, QUANTIZED


def fmm_by_definition(case: Case, event: int, head: int, horizon: int) -> float:
    """Eq. 13, sum by sum."""
    length, steps = int(case.lengths[event]), case.mass.shape[1]
    lane = head * case.tiers.shape[1] // case.mass.shape[0]
    missed = total = 0.0
    for step in range(length - case.prefill, min(length - case.prefill + horizon, steps)):
        for token in range(length):
            total += float(case.mass[head, step, token])
            if int(case.tiers[event, lane, token]) == EVICTED:
                missed += float(case.mass[head, step, token])
    return missed / total if total else math.nan


@settings(max_examples=30)
@given(cases(), st.integers(1, 12))
def test_fmm_is_equation_13(case: Case, horizon: int) -> None:
    accessible = case.tiers != EVICTED
    got = future_missed_mass(case.mass, accessible, case.lengths, case.prefill, horizon)
    for event in range(len(case.lengths)):
        for head in range(case.mass.shape[0]):
            expected = fmm_by_definition(case, event, head, horizon)
            assert math.isclose(float(got[event, head]), expected, rel_tol=1e-4, abs_tol=1e-6) or (
                math.isnan(expected) and math.isnan(float(got[event, head]))
            )


def test_a_policy_that_keeps_everything_misses_nothing_and_one_that_keeps_nothing_misses_all() -> None:
    mass = torch.rand(2, 6, 10)
    lengths = torch.tensor([4, 7, 10])
    everything, nothing = torch.ones(3, 1, 10, dtype=torch.bool), torch.zeros(3, 1, 10, dtype=torch.bool)
    kept = future_missed_mass(mass, everything, lengths, prefill=4)
    assert kept[:2].tolist() == [[0, 0], [0, 0]]
    assert bool(kept[2].isnan().all()), "no step follows the last event: it is not eligible"
    assert future_missed_mass(mass, nothing, lengths, prefill=4)[:2].tolist() == [[1, 1], [1, 1]]


def test_fmm_of_a_trace_worked_by_hand() -> None:
    # Two tokens of prompt, two steps. The first step looks at token 0 with .6, at token 1 with .3, at itself with .1.
    mass = torch.tensor([[[0.6, 0.3, 0.1, 0.0], [0.2, 0.4, 0.2, 0.2]]])
    without_token_1 = torch.tensor([[[True, False, True, True]]])
    event = torch.tensor([2])
    assert math.isclose(float(future_missed_mass(mass, without_token_1, event, 2, horizon=1)), 0.3 / 0.9, rel_tol=1e-6)
    assert math.isclose(float(future_missed_mass(mass, without_token_1, event, 2, horizon=9)), 0.7 / 1.5, rel_tol=1e-6)


@settings(max_examples=30)
@given(cases())
def test_churn_is_equation_14(case: Case) -> None:
    retained = (case.tiers == FULL) | (case.tiers == QUANTIZED)
    got = selection_churn(retained)
    assert got.shape == (len(case.lengths) - 1, case.tiers.shape[1])
    for event in range(len(case.lengths) - 1):
        for lane in range(case.tiers.shape[1]):
            now, then = ({i for i, kept in enumerate(retained[e, lane].tolist()) if kept} for e in (event, event + 1))
            expected = 1 - len(now & then) / len(now | then) if now | then else 0.0
            assert math.isclose(float(got[event, lane]), expected, abs_tol=1e-6)


def test_churn_worked_by_hand() -> None:
    sets = torch.tensor([[[1, 1, 0, 0]], [[0, 1, 1, 0]], [[0, 1, 1, 0]], [[0, 0, 0, 0]], [[0, 0, 0, 0]]]).bool()
    assert torch.allclose(selection_churn(sets)[:, 0], torch.tensor([2 / 3, 0.0, 1.0, 0.0]))


def test_events_apart_leave_at_least_so_many_tokens_between_them() -> None:
    assert events_apart(torch.arange(100, 180), 32).tolist() == [0, 32, 64]
    assert events_apart(torch.tensor([0, 8, 16, 24, 32, 40]), 20).tolist() == [0, 3]
    assert events_apart(torch.tensor([0, 32, 64]), 32).tolist() == [0, 1, 2]


@settings(max_examples=30)
@given(cases(), st.booleans())
def test_tier_mass_is_equation_15(case: Case, with_prompt: bool) -> None:
    prompt = torch.rand(case.mass.shape[0], case.mass.shape[2]) if with_prompt else None
    got = tier_mass(cumulative_scores(case.mass, case.lengths, case.prefill, prompt), case.tiers)
    for event, length in enumerate(case.lengths.tolist()):
        for head in range(case.mass.shape[0]):
            lane = head * case.tiers.shape[1] // case.mass.shape[0]
            sums = dict.fromkeys(SHARES, 0.0)
            for token in range(case.mass.shape[2]):
                state = int(case.tiers[event, lane, token])
                if state in sums:
                    received = float(prompt[head, token]) if prompt is not None else 0.0
                    received += sum(float(case.mass[head, step, token]) for step in range(length - case.prefill))
                    sums[state] += received
            total = sum(sums.values())
            _same(got[event, head], [sums[tier] / total if total else math.nan for tier in SHARES])


def test_shares_sum_to_one_without_the_sinks() -> None:
    tiers = torch.tensor([[[SINK, FULL, QUANTIZED, EVICTED, LOCAL]]], dtype=torch.uint8)
    scores = torch.tensor([[[90.0, 4.0, 3.0, 2.0, 1.0]]])
    assert torch.allclose(tier_mass(scores, tiers), torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]))


def _same(got: Tensor, expected: list[float]) -> None:
    assert torch.allclose(got, torch.tensor(expected), rtol=1e-4, atol=1e-5, equal_nan=True), (got, expected)
