"""SnapKV: the prompt's last queries vote for the tokens that each head keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qevict.methods.base import LayerPrefill, Selector, best
from qevict.methods.store import Kept


@dataclass(frozen=True)
class SnapKV(Selector):
    """Tokens that the last `window` queries look at most, their attention pooled over `kernel` neighbours.

    The attention of the observation window over the tokens before it is averaged over its queries, then over the query
    heads of a group, then pooled; the window itself always stays. Heads choose for themselves, all equally many.

    Attributes:
        window: queries that vote (and tokens that always stay).
        kernel: neighbours pooled over; odd.
        pooling: how. The paper's experiments take the maximum; several ports the average.
    """

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV (Li et al., 2024, arXiv 2404.14469)"
    source: ClassVar[str] = "FasterDecoding/SnapKV, experiments/LongBench/config"

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"window is {self.window}, kernel {self.kernel}; window is at least 1, kernel odd")
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"pooling is {self.pooling!r}; it is 'max' or 'avg'")

    @property
    def observed_queries(self) -> int | None:
        """The observation window."""
        return self.window

    @property
    def least_tokens(self) -> int:
        """The observation window."""
        return self.window

    def scores(self, prefill: LayerPrefill) -> Float[Tensor, "heads tokens"]:
        """Pooled votes; infinite for the observation window. The prompt has more tokens than the window."""
        votes = prefill.attention(self.window)[..., : -self.window].mean(dim=2)
        votes = self._pooled(votes.mean(dim=1))
        return torch.nn.functional.pad(votes, (0, self.window), value=torch.inf)

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The `tokens` highest-scored of each head."""
        return best(self.scores(prefill), tokens)

    def _pooled(self, votes: Float[Tensor, "heads tokens"]) -> Float[Tensor, "heads tokens"]:
        half = self.kernel // 2
        if self.pooling == "max":
            return torch.nn.functional.max_pool1d(votes, self.kernel, stride=1, padding=half)
        return torch.nn.functional.avg_pool1d(votes, self.kernel, stride=1, padding=half)
