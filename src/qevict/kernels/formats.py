"""How the CPU kernel reads a codec's windows: where rows of codes lie, with how many bits, and where their parameters.

A codec takes part by a function in `_FORMATS`. Without one it is decoded by itself, and attended by the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qevict.codecs import Codec, KiviCodec, MinMaxCodec, WindowShape


class CodeFormat(NamedTuple):
    """Windows whose keys are packed by channel and whose values by token. Offsets are bytes from a window's start.

    A key is `code * scale + offset`, and so is a value.

    Attributes:
        key_rows: `[heads, dim]` where the packed row of each channel is. Up to 7 bytes behind a row may be read, so
            the keys must not be the last of a window.
        key_bits: `[heads, dim]` bits of its codes, 1 to 8.
        key_scale, key_offset: where the float16 `[heads, dim]` are.
        value_codes: where the packed rows are, `[heads, tokens]`.
        value_bits: bits of their codes.
        value_scale, value_offset: where the float16 `[heads, tokens, groups]` are.
        value_group: channels that share a scale and an offset, a multiple of 8; the last group may have fewer.
    """

    key_rows: NDArray[np.int64]
    key_bits: NDArray[np.int64]
    key_scale: int
    key_offset: int
    value_codes: int
    value_bits: int
    value_scale: int
    value_offset: int
    value_group: int


def format_of(codec: Codec, shape: WindowShape) -> CodeFormat | None:
    """How windows of that shape are read; None if the kernel does not know the codec, or not for that shape."""
    describe = _FORMATS.get(type(codec))
    described = None if describe is None else describe(codec, shape)
    return None if described is None or described.value_group % 8 else described


def _minmax(codec: Any, shape: WindowShape) -> CodeFormat:
    return _ranges(codec, shape, shape.head_dim)


def _kivi(codec: Any, shape: WindowShape) -> CodeFormat:
    return _ranges(codec, shape, min(codec.channels, shape.head_dim))


def _ranges(codec: Any, shape: WindowShape, group: int) -> CodeFormat:
    """Scales and offsets in the window, the same number of bits everywhere."""
    sections = {section.name: section for section in codec.layout(shape).sections}
    codes = sections["key_codes"]
    heads, dim, row = codes.shape
    return CodeFormat(
        key_rows=codes.offset + row * np.arange(heads * dim).reshape(heads, dim),
        key_bits=np.full((heads, dim), codec.key_bits),
        key_scale=sections["key_scale"].offset,
        key_offset=sections["key_offset"].offset,
        value_codes=sections["value_codes"].offset,
        value_bits=codec.value_bits,
        value_scale=sections["value_scale"].offset,
        value_offset=sections["value_offset"].offset,
        value_group=group,
    )


_FORMATS: dict[type, Callable[[Any, WindowShape], CodeFormat]] = {MinMaxCodec: _minmax, KiviCodec: _kivi}
