"""The paper's codec (section 4.3): asymmetric min-max, keys per channel over the window, values per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, Float32, UInt8
from torch import Tensor

from qevict.codecs.base import WindowLayout, WindowShape
from qevict.codecs.packing import pack, packed_size, unpack

WIDTHS = (2, 3, 4, 8)

# Inputs beyond +-LIMIT are clamped. Parameters are then finite in float16, and so is every decoded value: rounding the
# scale up widens a range of at most 2 * LIMIT by less than 128, and LIMIT + 128 is the largest finite float16.
LIMIT = 65376.0


@dataclass(frozen=True)
class MinMaxCodec:
    """Asymmetric min-max quantisation with a float16 scale and offset for each key channel and each value token.

    A group (a key channel over the window's tokens, or a value token over its channels) with codes c is decoded as
    `c * scale + offset` in float32. The product is exact there, so a fused multiply-add gives the same result.

    The offset is the group's minimum rounded *down* to float16, the scale its remaining range over `2**bits - 1`
    rounded *up*, and codes are computed against these rounded parameters. So the grid covers the group and the error
    of an element is at most half a scale (and float32 rounding), even where float16 is coarser than the group's range
    (a large key bias) or where the range asks for a scale too small for it (1e-6). Inputs beyond +-65376 are clamped.

    Bytes of one window of H heads, T tokens, D channels (see `base` for offsets, `packing` for bits; P is
    `packed_size`)::

        section       dtype    shape
        key_codes     uint8    [H, D, P(T, key_bits)]     channel-major: a row is one channel over the window's tokens
        value_codes   uint8    [H, T, P(D, value_bits)]   token-major: a row is one token over its channels
        key_scale     float16  [H, D]                     >= 0, 0 for a constant channel; may be subnormal
        key_offset    float16  [H, D]
        value_scale   float16  [H, T]
        value_offset  float16  [H, T]

    Raises:
        ValueError: `key_bits` or `value_bits` is not 2, 3, 4 or 8.
    """

    key_bits: int = 2
    value_bits: int = 2

    def __post_init__(self) -> None:
        for field, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if bits not in WIDTHS:
                raise ValueError(f"{field} of the minmax codec is one of {', '.join(map(str, WIDTHS))}, not {bits}")

    def layout(self, shape: WindowShape) -> WindowLayout:
        """Where every array lies in the bytes of one window; 8 heads x 8 tokens x 128 at 2 bits take 4096 + 4352."""
        heads, tokens, dim = shape.heads, shape.tokens, shape.head_dim
        return WindowLayout.build(
            codes={
                "key_codes": ((heads, dim, packed_size(tokens, self.key_bits)), torch.uint8),
                "value_codes": ((heads, tokens, packed_size(dim, self.value_bits)), torch.uint8),
            },
            parameters={
                "key_scale": ((heads, dim), torch.float16),
                "key_offset": ((heads, dim), torch.float16),
                "value_scale": ((heads, tokens), torch.float16),
                "value_offset": ((heads, tokens), torch.float16),
            },
        )

    def encode(
        self, keys: Float[Tensor, "*windows heads tokens dim"], values: Float[Tensor, "*windows heads tokens dim"]
    ) -> UInt8[Tensor, "*windows bytes"]:
        """Encode windows of keys (before rotary embedding) and values.

        Raises:
            ValueError: keys and values differ in shape.
        """
        if keys.shape != values.shape:
            raise ValueError(f"keys and values have one shape, not {list(keys.shape)} and {list(values.shape)}")
        *windows, heads, tokens, dim = keys.shape
        layout = self.layout(WindowShape(heads, tokens, dim))
        packed = torch.zeros(*windows, layout.nbytes, dtype=torch.uint8, device=keys.device)
        arrays = layout.view(packed)
        for kind, rows, bits in (("key", keys.mT, self.key_bits), ("value", values, self.value_bits)):
            codes, scale, offset = quantize_rows(rows.detach().float(), bits)
            arrays[f"{kind}_codes"].copy_(pack(codes, bits))
            arrays[f"{kind}_scale"].copy_(scale)
            arrays[f"{kind}_offset"].copy_(offset)
        return packed

    def decode(
        self, packed: UInt8[Tensor, "*windows bytes"], shape: WindowShape
    ) -> tuple[Float32[Tensor, "*windows heads tokens dim"], Float32[Tensor, "*windows heads tokens dim"]]:
        """Keys (before rotary embedding) and values of encoded windows of `shape`.

        Raises:
            ValueError: the last dimension of `packed` is not the size of a window of `shape`.
        """
        arrays = self.layout(shape).view(packed)
        keys = dequantize_rows(
            unpack(arrays["key_codes"], self.key_bits, shape.tokens), arrays["key_scale"], arrays["key_offset"]
        )
        values = dequantize_rows(
            unpack(arrays["value_codes"], self.value_bits, shape.head_dim),
            arrays["value_scale"],
            arrays["value_offset"],
        )
        return keys.mT, values


def quantize_rows(
    rows: Float32[Tensor, "*rows n"], bits: int
) -> tuple[UInt8[Tensor, "*rows n"], Float16[Tensor, "*rows"], Float16[Tensor, "*rows"]]:
    """Codes of each row, and its scale and offset, as `MinMaxCodec` says."""
    levels = (1 << bits) - 1
    rows = rows.clamp(-LIMIT, LIMIT)
    lowest, highest = rows.amin(dim=-1), rows.amax(dim=-1)  # ten times as fast as aminmax along a strided dimension
    offset = round_down(lowest + 0.0)  # which of 0 and -0 is the minimum depends on the order of the search
    scale = round_down((offset.float() - highest) / levels).abs()  # a negative number down: its magnitude up
    step = torch.where(scale > 0, scale, 1).float()  # a row that equals its offset has scale 0 and codes 0
    codes = ((rows - offset.float().unsqueeze(-1)) / step.unsqueeze(-1)).round()  # 0 to levels: the grid covers the row
    return codes.to(torch.uint8), scale, offset


def dequantize_rows(
    codes: UInt8[Tensor, "*rows n"], scale: Float16[Tensor, "*rows"], offset: Float16[Tensor, "*rows"]
) -> Float32[Tensor, "*rows n"]:
    """What `quantize_rows` made codes of."""
    return torch.addcmul(offset.float().unsqueeze(-1), codes.float(), scale.float().unsqueeze(-1))


def round_down(x: Float32[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """The largest float16 that is not above x, for |x| <= 65504."""
    nearest = x.half()
    bits = nearest.view(torch.int16)
    # The bits of a float16 are its sign and its magnitude: the next number below has the next smaller magnitude if it
    # is positive, the next larger one if negative. A tiny negative x rounds to -0, which counts as negative here too.
    below = torch.where(bits < 0, bits + 1, bits - 1).view(torch.float16)
    return torch.where(nearest.float() > x, below, nearest)
