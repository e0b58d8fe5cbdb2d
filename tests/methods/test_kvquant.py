"""KVQuant: its outliers, ranges and levels against slow definitions, frozen statistics, and calibration files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from contract.driver import endless, forward, prompt
from methods.quantised import allow, feed, held, make_row
from qevict.methods.base import LayerPrefill
from qevict.methods.cache import MethodCache
from qevict.methods.kvquant import KVQuant, KVQuantStore
from qevict.methods.kvquant_calibration import (
    KVQuantCalibration,
    LayerStatistics,
    find_levels,
    measure_layer,
    side_by_side,
    split_values,
)
from reference.quantisers import key_thresholds, kmeans, nuq, same_moments, token_outliers, unit


def slow_row(keys: Tensor, values: Tensor, known: LayerStatistics, outliers: float) -> tuple[Tensor, Tensor]:
    """What un-rotated keys and values `[heads, tokens, dim]` come back as."""
    key_levels, value_levels = known.key_levels.tolist(), known.value_levels.tolist()
    new_keys, new_values = side_by_side(keys), side_by_side(values)
    for token in range(len(new_keys)):
        for channel, x in enumerate(new_keys[token].tolist()):
            lower, upper = float(known.lower[channel]), float(known.upper[channel])
            inside = lower <= x <= upper
            new_keys[token, channel] = nuq(x, lower, upper, *key_levels) if inside else float(np.float16(x))
        row = new_values[token].tolist()
        outside = token_outliers(row, outliers)
        between = [x for channel, x in enumerate(row) if channel not in outside]
        lower, upper = (float(np.float16(x)) for x in (min(between), max(between)))
        for channel, x in enumerate(row):
            inside = channel not in outside
            new_values[token, channel] = nuq(x, lower, upper, *value_levels) if inside else float(np.float16(x))
    return heads_apart(new_keys, keys.shape), heads_apart(new_values, keys.shape)


def heads_apart(rows: Tensor, shape: torch.Size) -> Tensor:
    """Rows `[tokens, channels]` as `[heads, tokens, dim]`."""
    return rows.view(shape[1], shape[0], shape[2]).transpose(0, 1)


def unrotated(prefill: LayerPrefill, keys: Tensor) -> Tensor:
    """All keys of a row without rotation."""
    first = prefill.first_position
    return prefill.rope.unrotate(keys, torch.arange(first, first + keys.shape[1]))


@settings(max_examples=15)
@given(
    heads=st.integers(1, 2),
    tokens=st.integers(1, 40),
    new=st.integers(0, 5),
    bits=st.integers(2, 4),
    outliers=st.sampled_from([0.0, 0.01, 0.1]),
    sinks=st.sampled_from([0, 1, 4]),
    first=st.sampled_from([0, 5]),
    seed=st.integers(0, 99),
)
def test_every_token_is_what_the_slow_definition_makes_of_it(
    heads: int, tokens: int, new: int, bits: int, outliers: float, sinks: int, first: int, seed: int
) -> None:
    prefill, keys, values = make_row(heads=heads, tokens=tokens, dim=8, new=new, seed=seed, first=first)
    method = KVQuant(bits, outliers, sinks)
    [store] = method.compress([prefill], allow(prefill, new=new))
    for token in range(new):
        feed(store, keys[:, token : token + 1], values[:, token : token + 1])
    store.settle(0)
    all_keys = unrotated(prefill, torch.cat([prefill.keys, keys], dim=1))
    all_values = torch.cat([prefill.values, values], dim=1)
    expected = slow_row(all_keys, all_values, method.statistics(prefill), outliers)
    expected_keys = prefill.rope.rotate(expected[0], torch.arange(first, first + tokens + new))
    mine = [torch.stack(x) for x in held(store)]
    assert torch.equal(mine[0][:, :sinks], torch.cat([prefill.keys, keys], dim=1)[:, :sinks])
    assert torch.equal(mine[1][:, :sinks], all_values[:, :sinks])
    # an element halfway between two levels may go either way
    for x, y in ((mine[0], expected_keys), (mine[1], expected[1])):
        apart = ~torch.isclose(x[:, sinks:], y[:, sinks:], rtol=1e-3, atol=1e-3)  # empty where all are sinks
        assert int(apart.sum()) <= apart.numel() * (0.01 if apart.numel() >= 100 else 0.1)


@settings(max_examples=20)
@given(st.integers(4, 120), st.sampled_from([0.0, 0.05, 0.2]), st.booleans(), st.integers(0, 99))
def test_key_ranges_leave_exactly_the_outliers_out(tokens: int, outliers: float, ties: bool, seed: int) -> None:
    prefill, _, _ = make_row(tokens=tokens, dim=4, seed=seed)
    keys = unrotated(prefill, prefill.keys)
    if ties:
        keys = keys.round()
    known = measure_layer(keys, prefill.values, 2, outliers)
    rows = side_by_side(keys)
    for channel in range(rows.shape[1]):
        lower, upper = key_thresholds(rows[:, channel].tolist(), outliers)
        assert (float(known.lower[channel]), float(known.upper[channel])) == (lower, upper)
    outside = ((rows < known.lower) | (rows > known.upper)).sum(dim=0)
    most = 2 * round(outliers / 2 * tokens)
    assert (outside <= most).all()
    assert ties or (outside == most).all()


@given(st.integers(2, 300), st.sampled_from([0.0, 0.01, 0.3]), st.booleans(), st.integers(0, 99))
@settings(max_examples=30)
def test_every_token_has_the_same_number_of_value_outliers(
    channels: int, outliers: float, ties: bool, seed: int
) -> None:
    rows = torch.randn(3, channels, generator=torch.Generator().manual_seed(seed))
    rows = rows.round() if ties else rows
    split = split_values(rows[None], outliers)
    for token, row in enumerate(rows.tolist()):
        outside = token_outliers(row, outliers)
        assert sorted(split.channels[token].tolist()) == sorted(outside)
        inside = [x for channel, x in enumerate(row) if channel not in outside]
        assert (float(split.lower[token]), float(split.upper[token])) == (min(inside), max(inside))


@settings(max_examples=20)
@given(st.integers(1, 300), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_levels_are_those_of_slow_clustering(size: int, bits: int, norm: bool, seed: int) -> None:
    sample = torch.randn(size, generator=torch.Generator().manual_seed(seed)).tanh()
    levels, decoded = find_levels(sample, None, bits, norm).tolist()
    expected = kmeans(sample.tolist(), 1 << bits)
    assert levels == pytest.approx(expected, abs=1e-5)
    if norm and np.std([min(expected, key=lambda level: abs(level - x)) for x in sample.tolist()]) > 0:
        assert decoded == pytest.approx(same_moments(expected, sample.tolist()), abs=1e-4)
    elif not norm:
        assert decoded == levels


def test_weights_draw_levels_to_what_matters() -> None:
    sample = torch.linspace(-1, 1, 2001)
    weights = torch.where(sample > 0, 100.0, 1.0)
    plain, weighted = (find_levels(sample, given_weights, 2, False)[0] for given_weights in (None, weights))
    assert int((weighted > 0).sum()) > int((plain > 0).sum())


def test_levels_beat_an_even_grid_on_real_shapes() -> None:
    sample = torch.randn(5000, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) / 3
    levels = find_levels(sample, None, 2, False)[0]
    even = torch.linspace(-1, 1, 4)

    def error(levels: Tensor) -> float:
        return float((sample[:, None] - levels).abs().amin(dim=1).square().mean())

    assert error(levels) < error(even) / 2
    assert unit(0.5, 0.0, 1.0) == 0


def test_statistics_stay_those_of_the_prompt() -> None:
    prefill, keys, values = make_row(tokens=60, dim=8, new=20)
    [store] = KVQuant(3).compress([prefill], allow(prefill, new=20))
    assert isinstance(store, KVQuantStore)
    codes = store.key_codes.rows.clone(), store.value_codes.rows.clone()
    lower = store.statistics.lower.clone()
    keys[:, 5] = 100  # far outside of any range: kept exactly
    for token in range(20):
        feed(store, keys[:, token : token + 1], values[:, token : token + 1])
    assert torch.equal(store.statistics.lower, lower)
    assert torch.equal(store.key_codes.rows[:59], codes[0])
    assert torch.equal(store.value_codes.rows[:59], codes[1])
    assert torch.allclose(torch.stack(held(store)[0])[:, 65], keys[:, 5], rtol=1e-3)


def test_bytes_are_counted_by_hand() -> None:
    prefill, keys, values = make_row(heads=2, tokens=201, dim=16, new=40, dtype=torch.float16)
    [store] = KVQuant(2).compress([prefill], allow(prefill, new=40))
    token = 2 * 8 + 4 + 2 * 4 + 2  # codes of 2 x 32 channels, a range, 2 outliers, the number of the key's
    key_outliers = 2 * 32  # 1 % of 200 tokens of each channel, at most
    statistics = 2 * 32 * 4 + 2 * 2 * 4 * 4
    exact = 2 * 2 * 2 * 16 * 2  # the sink and the newest token
    memory = store.memory()
    assert memory.codes == 200 * 16
    assert memory.parameters == 200 * (token - 16) + key_outliers * 4 + statistics
    assert memory.reserved == 240 * token + (key_outliers + round(0.01 * 32 * 40)) * 4 + statistics + exact + 32
    for step in range(40):
        feed(store, keys[:, step : step + 1], values[:, step : step + 1])
        assert store.memory().used <= store.memory().reserved


def test_a_draft_can_be_undone() -> None:
    prefill, keys, values = make_row(tokens=30, new=12)
    [store] = KVQuant(4).compress([prefill], allow(prefill, new=12))
    other, reserved = store.copy(), store.memory().reserved
    feed(store, keys[:, :9], values[:, :9])
    assert store.memory().reserved == reserved
    store.undo(6)
    feed(store, keys[:, 3:4], values[:, 3:4])
    feed(other, keys[:, :3], values[:, :3])
    feed(other, keys[:, 3:4], values[:, 3:4])
    for mine, theirs in zip(held(store), held(other), strict=True):
        assert torch.equal(torch.stack(mine), torch.stack(theirs))
    assert store.memory() == other.memory()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("constant", [0.0, 1e-6, 6e4])
@pytest.mark.parametrize("dim", [80, 96])
def test_extremes_stay_finite(constant: float, dtype: torch.dtype, dim: int) -> None:
    prefill, _, _ = make_row(tokens=12, dim=dim, dtype=dtype)
    x = torch.full((2, 12, dim), constant, dtype=dtype)
    x[0, 3, 0] = -constant
    known = measure_layer(x, x, 2, 0.01)
    store = KVQuantStore(prefill, KVQuant(), known, 0, dtype)
    store._encode(x.float(), x)
    for decoded in (store._decode_keys()[-12:], store._decode_values()[-12:]):
        assert decoded.half().isfinite().all()
        assert torch.allclose(decoded, side_by_side(x), rtol=2e-3, atol=1e-6)


# Calibration


def test_a_calibration_is_saved_loaded_and_used(tmp_path: Path) -> None:
    model, ids = endless(), prompt(50)
    texts = [prompt(70, seed=1), prompt(40, seed=2)]
    measured = KVQuantCalibration.measure(model, texts, name="noise", bits=8)
    measured.save(tmp_path / "noise.safetensors")
    loaded = KVQuantCalibration.load(tmp_path / "noise.safetensors")
    assert (loaded.name, loaded.bits, loaded.outliers, list(loaded.layers)) == ("noise", 8, 0.01, [0, 1])
    for index, layer in measured.layers.items():
        assert all(torch.equal(x, y) for x, y in zip(layer, loaded.layers[index], strict=True))
    method = KVQuant(8, calibration=loaded)
    assert method.label == "kvquant-8@noise"
    assert list(method.variants()) == [method]
    logits = []
    for each in (method, KVQuant(8)):
        cache = MethodCache(model, each, max_new_tokens=2)
        forward(model, cache, ids)
        logits.append(forward(model, cache, ids[:, :1]))
    exact = forward(model, None, torch.cat([ids, ids[:, :1]], dim=1))[:, -1:]
    assert (logits[0] - exact).norm() < 0.1 * exact.norm()
    assert not torch.equal(*logits)


def test_a_calibration_measures_keys_before_rotation() -> None:
    model, ids = endless(), prompt(30)
    seen: list[Tensor] = []
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *call: seen.append(call[2]))
    measured = KVQuantCalibration.measure(model, [ids], name="x", bits=2, outliers=0.0, sinks=0)
    handle.remove()
    assert torch.allclose(measured.layers[0].lower, seen[0][0].amin(dim=0), atol=1e-4)
    assert torch.allclose(measured.layers[0].upper, seen[0][0].amax(dim=0), atol=1e-4)


def test_a_calibration_for_something_else_is_refused(tmp_path: Path) -> None:
    model = endless()
    measured = KVQuantCalibration.measure(model, [prompt(30)], name="noise", bits=2)
    with pytest.raises(ValueError, match=r"is for 2 bits and outliers=.*, not for 3 bits"):
        KVQuant(3, calibration=measured)
    other = endless(num_key_value_heads=4)
    cache = MethodCache(other, KVQuant(2, calibration=measured))
    with pytest.raises(ValueError, match="for another model: layer 0 has 4 KV heads"):
        forward(other, cache, prompt(30))
    with pytest.raises(ValueError, match="at least one text"):
        KVQuantCalibration.measure(model, [], name="none", bits=2)
    save_file({"x": torch.zeros(1)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(ValueError, match="holds no KVQuant calibration"):
        KVQuantCalibration.load(tmp_path / "x.safetensors")


def test_names_and_settings() -> None:
    assert [method.label for method in KVQuant().variants()] == [f"kvquant-{bits}" for bits in (4, 3, 2)]
    for wrong, said in (({"bits": 9}, "bits is 9"), ({"outliers": 0.6}, "outliers is 0.6"), ({"sinks": -1}, "sinks")):
        with pytest.raises(ValueError, match=said):
            KVQuant(**wrong)
