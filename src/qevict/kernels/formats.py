"""How kernels read a codec's windows: where rows of codes lie, with how many bits, and where their parameters.

A codec takes part by a function in `_FORMATS`. Without one it is decoded by itself, and attended by the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qevict.codecs import Codec, KiviCodec, MinMaxCodec, WindowShape
from qevict.codecs.allotted import Allotted
from qevict.codecs.turboquant import block_sizes, lloyd_max_levels, turn_back

MOST_QUERIES = 64
"""Of a forward that kernels take; longer ones are a matter of large products, which the reference leaves to torch."""


class CodeFormat(NamedTuple):
    """Windows whose keys are packed by channel and whose values by token. Offsets are bytes from a window's start.

    A key is `code * scale + offset`. So is a value, or it is `levels[code] * scale`, and then the output of these
    windows is still to be multiplied with `turn_back`.

    Tensors are where the codec's are, or on the CPU.

    Attributes:
        key_rows: `[1, heads, dim]` where the packed row of each channel is, `[lanes, heads, dim]` where lanes differ.
        key_bits: bits of the codes of all channels, or of the same shape, 0 to 8.
        row_tokens: tokens that a row of keys has room for; at least those of a window.
        value_codes: where the packed rows are, `[heads, tokens]`.
        value_bits: bits of their codes.
        value_scale: where the float16 `[heads, tokens, groups]` are.
        value_groups: how many channels share a scale.
        value_offset: where the offsets are, as the scales; -1 if there are none.
        key_scale, key_offset: where the float16 `[heads, dim]` are.
        key_ranges: `[lanes, heads, 2, dim]` scales and offsets, where they are a lane's and not a window's.
        levels: `[groups, 2**value_bits]`.
        turn_back: `[dim, dim]`.
    """

    key_rows: Tensor
    key_bits: int | Tensor
    row_tokens: int
    value_codes: int
    value_bits: int
    value_scale: int
    value_groups: tuple[int, ...]
    value_offset: int = -1
    key_scale: int = 0
    key_offset: int = 0
    key_ranges: Tensor | None = None
    levels: Tensor | None = None
    turn_back: Tensor | None = None


def is_known(codec: Codec) -> bool:
    """Whether there is a format for such codecs, be it for some shapes only."""
    return type(codec) in _FORMATS


def format_of(codec: Codec, shape: WindowShape) -> CodeFormat | None:
    """How windows of that shape are read; None if no kernel knows the codec."""
    describe = _FORMATS.get(type(codec))
    return None if describe is None else describe(codec, shape)


def _minmax(codec: Any, shape: WindowShape) -> CodeFormat:
    return _ranges(codec, shape, shape.head_dim)


def _kivi(codec: Any, shape: WindowShape) -> CodeFormat:
    return _ranges(codec, shape, min(codec.channels, shape.head_dim))


def _ranges(codec: Any, shape: WindowShape, group: int) -> CodeFormat:
    """Scales and offsets in the window, the same number of bits everywhere."""
    sections = {section.name: section for section in codec.layout(shape).sections}
    codes = sections["key_codes"]
    heads, dim, row = codes.shape
    whole, rest = divmod(dim, group)
    return CodeFormat(
        key_rows=codes.offset + row * torch.arange(heads * dim).view(1, heads, dim),
        key_bits=codec.key_bits,
        row_tokens=shape.tokens,
        key_scale=sections["key_scale"].offset,
        key_offset=sections["key_offset"].offset,
        value_codes=sections["value_codes"].offset,
        value_bits=codec.value_bits,
        value_scale=sections["value_scale"].offset,
        value_offset=sections["value_offset"].offset,
        value_groups=(group,) * whole + ((rest,) if rest else ()),
    )


def _allotted(codec: Any, shape: WindowShape) -> CodeFormat:
    """Ranges and bits of key channels by lane, values rotated. (That decoded values are clamped has no effect here.)"""
    sections = {section.name: section for section in codec.layout(shape).sections}
    sizes, bits = block_sizes(shape.head_dim), codec.settings.value_bits
    octets = -(-shape.tokens // 8)
    rows = codec.row_starts.view(codec.bits.shape) * octets
    blocks = [turn_back(size, codec.settings.values.seed, codec.bits.device) for size in sizes]
    return CodeFormat(
        key_rows=sections["key_codes"].offset + rows,
        key_bits=codec.bits.long(),
        row_tokens=8 * octets,
        value_codes=sections["value_codes"].offset,
        value_bits=bits,
        value_scale=sections["value_scale"].offset,
        value_groups=tuple(sizes),
        key_ranges=torch.stack([codec.step, codec.offset], dim=2).float(),
        levels=torch.tensor([lloyd_max_levels(size, bits) for size in sizes]),
        turn_back=torch.block_diag(*blocks),
    )


_FORMATS: dict[type, Callable[[Any, WindowShape], CodeFormat]] = {
    MinMaxCodec: _minmax,
    KiviCodec: _kivi,
    Allotted: _allotted,
}
