"""What a codec is: it turns one window of keys and values into a fixed number of bytes, and back.

A *window* is O consecutive tokens of one layer, over all of its KV heads: keys and values of shape
`[heads, tokens, head_dim]` each. The recoverable tier (section 4.3 of the paper) stores windows as bytes and nothing
else, so a codec alone says what those bytes mean. To write a new one, write a frozen dataclass with these methods:

`layout(shape)`
    Where each array lies in the bytes of one window of that shape, built with `WindowLayout.build`. It depends on the
    codec's own fields and the shape only, never on data: every window costs the same, and budgets are computed from
    `layout(shape).nbytes` before any key exists. Kernels read the bytes through the layout, so a codec's docstring
    states the name, shape, dtype and meaning of every section, and changing them breaks its kernels.

`encode(keys, values)`
    `[*windows, heads, tokens, head_dim]`, keys before rotary embedding, any floating dtype, to uint8
    `[*windows, layout.nbytes]`. Any number of leading window dimensions, zero windows included. Allocate with
    `torch.zeros` (padding bytes are zero, so that equal windows have equal bytes) and fill the arrays that
    `layout.view(packed)` returns.

`decode(packed, shape)`
    The way back: float32 keys (before rotary embedding) and values, `[*windows, heads, tokens, head_dim]`.

The rules that the cache relies on:

- Deterministic, and each window by itself: a window's bytes do not depend on the others in the call. The cache encodes
  a window once in its life (write-once) and compares bytes.
- Finite in, finite out, for every finite input, and still finite after a cast to float16 or bfloat16: a key of 6e4, a
  constant channel and a window of one token all occur.
- Arithmetic in float32, whatever the input's dtype.

A codec whose parameters come from the prompt is a `PromptCodec`: settings and a layout, from which `fit` makes a
`FittedCodec` for some lanes, once, before the first window is encoded.

Sections start at multiples of 4 bytes and a window's size is a multiple of 4, so in any buffer whose windows start at
multiples of 4 bytes a section is a typed view of the bytes, not a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

ALIGNMENT = 4  # bytes


@dataclass(frozen=True)
class WindowShape:
    """Shape of one window's keys, and of its values: `[heads, tokens, head_dim]`.

    Raises:
        ValueError: a size is not positive.
    """

    heads: int
    tokens: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(self.heads, self.tokens, self.head_dim) < 1:
            raise ValueError(f"every size of a window is at least 1, not {self}")


@dataclass(frozen=True)
class Section:
    """One array inside the bytes of a window: C order, `nbytes` bytes from `offset` on."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array itself, without the padding after it."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WindowLayout:
    """Where the arrays of an encoded window lie: sections in the order of their offsets, codes before parameters.

    `code_bytes` are the bytes of packed codes and `parameter_bytes` those of everything needed to read them (M_Q and
    M_quant-meta of Eq. 8). Both count the padding after their sections, so together they are the whole window.
    """

    sections: tuple[Section, ...]
    code_bytes: int
    parameter_bytes: int

    @classmethod
    def build(
        cls,
        codes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ) -> WindowLayout:
        """Lay arrays, given as name -> (shape, dtype), one after another, each aligned to `ALIGNMENT` bytes."""
        code_sections, code_bytes = _place(codes, start=0)
        parameter_sections, nbytes = _place(parameters, start=code_bytes)
        return cls(code_sections + parameter_sections, code_bytes, nbytes - code_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of one encoded window, padding included; a multiple of `ALIGNMENT`."""
        return self.code_bytes + self.parameter_bytes

    def view(self, packed: UInt8[Tensor, "*windows bytes"]) -> dict[str, Tensor]:
        """The sections of encoded windows by name, `[*windows, *section.shape]`, sharing memory with `packed`.

        Raises:
            ValueError: the last dimension of `packed` is not `nbytes`.
            RuntimeError: windows in `packed` do not start at multiples of `ALIGNMENT` bytes (raised by torch).
        """
        if packed.shape[-1] != self.nbytes:
            raise ValueError(f"an encoded window of this layout has {self.nbytes} bytes, not {packed.shape[-1]}")
        return {
            section.name: packed[..., section.offset : section.offset + section.nbytes]
            .view(section.dtype)
            .view(*packed.shape[:-1], *section.shape)
            for section in self.sections
        }


@runtime_checkable
class Codec(Protocol):
    """A low-bit representation of windows; the module's docstring says what each method owes the cache."""

    def layout(self, shape: WindowShape) -> WindowLayout:
        """Where every array lies in the bytes of one window of this shape."""
        ...

    def encode(
        self, keys: Float[Tensor, "*windows heads tokens dim"], values: Float[Tensor, "*windows heads tokens dim"]
    ) -> UInt8[Tensor, "*windows bytes"]:
        """Encode windows of keys (before rotary embedding) and values."""
        ...

    def decode(
        self, packed: UInt8[Tensor, "*windows bytes"], shape: WindowShape
    ) -> tuple[Float32[Tensor, "*windows heads tokens dim"], Float32[Tensor, "*windows heads tokens dim"]]:
        """Keys (before rotary embedding) and values of encoded windows."""
        ...


@runtime_checkable
class FittedCodec(Codec, Protocol):
    """A codec with parameters of its own for each lane: the first dimension of what it encodes or decodes is lanes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters of all lanes."""
        ...

    def take(self, lanes: Int[Tensor, " chosen"]) -> FittedCodec:
        """The codec of the given lanes, in that order."""
        ...


@runtime_checkable
class PromptCodec(Protocol):
    """Settings of a codec whose parameters are fitted once, before a lane's first window is encoded."""

    def layout(self, shape: WindowShape) -> WindowLayout:
        """As `Codec.layout`."""
        ...

    def fitted_bytes(self, shape: WindowShape) -> int:
        """Bytes of a lane's parameters; budgets charge them."""
        ...

    def fit(
        self, keys: Float[Tensor, "lanes heads tokens dim"], energy: Float[Tensor, "lanes heads dim"]
    ) -> FittedCodec:
        """The codec for lanes whose keys are like the given ones.

        Args:
            keys: before rotary embedding; at least one token.
            energy: mean squared query of each channel, or ones; the same for the two channels of a rotary pair.
        """
        ...


def _place(arrays: Mapping[str, tuple[tuple[int, ...], torch.dtype]], start: int) -> tuple[tuple[Section, ...], int]:
    """Sections for the arrays from byte `start` (aligned) on, and the aligned byte after the last of them."""
    sections, offset = [], start
    for name, (shape, dtype) in arrays.items():
        section = Section(name, offset, shape, dtype)
        sections.append(section)
        offset += -(-section.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(sections), offset
