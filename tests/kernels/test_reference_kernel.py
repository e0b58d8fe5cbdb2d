"""The reference kernels against dense attention that forms every probability."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from views import SCALING, dense, make_view, random_query

from qevict.kernels import reference
from qevict.kernels.reference import TierView, attend, prompt_mass, window_sums


def check_against_dense(query: Tensor, view: TierView, count_last: int | None, tolerance: float = 1e-5) -> None:
    output, mass = attend(query, view, SCALING, count_last)
    assert output.shape == query.shape
    assert output.dtype == query.dtype
    assert mass.dtype == torch.float32
    for lane in range(len(query)):
        expected, masses = dense(query, view, lane)
        if count_last is not None:
            masses = masses[max(0, len(masses) - count_last) :].sum(dim=0, keepdim=True)
        torch.testing.assert_close(output[lane].double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(mass[lane].double(), masses, rtol=1e-4, atol=1e-5)


@settings(max_examples=30)
@given(
    lanes=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([16, 60, 64]),
    window=st.sampled_from([1, 4, 7, 16]),
    full=st.integers(0, 4),
    codes=st.integers(0, 4),
    queries=st.integers(1, 5),
    older=st.integers(0, 12),
    sinks=st.integers(0, 5),
    holes=st.booleans(),
    count_last=st.sampled_from([None, None, 1, 3, 99]),
    seed=st.integers(0, 2**31),
)
def test_attend_is_dense_attention(
    lanes: int,
    heads: int,
    group: int,
    dim: int,
    window: int,
    full: int,
    codes: int,
    queries: int,
    older: int,
    sinks: int,
    holes: bool,
    count_last: int | None,
    seed: int,
) -> None:
    view = make_view(
        lanes=lanes,
        heads=heads,
        dim=dim,
        window=window,
        full=full,
        codes=codes,
        stored=older,
        new=queries,
        sinks=min(sinks, older + queries),
        holes=holes,
        seed=seed,
    )
    check_against_dense(random_query(view, group, queries), view, count_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_lose_only_what_rounding_the_output_does(dtype: torch.dtype) -> None:
    view = make_view(dtype=dtype, new=3)
    check_against_dense(random_query(view, 2, 3), view, None, tolerance=1e-2)


def test_masses_and_sinks_share_all_of_the_probability() -> None:
    view = make_view(sinks=0, new=3)
    _, mass = attend(random_query(view, 2, 3), view, SCALING)
    torch.testing.assert_close(mass.sum(dim=-1), torch.ones(2, 3))
    absent = ~torch.cat([view.history.full_present, view.history.code_present], dim=1)
    assert bool((mass[:, :, : absent.shape[1]].masked_select(absent[:, None]) == 0).all())


def test_later_tokens_of_a_forward_are_not_seen() -> None:
    view = make_view(new=4)
    query = random_query(view, 2, 4)
    before = attend(query, view, SCALING).output
    view.new_keys[:, :, -2:] = torch.nan
    view.new_values[:, :, -2:] = 0.0
    after = attend(query, view, SCALING).output
    assert torch.equal(before[:, :, :, :2], after[:, :, :, :2])
    assert not torch.equal(before[:, :, :, 2:], after[:, :, :, 2:])


@pytest.mark.parametrize("elements", [1, 150, 400])
@pytest.mark.parametrize("count_last", [None, 1, 4, 99])
def test_blocks_change_nothing(elements: int, count_last: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view(lanes=1, new=7)
    query = random_query(view, 2, 7)
    whole = attend(query, view, SCALING, count_last)
    prompt, keys = torch.randn(1, 2, 2, 20, 16), torch.randn(1, 2, 20, 16)
    whole_prompt = prompt_mass(prompt, keys, SCALING, count_last)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", elements)
    output, mass = attend(query, view, SCALING, count_last)
    torch.testing.assert_close(output, whole.output, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mass, whole.mass, rtol=1e-6, atol=1e-6)
    blockwise = prompt_mass(prompt, keys, SCALING, count_last)
    torch.testing.assert_close(blockwise, whole_prompt, rtol=1e-6, atol=1e-6)


@settings(max_examples=25)
@given(
    lanes=st.integers(1, 2),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(1, 30),
    dim=st.sampled_from([3, 16]),
    count_last=st.sampled_from([None, 1, 5, 99]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_prompt_mass_is_the_column_sum_of_the_attention_matrix(
    lanes: int,
    heads: int,
    group: int,
    tokens: int,
    dim: int,
    count_last: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(lanes, heads, group, tokens, dim, generator=generator).to(dtype)
    keys = torch.randn(lanes, heads, tokens, dim, generator=generator).to(dtype)
    logits = query.double() @ keys.double()[:, :, None].mT * SCALING
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    matrix = logits.masked_fill(future, -torch.inf).softmax(dim=-1).mean(dim=(1, 2))
    counted = matrix if count_last is None else matrix[:, -count_last:]
    mass = prompt_mass(query, keys, SCALING, count_last)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), counted.sum(dim=1), rtol=1e-5, atol=1e-5)


def test_window_sums() -> None:
    tokens = torch.arange(1.0, 8.0)
    assert window_sums(tokens, 3).tolist() == [6.0, 15.0, 7.0]
    assert window_sums(tokens, 1).tolist() == tokens.tolist()
    assert window_sums(tokens, 100).tolist() == [28.0]
    assert window_sums(torch.ones(2, 3, 8), 4).tolist() == [[[4.0, 4.0]] * 3] * 2
    assert window_sums(torch.ones(2, 0), 4).shape == (2, 0)
