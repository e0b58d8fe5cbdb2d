"""KIVI's codec: its bytes to the unit, head sizes that are no whole number of groups, and each half by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qevict.codecs import KiviCodec, MinMaxCodec, WindowShape, get_codecs
from reference.quantisers import kivi_window

widths = st.sampled_from((2, 3, 4, 8))


def random_windows(shape: WindowShape, *windows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys with outlier channels and a bias, and values."""
    generator = torch.Generator().manual_seed(seed)
    size = (2, *windows, shape.heads, shape.tokens, shape.head_dim)
    spread = torch.exp(2 * torch.randn(shape.head_dim, generator=generator))
    keys, values = torch.randn(size, generator=generator) * spread + 5
    return keys, values


@given(
    st.builds(WindowShape, heads=st.integers(1, 2), tokens=st.integers(1, 9), head_dim=st.integers(1, 11)),
    widths,
    widths,
    st.integers(1, 8),
    st.integers(0, 99),
)
def test_same_bytes_as_the_slow_definition(
    shape: WindowShape, key_bits: int, value_bits: int, channels: int, seed: int
) -> None:
    keys, values = random_windows(shape, seed=seed)
    packed = KiviCodec(key_bits, value_bits, channels).encode(keys, values)
    assert bytes(packed.tolist()) == kivi_window(keys, values, key_bits, value_bits, channels)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_bytes_of_a_window(dim: int) -> None:
    layout = KiviCodec(2, 2).layout(WindowShape(heads=2, tokens=32, head_dim=dim))
    groups = -(-dim // 32)
    assert layout.code_bytes == 2 * 2 * 32 * dim * 2 // 8
    assert layout.parameter_bytes == 2 * 2 * (2 * dim + 2 * 32 * groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [80, 96])
def test_every_element_is_within_half_a_step(dtype: torch.dtype, dim: int) -> None:
    shape = WindowShape(heads=3, tokens=32, head_dim=dim)
    keys, values = (x.to(dtype) for x in random_windows(shape, 4))
    codec = KiviCodec(4, 4)
    packed = codec.encode(keys, values)
    arrays = codec.layout(shape).view(packed)
    decoded_keys, decoded_values = codec.decode(packed, shape)
    key_step = arrays["key_scale"].float()[..., None, :]
    value_step = arrays["value_scale"].float().repeat_interleave(32, dim=-1)[..., :dim]
    assert ((decoded_keys - keys.float()).abs() <= key_step / 2 + 1e-4).all()
    assert ((decoded_values - values.float()).abs() <= value_step / 2 + 1e-4).all()


def test_an_outlier_harms_its_own_group_of_channels_only() -> None:
    keys, values = random_windows(WindowShape(1, 1, 64))
    values[..., 0] = 1000
    decoded = KiviCodec(2, 2).decode(KiviCodec(2, 2).encode(keys, values), WindowShape(1, 1, 64))[1]
    plain = MinMaxCodec(2, 2).decode(MinMaxCodec(2, 2).encode(keys, values), WindowShape(1, 1, 64))[1]
    error = (decoded - values)[..., 32:].abs().amax()
    assert error < (plain - values)[..., 32:].abs().amax() / 2


@given(st.sampled_from([0.0, 1e-6, -6e4, 7e4, 3.5]), widths)
def test_constant_windows_come_back(constant: float, bits: int) -> None:
    shape = WindowShape(2, 5, 40)
    x = torch.full((2, 5, 40), constant)
    for decoded in KiviCodec(bits, bits).decode(KiviCodec(bits, bits).encode(x, x), shape):
        assert decoded.half().isfinite().all()
        assert torch.allclose(decoded, x.clamp(-65376, 65376), rtol=1e-3, atol=6e-8)


def test_each_half_alone_decodes_to_the_same() -> None:
    shape, codec = WindowShape(2, 7, 40), KiviCodec(2, 4, channels=16)
    keys, values = random_windows(shape, 3)
    together = codec.decode(codec.encode(keys, values), shape)
    for half, x, decoded in zip((codec.key_half, codec.value_half), (keys, values), together, strict=True):
        packed = half.encode(x)
        assert packed.shape == (3, half.layout(shape).nbytes)
        assert torch.equal(half.decode(packed, shape), decoded)


def test_no_windows() -> None:
    shape = WindowShape(2, 7, 40)
    keys, values = random_windows(shape, 0)
    assert KiviCodec().decode(KiviCodec().encode(keys, values), shape)[0].shape == (0, 2, 7, 40)


def test_settings_are_checked() -> None:
    assert [*get_codecs("kivi", 4)] == [KiviCodec(4, 4)]
    for wrong in ({"key_bits": 5}, {"value_bits": 1}, {"channels": 0}):
        with pytest.raises(ValueError, match="kivi codec"):
            KiviCodec(**wrong)
