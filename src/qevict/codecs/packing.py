"""Unsigned integer codes of 1 to 8 bits, packed along the last dimension into whole bytes.

A width that divides a byte (1, 2, 4, 8) is one *plane*; any other is the sum of such widths, one plane after another,
the widest first and holding the lowest bits of each code::

    bits    planes
    3       2 bits (code bits 0-1), then 1 bit  (code bit 2)
    5       4 bits (code bits 0-3), then 1 bit  (code bit 4)
    6       4 bits (code bits 0-3), then 2 bits (code bits 4-5)
    7       4 bits (code bits 0-3), then 2 bits (code bits 4-5), then 1 bit (code bit 6)

Within a plane consecutive elements fill a byte from its low bits up: in a 2-bit plane, element 0 is bits 0-1 of byte 0,
element 3 bits 6-7 of byte 0, element 4 bits 0-1 of byte 1. Each plane of each row is padded with zero bits to a whole
byte, so a reader can shift and mask inside one byte and never crosses a byte boundary.
"""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Tensor


def plane_widths(bits: int) -> tuple[int, ...]:
    """Bits per element in each plane, in the order in which the planes are stored; they sum to `bits`.

    Raises:
        ValueError: `bits` is not one of 1 to 8.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def packed_size(length: int, bits: int) -> int:
    """Bytes that a row of `length` codes of `bits` bits takes."""
    return sum(_plane_bytes(length, width) for width in plane_widths(bits))


def pack(codes: UInt8[Tensor, "*rows length"], bits: int) -> UInt8[Tensor, "*rows bytes"]:
    """Pack each row of codes into `packed_size(length, bits)` bytes. Bits of a code beyond `bits` are dropped."""
    planes, lowest_bit = [], 0
    for width in plane_widths(bits):
        planes.append(_pack_plane(codes >> lowest_bit, width))
        lowest_bit += width
    return torch.cat(planes, dim=-1)


def unpack(packed: UInt8[Tensor, "*rows bytes"], bits: int, length: int) -> UInt8[Tensor, "*rows length"]:
    """Undo `pack` for rows of `length` codes.

    Raises:
        ValueError: the rows do not have the size that `length` codes of `bits` bits take.
    """
    if packed.shape[-1] != packed_size(length, bits):
        raise ValueError(
            f"a row of {length} codes of {bits} bits takes {packed_size(length, bits)} bytes, not {packed.shape[-1]}"
        )
    widths = plane_widths(bits)
    planes = torch.split_with_sizes(packed, [_plane_bytes(length, width) for width in widths], dim=-1)
    codes, lowest_bit = _unpack_plane(planes[0], widths[0], length), widths[0]
    for plane, width in zip(planes[1:], widths[1:], strict=True):
        codes = codes | _unpack_plane(plane, width, length) << lowest_bit
        lowest_bit += width
    return codes


def _plane_bytes(length: int, width: int) -> int:
    return -(-length * width // 8)


def _pack_plane(codes: UInt8[Tensor, "*rows length"], width: int) -> UInt8[Tensor, "*rows bytes"]:
    """Pack the low `width` bits (1, 2, 4 or 8) of each code."""
    if width == 8:
        return codes
    length, per_byte = codes.shape[-1], 8 // width
    nbytes = _plane_bytes(length, width)
    codes = torch.nn.functional.pad(codes & (1 << width) - 1, (0, nbytes * per_byte - length))
    elements = codes.reshape(*codes.shape[:-1], nbytes, per_byte).unbind(-1)
    plane = elements[0]
    for place, element in enumerate(elements[1:], start=1):
        plane = plane | element << place * width
    return plane


def _unpack_plane(plane: UInt8[Tensor, "*rows bytes"], width: int, length: int) -> UInt8[Tensor, "*rows length"]:
    if width == 8:
        return plane
    elements = torch.stack([plane >> shift & (1 << width) - 1 for shift in range(0, 8, width)], dim=-1)
    return elements.flatten(-2)[..., :length]
