"""AdaKV: SnapKV's scores, and one budget for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qevict.methods.base import LayerPrefill, best
from qevict.methods.snapkv import SnapKV
from qevict.methods.store import Kept


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Heads with spread attention keep more tokens than heads with peaked attention; each is sure of a share.

    The heads' scores (SnapKV's) compete in one ranking, and a head's budget is the number of its tokens among the best.
    What the heads keep is stored ragged, each at its own length. Two rules of the safeguard are in use:

    - "blend" (the authors' code): budget = (1 - alpha) * count + alpha * even, where `count` is the head's number among
      the best and `even` what it would have if all had the same; the observation window comes on top of both. They
      round every head to the nearest whole number, so that the sum may miss the budget by a few tokens; here the
      largest fractions are rounded up until the sum is the budget's.
    - "floor" (kvpress): the best int(alpha * tokens) of each head, at least one, are out of competition; the
      observation window counts as its best.

    Attributes:
        alpha: safeguard share of the average budget, 0 to 1. The authors' scripts take 0.2 with GQA.
        safeguard: its rule.
    """

    alpha: float = 0.2
    safeguard: Literal["blend", "floor"] = "blend"

    name: ClassVar[str] = "adakv"
    paper: ClassVar[str] = "Ada-KV (Feng et al., 2024, arXiv 2407.11550)"
    source: ClassVar[str] = "FFY0/AdaKV, experiments/LongBench/GQA_eval_longbench.sh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it is a share, from 0 to 1")
        if self.safeguard not in ("blend", "floor"):
            raise ValueError(f"safeguard is {self.safeguard!r}; it is 'blend' or 'floor'")

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The best of each head, as many as its budget says."""
        scores = self.scores(prefill)
        budgets = self.budgets(scores, tokens)
        return [best(row[None], budget)[0] for row, budget in zip(scores, budgets, strict=True)]

    def budgets(self, scores: Float[Tensor, "heads tokens"], tokens: int) -> list[int]:
        """Tokens that each head may keep, the observation window included; `tokens` of them on average."""
        heads = scores.shape[0]
        if self.safeguard == "floor":
            safe = self.safe(tokens)
            secured = torch.stack(best(scores, safe)) if safe else scores.new_empty(heads, 0, dtype=torch.long)
            return _counts(scores.scatter(1, secured, torch.inf), heads * tokens)
        even = tokens - self.window
        counts = _counts(scores[:, : -self.window], heads * even)
        exact = [(1 - self.alpha) * count + self.alpha * even for count in counts]
        return [self.window + budget for budget in _rounded(exact, heads * even)]

    def safe(self, tokens: int) -> int:
        """Tokens of each head that do not compete, by the rule "floor"."""
        return max(1, int(self.alpha * tokens)) if self.alpha > 0 else 0


def _counts(scores: Float[Tensor, "heads tokens"], total: int) -> list[int]:
    """How many of the `total` best of all heads each head has."""
    chosen = best(scores.reshape(1, -1), total)[0] // scores.shape[1]
    return torch.bincount(chosen, minlength=scores.shape[0]).tolist()


def _rounded(exact: list[float], total: int) -> list[int]:
    """Whole numbers that add up to `total`: rounded down, those with the largest fractions up."""
    rounded = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda head: rounded[head] - exact[head])
    for head in order[: total - sum(rounded)]:
        rounded[head] += 1
    return rounded
