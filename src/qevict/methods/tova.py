"""TOVA: whatever the last token looks at least has to go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.methods.base import Allowance, LayerPrefill, best
from qevict.methods.evicting import DecodeSelector, ScoredStore
from qevict.methods.store import Kept, RowStore
from qevict.shared import shared


@dataclass(frozen=True)
class TOVA(DecodeSelector):
    """The tokens that the last query attends to most, averaged over all heads of a layer, which all keep the same.

    After the prompt, and then whenever a new token needs room, those with the least attention from the last token go,
    whatever they received before.

    Attributes:
        keep_last: whether the last token stays in any case. The authors let it compete; kvpress keeps it.
    """

    keep_last: bool = False

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "TOVA (Oren et al., 2024, arXiv 2401.06104)"
    source: ClassVar[str] = "schwartz-lab-NLP/TOVA, src/tova_cache.py"

    @property
    def observed_queries(self) -> int | None:
        """The last one."""
        return 1

    def score_rows(self, heads: int) -> int:
        """One for all heads."""
        return 1

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The best, the same for every head."""
        return list(self.choose(_last_attention(prefill), tokens).expand(prefill.keys.shape[0], -1))

    def choose(self, scores: Float[Tensor, "1 held"], tokens: int) -> Int[Tensor, "1 tokens"]:
        """The best of all tokens."""
        if self.keep_last:
            scores = scores.index_fill(1, torch.tensor([scores.shape[1] - 1], device=scores.device), torch.inf)
        return best(scores, tokens)[0][None]

    def store(self, prefill: LayerPrefill, capacity: int, allowance: Allowance) -> RowStore:
        """Tokens with the last one's attention to them."""
        kept = self.select([prefill], capacity)[0]
        scores = _last_attention(prefill)[:, kept[0]]
        return LastAttentionStore(prefill, kept, capacity, allowance, scores, self)


class LastAttentionStore(ScoredStore):
    """Tokens that the last one attends to."""

    def __init__(
        self,
        prefill: LayerPrefill,
        kept: Kept,
        capacity: int,
        allowance: Allowance,
        scores: Float[Tensor, "1 kept"],
        method: TOVA,
    ) -> None:
        super().__init__(prefill, kept, capacity, allowance, scores)
        self.method = method

    def read(self, weights: Float[Tensor, "heads group some tokens"]) -> Float[Tensor, "1 some tokens"]:
        """The mean over all query heads."""
        return weights.mean(dim=(0, 1))[None]

    def merge(
        self, scores: Float[Tensor, "1 settled"], pending: Float[Tensor, "1 new tokens"]
    ) -> Float[Tensor, "1 tokens"]:
        """What the last token says."""
        return pending[:, -1].clone()  # not a view that keeps the rest

    def choose(self, tokens: int) -> Int[Tensor, "heads tokens"]:
        """The best, the same for every head."""
        return self.method.choose(self.scores, tokens).expand(self.buffer.keys.shape[0], -1)


@shared
def _last_attention(prefill: LayerPrefill) -> Float[Tensor, "1 tokens"]:
    return prefill.attention(1).mean(dim=(0, 1))
