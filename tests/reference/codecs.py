"""Slow, obvious codecs: loops over elements and bits, written from the documented bytes, sharing no code with qevict.

Rows are lists of numbers, packed rows and windows are `bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

PLANES = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}
LIMIT = 65376.0


def pack_row(codes: Sequence[int], bits: int) -> bytes:
    """Write the codes bit by bit, plane after plane."""
    packed, first_bit = b"", 0
    for width in PLANES[bits]:
        stream = [code >> first_bit + bit & 1 for code in codes for bit in range(width)]
        stream += [0] * (-len(stream) % 8)
        packed += bytes(sum(stream[start + bit] << bit for bit in range(8)) for start in range(0, len(stream), 8))
        first_bit += width
    return packed


def unpack_row(packed: bytes, bits: int, length: int) -> list[int]:
    """Read the codes bit by bit, plane after plane."""
    codes, first_bit, first_byte = [0] * length, 0, 0
    for width in PLANES[bits]:
        for element in range(length):
            for bit in range(width):
                position = element * width + bit
                codes[element] |= (packed[first_byte + position // 8] >> position % 8 & 1) << first_bit + bit
        first_byte += (length * width + 7) // 8
        first_bit += width
    return codes


def quantize_row(row: Sequence[float], bits: int) -> tuple[list[int], np.float16, np.float16]:
    """Codes, scale and offset of one group of min-max quantisation."""
    levels = 2**bits - 1
    numbers = [np.float32(min(max(x, -LIMIT), LIMIT)) for x in row]
    offset = float16_below(min(numbers))
    scale = -float16_below((np.float32(offset) - max(numbers)) / np.float32(levels))
    codes = []
    for x in numbers:
        steps = (x - np.float32(offset)) / np.float32(scale) if scale > 0 else 0.0
        codes.append(min(max(round(float(steps)), 0), levels))
    return codes, abs(scale), offset


def decode_row(row: Sequence[float], bits: int) -> list[float]:
    """What one group of min-max quantisation is decoded as."""
    codes, scale, offset = quantize_row(row, bits)
    return [float(np.float32(code) * np.float32(scale) + np.float32(offset)) for code in codes]


def float16_below(x: np.float32) -> np.float16:
    """The largest float16 that is not above x."""
    nearest = np.float16(x + np.float32(0))  # never -0
    return np.nextafter(nearest, np.float16(-np.inf)) if np.float32(nearest) > x else nearest


def encode_window(keys: Tensor, values: Tensor, key_bits: int, value_bits: int) -> bytes:
    """The bytes of one window, keys and values [heads, tokens, dim], with the paper's codec."""
    heads, tokens, dim = keys.shape
    channels = [keys[head, :, channel].tolist() for head in range(heads) for channel in range(dim)]
    positions = [values[head, token].tolist() for head in range(heads) for token in range(tokens)]
    key_groups = [quantize_row(row, key_bits) for row in channels]
    value_groups = [quantize_row(row, value_bits) for row in positions]
    sections = [
        b"".join(pack_row(codes, key_bits) for codes, _, _ in key_groups),
        b"".join(pack_row(codes, value_bits) for codes, _, _ in value_groups),
        b"".join(scale.tobytes() for _, scale, _ in key_groups),
        b"".join(offset.tobytes() for _, _, offset in key_groups),
        b"".join(scale.tobytes() for _, scale, _ in value_groups),
        b"".join(offset.tobytes() for _, _, offset in value_groups),
    ]
    return b"".join(section + bytes(-len(section) % 4) for section in sections)
