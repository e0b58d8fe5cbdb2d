"""Random rows for the quantised methods, and how they are run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qevict.geometry import KVGeometry
from qevict.methods.base import Allowance, LayerPrefill
from qevict.methods.store import RowStore
from qevict.rope import Rope


def make_row(
    heads: int = 2,
    group: int = 2,
    tokens: int = 20,
    dim: int = 8,
    new: int = 0,
    seed: int = 0,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[LayerPrefill, Tensor, Tensor]:
    """A prompt, and the keys (rotated) and values `[heads, new, dim]` that follow it."""
    generator = torch.Generator().manual_seed(seed)
    rope = Rope(10000.0 ** (-torch.arange(0, dim, 2) / dim))
    positions = torch.arange(first, first + tokens + new)
    query = torch.randn(heads, group, tokens, dim, generator=generator)
    keys, values = torch.randn(2, heads, tokens + new, dim, generator=generator)
    keys = rope.rotate(keys * torch.exp(torch.randn(dim, generator=generator)) + 2, positions).to(dtype)
    values = values.to(dtype)
    prefill = LayerPrefill(
        index=0,
        query=query.to(dtype),
        keys=keys[:, :tokens],
        values=values[:, :tokens],
        first_position=first,
        rope=rope,
        scaling=0.7,
        module=nn.Identity(),
    )
    return prefill, keys[:, tokens:], values[:, tokens:]


def allow(
    prefill: LayerPrefill, size: int | None = None, new: int | None = 0, exact: bool = False, layers: int = 1
) -> Allowance:
    """`size` bytes a layer."""
    heads, group, _, dim = prefill.query.shape
    geometry = KVGeometry(layers, heads, heads * group, dim, prefill.keys.element_size())
    return Allowance(size, new, exact, prefill.keys.dtype, geometry)


def held(store: RowStore) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values `[tokens, dim]` of each head, as attention sees them."""
    blocks = sorted(store.blocks(), key=lambda block: block.heads.start)
    return [k for block in blocks for k in block.keys], [v for block in blocks for v in block.values]


def feed(store: RowStore, keys: Tensor, values: Tensor) -> None:
    """A forward's tokens."""
    store.settle(keys.shape[1])
    store.append(keys, values)
    store.fresh = keys.shape[1]
