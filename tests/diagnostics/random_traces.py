"""Random reference masses and policy states that hang together, for hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from qevict.diagnostics.policy import ABSENT, LOCAL, SINK


@dataclass
class Case:
    """One layer of a reference (`mass`) and of a policy (`tiers` at `lengths`)."""

    mass: Tensor
    tiers: Tensor
    lengths: Tensor
    prefill: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any number of heads and lanes, events from the prompt's end on, tokens in arbitrary tiers."""
    prefill, steps = draw(st.integers(1, 12)), draw(st.integers(1, 14))
    lanes = draw(st.integers(1, 3))
    heads = lanes * draw(st.integers(1, 3))
    later = draw(st.sets(st.integers(1, steps), max_size=5))
    lengths = torch.tensor([prefill, *(prefill + step for step in sorted(later))])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    total = prefill + steps
    mass = torch.rand(heads, steps, total, generator=generator) ** 4
    seen = torch.arange(total) <= prefill + torch.arange(steps)[:, None]
    mass = mass * seen
    mass = mass / mass.sum(dim=-1, keepdim=True)
    tiers = torch.randint(0, 3, (len(lengths), lanes, total), generator=generator).to(torch.uint8)
    for event, length in enumerate(lengths.tolist()):
        tiers[event, :, max(0, length - 3) : length] = LOCAL
        tiers[event, :, : min(2, length)] = SINK
        tiers[event, :, length:] = ABSENT
    return Case(mass, tiers, lengths, prefill)
