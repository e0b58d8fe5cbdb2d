"""TurboQuant's codec: its levels, its codes against a slow rotation, its error, and inputs that break quantisers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contract.driver import endless, generate, prompt
from qevict import QEvictCache, QEvictConfig
from qevict.codecs import TurboQuantCodec, WindowShape, get_codecs
from qevict.codecs.turboquant import hadamard, lloyd_max_levels, random_signs
from reference.quantisers import blocks, sylvester, turboquant_block, turboquant_levels


def random_windows(shape: WindowShape, *windows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys with channels of very different size, and values."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, *windows, shape.heads, shape.tokens, shape.head_dim, generator=generator)
    return keys * torch.exp(torch.randn(shape.head_dim, generator=generator)), values


def relative_error(codec: TurboQuantCodec, x: Tensor) -> float:
    """Mean squared error of keys, as a share of their mean square."""
    decoded = codec.decode(codec.encode(x, x), WindowShape(*x.shape[-3:]))[0]
    return float((decoded - x).square().sum() / x.square().sum())


# Levels


def test_levels_of_many_dimensions_are_those_of_the_normal_distribution() -> None:
    # Max (1960), table I: the best 4 and 8 levels for a normal variable.
    assert lloyd_max_levels(4096, 2) == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=2e-3)
    assert lloyd_max_levels(4096, 3)[4:] == pytest.approx([0.2451, 0.7560, 1.344, 2.152], abs=3e-3)


@pytest.mark.parametrize(("size", "bits"), [(4, 2), (16, 3), (64, 4)])
def test_levels_are_those_that_a_sample_leads_to(size: int, bits: int) -> None:
    assert lloyd_max_levels(size, bits) == pytest.approx(turboquant_levels(size, bits), abs=0.03)


@pytest.mark.parametrize("size", [4, 8, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_levels_are_ascending_and_symmetric(size: int, bits: int) -> None:
    levels = torch.tensor(lloyd_max_levels(size, bits), dtype=torch.float64)
    assert len(levels) == 2**bits
    assert (levels.diff() > 0).all()
    assert torch.equal(levels, -levels.flip(0))
    assert levels[-1] < math.sqrt(size)


# Rotation and codes


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_rotation_is_the_hadamard_matrix(size: int) -> None:
    matrix = torch.tensor(sylvester(size))
    assert torch.allclose(hadamard(torch.eye(size)), matrix, atol=1e-6)
    assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-6)


@given(
    st.sampled_from([4, 12, 16, 20, 28]),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 20),
)
def test_codes_scales_and_decoded_are_those_of_the_slow_definition(
    dim: int, bits: int, keep_norm: bool, seed: int
) -> None:
    shape = WindowShape(2, 3, dim)
    keys, values = random_windows(shape, seed=seed)
    codec = TurboQuantCodec(bits, bits, keep_norm, seed)
    packed = codec.encode(keys, values)
    for x, decoded in zip((keys, values), codec.decode(packed, shape), strict=True):
        for head in range(2):
            for token in range(3):
                for start, size in blocks(dim):
                    row = x[head, token, start : start + size].tolist()
                    signs = random_signs(size, seed, x.device).tolist()
                    expected = turboquant_block(row, signs, lloyd_max_levels(size, bits), keep_norm)[2]
                    tolerance = 2e-3 * max(map(abs, row))  # a float16 scale that rounds the other way
                    assert decoded[head, token, start : start + size].tolist() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_distortion_is_the_papers(bits: int, distortion: float, dim: int) -> None:
    keys, values = random_windows(WindowShape(2, 200, dim))
    codec = TurboQuantCodec(bits, bits, keep_norm=False)
    # section 3.1 of the paper: mean squared error of unit vectors; fewer large channels make it smaller
    assert relative_error(codec, values) == pytest.approx(distortion, rel=0.12)
    assert relative_error(codec, keys) < distortion * 1.12
    assert relative_error(TurboQuantCodec(bits, bits), values) < distortion * 1.35


def test_lengths_are_kept() -> None:
    _, values = random_windows(WindowShape(2, 50, 64))
    for keep_norm, ratio in ((True, 1.0), (False, math.sqrt(1 - 0.117))):
        codec = TurboQuantCodec(2, 2, keep_norm)
        decoded = codec.decode(codec.encode(values, values), WindowShape(2, 50, 64))[0]
        assert float((decoded.norm(dim=-1) / values.norm(dim=-1)).mean()) == pytest.approx(ratio, abs=2e-3)


def test_bytes() -> None:
    layout = TurboQuantCodec(3, 4).layout(WindowShape(heads=2, tokens=16, head_dim=128))
    assert layout.code_bytes == 2 * 16 * (48 + 64)
    assert layout.parameter_bytes == 2 * 16 * 2 * 2
    blocks_of_96 = TurboQuantCodec(4, 4).layout(WindowShape(heads=2, tokens=16, head_dim=96))
    assert blocks_of_96.parameter_bytes == 2 * 16 * 2 * 2 * 2  # 64 and 32


# Rules of every codec


def test_a_tokens_codes_do_not_depend_on_the_others() -> None:
    keys, values = random_windows(WindowShape(3, 1, 96), 257)
    codec = TurboQuantCodec(4, 2)
    whole = codec.encode(keys, values)
    assert torch.equal(whole, torch.stack([codec.encode(k, v) for k, v in zip(keys, values, strict=True)]))
    assert codec.encode(keys[:0], values[:0]).shape == (0, whole.shape[1])
    assert codec.decode(whole[:0], WindowShape(3, 1, 96))[0].shape == (0, 3, 1, 96)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_16_bit_inputs_are_those_of_their_values(dtype: torch.dtype) -> None:
    keys, values = (x.to(dtype) for x in random_windows(WindowShape(2, 8, 64)))
    codec = TurboQuantCodec()
    assert torch.equal(codec.encode(keys, values), codec.encode(keys.float(), values.float()))


@given(st.sampled_from([0.0, 1e-6, 6e4, -7e4]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_extremes_stay_finite(constant: float, bits: int, keep_norm: bool) -> None:
    x = torch.full((2, 3, 64), constant)
    x[0, 0, 0] = -constant
    codec = TurboQuantCodec(bits, bits, keep_norm)
    for decoded in codec.decode(codec.encode(x, x), WindowShape(2, 3, 64)):
        assert decoded.half().isfinite().all()
        assert decoded.bfloat16().isfinite().all()
        assert constant or not decoded.any()
        assert float((decoded - x).norm()) <= float(x.norm())


def test_settings_are_checked() -> None:
    assert [*get_codecs("turboquant", 3)] == [TurboQuantCodec(3, 3)]
    for bits in (0, 9):
        with pytest.raises(ValueError, match="from 1 to 8"):
            TurboQuantCodec(key_bits=bits)
    for dim in (2, 6, 66):
        with pytest.raises(ValueError, match="multiple of 4"):
            TurboQuantCodec().layout(WindowShape(1, 1, dim))


def test_qevict_runs_on_it() -> None:
    model = endless(head_dim=32)
    config = QEvictConfig(budget=0.4, codec="turboquant", bits=4, window_size=4, sink_tokens=1, recent_tokens=4)
    cache = QEvictCache(model, config, max_new_tokens=20)
    assert generate(model, cache, prompt(60), 20).shape == (1, 20)
    assert cache.memory().codes > 0
    assert cache.memory().overshoot == 0
