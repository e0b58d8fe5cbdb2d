"""Means, errors and intervals against cases worked by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict.report.statistics import Mean, Values, bootstrap_mean, clustered_mean, holm, macro_mean


def test_each_sample_its_own_document_is_the_usual_standard_error() -> None:
    mean = clustered_mean(Values([1.0, 0.0, 0.0, 1.0, 1.0], ["a", "b", "c", "d", "e"]))
    assert mean.value == pytest.approx(0.6)
    assert mean.error == pytest.approx(math.sqrt(0.6 * 0.4 / 4))
    assert mean.samples == 5


def test_two_documents_of_unequal_size() -> None:
    # Mean 2/3; residual sums 2 - 2 * 2/3 = 2/3 and 0 - 2/3; sqrt(2 / 1 * (4/9 + 4/9)) / 3 = 4/9.
    mean = clustered_mean(Values([1.0, 1.0, 0.0], ["a", "a", "b"]))
    assert mean.value == pytest.approx(2 / 3)
    assert mean.error == pytest.approx(4 / 9)


def test_samples_of_one_document_count_once() -> None:
    alone = clustered_mean(Values([1.0, 0.0, 0.0], ["a", "b", "c"]))
    repeated = clustered_mean(Values([1.0, 0.0, 0.0] * 5, ["a", "b", "c"] * 5))
    assert repeated.error == pytest.approx(alone.error)


def test_one_document_has_no_error_and_no_interval() -> None:
    assert math.isnan(clustered_mean(Values([1.0, 0.0], ["a", "a"])).error)
    interval = bootstrap_mean({"t": Values([1.0, 0.0], ["a", "a"])})
    assert interval.value == 0.5
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)
    assert math.isnan(interval.p)
    assert not interval.excludes_zero


def test_tasks_count_alike_in_a_macro_mean() -> None:
    mean = macro_mean([Mean(1.0, 0.3, 100), Mean(0.0, 0.4, 2)])
    assert mean == Mean(0.5, pytest.approx(0.25), 102)


def test_identical_methods_differ_by_nothing() -> None:
    interval = bootstrap_mean({"t": Values([0.0] * 6, list("aabbcc"))})
    assert interval[:3] == (0.0, 0.0, 0.0)
    assert not interval.excludes_zero
    assert interval.p == 1.0


def test_bootstrap_of_two_documents() -> None:
    # The resamples aa, ab, ba, bb have the means 1, 2/3, 2/3, 0, so a quarter is 0 and a quarter is 1.
    interval = bootstrap_mean({"t": Values([1.0, 1.0, 0.0], ["a", "a", "b"])})
    assert interval.value == pytest.approx(2 / 3)
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_bootstrap_of_two_tasks_draws_each_by_itself() -> None:
    # Each task's mean is 0, 1/2, 1/2 or 1; were they drawn alike, the average would be 0 in a quarter of the resamples.
    task = Values([1.0, 0.0], ["a", "b"])
    drawn = bootstrap_mean({"s": task, "t": Values([-1.0, 0.0], ["a", "b"])}, resamples=4000)
    assert drawn.value == 0.0
    assert (drawn.low, drawn.high) == (-0.5, 0.5)


def test_p_is_twice_the_smaller_side_of_every_resample() -> None:
    values = [3.0, 1.0, -2.0, 4.0]
    sums = [sum(chosen) for chosen in itertools.product(values, repeat=4)]
    expected = 2 * np.mean([total <= 0 for total in sums])
    assert bootstrap_mean({"t": Values(values, list("abcd"))}).p == pytest.approx(expected, abs=0.02)
    mirrored = [-value for value in values]
    assert bootstrap_mean({"t": Values(mirrored, list("abcd"))}).p == pytest.approx(expected, abs=0.02)


def test_p_is_never_zero() -> None:
    assert bootstrap_mean({"t": Values([1.0, 1.0], ["a", "b"])}, resamples=99).p == pytest.approx(2 / 100)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_against_closed_testing(p: list[float]) -> None:
    """Holm is the closed test with Bonferroni's: a hypothesis falls when every set of hypotheses that has it falls."""
    sets = [set(chosen) for size in range(1, len(p) + 1) for chosen in itertools.combinations(range(len(p)), size)]
    slow = [max(min(1.0, len(s) * min(p[i] for i in s)) for s in sets if index in s) for index in range(len(p))]
    assert holm(p) == pytest.approx(slow)


def test_interval_against_every_resample() -> None:
    values = [3.0, 1.0, 0.0, 7.0, 2.0]
    means = [np.mean(chosen) for chosen in itertools.product(values, repeat=5)]
    low, high = np.quantile(means, [0.025, 0.975])
    interval = bootstrap_mean({"t": Values(values, list("abcde"))})
    assert interval.low == pytest.approx(low, abs=0.1)
    assert interval.high == pytest.approx(high, abs=0.1)
    assert interval.excludes_zero


@given(st.lists(st.tuples(st.floats(-1, 1), st.integers(0, 4)), min_size=1, max_size=20), st.integers(0, 3))
def test_the_same_seed_gives_the_same_interval_around_the_mean(pairs: list[tuple[float, int]], seed: int) -> None:
    values = Values([value for value, _ in pairs], [str(document) for _, document in pairs])
    first = bootstrap_mean({"t": values}, seed, 200)
    again = bootstrap_mean({"t": values}, seed, 200)
    assert first[:1] == again[:1]
    if len(set(values.documents)) > 1:
        assert first == again
        assert min(values.values) - 1e-9 <= first.low <= first.high <= max(values.values) + 1e-9


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no values"):
        clustered_mean(Values([], []))
    with pytest.raises(ValueError, match="no tasks"):
        macro_mean([])
    with pytest.raises(ValueError, match="no tasks"):
        bootstrap_mean({})
