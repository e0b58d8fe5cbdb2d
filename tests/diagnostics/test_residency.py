"""Eqs. 18 and 19 against direct transcriptions, and on histories with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.diagnostics.residency import (
    Revival,
    global_lir,
    median_return,
    movements,
    oracle_selection,
    probabilities,
    transitions,
)


def history(*windows: str) -> tuple[Tensor, Tensor]:
    """Windows as strings over events: `1` selected, `0` not, `.` not there yet."""
    selected = torch.tensor([[event == "1" for event in window] for window in windows]).T
    present = torch.tensor([[event != "." for event in window] for window in windows]).T
    return selected, present


@st.composite
def histories(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    events = draw(st.integers(1, 14))
    windows = []
    for _ in range(draw(st.integers(1, 6))):
        born = draw(st.integers(0, events - 1))
        windows.append("." * born + "".join(draw(st.sampled_from("01")) for _ in range(events - born)))
    return history(*windows)


def episodes_by_definition(selected: Tensor, present: Tensor, m: int) -> list[tuple[int, bool]]:
    """Length of every maximal inactive run of at least m events, and whether the window was selected after it."""
    found = []
    for window in range(selected.shape[1]):
        events = [e for e in range(selected.shape[0]) if present[e, window]]
        start = None
        for event in [*events, None]:
            inactive = event is not None and not bool(selected[event, window])
            if inactive and start is None:
                start = event
            if not inactive and start is not None:
                end = event if event is not None else selected.shape[0]
                if end - start >= m:
                    found.append((end - start, event is not None))
                start = None
    return found


@settings(max_examples=100)
@given(histories(), st.integers(1, 5), st.booleans())
def test_lir_is_equation_18(case: tuple[Tensor, Tensor], m: int, never: bool) -> None:
    selected, present = case
    counted = [w for w in range(selected.shape[1]) if never or bool(selected[:, w].any())]
    expected = episodes_by_definition(selected[:, counted], present[:, counted], m)
    got = global_lir(selected, present, m, never_selected=never)
    assert got.eligible == len(expected)
    assert sorted(got.away) == sorted(length for length, back in expected if back)
    assert got.rescued == len(got.away)


@pytest.mark.parametrize(
    ("windows", "m", "eligible", "rescued"),
    [
        (["11111"], 1, 0, 0),  # always there
        (["10000"], 3, 1, 0),  # never returns: censored, in the denominator all the same
        (["100010"], 3, 1, 1),  # returns after three events; then away for one, which is not eligible
        (["100010"], 4, 0, 0),
        (["0001"], 3, 1, 1),  # inactive from its first event
        (["..0001"], 4, 0, 0),  # the events before it was there do not count
        (["10100"], 1, 2, 1),  # every maximal episode counts once
    ],
)
def test_lir_of_known_histories(windows: list[str], m: int, eligible: int, rescued: int) -> None:
    got = global_lir(*history(*windows), m=m)
    assert (got.eligible, got.rescued) == (eligible, rescued)


def test_windows_never_selected_can_be_left_out() -> None:
    case = history("10001", "00000", "00000")
    assert global_lir(*case, m=3).rate == pytest.approx(1 / 3)
    assert global_lir(*case, m=3, never_selected=False).rate == 1.0


def test_a_tier_that_holds_everything_has_nothing_eligible() -> None:
    assert math.isnan(global_lir(*history("111", ".11"), m=1).rate)


def test_revivals_add_up() -> None:
    total = Revival(4, 2, (3, 5)) + Revival(6, 1, (8,))
    assert (total.rate, total.away) == (0.3, (3, 5, 8))


def test_median_return_from_departure_and_from_eligibility() -> None:
    assert median_return(Revival(5, 3, (3, 5, 8)), 3) == (5.0, 2.0)
    assert all(math.isnan(value) for value in median_return(Revival(5, 0, ()), 3))


@settings(max_examples=60)
@given(histories(), st.integers(1, 6))
def test_transitions_are_equation_19(case: tuple[Tensor, Tensor], lag: int) -> None:
    selected, present = case
    expected = [[0, 0], [0, 0]]
    for window in range(selected.shape[1]):
        for event in range(selected.shape[0] - lag):
            if present[event, window]:
                expected[int(selected[event, window])][int(selected[event + lag, window])] += 1
    assert transitions(selected, present, lag).tolist() == expected


def test_transition_probabilities_worked_by_hand() -> None:
    counts = transitions(*history("1100", "0010"), lag=1)
    assert counts.tolist() == [[2, 1], [2, 1]]
    assert torch.allclose(probabilities(counts), torch.tensor([[2 / 3, 1 / 3], [2 / 3, 1 / 3]]))
    assert bool(probabilities(torch.tensor([[0, 0], [1, 1]]))[0].isnan().all())


def test_a_lag_of_no_event_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        transitions(*history("1"), lag=0)


def test_the_oracle_takes_the_best_windows_present_and_ties_go_to_the_later() -> None:
    scores = torch.tensor([[5.0, 1.0, 1.0, 9.0], [5.0, 1.0, 7.0, 9.0]])
    present = torch.tensor([[True, True, True, False], [True, True, True, True]])
    assert oracle_selection(scores, present, 2).tolist() == [[True, False, True, False], [False, False, True, True]]
    assert oracle_selection(scores, present, 9).tolist() == present.tolist()


def test_movements_count_windows_that_change_tiers() -> None:
    codes, _ = history("1100", "0110")
    full, _ = history("0011", "1001")
    assert movements(codes, full) == 2
