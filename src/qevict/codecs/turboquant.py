"""TurboQuant's codec: each token's vector rotated so that its coordinates are alike, each then at its nearest level."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from qevict.codecs.base import WindowLayout, WindowShape
from qevict.codecs.packing import pack, packed_size, unpack

LIMIT = 65504.0
"""Inputs and decoded elements beyond it, the largest finite float16, are clamped."""
SMALLEST_BLOCK = 4


@dataclass(frozen=True)
class TurboQuantCodec:
    """Each token's key and value by itself: randomly signed Hadamard rotation, one scale, a level for each coordinate.

    x is split into blocks of a power of two of channels: one for head sizes that are powers of two, else those of the
    binary number (96 is 64 + 32), each encoded by itself. A block of size n is decoded as
    `S H (scale * level[codes])`, where H is the orthonormal Hadamard matrix of size n and S random signs, the same for
    all tokens. The levels are those of least mean squared error (Lloyd-Max) for a coordinate of a random vector of
    length sqrt(n) in n dimensions. With `keep_norm` the scale is such that the decoded block is as long as x was;
    without, it is |x| / sqrt(n), and the block comes out shorter, by as much as the squared error.

    The paper (arXiv 2504.19874) rotates by a random orthogonal matrix; serving engines use a Hadamard matrix as here.
    Its second stage (QJL, a one-bit sketch of what is left) is left out, as engines do: it made attention worse. vLLM
    (PR 38479) does this for keys alone, with `keep_norm` in its "_nc" presets and levels of the normal distribution;
    its values are min-max per token without rotation, and its first and last two layers stay exact.

    Encoding sums pairs in a fixed order, so that a token's codes do not depend on what is encoded with it. Inputs and
    decoded elements beyond +-65504 are clamped. Scales are float16: elements below about 1e-7 vanish.

    Bytes of one window of H heads, T tokens, D channels in B blocks (see `base` for offsets, `packing` for bits; P is
    `packed_size`)::

        section       dtype    shape
        key_codes     uint8    [H, T, P(D, key_bits)]     the blocks' coordinates one after another
        value_codes   uint8    [H, T, P(D, value_bits)]
        key_scale     float16  [H, T, B]
        value_scale   float16  [H, T, B]

    Attributes:
        key_bits, value_bits: of each coordinate.
        keep_norm: whether decoded vectors have the length of the encoded ones.
        seed: of the random signs.

    Raises:
        ValueError: a width is not one of 1 to 8; from `layout`, if D is no multiple of 4.
    """

    key_bits: int = 4
    value_bits: int = 4
    keep_norm: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for field, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if not 1 <= bits <= 8:
                raise ValueError(f"{field} of the turboquant codec is a whole number from 1 to 8, not {bits}")

    def layout(self, shape: WindowShape) -> WindowLayout:
        """Where every array lies in the bytes of one window."""
        heads, tokens, dim = shape.heads, shape.tokens, shape.head_dim
        scales = ((heads, tokens, len(block_sizes(dim))), torch.float16)
        return WindowLayout.build(
            codes={
                "key_codes": ((heads, tokens, packed_size(dim, self.key_bits)), torch.uint8),
                "value_codes": ((heads, tokens, packed_size(dim, self.value_bits)), torch.uint8),
            },
            parameters={"key_scale": scales, "value_scale": scales},
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
        arrays, sides = layout.view(packed), {"key": keys, "value": values}
        for bits, kinds in self._widths.items():
            rows = torch.stack([sides[kind] for kind in kinds]).detach().float().clamp(-LIMIT, LIMIT)
            codes, scales = self.quantize(rows, bits)
            for kind, own_codes, own_scales in zip(kinds, pack(codes, bits), scales, strict=True):
                arrays[f"{kind}_codes"].copy_(own_codes)
                arrays[f"{kind}_scale"].copy_(own_scales)
        return packed

    def decode(
        self, packed: UInt8[Tensor, "*windows bytes"], shape: WindowShape
    ) -> tuple[Float32[Tensor, "*windows heads tokens dim"], Float32[Tensor, "*windows heads tokens dim"]]:
        """Keys and values of encoded windows of `shape`."""
        arrays = self.layout(shape).view(packed)
        sides: dict[str, Tensor] = {}
        for bits, kinds in self._widths.items():
            codes, scales = (torch.stack([arrays[f"{kind}_{name}"] for kind in kinds]) for name in ("codes", "scale"))
            rows = self.dequantize(unpack(codes, bits, shape.head_dim), scales, bits)
            sides.update(zip(kinds, rows, strict=True))
        return sides["key"], sides["value"]

    @property
    def _widths(self) -> dict[int, tuple[str, ...]]:
        """What is coded in so many bits; what has the same width goes through the arithmetic together."""
        if self.key_bits == self.value_bits:
            return {self.key_bits: ("key", "value")}
        return {self.key_bits: ("key",), self.value_bits: ("value",)}

    def quantize(self, rows: Float32[Tensor, "*rows dim"], bits: int) -> tuple[Tensor, Tensor]:
        """Codes `[*rows, dim]` (not packed) and scales `[*rows, blocks]` of rows within +-LIMIT."""
        codes, scales = [], []
        for x, size in zip(rows.split(block_sizes(rows.shape[-1]), dim=-1), block_sizes(rows.shape[-1]), strict=True):
            levels = torch.tensor(lloyd_max_levels(size, bits), device=rows.device)
            turned = hadamard(x * random_signs(size, self.seed, rows.device))
            norm = _norm(turned)
            unit = turned * (math.sqrt(size) / torch.where(norm > 0, norm, 1))
            chosen = _nearest(unit, levels)
            length = _norm(_looked_up(levels, chosen)) if self.keep_norm else math.sqrt(size)
            codes.append(chosen)
            scales.append((norm / length).clamp(max=LIMIT))
        return torch.cat(codes, dim=-1), torch.cat(scales, dim=-1)

    def dequantize(self, codes: UInt8[Tensor, "*rows dim"], scales: Tensor, bits: int) -> Float32[Tensor, "*rows dim"]:
        """What `quantize` made codes of."""
        sizes, rows = block_sizes(codes.shape[-1]), []
        for block, chosen in enumerate(codes.split(sizes, dim=-1)):
            levels = torch.tensor(lloyd_max_levels(sizes[block], bits), device=codes.device)
            turned = _looked_up(levels, chosen)
            turned *= scales[..., block, None].float()
            rows.append(turned @ turn_back(sizes[block], self.seed, codes.device))
        return torch.cat(rows, dim=-1).clamp(-LIMIT, LIMIT)


@functools.cache
def block_sizes(dim: int) -> list[int]:
    """Powers of two that sum to `dim`, the largest first.

    Raises:
        ValueError: if one of them is below 4, where coordinates are nothing like each other.
    """
    if dim < SMALLEST_BLOCK or dim % SMALLEST_BLOCK:
        raise ValueError(
            f"codecs that rotate need a head size that is a multiple of {SMALLEST_BLOCK}, not {dim}; codec='minmax' "
            "takes any"
        )
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


@functools.cache
def lloyd_max_levels(size: int, bits: int) -> tuple[float, ...]:
    """The 2**bits levels of least mean squared error for a coordinate of a random vector of length sqrt(size).

    The coordinate t of a random unit vector in n dimensions has a density proportional to (1 - t^2)^((n - 3) / 2). Each
    level is the mean of what is nearest to it; Lloyd's iteration finds such levels, starting from quantiles. They are
    ascending, and symmetric about 0.
    """
    edges = np.linspace(-1, 1, 40001)
    t = (edges[1:] + edges[:-1]) / 2
    density = (1 - t * t) ** ((size - 3) / 2)
    mass = np.concatenate([[0.0], np.cumsum(density)])
    moment = np.concatenate([[0.0], np.cumsum(density * t)])
    count = 1 << bits
    levels = np.interp((np.arange(count) + 0.5) / count, mass / mass[-1], edges)
    for _ in range(5000):
        bounds = np.concatenate([[-1], (levels[1:] + levels[:-1]) / 2, [1]])
        means = np.diff(np.interp(bounds, edges, moment)) / np.diff(np.interp(bounds, edges, mass))
        means = (means - means[::-1]) / 2
        change, levels = np.abs(means - levels).max(), means
        if change < 1e-10:
            break
    return tuple((levels * math.sqrt(size)).tolist())


@functools.cache
def random_signs(size: int, seed: int, device: torch.device) -> Float32[Tensor, " size"]:
    """+1 and -1, always the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randint(0, 2, (size,), generator=generator) - 1).float().to(device)


def hadamard(x: Float32[Tensor, "*rows size"]) -> Float32[Tensor, "*rows size"]:
    """x times the orthonormal Hadamard matrix, which is its own inverse; `size` is a power of two."""
    size, half = x.shape[-1], 1
    while half < size:
        first, second = x.unflatten(-1, (size // (2 * half), 2, half)).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return x / math.sqrt(size)


@functools.cache
def turn_back(size: int, seed: int, device: torch.device) -> Float32[Tensor, "size size"]:
    """What a rotated row is multiplied with; a product of matrices is faster than `hadamard`."""
    return hadamard(torch.eye(size, device=device)) * random_signs(size, seed, device)


def _nearest(x: Float32[Tensor, "*rows size"], levels: Float32[Tensor, " levels"]) -> UInt8[Tensor, "*rows size"]:
    """Which of the ascending levels is nearest to each number; the lower one in the middle of two."""
    chosen = torch.zeros_like(x, dtype=torch.uint8)
    for middle in ((levels[1:] + levels[:-1]) / 2).tolist():  # for so few, many times faster than torch.bucketize
        chosen += x > middle
    return chosen


def _looked_up(
    levels: Float32[Tensor, " levels"], chosen: UInt8[Tensor, "*rows size"]
) -> Float32[Tensor, "*rows size"]:
    return levels.index_select(0, chosen.int().flatten()).view(chosen.shape)  # twice as fast as levels[chosen]


def _norm(x: Float32[Tensor, "*rows size"]) -> Float32[Tensor, "*rows one"]:
    """Euclidean length, summed in a fixed order."""
    x = x * x
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x.sqrt()
