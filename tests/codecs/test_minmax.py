"""The paper's codec: its bytes to the unit, its error bound, and inputs that break careless quantisers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.codecs import Codec, MinMaxCodec, WindowLayout, WindowShape, get_codecs
from reference.codecs import decode_row, encode_window

WIDTHS = (2, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

widths = st.sampled_from(WIDTHS)
shapes = st.builds(
    WindowShape, heads=st.integers(1, 3), tokens=st.integers(1, 64), head_dim=st.sampled_from([60, 80, 96])
)
small_shapes = st.builds(WindowShape, heads=st.integers(1, 3), tokens=st.integers(1, 9), head_dim=st.integers(1, 9))


def random_windows(shape: WindowShape, *windows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values with the outlier channels and biases that real ones have."""
    generator = torch.Generator().manual_seed(seed)
    size = (2, *windows, shape.heads, shape.tokens, shape.head_dim)
    spread = torch.exp(2 * torch.randn(shape.head_dim, generator=generator))
    keys, values = torch.randn(size, generator=generator) * spread + 5 * torch.randn(
        shape.head_dim, generator=generator
    )
    return keys, values


def group_scales(codec: MinMaxCodec, packed: Tensor, shape: WindowShape) -> tuple[Tensor, Tensor]:
    """Scale of each element's group, for keys and for values, broadcastable to [heads, tokens, dim]."""
    arrays = codec.layout(shape).view(packed)
    return arrays["key_scale"].float().unsqueeze(-2), arrays["value_scale"].float().unsqueeze(-1)


def assert_error_bound(codec: MinMaxCodec, keys: Tensor, values: Tensor) -> None:
    """Each element is decoded within half a scale of what it was."""
    shape = WindowShape(*keys.shape[-3:])
    packed = codec.encode(keys, values)
    for x, decoded, scale in zip(
        (keys, values), codec.decode(packed, shape), group_scales(codec, packed, shape), strict=True
    ):
        slack = 1e-6 * x.float().abs().amax()  # float32 rounding in the codec and here
        assert decoded.isfinite().all()
        assert ((decoded - x.float()).abs() <= scale / 2 + slack).all()


# The byte contract


def test_bytes_of_the_papers_window() -> None:
    layout = MinMaxCodec(2, 2).layout(WindowShape(heads=8, tokens=8, head_dim=128))
    assert (layout.code_bytes, layout.parameter_bytes, layout.nbytes) == (4096, 4352, 8448)


@given(small_shapes, widths, widths, st.integers(0, 99))
def test_same_bytes_as_the_slow_definition(shape: WindowShape, key_bits: int, value_bits: int, seed: int) -> None:
    keys, values = random_windows(shape, seed=seed)
    packed = MinMaxCodec(key_bits, value_bits).encode(keys, values)
    assert bytes(packed.tolist()) == encode_window(keys, values, key_bits, value_bits)


@given(shapes, widths, widths)
def test_layout_is_aligned_and_complete(shape: WindowShape, key_bits: int, value_bits: int) -> None:
    layout = MinMaxCodec(key_bits, value_bits).layout(shape)
    end = 0
    for section in layout.sections:
        assert section.offset % 4 == 0
        assert 0 <= section.offset - end < 4  # sections follow one another, apart from padding
        end = section.offset + section.nbytes
    assert layout.nbytes % 4 == 0
    assert 0 <= layout.nbytes - end < 4
    assert layout.code_bytes == layout.sections[2].offset


def test_view_shares_memory_and_refuses_another_size() -> None:
    layout = WindowLayout.build(codes={"a": ((3,), torch.uint8)}, parameters={"b": ((2, 1), torch.float16)})
    assert (layout.code_bytes, layout.parameter_bytes) == (4, 4)
    packed = torch.zeros(5, layout.nbytes, dtype=torch.uint8)
    layout.view(packed)["b"].fill_(1)
    assert packed[4].tolist() == [0, 0, 0, 0, 0x00, 0x3C, 0x00, 0x3C]
    with pytest.raises(ValueError, match="has 8 bytes, not 7"):
        layout.view(packed[:, :7])


# Properties of every codec


@given(shapes, widths, widths, st.sampled_from(DTYPES), st.integers(0, 99))
@settings(max_examples=50)
def test_error_is_at_most_half_a_scale(
    shape: WindowShape, key_bits: int, value_bits: int, dtype: torch.dtype, seed: int
) -> None:
    keys, values = random_windows(shape, seed=seed)
    assert_error_bound(MinMaxCodec(key_bits, value_bits), keys.to(dtype), values.to(dtype))


@given(small_shapes, st.lists(st.integers(0, 3), max_size=3), widths)
def test_any_window_dimensions(shape: WindowShape, windows: list[int], bits: int) -> None:
    codec = MinMaxCodec(bits, bits)
    keys, values = random_windows(shape, *windows)
    packed = codec.encode(keys, values)
    assert packed.shape == (*windows, codec.layout(shape).nbytes)
    decoded_keys, decoded_values = codec.decode(packed, shape)
    assert decoded_keys.shape == decoded_values.shape == keys.shape


@given(shapes, widths, st.integers(0, 99))
@settings(max_examples=15)
def test_a_window_does_not_depend_on_the_others(shape: WindowShape, bits: int, seed: int) -> None:
    codec = MinMaxCodec(bits, bits)
    keys, values = random_windows(shape, 2, 3, seed=seed)
    packed = codec.encode(keys, values)
    alone = codec.encode(keys[1, 2].clone(), values[1, 2].clone())
    assert torch.equal(packed[1, 2], alone)
    together, single = codec.decode(packed, shape), codec.decode(alone, shape)
    assert torch.equal(together[0][1, 2], single[0])
    assert torch.equal(together[1][1, 2], single[1])


@given(shapes, widths, st.integers(0, 99))
@settings(max_examples=15)
def test_encoding_is_deterministic_whatever_the_strides(shape: WindowShape, bits: int, seed: int) -> None:
    codec = MinMaxCodec(bits, bits)
    keys, values = random_windows(shape, 3, seed=seed)
    as_in_attention = [x.transpose(-2, -3).contiguous().transpose(-2, -3) for x in (keys, values)]
    assert torch.equal(codec.encode(keys, values), codec.encode(*as_in_attention))


def test_windows_are_decoded_in_place_from_a_larger_buffer() -> None:
    codec, shape = MinMaxCodec(3, 2), WindowShape(2, 5, 60)
    packed = codec.encode(*random_windows(shape, 4))
    buffer = torch.full((4, packed.shape[-1] + 20), 255, dtype=torch.uint8)
    slots = buffer[:, 12:-8]
    slots.copy_(packed)
    assert torch.equal(codec.decode(slots, shape)[0], codec.decode(packed, shape)[0])
    assert torch.equal(codec.decode(slots, shape)[1], codec.decode(packed, shape)[1])


def test_codes_carry_no_gradient() -> None:
    keys, values = random_windows(WindowShape(2, 8, 60))
    packed = MinMaxCodec().encode(keys, values)
    tracked = MinMaxCodec().encode(keys.requires_grad_(), values.requires_grad_())
    assert torch.equal(tracked, packed)
    assert not any(x.requires_grad for x in MinMaxCodec().decode(tracked, WindowShape(2, 8, 60)))


def test_negative_zero_is_zero() -> None:
    keys = torch.tensor([0.0, -0.0, 0.0]).reshape(1, 3, 1)
    codec, zeros = MinMaxCodec(), torch.zeros(1, 3, 1)
    assert not codec.encode(keys, -zeros).any()
    assert torch.equal(codec.encode(keys, zeros), codec.encode(-keys, -zeros))


# Inputs that break careless quantisers


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [0.0, 1.0, -0.3, 1e-6, 123.4, 6e4, -6e4])
def test_constant_windows_come_back(number: float, dtype: torch.dtype, bits: int) -> None:
    x = torch.full((2, 8, 60), number, dtype=dtype)
    shape = WindowShape(2, 8, 60)
    for decoded in MinMaxCodec(bits, bits).decode(MinMaxCodec(bits, bits).encode(x, x), shape):
        torch.testing.assert_close(decoded, x.float(), rtol=2**-12, atol=2**-25)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6e4, 1e-6, 1e-7])
def test_extreme_ranges_keep_the_error_bound(size: float, dtype: torch.dtype, bits: int) -> None:
    keys, values = (size * torch.rand(2, 3, 8, 96, generator=torch.Generator().manual_seed(0)) * 2 - size).to(dtype)
    assert_error_bound(MinMaxCodec(bits, bits), keys, values)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_numbers_are_clamped_to_finite_ones(dtype: torch.dtype, bits: int) -> None:
    largest = min(3e38, torch.finfo(dtype).max)
    keys = torch.rand(2, 8, 80, generator=torch.Generator().manual_seed(0))
    keys[0, :, 0], keys[0, 3, 1], keys[0, 5, 1], keys[1, :, 2] = largest, largest, -largest, -largest
    keys[0, 1, 0] = 65504
    keys = keys.to(dtype)
    codec = MinMaxCodec(bits, bits)
    decoded = codec.decode(codec.encode(keys, keys), WindowShape(2, 8, 80))
    for x in decoded:
        for kept_in in DTYPES:
            assert x.to(kept_in).isfinite().all()
        torch.testing.assert_close(x[0, :, 0], torch.full((8,), 65440.0), rtol=1e-3, atol=0)
    torch.testing.assert_close(decoded[0][0, [3, 5], 1], torch.tensor([65440.0, -65440.0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_huge_channel_does_not_spoil_small_ones(bits: int) -> None:
    keys = torch.rand(1, 8, 128, generator=torch.Generator().manual_seed(0))
    keys[..., 7] *= 6e4
    codec = MinMaxCodec(bits, bits)
    decoded, _ = codec.decode(codec.encode(keys, keys), WindowShape(1, 8, 128))
    small = torch.arange(128) != 7
    assert (decoded - keys)[..., small].abs().max() <= 0.51 / (2**bits - 1)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_large_bias_does_not_swallow_a_small_range(bits: int) -> None:
    """Around 100 float16 numbers lie 0.06 apart: rounding the offset to the nearest one would lose half of it."""
    keys = 100.03 + 0.04 * torch.rand(1, 32, 60, generator=torch.Generator().manual_seed(0))
    codec = MinMaxCodec(bits, bits)
    decoded, _ = codec.decode(codec.encode(keys, keys), WindowShape(1, 32, 60))
    assert (decoded - keys).abs().max() <= 0.51 * (0.04 + 0.0625) / (2**bits - 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_a_window_of_one_token_cost_only_rounding(dtype: torch.dtype) -> None:
    keys, values = random_windows(WindowShape(2, 1, 80))
    keys, values = keys.to(dtype), values.to(dtype)
    decoded, _ = MinMaxCodec().decode(MinMaxCodec().encode(keys, values), WindowShape(2, 1, 80))
    torch.testing.assert_close(decoded, keys.float(), rtol=2**-11, atol=1e-7)


@given(st.lists(st.floats(-7e4, 7e4, width=32), min_size=1, max_size=16), widths)
def test_a_group_of_any_numbers_decodes_as_defined(row: list[float], bits: int) -> None:
    codec, shape = MinMaxCodec(bits, bits), WindowShape(1, len(row), 1)
    x = torch.tensor(row).reshape(1, -1, 1)
    keys, _ = codec.decode(codec.encode(x, x), shape)
    assert keys.flatten().tolist() == decode_row(row, bits)


# What users may pass


@pytest.mark.parametrize("bits", [0, 1, 5, 6, 7, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"key_bits of the minmax codec is one of 2, 3, 4, 8, not {bits}"):
        MinMaxCodec(key_bits=bits)
    with pytest.raises(ValueError, match=f"value_bits .* not {bits}"):
        MinMaxCodec(value_bits=bits)


def test_a_window_of_another_shape_is_refused() -> None:
    codec = MinMaxCodec()
    packed = codec.encode(*random_windows(WindowShape(2, 8, 64)))
    with pytest.raises(ValueError, match="has 1664 bytes, not 1088"):
        codec.decode(packed, WindowShape(2, 16, 64))


def test_keys_and_values_of_different_shapes_are_refused() -> None:
    keys, values = random_windows(WindowShape(2, 8, 64))
    with pytest.raises((ValueError, TypeError)):  # the shape checks of the test run may come first
        MinMaxCodec().encode(keys, values[:1])


@pytest.mark.parametrize("sizes", [(0, 8, 64), (2, 0, 64), (2, 8, -1)])
def test_empty_windows_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        WindowShape(*sizes)


def test_codecs_by_name() -> None:
    assert [*get_codecs("minmax", 3)] == [MinMaxCodec(key_bits=3, value_bits=3)]
    assert isinstance(next(get_codecs("minmax", 2)), Codec)
    with pytest.raises(ValueError, match="unknown codec 'gzip': the known ones are allotted, kivi, minmax, turboquant"):
        list(get_codecs("gzip", 2))
    with pytest.raises(ValueError, match="2, 3, 4, 8, not 5"):
        list(get_codecs("minmax", 5))
