"""Who leaves the full-precision set and who comes back: Eqs. 18 and 19.

A history is `[events, windows]`: whether each window was in the selected set, and whether it was there to be selected
(once aged, a window stays a window). Windows of several layers and lanes can stand side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EPISODES = (1, 2, 4, 8)
"""m for which the paper verifies the trend."""
EPISODE = 3
"""m, the paper's default."""


class Revival(NamedTuple):
    """Inactive episodes of a history.

    Attributes:
        eligible: episodes of at least m events.
        rescued: those after which the window was selected again.
        away: events that each rescued episode lasted.
    """

    eligible: int
    rescued: int
    away: tuple[int, ...]

    @property
    def rate(self) -> float:
        """GlobalLIR (Eq. 18); nan where nothing was eligible."""
        return self.rescued / self.eligible if self.eligible else torch.nan

    def __add__(self, other: tuple[object, ...]) -> Revival:
        assert isinstance(other, Revival)
        return Revival(self.eligible + other.eligible, self.rescued + other.rescued, self.away + other.away)


def global_lir(
    selected: Bool[Tensor, "events windows"],
    present: Bool[Tensor, "events windows"],
    m: int = EPISODE,
    *,
    never_selected: bool = True,
) -> Revival:
    """Global LIR(m) (Eq. 18).

    An episode is a maximal run of events at which a window is present and not selected, one that begins with the
    window's first event included, as the paper's definition has it. Episodes that the end of the trace cuts off stay in
    the denominator.

    Args:
        never_selected: whether windows that are never selected count. They can only be eligible and not rescued.
    """
    if not never_selected:
        chosen = selected.any(dim=0)
        selected, present = selected[:, chosen], present[:, chosen]
    run = torch.zeros(selected.shape[1], dtype=torch.long)
    away: list[int] = []
    for active, there in zip(selected, present, strict=True):
        away += run[active & (run >= m)].tolist()
        run = torch.where(active, 0, run + there.long())
    unreturned = int((run >= m).sum())
    return Revival(eligible=len(away) + unreturned, rescued=len(away), away=tuple(away))


def median_return(revival: Revival, m: int) -> tuple[float, float]:
    """Median time to return in routing events: from departure, and from the event at which the episode was eligible.

    The paper does not say which it means; from departure no time is below m.
    """
    if not revival.away:
        return torch.nan, torch.nan
    median = float(torch.tensor(revival.away, dtype=torch.float64).quantile(0.5))
    return median, median - m


def transitions(
    selected: Bool[Tensor, "events windows"], present: Bool[Tensor, "events windows"], lag: int
) -> Int[Tensor, "2 2"]:
    """Counts behind P_ab(lag) (Eq. 19): windows in state a at an event and in state b `lag` events later."""
    if lag < 1:
        raise ValueError(f"lag is {lag}; it has to be at least 1 event")
    before, after = selected[:-lag], selected[lag:]
    there = present[:-lag]
    pairs = [[(there & (before == a) & (after == b)).sum() for b in (False, True)] for a in (False, True)]
    return torch.tensor(pairs)


def probabilities(counts: Int[Tensor, "2 2"]) -> Float[Tensor, "2 2"]:
    """P_ab (Eq. 19); nan in the row of a state that never was."""
    return counts / counts.sum(dim=1, keepdim=True)


def oracle_selection(
    scores: Float[Tensor, "events windows"], present: Bool[Tensor, "events windows"], capacity: int
) -> Bool[Tensor, "events windows"]:
    """The `capacity` windows that full KV scores highest at each event (appendix I.4), ties to the later window.

    The oracle never evicts: all windows that are present compete at every event.
    """
    late_first = scores.masked_fill(~present, -torch.inf).flip(-1)
    order = late_first.argsort(dim=-1, descending=True, stable=True)[:, :capacity]
    chosen = torch.zeros_like(present).scatter_(-1, scores.shape[-1] - 1 - order, True)
    return chosen & present


def movements(before: Bool[Tensor, "events windows"], after: Bool[Tensor, "events windows"]) -> int:
    """Windows in one tier at an event and in another at the next: Q to F where `before` is codes and `after` full."""
    return int((before[:-1] & after[1:]).sum())
