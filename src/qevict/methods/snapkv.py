"""SnapKV: the prompt's last queries vote for the tokens that each head keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qevict.methods.base import LayerPrefill, Selector, best
from qevict.methods.store import Kept
from qevict.shared import shared

Pooling = Literal["max", "avg"]


@dataclass(frozen=True)
class SnapKV(Selector):
    """Tokens that the last `window` queries look at most, their attention pooled over `kernel` neighbours.

    The attention of the observation window over the tokens before it is averaged over its queries, then over the query
    heads of a group, then pooled; the window itself always stays. Heads choose for themselves, all equally many.

    The authors' code repeats keys and values for the query heads of a group before it selects, so that each query head
    chooses for itself and nothing of what GQA saves is left. Here a KV head is stored once and its group votes
    together, as in kvpress and AdaKV.

    Attributes:
        window: queries that vote (and tokens that always stay).
        kernel: neighbours pooled over; odd.
        pooling: how; tokens beyond the ends count as zeros. The authors' experiments: 32, 7, "max" (their code falls
            back to 32, 5, "avg"); kvpress: 64, 5, "avg".
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"

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

    def votes(self, prefill: LayerPrefill) -> Float[Tensor, "heads earlier"]:
        """Pooled votes for the tokens before the observation window, of which there has to be one at least."""
        return pooled_votes(prefill, self.window, self.kernel, self.pooling)

    def scores(self, prefill: LayerPrefill) -> Float[Tensor, "heads tokens"]:
        """The votes; infinite for the observation window."""
        return torch.nn.functional.pad(self.votes(prefill), (0, self.window), value=torch.inf)

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The `tokens` highest-scored of each head."""
        return best(self.scores(prefill), tokens)


@shared
def pooled_votes(prefill: LayerPrefill, window: int, kernel: int, pooling: Pooling) -> Float[Tensor, "heads earlier"]:
    """The attention of the last `window` queries to the tokens before them, averaged over a group, then pooled."""
    votes = prefill.attention(window)[..., :-window].mean(dim=2).mean(dim=1)
    if pooling == "max":
        return torch.nn.functional.max_pool1d(votes, kernel, stride=1, padding=kernel // 2)
    return torch.nn.functional.avg_pool1d(votes, kernel, stride=1, padding=kernel // 2)
