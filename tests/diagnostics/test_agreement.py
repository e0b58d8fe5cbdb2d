"""Eqs. 16 and 17, Spearman and the shuffled null: against plain sums, and on vectors with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.diagnostics.agreement import cosine, event_sums, score_agreement, shuffled_cosine, spearman


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 10_000))
def test_agreement_is_equations_16_and_17(events: int, windows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = torch.rand(2, events, windows, generator=generator)
    member = torch.rand(events, windows, generator=generator) < 0.6
    got = score_agreement(ours, theirs, member)
    for event in range(events):
        chosen = [w for w in range(windows) if member[event, w]]
        a, b = ([float(scores[event, w]) for w in chosen] for scores in (ours, theirs))
        if not chosen:
            assert math.isnan(float(got.ratio[event]))
            continue
        assert math.isclose(float(got.ratio[event]), sum(a) / sum(b), rel_tol=1e-5)
        if len(chosen) == 1:
            assert math.isnan(float(got.cosine[event])), "a single window agrees with itself whatever its score"
            continue
        inner = sum(x * y for x, y in zip(a, b, strict=True))
        norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
        assert math.isclose(float(got.cosine[event]), inner / norms, rel_tol=1e-5)


def test_a_mass_shared_by_all_windows_makes_the_cosine_high_whatever_the_scores_and_the_null_shows_it() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(2, 1, 40, generator=generator)
    got = score_agreement(100 + noise[0], 100 + noise[1], torch.ones(1, 40, dtype=torch.bool))
    assert float(got.cosine) > 0.999
    assert float(got.null) > 0.999
    assert abs(float(got.spearman)) < 0.5


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0, 3.0], [10.0, 200.0, 201.0], 1.0),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], -1.0),
        ([1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0], 4.5 / math.sqrt(4.5 * 5)),  # ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3
        ([1.0, 1.0], [1.0, 2.0], math.nan),
        ([1.0], [1.0], math.nan),
    ],
)
def test_spearman_of_known_vectors(a: list[float], b: list[float], expected: float) -> None:
    assert math.isclose(spearman(torch.tensor(a), torch.tensor(b)), expected, rel_tol=1e-6) or math.isnan(expected)


def test_the_null_of_one_lone_peak_is_its_chance_to_meet_the_other() -> None:
    peak = torch.zeros(8)
    peak[3] = 1.0
    assert cosine(peak, peak) == 1.0
    null = shuffled_cosine(peak, peak, torch.Generator().manual_seed(0))
    assert 0 <= null < 0.4


def test_sums_before_an_event_and_from_it_to_the_next() -> None:
    mass = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])  # five decode steps of one window
    lengths = torch.tensor([10, 12, 14])  # before steps 0, 2 and 4
    assert event_sums(mass, lengths, 10, increments=False)[:, 0].tolist() == [0, 3, 15]
    assert event_sums(mass, lengths, 10, increments=True)[:, 0].tolist() == [3, 12, 16]
