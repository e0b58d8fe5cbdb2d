"""Whether scores measured under quantized execution rank windows as full KV would: Eqs. 16 and 17.

One layer and lane at a time: `[events, windows]` scores that the cache measured and those of the reference, both means
over the lane's query heads as the cache ranks by (Eq. 1), and which windows were in codes at each event.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SHUFFLES = 64
"""Random pairings that the null is a mean of."""


class Agreement(NamedTuple):
    """Of each event; nan where fewer than two windows are in codes (the ratio: none).

    Attributes:
        cosine: QSA (Eq. 16).
        spearman: the same question asked of ranks alone.
        null: the cosine between the same scores when windows are paired at random: what a high cosine costs nothing.
        ratio: R_Q (Eq. 17).
    """

    cosine: Float[Tensor, " events"]
    spearman: Float[Tensor, " events"]
    null: Float[Tensor, " events"]
    ratio: Float[Tensor, " events"]


def score_agreement(
    quantized: Float[Tensor, "events windows"],
    full: Float[Tensor, "events windows"],
    member: Bool[Tensor, "events windows"],
    seed: int = 0,
) -> Agreement:
    """QSA and R_Q of every event over its quantized windows, with what they are to be judged by.

    Args:
        quantized, full: attention mass, of whatever stretch of time the caller sums over.
        member: windows in the low-bit tier.
        seed: of the shuffles.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for ours, reference, chosen in zip(quantized.double(), full.double(), member, strict=True):
        own, theirs = ours[chosen], reference[chosen]
        rows.append(
            (
                cosine(own, theirs),
                spearman(own, theirs),
                shuffled_cosine(own, theirs, generator),
                float(own.sum() / theirs.sum()) if len(own) and theirs.sum() > 0 else torch.nan,
            )
        )
    return Agreement(*torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).float().unbind(dim=1))


def cosine(a: Float[Tensor, " windows"], b: Float[Tensor, " windows"]) -> float:
    """<a, b> / (|a| |b|) (Eq. 16); nan for fewer than two windows, of which one always agrees, or a zero vector."""
    norm = a.norm() * b.norm()
    return float(a @ b / norm) if len(a) > 1 and norm > 0 else torch.nan


def spearman(a: Float[Tensor, " windows"], b: Float[Tensor, " windows"]) -> float:
    """Correlation of the ranks, equal values sharing their mean rank; nan where one of them is constant."""
    ranks = [_ranks(a), _ranks(b)]
    return cosine(*(r - r.mean() for r in ranks)) if len(a) > 1 else torch.nan


def shuffled_cosine(a: Float[Tensor, " windows"], b: Float[Tensor, " windows"], generator: torch.Generator) -> float:
    """Mean cosine over random pairings."""
    if len(a) < 2:
        return torch.nan
    order = torch.rand(SHUFFLES, len(b), generator=generator).argsort(dim=1)
    norm = a.norm() * b.norm()
    return float((b[order] @ a).mean() / norm) if norm > 0 else torch.nan


def event_sums(
    mass: Float[Tensor, "steps windows"], lengths: Int[Tensor, " events"], prefill: int, *, increments: bool
) -> Float[Tensor, "events windows"]:
    """Attention that windows received around each event.

    Args:
        increments: the decode steps from the event to the next (or to the end), in which the windows that the event put
            into codes were read from codes. Otherwise all decode steps before the event.
    """
    at_step = torch.cat([torch.zeros_like(mass[:1]), mass.cumsum(dim=0)])
    now = at_step[(lengths - prefill).long()]
    if not increments:
        return now
    return torch.cat([now[1:], at_step[-1:]]) - now


def _ranks(values: Float[Tensor, " windows"]) -> Float[Tensor, " windows"]:
    below = (values[None] < values[:, None]).sum(dim=1)
    equal = (values[None] == values[:, None]).sum(dim=1)
    return (below + (equal - 1) / 2).to(values.dtype)
