"""Packed codes come back, in the documented bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qevict.codecs.packing import pack, packed_size, unpack
from reference.codecs import pack_row, unpack_row

WIDTHS = range(1, 9)
bits_of_codes = st.integers(1, 8)
lengths = st.integers(0, 70)


def random_codes(*shape: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)


@given(bits_of_codes, lengths, st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99))
def test_round_trip(bits: int, length: int, rows: list[int], seed: int) -> None:
    codes = random_codes(*rows, length, bits=bits, seed=seed)
    packed = pack(codes, bits)
    assert packed.shape == (*rows, packed_size(length, bits))
    assert torch.equal(unpack(packed, bits, length), codes)


@given(bits_of_codes, lengths, st.integers(0, 99))
def test_same_bytes_as_bit_by_bit(bits: int, length: int, seed: int) -> None:
    codes = random_codes(length, bits=bits, seed=seed)
    packed = pack(codes, bits)
    assert bytes(packed.tolist()) == pack_row(codes.tolist(), bits)
    assert unpack(packed, bits, length).tolist() == unpack_row(bytes(packed.tolist()), bits, length)


def test_documented_examples() -> None:
    two = torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8)
    assert pack(two, 2).tolist() == [0b00_11_10_01, 0b10]
    three = torch.tensor([0b101, 0b010, 0b111, 0b100, 0b001], dtype=torch.uint8)
    assert pack(three, 3).tolist() == [0b00_11_10_01, 0b01, 0b0_1_1_0_1]


@pytest.mark.parametrize("bits", WIDTHS)
def test_size_is_whole_bytes_per_plane(bits: int) -> None:
    assert packed_size(8, bits) == bits  # eight codes fill every plane exactly
    assert packed_size(1, bits) == bin(bits).count("1")
    assert packed_size(0, bits) == 0


@pytest.mark.parametrize("bits", WIDTHS)
def test_transposed_codes(bits: int) -> None:
    codes = random_codes(5, 12, bits=bits)
    assert torch.equal(unpack(pack(codes.mT, bits), bits, 5), codes.mT)


@pytest.mark.parametrize("bits", range(1, 8))
def test_bits_beyond_the_width_do_not_reach_neighbours(bits: int) -> None:
    codes = random_codes(3, 13, bits=8)
    assert torch.equal(unpack(pack(codes, bits), bits, 13), codes & (1 << bits) - 1)


@pytest.mark.parametrize("bits", [0, 9, -2])
def test_unknown_width_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 8 bits, not {bits}"):
        pack(random_codes(4, bits=1), bits)


def test_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="8 codes of 3 bits takes 3 bytes, not 2"):
        unpack(random_codes(2, bits=8), 3, 8)
