"""KIVI: which tokens are exact at every step, what the others are decoded as, and that they are encoded once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.driver import endless, forward, prompt
from methods.quantised import allow, feed, held, make_row
from qevict.methods.cache import MethodCache
from qevict.methods.kivi import KIVI, KIVIStore
from reference.quantisers import SlowKIVI, decoded_keys, decoded_values


@settings(max_examples=25)
@given(
    heads=st.integers(1, 2),
    dim=st.sampled_from([4, 6]),
    tokens=st.integers(1, 25),
    new=st.integers(1, 12),
    bits=st.sampled_from([2, 4]),
    residual=st.sampled_from([3, 6, 12]),
    seed=st.integers(0, 99),
)
def test_every_step_attends_to_what_the_authors_code_would(
    heads: int, dim: int, tokens: int, new: int, bits: int, residual: int, seed: int
) -> None:
    prefill, keys, values = make_row(heads=heads, tokens=tokens, dim=dim, new=new, seed=seed)
    [store] = KIVI(bits, group=3, residual=residual).compress([prefill], allow(prefill, new=new))
    slow = SlowKIVI(prefill.keys, prefill.values, bits, 3, residual)
    for step in range(new):
        feed(store, keys[:, step : step + 1], values[:, step : step + 1])
        expected = slow.step(keys[:, step], values[:, step])
        for mine, theirs in zip(held(store), expected, strict=True):
            assert torch.equal(torch.stack(mine), theirs)


@pytest.mark.parametrize("tokens", [127, 128, 129, 255, 256, 300])
def test_canonical_settings(tokens: int) -> None:
    prefill, _, _ = make_row(tokens=tokens, dim=96)
    [store] = KIVI().compress([prefill], allow(prefill))
    exact_keys, exact_values = tokens % 128, min(tokens, 128)
    keys, values = (torch.stack(x) for x in held(store))
    assert torch.equal(keys[:, tokens - exact_keys :], prefill.keys[:, tokens - exact_keys :])
    assert torch.equal(values[:, tokens - exact_values :], prefill.values[:, tokens - exact_values :])
    if tokens >= 160:
        assert torch.equal(keys[:, 32:64], decoded_keys(prefill.keys[:, 32:64], 2))
        assert torch.equal(values[:, 1:3], decoded_values(prefill.values[:, 1:3], 2, 32))
        assert not torch.equal(values[:, 1:3], prefill.values[:, 1:3])


def test_codes_are_written_once() -> None:
    prefill, keys, values = make_row(tokens=17, new=40)
    [store] = KIVI(2, group=4, residual=8).compress([prefill], allow(prefill, new=40))
    assert isinstance(store, KIVIStore)
    for step in range(40):
        before = [side.codes.rows.clone() for side in (store.keys, store.values)]
        feed(store, keys[:, step : step + 1], values[:, step : step + 1])
        for side, codes in zip((store.keys, store.values), before, strict=True):
            assert torch.equal(side.codes.rows[: len(codes)], codes)


@given(st.integers(1, 30), st.integers(0, 20), st.sampled_from([4, 8]))
@settings(max_examples=20)
def test_reserved_bytes_do_not_grow_and_are_counted_by_hand(tokens: int, new: int, residual: int) -> None:
    prefill, keys, values = make_row(heads=2, tokens=tokens, dim=8, new=new, dtype=torch.float16)
    [store] = KIVI(2, group=4, residual=residual).compress([prefill], allow(prefill, new=new))
    total = tokens + new
    window = 2 * 8 * 4 // 4 + 2 * 2 * 8 * 2  # 2 heads x 8 channels x 4 tokens of 2 bits, scale and offset each
    coded_value = 2 * 2 + 2 * 2 * 2 * 2  # 2 heads x 8 channels of 2 bits; 2 heads x 2 groups, scale and offset each
    expected = 32 + total // residual * residual // 4 * window + max(0, total - residual) * coded_value
    expected += (min(total, residual) + min(total, residual + 1)) * 2 * 8 * 2
    assert store.memory().reserved == expected
    for step in range(new):
        feed(store, keys[:, step : step + 1], values[:, step : step + 1])
        memory = store.memory()
        assert memory.used <= memory.reserved == expected
        assert memory.workspace == 0


def test_a_draft_beyond_the_room_is_workspace_and_can_be_undone() -> None:
    prefill, keys, values = make_row(tokens=10, new=30)
    [store] = KIVI(4, group=4, residual=8).compress([prefill], allow(prefill, new=30))
    feed(store, keys[:, :1], values[:, :1])
    reserved, copy = store.memory().reserved, store.copy()
    feed(store, keys[:, 1:], values[:, 1:])
    assert store.memory().reserved == reserved
    assert store.memory().workspace > 0
    store.undo(28)
    feed(store, keys[:, 2:3], values[:, 2:3])
    assert store.memory().workspace == 0
    for token in (1, 2):
        feed(copy, keys[:, token : token + 1], values[:, token : token + 1])
    for mine, theirs in zip(held(store), held(copy), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_huge_key_bias_as_in_qwen2(dtype: torch.dtype) -> None:
    model = endless("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[::5] = 300.0
    model, ids = model.to(dtype), prompt(60)
    cache = MethodCache(model, KIVI(4, group=8, residual=8), max_new_tokens=8)
    logits = forward(model, cache, ids)
    for _ in range(8):
        logits = forward(model, cache, logits[:, -1:].argmax(-1))
        assert logits.isfinite().all()


def test_names_and_settings() -> None:
    assert [method.label for method in KIVI().variants()][::3] == ["kivi-4", "kivi-2"]
    assert KIVI(4, residual=32).label == "kivi-4[residual=32]"
    for wrong in ({"bits": 5}, {"residual": 100}, {"group": 0}, {"residual": 0}):
        with pytest.raises(ValueError, match=r"bits|multiple of group"):
            KIVI(**wrong)
