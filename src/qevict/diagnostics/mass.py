"""How much reference attention a policy gives up, and how steady its choice is: Eqs. 12 to 15.

All functions are pure. Their inputs are one layer's: the reference's attention `[query_heads, steps, tokens]`, and what
a policy kept at its events, `[events, lanes, tokens]`. A lane's tokens are those of an equal share of the query heads,
in order (all of them where a layer has one lane). Event r happens when `lengths[r]` tokens have been seen; the decode
step that follows it is `lengths[r] - prefill`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from qevict.diagnostics.policy import LOCAL
from qevict.routing import EVICTED, FULL, QUANTIZED

HORIZON = 32
"""H, decode steps that FMM looks ahead."""
SHARES = (FULL, QUANTIZED, EVICTED, LOCAL)
"""The tiers of Eq. 15, in the order of `tier_mass`."""


def cumulative_scores(
    mass: Float[Tensor, "heads steps tokens"],
    lengths: Int[Tensor, " events"],
    prefill: int,
    prompt: Float[Tensor, "heads tokens"] | None = None,
) -> Float[Tensor, "events heads tokens"]:
    """S of Eq. 12 at every event, token by token: attention received from all decode steps before it.

    Args:
        prompt: what the prompt's own queries gave, if it is to count. The paper's sum over all steps up to t does not
            say whether prompt queries are among them; its cache does begin with their mass.

    Returns:
        Attention mass (a sum of probabilities).
    """
    total = mass.cumsum(dim=1)
    start = torch.zeros_like(total[:, :1]) if prompt is None else prompt[:, None]
    at_step = torch.cat([start, start + total], dim=1)
    return at_step[:, (lengths - prefill).long()].transpose(0, 1)


def future_missed_mass(
    mass: Float[Tensor, "heads steps tokens"],
    accessible: Bool[Tensor, "events lanes tokens"],
    lengths: Int[Tensor, " events"],
    prefill: int,
    horizon: int = HORIZON,
) -> Float[Tensor, "events heads"]:
    """FMM_H (Eq. 13): the share of attention in the next H decode steps, over tokens that were there at the event, that
    falls on those that the policy had made inaccessible.

    Tokens that come after the event are in neither sum; sinks and recent tokens are in the second.

    Returns:
        Shares from 0 to 1; nan at events that no decode step follows, which are not eligible.
    """
    heads, steps, _ = mass.shape
    lanes = accessible.shape[1]
    shares = torch.full((len(lengths), heads), torch.nan)
    for event, length in enumerate(lengths.tolist()):
        first = length - prefill
        future = mass[:, first : min(first + horizon, steps), :length].sum(dim=1)
        if first < steps:
            reached = accessible[event, :, :length].repeat_interleave(heads // lanes, dim=0)
            shares[event] = future.masked_fill(reached, 0).sum(dim=1) / future.sum(dim=1)
    return shares


def selection_churn(retained: Bool[Tensor, "events lanes tokens"]) -> Float[Tensor, "changes lanes"]:
    """Churn (Eq. 14): the Jaccard distance of the historical sets after consecutive events, on token positions.

    The caller leaves the recent region out, as the paper does, and the sinks, which never move and which the paper
    counts apart from history as well. Two empty sets are at distance 0.

    Returns:
        Distances from 0 to 1; change r is from event r to event r + 1.
    """
    before, after = retained[:-1], retained[1:]
    union = (before | after).sum(dim=-1)
    return torch.where(union > 0, 1 - (before & after).sum(dim=-1) / union.clamp(min=1), 0.0)


def events_apart(lengths: Int[Tensor, " events"], tokens: int) -> Int[Tensor, " chosen"]:
    """Indices of events that are at least so many tokens apart, beginning with the first.

    Churn between such events compares policies with different routing intervals over the same stretch of text.
    """
    chosen, last = [], None
    for index, length in enumerate(lengths.tolist()):
        if last is None or length - last >= tokens:
            chosen.append(index)
            last = length
    return torch.tensor(chosen)


def tier_mass(
    scores: Float[Tensor, "events heads tokens"], tiers: UInt8[Tensor, "events lanes tokens"]
) -> Float[Tensor, "events heads shares"]:
    """mu (Eq. 15): the share of cumulative reference attention on each of `SHARES`.

    Sinks are in no share (the paper's 33.3 + 64.8 + 1.9 = 100), tokens that are not there yet have no mass.

    Args:
        scores: from `cumulative_scores`.

    Returns:
        Shares that sum to 1; nan where no attention was received yet.
    """
    group = scores.shape[1] // tiers.shape[1]
    states = tiers.repeat_interleave(group, dim=1)
    sums = torch.stack([scores.masked_fill(states != tier, 0).sum(dim=-1) for tier in SHARES], dim=-1)
    return sums / sums.sum(dim=-1, keepdim=True)
