"""KIVI's codec: asymmetric min-max, keys per channel over the window, values per token in groups of channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from qevict.codecs.base import WindowLayout, WindowShape
from qevict.codecs.minmax import dequantize_rows, quantize_rows
from qevict.codecs.packing import pack, packed_size, unpack

WIDTHS = (2, 3, 4, 8)
Arrays = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class KeyHalf:
    """The keys' half of `KiviCodec`; by itself it encodes keys alone, with the same methods as a codec.

    Raises:
        ValueError: `bits` is not 2, 3, 4 or 8.
    """

    bits: int
    name: ClassVar[str] = "key"

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ValueError(f"{self.name}s of the kivi codec have {', '.join(map(str, WIDTHS))} bits, not {self.bits}")

    def _codes(self, shape: WindowShape) -> tuple[int, ...]:
        return shape.heads, shape.head_dim, packed_size(shape.tokens, self.bits)

    def _groups(self, shape: WindowShape) -> tuple[int, ...]:
        return shape.heads, shape.head_dim

    def code_arrays(self, shape: WindowShape) -> Arrays:
        """Shapes of the packed codes in a window."""
        return {f"{self.name}_codes": (self._codes(shape), torch.uint8)}

    def parameter_arrays(self, shape: WindowShape) -> Arrays:
        """Shapes of the parameters in a window."""
        groups = self._groups(shape)
        return {f"{self.name}_scale": (groups, torch.float16), f"{self.name}_offset": (groups, torch.float16)}

    def layout(self, shape: WindowShape) -> WindowLayout:
        """Where the arrays lie in a window that holds this half alone."""
        return WindowLayout.build(self.code_arrays(shape), self.parameter_arrays(shape))

    def write(self, arrays: Mapping[str, Tensor], x: Float[Tensor, "*windows heads tokens dim"]) -> None:
        """Encode into the arrays of a layout."""
        codes, scale, offset = quantize_rows(x.detach().float().mT, self.bits)
        self._fill(arrays, codes, scale, offset)

    def _fill(self, arrays: Mapping[str, Tensor], codes: Tensor, scale: Tensor, offset: Tensor) -> None:
        arrays[f"{self.name}_codes"].copy_(pack(codes, self.bits))
        arrays[f"{self.name}_scale"].copy_(scale)
        arrays[f"{self.name}_offset"].copy_(offset)

    def read(self, arrays: Mapping[str, Tensor], shape: WindowShape) -> Float32[Tensor, "*windows heads tokens dim"]:
        """Decode from the arrays of a layout."""
        codes = unpack(arrays["key_codes"], self.bits, shape.tokens)
        return dequantize_rows(codes, arrays["key_scale"], arrays["key_offset"]).mT

    def encode(self, x: Float[Tensor, "*windows heads tokens dim"]) -> UInt8[Tensor, "*windows bytes"]:
        """Encode windows of this half alone."""
        *windows, heads, tokens, dim = x.shape
        layout = self.layout(WindowShape(heads, tokens, dim))
        packed = torch.zeros(*windows, layout.nbytes, dtype=torch.uint8, device=x.device)
        self.write(layout.view(packed), x)
        return packed

    def decode(
        self, packed: UInt8[Tensor, "*windows bytes"], shape: WindowShape
    ) -> Float32[Tensor, "*windows heads tokens dim"]:
        """Decode windows of this half alone."""
        return self.read(self.layout(shape).view(packed), shape)


@dataclass(frozen=True)
class ValueHalf(KeyHalf):
    """The values' half of `KiviCodec`: a token's channels in groups of `channels`; the last may be smaller.

    Raises:
        ValueError: `bits` is not 2, 3, 4 or 8, or `channels` is below 1.
    """

    channels: int = 32
    name: ClassVar[str] = "value"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels < 1:
            raise ValueError(f"value groups of the kivi codec have at least 1 channel, not {self.channels}")

    def _codes(self, shape: WindowShape) -> tuple[int, ...]:
        return shape.heads, shape.tokens, packed_size(shape.head_dim, self.bits)

    def _groups(self, shape: WindowShape) -> tuple[int, ...]:
        return shape.heads, shape.tokens, -(-shape.head_dim // self.channels)

    def write(self, arrays: Mapping[str, Tensor], x: Float[Tensor, "*windows heads tokens dim"]) -> None:
        """Encode into the arrays of a layout."""
        codes, scale, offset = quantize_rows(self._split(x.detach().float()), self.bits)
        self._fill(arrays, codes.flatten(-2)[..., : x.shape[-1]], scale, offset)

    def read(self, arrays: Mapping[str, Tensor], shape: WindowShape) -> Float32[Tensor, "*windows heads tokens dim"]:
        """Decode from the arrays of a layout."""
        codes = self._split(unpack(arrays["value_codes"], self.bits, shape.head_dim))
        values = dequantize_rows(codes, arrays["value_scale"], arrays["value_offset"])
        return values.flatten(-2)[..., : shape.head_dim]

    def _split(self, rows: Tensor) -> Tensor:
        """Rows in groups; the last group is filled up with its last channel, which leaves its range as it is."""
        channels = min(self.channels, rows.shape[-1])
        missing = -rows.shape[-1] % channels
        if missing:
            rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], dim=-1)
        return rows.unflatten(-1, (-1, channels))


@dataclass(frozen=True)
class KiviCodec:
    """Keys per channel over the window's tokens, values per token in groups of `channels` channels.

    A group's codes, scale and offset are those of `MinMaxCodec` (float16, rounded so that the grid covers the group;
    KIVI rounds both to the nearest float16 and fails on constant groups). Where a head has fewer channels than a whole
    number of groups, the last group is smaller; KIVI refuses such heads.

    Bytes of one window of H heads, T tokens, D channels and G = ceil(D / channels) groups (see `base` for offsets,
    `packing` for bits; P is `packed_size`)::

        section       dtype    shape
        key_codes     uint8    [H, D, P(T, key_bits)]     channel-major
        value_codes   uint8    [H, T, P(D, value_bits)]   token-major
        key_scale     float16  [H, D]
        key_offset    float16  [H, D]
        value_scale   float16  [H, T, G]
        value_offset  float16  [H, T, G]

    Raises:
        ValueError: a width is not 2, 3, 4 or 8, or `channels` is below 1.
    """

    key_bits: int = 2
    value_bits: int = 2
    channels: int = 32

    def __post_init__(self) -> None:
        _ = self.key_half, self.value_half  # which check the settings

    @property
    def key_half(self) -> KeyHalf:
        """What encodes the keys."""
        return KeyHalf(self.key_bits)

    @property
    def value_half(self) -> ValueHalf:
        """What encodes the values."""
        return ValueHalf(self.value_bits, self.channels)

    def layout(self, shape: WindowShape) -> WindowLayout:
        """Where every array lies in the bytes of one window."""
        halves = self.key_half, self.value_half
        return WindowLayout.build(
            codes={name: array for half in halves for name, array in half.code_arrays(shape).items()},
            parameters={name: array for half in halves for name, array in half.parameter_arrays(shape).items()},
        )

    def encode(
        self, keys: Float[Tensor, "*windows heads tokens dim"], values: Float[Tensor, "*windows heads tokens dim"]
    ) -> UInt8[Tensor, "*windows bytes"]:
        """Encode windows of keys and values.

        Raises:
            ValueError: keys and values differ in shape.
        """
        if keys.shape != values.shape:
            raise ValueError(f"keys and values have one shape, not {list(keys.shape)} and {list(values.shape)}")
        *windows, heads, tokens, dim = keys.shape
        layout = self.layout(WindowShape(heads, tokens, dim))
        packed = torch.zeros(*windows, layout.nbytes, dtype=torch.uint8, device=keys.device)
        arrays = layout.view(packed)
        self.key_half.write(arrays, keys)
        self.value_half.write(arrays, values)
        return packed

    def decode(
        self, packed: UInt8[Tensor, "*windows bytes"], shape: WindowShape
    ) -> tuple[Float32[Tensor, "*windows heads tokens dim"], Float32[Tensor, "*windows heads tokens dim"]]:
        """Keys and values of encoded windows of `shape`."""
        arrays = self.layout(shape).view(packed)
        return self.key_half.read(arrays, shape), self.value_half.read(arrays, shape)
