"""Routing against a literal Algorithm 1, and the promises of the coverage allocation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.routing import EVICTED, FULL, QUANTIZED, Candidates, route_coverage, route_split


@dataclass(frozen=True)
class Window:
    """One candidate as a test sees it; `coded` has a ledger entry, `active` is in the low-bit tier."""

    number: int
    score: float
    active: bool
    coded: bool


def rank(pool: list[Window]) -> list[Window]:
    """The best first: by score, then the later window; a score that is not a number comes last."""
    return sorted(pool, key=lambda w: (not math.isnan(w.score), 0 if math.isnan(w.score) else w.score, w.number))[::-1]


def literal_split(pool: list[Window], k_full: int, k_codes: int, promotion: bool, extra: bool) -> dict[int, int]:
    """Algorithm 1 with sets."""
    ordered = rank(pool)
    full = [w for w in ordered if promotion or not w.active][:k_full]
    rest = [w for w in ordered if w not in full]
    dormant = 0 if extra else len([w for w in full if w.coded])
    codes = rest[: max(0, k_codes - dormant)]
    return {w.number: FULL if w in full else QUANTIZED if w in codes else EVICTED for w in pool}


@dataclass(frozen=True)
class Capacity:
    """What the coverage allocation may use, in bytes and slots."""

    arena: int
    full: int
    code: int
    max_full: int
    max_codes: int


def literal_coverage(pool: list[Window], capacity: Capacity, promotion: bool) -> dict[int, int]:
    """Of all counts (kept, of them fresh in full, of them promoted) that fit, the largest in this order."""
    ordered, best, choice = rank(pool), (-1, -1, -1), {}
    for n in range(len(ordered) + 1):
        fresh = [w for w in ordered[:n] if not w.coded]
        old = [w for w in ordered[:n] if w.coded]
        for f in range(len(fresh) + 1):
            for p in range((len(old) if promotion else 0) + 1):
                fits = (f + p) * capacity.full + (n - f) * capacity.code <= capacity.arena
                slots = f + p <= capacity.max_full and n - f <= capacity.max_codes
                if fits and slots and (n, f, p) > best:
                    full = fresh[:f] + old[:p]
                    kept = ordered[:n]
                    best = (n, f, p)
                    choice = {w.number: FULL if w in full else QUANTIZED if w in kept else EVICTED for w in pool}
    return choice


SCORES = st.sampled_from([0.0, 0.5, 1.0, math.inf, -math.inf, math.nan]) | st.floats(-4, 4, width=32)


@st.composite
def pools(draw: st.DrawFn, most: int = 9, most_coded: int = 9) -> list[list[Window]]:
    """One to three lanes, empty ones among them; at most `most_coded` windows of a lane have codes."""
    lanes = []
    for _ in range(draw(st.integers(1, 3))):
        numbers = draw(st.lists(st.integers(0, 30), unique=True, max_size=most))
        states = [draw(st.sampled_from(["never", "active", "dormant"])) for _ in numbers]
        coded = [i for i, state in enumerate(states) if state != "never"][most_coded:]
        states = ["never" if i in coded else state for i, state in enumerate(states)]
        lanes.append(
            [
                Window(number, draw(SCORES), state == "active", state != "never")
                for number, state in zip(numbers, states, strict=True)
            ]
        )
    return lanes


def batch(lanes: list[list[Window]], seed: int = 0) -> Candidates:
    """Columns in a random order, with empty ones (which hold arbitrary scores and flags) in between."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, lanes)) + 2
    window = torch.full((len(lanes), width), -1, dtype=torch.int32)
    score = torch.randn(len(lanes), width, generator=generator) * 100
    in_codes = torch.rand(len(lanes), width, generator=generator) < 0.5
    has_codes = in_codes.clone()
    for i, lane in enumerate(lanes):
        for column, w in zip(torch.randperm(width, generator=generator).tolist(), lane, strict=False):
            window[i, column], score[i, column] = w.number, w.score
            in_codes[i, column], has_codes[i, column] = w.active, w.coded
    return Candidates(window, score, in_codes, has_codes)


def states(candidates: Candidates, tier: torch.Tensor) -> list[dict[int, int]]:
    """State by window number; empty columns must be EVICTED."""
    assert bool((tier[candidates.window < 0] == EVICTED).all())
    rows = zip(candidates.window.tolist(), tier.tolist(), strict=True)
    return [{w: t for w, t in zip(*row, strict=True) if w >= 0} for row in rows]


@settings(max_examples=100)
@given(pools(), st.integers(0, 10), st.integers(0, 10), st.booleans(), st.booleans(), st.integers(0, 99))
def test_split_is_algorithm_1(
    lanes: list[list[Window]], k_full: int, k_codes: int, promotion: bool, extra: bool, seed: int
) -> None:
    candidates = batch(lanes, seed)
    tier = route_split(candidates, k_full, k_codes, promotion=promotion, dormant_extra=extra)
    assert states(candidates, tier) == [literal_split(lane, k_full, k_codes, promotion, extra) for lane in lanes]


@st.composite
def capacities(draw: st.DrawFn) -> Capacity:
    """As plans make them: code slots fit into the arena, and a window's codes are smaller than the window."""
    code = draw(st.integers(1, 6))
    full = draw(st.integers(code + 1, 20))
    arena = draw(st.integers(0, 120))
    return Capacity(arena, full, code, draw(st.integers(0, 10)), draw(st.integers(0, arena // code)))


@settings(max_examples=100)
@given(st.data(), capacities(), st.booleans(), st.integers(0, 99))
def test_coverage_is_the_best_of_all_counts_that_fit(
    data: st.DataObject, capacity: Capacity, promotion: bool, seed: int
) -> None:
    lanes = data.draw(pools(7, most_coded=capacity.max_codes))
    candidates = batch(lanes, seed)
    tier = route_coverage(
        candidates,
        capacity.arena,
        capacity.full,
        capacity.code,
        capacity.max_full,
        capacity.max_codes,
        promotion=promotion,
    )
    routed = states(candidates, tier)
    assert routed == [literal_coverage(lane, capacity, promotion) for lane in lanes]
    for lane, state in zip(lanes, routed, strict=True):
        check_promises(lane, state, capacity)


def check_promises(lane: list[Window], state: dict[int, int], capacity: Capacity) -> None:
    """What the allocation promises, each by itself."""
    full = [w for w in lane if state[w.number] == FULL]
    quantized = [w for w in lane if state[w.number] == QUANTIZED]
    evicted = [w for w in lane if state[w.number] == EVICTED]
    code_slots = len(quantized) + sum(w.coded for w in full)
    used = len(full) * capacity.full + code_slots * capacity.code
    assert used <= capacity.arena
    assert len(full) <= capacity.max_full
    assert code_slots <= capacity.max_codes
    if evicted:  # no room for one more window's codes, nor within the low-bit share
        assert code_slots == capacity.max_codes or used + capacity.code > capacity.arena
    kept = full + quantized
    if evicted and kept:
        assert rank(kept + evicted)[: len(kept)] == rank(kept)
    if any(not w.coded for w in quantized):  # a fresh window was quantized: nothing was promoted in its stead
        spare = capacity.arena - used
        assert not any(w.coded for w in full) or spare < capacity.full - capacity.code or len(full) == capacity.max_full
    everything = len(lane) * capacity.full <= capacity.arena and len(lane) <= capacity.max_full
    if everything and not any(w.coded for w in lane):
        assert not quantized
        assert not evicted


@pytest.mark.parametrize("function", ["split", "coverage"])
def test_ties_go_to_the_later_window(function: str) -> None:
    candidates = batch([[Window(n, 1.0, False, False) for n in (3, 0, 7, 5, 1)]], seed=3)
    if function == "split":
        tier = route_split(candidates, 2, 2)
    else:
        tier = route_coverage(candidates, 2 * 10 + 2 * 3, 10, 3, 9, 2)
    assert states(candidates, tier) == [{7: FULL, 5: FULL, 3: QUANTIZED, 1: QUANTIZED, 0: EVICTED}]


def test_fresh_windows_come_before_better_ones_that_were_quantized() -> None:
    """A promotion buys a low-bit approximation: a window that still has its original is worth the slot more."""
    lane = [Window(0, 9.0, True, True), Window(1, 5.0, False, False), Window(2, 1.0, False, False)]
    candidates = batch([lane])
    assert states(candidates, route_coverage(candidates, 23, 10, 3, 9, 9)) == [{0: QUANTIZED, 1: FULL, 2: FULL}]
    assert states(candidates, route_coverage(candidates, 33, 10, 3, 9, 9)) == [{0: FULL, 1: FULL, 2: FULL}]
    unpromoted = route_coverage(candidates, 33, 10, 3, 9, 9, promotion=False)
    assert states(candidates, unpromoted) == [{0: QUANTIZED, 1: FULL, 2: FULL}]
    assert states(candidates, route_split(candidates, 1, 1)) == [{0: FULL, 1: EVICTED, 2: EVICTED}]
    assert states(candidates, route_split(candidates, 1, 1, dormant_extra=True)) == [
        {0: FULL, 1: QUANTIZED, 2: EVICTED}
    ]


@settings(max_examples=30)
@given(pools(), st.integers(0, 99), st.integers(0, 99))
def test_the_order_of_columns_does_not_matter(lanes: list[list[Window]], one: int, other: int) -> None:
    first, second = batch(lanes, one), batch(lanes, other)
    assert states(first, route_split(first, 2, 3)) == states(second, route_split(second, 2, 3))
    sizes = (37, 8, 3, 4, 6)
    assert states(first, route_coverage(first, *sizes)) == states(second, route_coverage(second, *sizes))


def test_no_candidates_and_no_capacity() -> None:
    nothing = Candidates(*(torch.zeros(2, 0, dtype=t) for t in (torch.int32, torch.float32, torch.bool, torch.bool)))
    assert route_split(nothing, 2, 2).shape == (2, 0)
    assert route_coverage(nothing, 10, 2, 1, 4, 4).shape == (2, 0)
    some = batch([[Window(0, 1.0, False, False)], [Window(4, 1.0, False, False)]])
    assert states(some, route_split(some, 0, 0)) == [{0: EVICTED}, {4: EVICTED}]
    assert states(some, route_coverage(some, 0, 2, 1, 0, 0)) == [{0: EVICTED}, {4: EVICTED}]
