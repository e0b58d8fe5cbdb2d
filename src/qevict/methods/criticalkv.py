"""CriticalKV: half of the budget by attention, the other half by attention times what the value adds to the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qevict.methods.adakv import AdaKV
from qevict.methods.base import LayerPrefill, best
from qevict.methods.projection import output_norms
from qevict.methods.snapkv import SnapKV
from qevict.methods.store import Kept

_PAPER = "CriticalKV (Feng et al., 2025, arXiv 2502.03805)"
_SOURCE = "NVIDIA/kvpress and FFY0/DefensiveKV, kvpress/presses/criticalkv_press.py"


@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """Two stages over SnapKV's scores s.

    The first takes the best int(first_stage * tokens) of each head by s, the observation window counted among them; the
    second fills up by (s + epsilon) * |W_o v|_1, the L1 norm averaged over the query heads of the group.

    In the authors' code the observation window has a finite score, so that its values' norms may push tokens out of it
    when the first stage is smaller than the window. Here it always stays.

    Attributes:
        epsilon: added to the scores, so that a large value counts even where attention is nearly zero.
        first_stage: share of the budget of the first stage.
    """

    epsilon: float = 1e-4
    first_stage: float = 0.5

    name: ClassVar[str] = "criticalkv"
    paper: ClassVar[str] = _PAPER
    source: ClassVar[str] = _SOURCE

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stages(self.epsilon, self.first_stage)

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """Equally many of each head, in two stages."""
        scores = self.scores(prefill)
        first = [int(self.first_stage * tokens)] * len(scores)
        return two_stages(scores, output_norms(prefill), self.epsilon, first, [tokens] * len(scores))


@dataclass(frozen=True)
class CriticalAdaKV(AdaKV):
    """CriticalKV's two stages within AdaKV's budgets of the heads.

    The first stage is a share of a head's own budget. By the safeguard's rule "floor" (which is the authors' here) the
    tokens that it secures belong to the first stage in any case.

    Attributes:
        epsilon, first_stage: as in `CriticalKV`.
    """

    safeguard: Literal["blend", "floor"] = "floor"
    epsilon: float = 1e-4
    first_stage: float = 0.5

    name: ClassVar[str] = "criticaladakv"
    paper: ClassVar[str] = _PAPER
    source: ClassVar[str] = _SOURCE

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stages(self.epsilon, self.first_stage)

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """Each head as many as its budget says, in two stages."""
        scores = self.scores(prefill)
        budgets = self.budgets(scores, tokens)
        safe = self.safe(tokens) if self.safeguard == "floor" else 0
        first = [max(safe, int(self.first_stage * budget)) for budget in budgets]
        return two_stages(scores, output_norms(prefill), self.epsilon, first, budgets)


def two_stages(
    scores: Float[Tensor, "heads tokens"],
    norms: Float[Tensor, "heads tokens"],
    epsilon: float,
    first: list[int],
    budgets: list[int],
) -> Kept:
    """The best of each head: `first` by score, then up to the budget by (score + epsilon) * norm.

    Infinite scores are kept in either stage.
    """
    second = torch.where(scores.isinf(), torch.inf, (scores + epsilon) * norms)
    kept = []
    for head, (early, budget) in enumerate(zip(first, budgets, strict=True)):
        chosen = best(scores[head : head + 1], early)[0]
        kept.append(best(second[head].index_fill(0, chosen, torch.inf)[None], budget)[0])
    return kept


def _check_stages(epsilon: float, first_stage: float) -> None:
    if epsilon < 0 or not 0 <= first_stage <= 1:
        raise ValueError(
            f"epsilon is {epsilon}, first_stage {first_stage}; epsilon is at least 0, first_stage a share from 0 to 1"
        )
