"""Bits where the attention needs them: key channels with ranges from the prompt and as many bits as they deserve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Float16, Float32, Int, UInt8
from torch import Tensor

from qevict.codecs.base import WindowLayout, WindowShape
from qevict.codecs.minmax import LIMIT, round_down
from qevict.codecs.packing import pack, unpack
from qevict.codecs.turboquant import TurboQuantCodec

MOST_BITS = 8
_TOKENS = 8  # of a byte where codes have one bit


@dataclass(frozen=True)
class AllottedCodec:
    """Keys per channel, with ranges and bits fixed once from the prompt; values rotated, per token.

    The paper's codec stores a scale and an offset for each channel *in every window*: at 8 tokens a window that is four
    of six bits. Keys before the rotary embedding have much the same range in a channel throughout a text, so here a
    lane's ranges are those of its prompt, stored once; later keys beyond them are clamped.

    `key_bits` is an average. Bit by bit, each goes to the channel where the expected squared error of a logit is
    largest: mean squared query times squared range, divided by 4 for every bit that the channel has (reverse water
    filling). The two channels of a rotary pair share the query's energy, since rotation mixes them. A channel of no
    bits is its mean.

    Values are `TurboQuantCodec`'s: rotated, Lloyd-Max levels, a scale for each token.

    This object holds settings only; `fit` makes the codec. Bytes of one window of H heads, T tokens, D channels and
    B blocks of a head (see `turboquant`; N = round(key_bits * H * D) bits of a token's keys)::

        section      dtype    shape
        key_codes    uint8    [N, ceil(T / 8)]               rows of channels, one after another, head by head
        value_codes  uint8    [H, T, packed_size(D, value_bits)]
        value_scale  float16  [H, T, B]

    The row of a channel of b bits is its T codes as `packing` packs them, T rounded up to whole bytes of one bit with
    zeros: b * ceil(T / 8) bytes, none where b is 0. So windows of a multiple of 8 tokens waste nothing.

    Raises:
        ValueError: `key_bits` is not between 0.5 and 8, or `value_bits` is not one of TurboQuant's.
    """

    key_bits: int | float = 3
    value_bits: int = 3

    def __post_init__(self) -> None:
        if not 0.5 <= self.key_bits <= MOST_BITS:
            raise ValueError(f"key_bits of the allotted codec is from 0.5 to {MOST_BITS}, not {self.key_bits}")
        _ = self.values

    @property
    def values(self) -> TurboQuantCodec:
        """What encodes the values."""
        return TurboQuantCodec(self.value_bits, self.value_bits)

    def token_bits(self, shape: WindowShape) -> int:
        """Bits of a token's keys, over all heads."""
        return round(self.key_bits * shape.heads * shape.head_dim)

    def layout(self, shape: WindowShape) -> WindowLayout:
        """Where every array lies in the bytes of one window.

        Raises:
            ValueError: the head size is not one of TurboQuant's.
        """
        values = {section.name: (section.shape, section.dtype) for section in self.values.layout(shape).sections}
        return WindowLayout.build(
            codes={
                "key_codes": ((self.token_bits(shape), -(-shape.tokens // _TOKENS)), torch.uint8),
                "value_codes": values["value_codes"],
            },
            parameters={"value_scale": values["value_scale"]},
        )

    def fitted_bytes(self, shape: WindowShape) -> int:
        """Bytes that a lane keeps beside its windows: offset, step and bits of each channel."""
        return shape.heads * shape.head_dim * 5

    def fit(
        self,
        keys: Float[Tensor, "lanes heads tokens dim"],
        energy: Float[Tensor, "lanes heads dim"],
    ) -> Allotted:
        """The codec for lanes whose keys are like the given ones.

        Args:
            keys: before rotary embedding; at least one token.
            energy: mean squared query of each channel, or ones; the same for the two channels of a rotary pair.
        """
        keys = keys.detach().float().clamp(-LIMIT, LIMIT)
        lowest, highest = keys.amin(dim=2), keys.amax(dim=2)
        shape = WindowShape(keys.shape[1], _TOKENS, keys.shape[3])
        bits = allotted(energy.float() * (highest - lowest) ** 2, self.token_bits(shape))
        offset = round_down(torch.where(bits > 0, lowest, keys.mean(dim=2)))
        levels = (1 << bits.int()) - 1
        step = round_down((offset.float() - highest) / levels.clamp(min=1)).abs()
        return Allotted(self, offset, step, bits)


@dataclass(frozen=True, eq=False)
class Allotted:
    """An `AllottedCodec` with the ranges and bits of some lanes.

    Leading dimensions of what is encoded or decoded are lanes, then windows of each.

    Attributes:
        settings: what was fitted.
        offset, step: a key of code c is `c * step + offset`.
        bits: of each channel, 0 to 8.
    """

    settings: AllottedCodec
    offset: Float16[Tensor, "lanes heads dim"]
    step: Float16[Tensor, "lanes heads dim"]
    bits: UInt8[Tensor, "lanes heads dim"]

    @property
    def nbytes(self) -> int:
        """Bytes held for all lanes."""
        return self.offset.nbytes + self.step.nbytes + self.bits.nbytes

    def take(self, lanes: Int[Tensor, " chosen"]) -> Allotted:
        """The codec of the given lanes, in that order."""
        return Allotted(self.settings, self.offset[lanes], self.step[lanes], self.bits[lanes])

    def layout(self, shape: WindowShape) -> WindowLayout:
        """As `AllottedCodec.layout`."""
        return self.settings.layout(shape)

    def encode(
        self, keys: Float[Tensor, "lanes *windows heads tokens dim"], values: Tensor
    ) -> UInt8[Tensor, "lanes *windows bytes"]:
        """Encode windows of keys (before rotary embedding) and values.

        Raises:
            ValueError: keys and values differ in shape.
        """
        if keys.shape != values.shape:
            raise ValueError(f"keys and values have one shape, not {list(keys.shape)} and {list(values.shape)}")
        lanes, *windows, heads, tokens, dim = keys.shape
        shape = WindowShape(heads, tokens, dim)
        layout = self.layout(shape)
        packed = torch.zeros(lanes, *windows, layout.nbytes, dtype=torch.uint8, device=keys.device)
        arrays, value_bits = layout.view(packed), self.settings.value_bits
        offset, step, bits = (self._expanded(t, len(windows)) for t in (self.offset, self.step, self.bits))
        grid = (keys.detach().float().mT - offset.float()) / torch.where(step > 0, step, 1).float()
        codes = grid.round().clamp(min=0).minimum(((1 << bits.int()) - 1).float()).to(torch.uint8).flatten(-3, -2)
        codes = torch.nn.functional.pad(codes, (0, -tokens % _TOKENS))
        for rows in self._rows:
            packed_rows = pack(codes[rows.lane][..., rows.channels, :], rows.bits).unflatten(-1, (rows.bits, -1))
            arrays["key_codes"][rows.lane].index_copy_(-2, rows.places, packed_rows.flatten(-3, -2))
        value_codes, scales = self.settings.values.quantize(values.detach().float().clamp(-LIMIT, LIMIT), value_bits)
        arrays["value_codes"].copy_(pack(value_codes, value_bits))
        arrays["value_scale"].copy_(scales)
        return packed

    def decode(
        self, packed: UInt8[Tensor, "lanes *windows bytes"], shape: WindowShape
    ) -> tuple[Float32[Tensor, "lanes *windows heads tokens dim"], Float32[Tensor, "lanes *windows heads tokens dim"]]:
        """Keys (before rotary embedding) and values of encoded windows of `shape`."""
        arrays, value_bits = self.layout(shape).view(packed), self.settings.value_bits
        codes = torch.zeros(
            *packed.shape[:-1], shape.heads * shape.head_dim, shape.tokens, dtype=torch.uint8, device=packed.device
        )
        padded = shape.tokens + -shape.tokens % _TOKENS
        for rows in self._rows:
            packed_rows = arrays["key_codes"][rows.lane].index_select(-2, rows.places)
            packed_rows = packed_rows.unflatten(-2, (-1, rows.bits)).flatten(-2)
            codes[rows.lane].index_copy_(-2, rows.channels, unpack(packed_rows, rows.bits, padded)[..., : shape.tokens])
        offset, step = (self._expanded(t, packed.ndim - 2).float() for t in (self.offset, self.step))
        keys = torch.addcmul(offset, codes.unflatten(-2, (shape.heads, shape.head_dim)).float(), step)
        value_codes = unpack(arrays["value_codes"], value_bits, shape.head_dim)
        return keys.mT, self.settings.values.dequantize(value_codes, arrays["value_scale"], value_bits)

    @cached_property
    def row_starts(self) -> Int[Tensor, "lanes channels"]:
        """Where the row of each channel, of all heads, begins in `key_codes`, in its first dimension."""
        bits = self.bits.long().flatten(1)
        return bits.cumsum(dim=1) - bits

    @cached_property
    def _rows(self) -> tuple[_Rows, ...]:
        """The rows of all lanes, those of a lane with equally many bits together."""
        return tuple(self._grouped())

    def _grouped(self) -> Iterator[_Rows]:
        for lane, (bits, starts) in enumerate(zip(self.bits.flatten(1), self.row_starts, strict=True)):
            for width in bits.unique().tolist():
                if width:
                    channels = (bits == width).nonzero()[:, 0]
                    places = starts[channels, None] + torch.arange(width, device=bits.device)
                    yield _Rows(lane, width, channels, places.flatten())

    @staticmethod
    def _expanded(x: Tensor, windows: int) -> Tensor:
        """`[lanes, ...]` beside `[lanes, *windows, ..., tokens]`."""
        return x[(slice(None), *[None] * windows, ..., None)]


class _Rows(NamedTuple):
    """Channels of a lane with the same number of bits.

    Attributes:
        places: `[channels * bits]` where their rows are, in the first dimension of `key_codes`.
    """

    lane: int
    bits: int
    channels: Int[Tensor, " channels"]
    places: Int[Tensor, " places"]


def allotted(error: Float32[Tensor, "lanes heads dim"], total: int) -> UInt8[Tensor, "lanes heads dim"]:
    """Bits of each channel, `total` for all of a lane: each goes where the error, a quarter with every bit, is most.

    A channel has at most 8 bits.
    """
    gains = error.flatten(1)[..., None] / 4.0 ** torch.arange(MOST_BITS, device=error.device)
    order = gains.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :total] // MOST_BITS
    bits = torch.zeros(gains.shape[:2], dtype=torch.uint8, device=error.device)
    return bits.scatter_add_(1, order, torch.ones_like(order, dtype=torch.uint8)).view(error.shape)
