"""H2O: tokens that have received much attention so far, and recent ones; and kvpress's relative of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.kernels import prompt_mass
from qevict.methods.base import Allowance, LayerPrefill, Selector, best
from qevict.methods.evicting import DecodeSelector, ScoredStore
from qevict.methods.store import Kept, RowStore


@dataclass(frozen=True)
class H2O(DecodeSelector):
    """Heavy hitters and recent tokens of each KV head, chosen anew at every step.

    A token's score is the sum of the attention that all later queries, and its own, paid to it, those of the prompt and
    of generated tokens alike; averaged over the query heads of the group. Of the budget's tokens int(heavy * budget)
    are those with the highest scores before the recent ones, and the others are the recent ones. Room for a new token
    is made among the recent ones, so that the heavy hitters compete with the oldest of them.

    The authors' code that really drops tokens sums the scores over the batch, and knows no GQA; here every row and KV
    head has its own. Scores are stored beside the tokens and charged.

    Attributes:
        heavy: share of the budget for heavy hitters; the authors give both parts the same.
    """

    heavy: float = 0.5

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O (Zhang et al., 2023, arXiv 2306.14048)"
    source: ClassVar[str] = "FMInference/H2O, h2o_hf/README.md and utils_real_drop"

    def __post_init__(self) -> None:
        if not 0 <= self.heavy <= 1:
            raise ValueError(f"heavy is {self.heavy}; it is a share of the budget, from 0 to 1")

    @property
    def observed_queries(self) -> int | None:
        """All of them."""
        return None

    def score_rows(self, heads: int) -> int:
        """One for each head."""
        return heads

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """Heavy hitters and recent tokens of each head."""
        return heavy_and_recent(received(prefill), tokens, int(self.heavy * tokens))

    def store(self, prefill: LayerPrefill, capacity: int, allowance: Allowance) -> RowStore:
        """Tokens with their scores."""
        scores, heavy = received(prefill), int(self.heavy * capacity)
        kept = heavy_and_recent(scores, min(capacity, prefill.tokens), heavy)
        return HeavyHitterStore(prefill, kept, capacity, allowance, scores.gather(1, torch.stack(kept)), heavy)


class HeavyHitterStore(ScoredStore):
    """Heavy hitters and recent tokens of each head."""

    def __init__(
        self,
        prefill: LayerPrefill,
        kept: Kept,
        capacity: int,
        allowance: Allowance,
        scores: Float[Tensor, "heads kept"],
        heavy: int,
    ) -> None:
        super().__init__(prefill, kept, capacity, allowance, scores)
        self.heavy = heavy

    def read(self, weights: Float[Tensor, "heads group some tokens"]) -> Float[Tensor, "heads some tokens"]:
        """The mean over the group."""
        return weights.mean(dim=1)

    def merge(
        self, scores: Float[Tensor, "heads settled"], pending: Float[Tensor, "heads new tokens"]
    ) -> Float[Tensor, "heads tokens"]:
        """The sum over the queries, added."""
        return torch.nn.functional.pad(scores, (0, pending.shape[1])) + pending.sum(dim=1)

    def choose(self, tokens: int) -> Int[Tensor, "heads tokens"]:
        """The heaviest, and the last ones."""
        return torch.stack(heavy_and_recent(self.scores, tokens, self.heavy))


@dataclass(frozen=True)
class ObservedAttention(Selector):
    """kvpress's relative of H2O: the mean instead of the sum, no recent tokens, no eviction of generated ones.

    A token's score is the average attention that it received from the prompt's queries that could see it.
    """

    name: ClassVar[str] = "observedattention"
    paper: ClassVar[str] = "related to H2O (Zhang et al., 2023, arXiv 2306.14048)"
    source: ClassVar[str] = "NVIDIA/kvpress, kvpress/presses/observed_attention_press.py"

    @property
    def observed_queries(self) -> int | None:
        """All of them."""
        return None

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The `tokens` highest-scored of each head."""
        seen = torch.arange(prefill.tokens, 0, -1, device=prefill.keys.device)
        return best(received(prefill) / seen, tokens)


def received(prefill: LayerPrefill) -> Float[Tensor, "heads tokens"]:
    """Attention that each token received from all queries of the prompt, averaged over the group; float32."""
    # Each head by itself, as a lane.
    return prompt_mass(prefill.query[:, None], prefill.keys[:, None], prefill.scaling, None)


def heavy_and_recent(scores: Float[Tensor, "heads held"], tokens: int, heavy: int) -> Kept:
    """The `heavy` best before the recent ones, and the last ones, `tokens` altogether, of each head; ascending."""
    heavy = min(heavy, tokens)
    recent = tokens - heavy
    held = scores.shape[1]
    last = torch.arange(held - recent, held, device=scores.device)
    return [torch.cat((index, last)) for index in best(scores[:, : held - recent], heavy)]
