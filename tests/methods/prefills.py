"""Random prompts of one layer, as a model would hand them to a method."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from qevict.geometry import KVGeometry
from qevict.methods.base import Allowance, LayerPrefill
from qevict.methods.store import POSITION_BYTES
from qevict.rope import Rope

DIM = 6


def make_rope(dim: int = DIM) -> Rope:
    return Rope(10000.0 ** (-torch.arange(0, dim, 2) / dim))


class Projection(nn.Module):
    """An attention module, as far as methods look at it."""

    def __init__(self, channels: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.o_proj = nn.Linear(channels, hidden, bias=False)
        self.o_proj.weight.data = torch.randn(hidden, channels, generator=generator)


def make_prefill(
    heads: int = 2,
    group: int = 2,
    tokens: int = 20,
    seed: int = 0,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    index: int = 0,
) -> LayerPrefill:
    """Attention that is far from uniform; the projection takes as many channels as it makes, plus one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, DIM, generator=generator)

    rope = make_rope()
    positions = torch.arange(first, first + tokens)
    return LayerPrefill(
        index=index,
        query=rope.rotate(2 * normal(heads, group, tokens), positions).to(dtype),
        keys=rope.rotate(normal(heads, tokens), positions).to(dtype),
        values=normal(heads, tokens).to(dtype),
        first_position=first,
        rope=rope,
        scaling=0.7,
        module=Projection(heads * group * DIM, heads * group * DIM + 1, generator),
    )


def allow(
    prefill: LayerPrefill, tokens: int | None, new: int | None = 0, exact: bool = False, spare: int = 0
) -> Allowance:
    """Bytes for so many uncompressed tokens of a layer, with the fixed metadata of a `Selector`, and `spare` more."""
    heads, _, dim = prefill.keys.shape
    geometry = KVGeometry(1, heads, heads * prefill.query.shape[1], dim, prefill.keys.element_size())
    size = None if tokens is None else tokens * geometry.token_bytes + POSITION_BYTES * (1 + heads) + spare
    return Allowance(size, new, exact, prefill.keys.dtype, geometry)


shapes = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3]),
        "seed": st.integers(0, 10**6),
        "first": st.sampled_from([0, 7]),
    }
)
"""Arguments of `make_prefill`: MQA, GQA, MHA."""


def as_lists(kept: list[Tensor]) -> list[list[int]]:
    return [index.tolist() for index in kept]
