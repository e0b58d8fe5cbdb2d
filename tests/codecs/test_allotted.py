"""The allotted codec against its slow definition, and in a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from qevict import QEvictCache, QEvictConfig
from qevict.budget import InfeasibleBudgetError, plan_tiers
from qevict.codecs import AllottedCodec, WindowShape, get_codecs
from qevict.codecs.allotted import allotted
from qevict.compat import cache_argument
from qevict.config import Budget
from qevict.geometry import KVGeometry
from qevict.methods import get_method, make_cache
from qevict.trace import PrefillTrace


def keys_of(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(shape[0], shape[1], 1, shape[3], generator=generator) * 8
    return torch.randn(shape, generator=generator) * spread + torch.randn(shape[3], generator=generator) * 5


def tiny(layers: int, heads: int, kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=16,
        )
    ).eval()


def generate(model: LlamaForCausalLM, ids: torch.Tensor, cache: QEvictCache, count: int) -> torch.Tensor:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **cache_argument(cache),
    )


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([4, 8, 12]),
    st.sampled_from([0.5, 1.7, 3.0, 8.0]),
    st.sampled_from([1, 5, 8, 16]),
    st.integers(0, 9),
)
def test_every_key_is_the_nearest_of_its_channels_levels(
    lanes: int, heads: int, dim: int, key_bits: float, tokens: int, seed: int
) -> None:
    codec = AllottedCodec(key_bits, 4)
    prompt = keys_of(seed, lanes, heads, 40, dim)
    fitted = codec.fit(prompt, torch.ones(lanes, heads, dim))
    windows = prompt[:, :, : 2 * tokens].unflatten(2, (2, tokens)).transpose(1, 2)
    shape = WindowShape(heads, tokens, dim)
    packed = fitted.encode(windows, windows)
    keys, values = fitted.decode(packed, shape)
    assert packed.shape == (lanes, 2, codec.layout(shape).nbytes)
    assert fitted.bits.sum(dim=(1, 2), dtype=torch.long).tolist() == [codec.token_bits(shape)] * lanes
    for lane in range(lanes):
        for head in range(heads):
            for channel in range(dim):
                x, got = (t[lane, :, head, :, channel] for t in (windows, keys))
                bits = int(fitted.bits[lane, head, channel])
                step = fitted.step[lane, head, channel].float()
                levels = fitted.offset[lane, head, channel].float() + torch.arange(1 << bits) * step
                nearest = (x[..., None] - levels).abs().amin(dim=-1)
                torch.testing.assert_close((x - got).abs(), nearest, rtol=1e-3, atol=1e-3)
                if bits:
                    assert (x - got).abs().max() <= step * 0.501 + 1e-3
    assert (values - windows).norm() < 0.25 * windows.norm()


@given(st.integers(1, 12), st.integers(0, 99))
def test_bits_go_one_by_one_where_the_error_is_largest(channels: int, seed: int) -> None:
    error = torch.rand(1, 1, channels, generator=torch.Generator().manual_seed(seed)) * 100
    left, slow = error.flatten().tolist(), [0] * channels
    for _ in range(3 * channels):
        worst = max(range(channels), key=lambda c: left[c] if slow[c] < 8 else -1)
        slow[worst] += 1
        left[worst] /= 4
    assert allotted(error, 3 * channels).flatten().tolist() == slow


def test_lanes_are_independent() -> None:
    keys = keys_of(0, 3, 2, 16, 8)
    fitted = AllottedCodec().fit(keys, torch.ones(3, 2, 8))
    packed, shape, lanes = fitted.encode(keys, keys), WindowShape(2, 16, 8), torch.tensor([2, 0])
    taken = fitted.take(lanes)
    assert torch.equal(taken.encode(keys[lanes], keys[lanes]), packed[lanes])
    for x, y in zip(taken.decode(packed[lanes], shape), fitted.decode(packed, shape), strict=True):
        assert torch.equal(x, y[lanes])


def test_extreme_and_constant_channels_stay_finite() -> None:
    keys = torch.zeros(1, 1, 16, 8)
    keys[..., 0], keys[..., 1] = 6e4, torch.linspace(-6e4, 6e4, 16)
    fitted = AllottedCodec(4, 4).fit(keys, torch.ones(1, 1, 8))
    shape = WindowShape(1, 16, 8)
    for x in fitted.decode(fitted.encode(keys * 2, keys * 2), shape):
        assert x.half().isfinite().all()
    assert torch.equal(fitted.decode(fitted.encode(keys, keys), shape)[0][..., 2:], keys[..., 2:])


def test_names_say_the_bits_of_keys_and_values() -> None:
    assert [*get_codecs("allotted:2.5+3")] == [AllottedCodec(2.5, 3)]
    assert [*get_codecs("allotted", 3)] == [AllottedCodec(3, 3)]
    with pytest.raises(ValueError, match=r"as in 3\+2"):
        list(get_codecs("minmax:4"))


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_a_cache_holds_its_budget_and_a_row_equals_that_row_alone(granularity: str) -> None:
    model = tiny(2, 4, 2)
    config = QEvictConfig(
        0.4, codec="allotted:2.5+3", window_size=8, recent_tokens=8, sink_tokens=2, granularity=granularity
    )
    ids = torch.randint(3, 64, (2, 240))
    generated = []
    for rows in (ids, ids[:1], ids[1:]):
        cache = QEvictCache(model, config, max_new_tokens=40)
        generated.append(generate(model, rows, cache, 40))
        report = cache.memory()
        assert report.codes > 0
        assert report.budget is not None
        assert report.reserved <= report.budget
    assert torch.equal(generated[0], torch.cat(generated[1:]))


def test_a_short_prompt_is_fitted_when_windows_are_first_quantized() -> None:
    model = tiny(1, 2, 1)
    config = QEvictConfig(0.4, codec="allotted:4+4", window_size=8, recent_tokens=8, sink_tokens=2)
    cache = QEvictCache(model, config, max_new_tokens=300)
    generate(model, torch.randint(3, 64, (1, 4)), cache, 300)
    report = cache.memory()
    assert report.codes > 0
    assert report.budget is not None
    assert report.reserved <= report.budget


def test_bits_are_the_same_whatever_else_a_trace_is_for() -> None:
    model = tiny(2, 4, 2)
    method = get_method("qevict", codec="allotted:2.5+3", window_size=8, recent_tokens=8, prompt_queries=4)
    ids = torch.randint(3, 64, (1, 120))
    caches = []
    for queries in (method.observed_queries, None):
        cache = make_cache(model, method, 0.4, max_new_tokens=8)
        caches.append(PrefillTrace.capture(model, ids, queries=queries).fill(cache))
    read = make_cache(model, method, 0.4, max_new_tokens=8)
    with torch.no_grad():
        model(ids, **cache_argument(read))
    for layers in zip(*(cache.layers for cache in [*caches, read]), strict=True):
        stores = [layer.cohorts[0].store for layer in layers]
        assert all(torch.equal(store.codec.bits, stores[0].codec.bits) for store in stores)
        assert all(torch.equal(store.arena.data, stores[0].arena.data) for store in stores)


def test_a_budget_without_room_for_the_parameters_says_so() -> None:
    geometry = KVGeometry(layers=2, kv_heads=2, query_heads=4, head_dim=16, element_bytes=2)
    budget = Budget(bytes=2 * 3300)  # of which 25 protected tokens take 2 * 3200
    settings = {"budget": budget, "window_size": 8, "recent_tokens": 8, "sink_tokens": 2}
    plan_tiers(QEvictConfig(**settings, codec="minmax"), geometry, 200)
    with pytest.raises(InfeasibleBudgetError, match=r"beside 320 bytes of the codec's parameters"):
        plan_tiers(QEvictConfig(**settings, codec="allotted"), geometry, 200)
