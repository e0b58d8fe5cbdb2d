"""The CPU kernel against the reference, which is its definition."""

from __future__ import annotations

import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import agreement
import pytest
import torch
from agreement import ASKED, ROPES, SIZES, check_random, swapped, unknown
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import caching
from views import SCALING, make_view, random_query

from qevict.codecs import AllottedCodec
from qevict.kernels import attend, cpu, reference
from qevict.kernels.compiled import kept

by_kernel, check = partial(agreement.by_kernel, cpu.attend), partial(agreement.check, cpu.attend)


@settings(max_examples=120)
@given(sizes=st.fixed_dictionaries(SIZES), queries=st.sampled_from([1, 1, 2, 5, 17]), asked=ASKED)
def test_output_and_masses_are_the_reference_s(sizes: dict[str, Any], queries: int, asked: dict[str, Any]) -> None:
    check_random(cpu.attend, sizes, queries=queries, **asked)


@settings(max_examples=60)
@given(
    sizes=st.fixed_dictionaries(
        SIZES
        | {
            "window": st.sampled_from([8, 16, 24, 32, 64, 104]),
            "codec": st.builds(AllottedCodec, st.sampled_from([0.5, 2, 3.3, 4, 8]), st.integers(1, 4)),
        }
    ),
    rope=st.sampled_from(sorted(ROPES)),
    group=st.integers(1, 4),
)
def test_lanes_may_have_ranges_and_bits_of_their_own(sizes: dict[str, Any], rope: str, group: int) -> None:
    view = make_view(**sizes, new=2, rope=ROPES[rope](sizes["dim"]))
    check(random_query(view, group, 2), view)


def test_many_windows_make_several_items() -> None:
    view = make_view(codes=150, full=90, stored=300, window=16, lanes=2, dim=64, new=2)
    query = random_query(view, 3, 2)
    check(query, view)


def test_a_step_sees_what_its_history_holds_at_that_time() -> None:
    """What is known of a history is kept with it; the next event's is another, whatever bytes they share."""
    view = make_view(codes=3, holes=False)
    query = random_query(view, 2, 4)
    by_kernel(query, view)
    later = view._replace(history=make_view(codes=9, seed=1).history)
    check(query, later)


def test_tensors_may_be_cut_out_of_larger_ones() -> None:
    view = make_view(dim=64, new=3)
    query = random_query(view, 2, 3)
    assert torch.equal(by_kernel(*swapped(query, view)).output, by_kernel(query, view).output)


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is to do, three threads do it."""
    monkeypatch.setattr(cpu, "_SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def test_how_many_threads_there_are_changes_nothing(request: pytest.FixtureRequest) -> None:
    view = make_view(codes=60, full=60, window=16, new=1)
    query = random_query(view, 3, 1)
    alone = by_kernel(query, view)
    request.getfixturevalue("shared_out")
    together = by_kernel(query, view)
    assert torch.equal(alone.output, together.output)
    assert torch.equal(alone.mass, together.mass)


@pytest.mark.usefixtures("shared_out")
def test_several_threads_may_attend_at_once() -> None:
    views = [make_view(codes=60, window=16, seed=seed) for seed in range(4)]
    queries = [random_query(view, 2, 4) for view in views]
    alone = [by_kernel(*pair) for pair in zip(queries, views, strict=True)]
    with ThreadPoolExecutor(len(views)) as threads:
        for _ in range(20):
            for given, expected in zip(threads.map(by_kernel, queries, views), alone, strict=True):
                assert torch.equal(given.output, expected.output)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.usefixtures("shared_out")
def test_a_forked_process_attends_as_its_parent_did() -> None:
    """The parent's threads are not in the child: waiting for them would never end."""
    view = make_view(codes=60, window=16)
    query = random_query(view, 2, 4)
    expected = by_kernel(query, view)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks where there are threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        same = False
        try:
            same = torch.equal(by_kernel(query, view).output, expected.output)
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_where_no_compiled_code_can_be_kept_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def next_number(x: int) -> int:
        return x + 1

    assert kept(next_number)(1) == 2


@pytest.mark.parametrize(
    "what", ["codec", "many levels", "value groups", "head size", "dtype", "storage", "text", "strides", "gradient"]
)
def test_what_the_kernel_does_not_know_is_attended_by_the_reference(what: str) -> None:
    query, view = unknown(what, cpu.MOST_QUERIES)
    assert cpu.attend(query, view, SCALING) is None
    given, expected = attend(query, view, SCALING), reference.attend(query, view, SCALING)
    assert torch.equal(given.output, expected.output)
    assert torch.equal(given.mass, expected.mass)
    assert given.output.requires_grad == (what == "gradient")
