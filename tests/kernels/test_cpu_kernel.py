"""The CPU kernel against the reference, which is its definition."""

from __future__ import annotations

import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import caching
from torch import Tensor
from views import SCALING, make_view, random_query

from qevict.codecs import AllottedCodec, KiviCodec, MinMaxCodec, TurboQuantCodec
from qevict.kernels import attend, cpu, reference
from qevict.kernels.compiled import kept
from qevict.kernels.reference import Attended, TierView
from qevict.rope import Rope

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROPES = {
    "half": lambda dim: Rope(0.7 ** torch.arange(dim // 2)),
    "interleaved": lambda dim: Rope(0.7 ** torch.arange(dim // 2), layout="interleaved"),
    "partial": lambda dim: Rope(0.7 ** torch.arange(dim // 4 + 1), scaling=1.3, dtype=torch.bfloat16),
    "partial interleaved": lambda dim: Rope(0.7 ** torch.arange(dim // 4 + 1), layout="interleaved"),
    "none": lambda _: Rope.identity(),
}
CODECS = st.builds(MinMaxCodec, *[st.sampled_from([2, 3, 4, 8])] * 2) | st.builds(
    KiviCodec, *[st.sampled_from([2, 3, 4, 8])] * 2, st.sampled_from([8, 32, 64])
)


def by_kernel(query: Tensor, view: TierView, count_last: int | None = None) -> Attended:
    attended = cpu.attend(query, view, SCALING, count_last)
    assert attended is not None, "the kernel left it to the reference"
    return attended


def distance(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


SIZES = {
    "lanes": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "dim": st.sampled_from([8, 64, 80, 96, 128, 256]),
    "window": st.sampled_from([1, 4, 7, 8, 16, 24, 32, 40, 48, 61, 64, 100]),
    "full": st.integers(0, 4),
    "codes": st.integers(0, 4) | st.sampled_from([9, 40]),
    "stored": st.integers(0, 40),
    "holes": st.booleans(),
    "dtype": st.sampled_from(DTYPES),
    "store": st.sampled_from(DTYPES),
    "codec": CODECS,
    "seed": st.integers(0, 2**31),
}


def check(query: Tensor, view: TierView, count_last: int | None = None) -> None:
    given, expected = by_kernel(query, view, count_last), reference.attend(query, view, SCALING, count_last)
    assert given.output.dtype == query.dtype
    assert given.output.shape == query.shape
    assert distance(given.output, expected.output) < (1e-4 if query.dtype == torch.float32 else 2e-2)
    torch.testing.assert_close(given.mass, expected.mass, rtol=1e-3, atol=1e-5)


@settings(max_examples=120)
@given(
    sizes=st.fixed_dictionaries(SIZES),
    rope=st.sampled_from(sorted(ROPES)),
    group=st.integers(1, 4),
    queries=st.sampled_from([1, 1, 2, 5, 17]),
    sinks=st.integers(0, 5),
    count_last=st.sampled_from([None, None, 1, 3, 99]),
)
def test_output_and_masses_are_the_reference_s(
    sizes: dict[str, Any], rope: str, group: int, queries: int, sinks: int, count_last: int | None
) -> None:
    sinks = min(sinks, sizes["stored"] + queries)
    view = make_view(**sizes, new=queries, sinks=sinks, rope=ROPES[rope](sizes["dim"]))
    check(random_query(view, group, queries), view, count_last)


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
    """As models hand them over: heads and tokens swapped, storages with room behind."""
    view = make_view(dim=64, new=3)
    query = random_query(view, 2, 3)
    expected = by_kernel(query, view)

    def cut(x: Tensor) -> Tensor:
        room = x.transpose(1, 2).repeat(1, 2, 1, 2)
        return room.transpose(1, 2)[:, :, : x.shape[2], : x.shape[3]]

    swapped = query.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    given = by_kernel(swapped, view._replace(new_keys=cut(view.new_keys), new_values=cut(view.new_values)))
    assert torch.equal(given.output, expected.output)
    padded = [torch.cat([t, torch.full_like(t, torch.nan)], dim=2) for t in (view.stored_keys, view.stored_values)]
    stored = [t[:, :, : view.stored_keys.shape[2]] for t in padded]
    given = by_kernel(query, view._replace(stored_keys=stored[0], stored_values=stored[1]))
    assert torch.equal(given.output, expected.output)


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


def unknown(what: str) -> tuple[Tensor, TierView]:
    """A query and a view that the kernel has to leave alone."""
    sizes: dict[str, Any] = {
        "codec": {"codec": TurboQuantCodec()},
        "many levels": {"codec": AllottedCodec(3, 5), "window": 8},
        "value groups": {"codec": KiviCodec(channels=12), "dim": 24},
        "head size": {"dim": 20},
        "dtype": {"dtype": torch.float64},
        "storage": {"store": torch.float64},
        "text": {"new": cpu.MOST_QUERIES + 1},
    }
    view = make_view(**sizes.get(what, {}))
    query = random_query(view, 2, view.new_keys.shape[2])
    if what == "strides":
        query = query.mT.contiguous().mT
    return query.requires_grad_(what == "gradient"), view


@pytest.mark.parametrize(
    "what", ["codec", "many levels", "value groups", "head size", "dtype", "storage", "text", "strides", "gradient"]
)
def test_what_the_kernel_does_not_know_is_attended_by_the_reference(what: str) -> None:
    query, view = unknown(what)
    assert cpu.attend(query, view, SCALING) is None
    given, expected = attend(query, view, SCALING), reference.attend(query, view, SCALING)
    assert torch.equal(given.output, expected.output)
    assert torch.equal(given.mass, expected.mass)
    assert given.output.requires_grad == (what == "gradient")
