"""DefensiveKV: tokens are kept by the most that any observed query wanted of them, not by the average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qevict.methods.base import LayerPrefill, Selector, best
from qevict.methods.projection import output_norms
from qevict.methods.store import Kept
from qevict.shared import shared

WindowBias = Literal["author", "corrected"]
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class DefensiveKV(Selector):
    """The worst case of the observation window, one budget over the heads of a layer.

    With a the attention of one query of the window to the n tokens before it:

    1. a is averaged over `kernel` neighbours and scaled back to its sum; the score of a token for a KV head is the
       maximum over the group and the window, at least the mean of these maxima over the tokens.
    2. It is multiplied by the share that the head has of the L1 norms |W_o v|_1 of all KV heads at that token.
    3. Of each head, the tokens that average attention reaches first stay in any case: in falling order, those before
       the cumulative share (of the attention to the n tokens) reaches `coverage` less the window's own attention; at
       most the average budget less the window. So does the observation window.
    4. The best of all heads fill the budget. Heads are stored ragged.

    The authors' code measures the window's attention after it has cut the window off, so that what it subtracts is the
    attention to the last `window` tokens *before* it. `window_bias` chooses: "author" does as the code, "corrected"
    measures the window itself.

    Attributes:
        window: queries that are observed (and tokens that always stay).
        kernel: neighbours averaged over; odd.
        coverage: share of the attention that is secured.
        window_bias: which tokens' attention is subtracted from it, averaged over heads and queries.
    """

    window: int = 32
    kernel: int = 5
    coverage: float = 0.9
    window_bias: WindowBias = "author"

    name: ClassVar[str] = "defensivekv"
    paper: ClassVar[str] = "DefensiveKV (Feng et al., 2025)"
    source: ClassVar[str] = "FFY0/DefensiveKV, kvpress/presses/efficient_defensivekv_press.py"

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"window is {self.window}, kernel {self.kernel}; window is at least 1, kernel odd")
        if not 0 <= self.coverage <= 1:
            raise ValueError(f"coverage is {self.coverage}; it is a share, from 0 to 1")
        if self.window_bias not in ("author", "corrected"):
            raise ValueError(f"window_bias is {self.window_bias!r}; it is 'author' or 'corrected'")

    @property
    def observed_queries(self) -> int | None:
        """The observation window."""
        return self.window

    @property
    def least_tokens(self) -> int:
        """The observation window."""
        return self.window

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The best of all heads together."""
        return best_of_all([self.scores(prefill, tokens)], tokens)[0]

    def scores(self, prefill: LayerPrefill, tokens: int) -> Float[Tensor, "heads tokens"]:
        """Scores of all tokens; those that stay in any case lie just above the layer's best.

        Args:
            tokens: the average budget of a head.
        """
        observed = observe(prefill, self.window, self.kernel, self.window_bias)
        secured = self._secured(observed.average, self.coverage - float(observed.bias), tokens - self.window)

        norms = output_norms(prefill)[:, : -self.window]
        scores = observed.worst * (norms / norms.sum(dim=0).clamp_min(_TINY))
        above = float(scores.max().nextafter(scores.new_tensor(torch.inf)))
        return torch.nn.functional.pad(scores.masked_fill(secured, above), (0, self.window), value=above)

    def _secured(self, average: Float[Tensor, "heads n"], threshold: float, most: int) -> Bool[Tensor, "heads n"]:
        shares = average / average.sum(dim=-1, keepdim=True).clamp_min(_TINY)
        falling, order = shares.sort(dim=-1, descending=True, stable=True)
        reached = falling.cumsum(dim=-1) >= threshold
        # a threshold that rounding keeps out of reach secures nothing, as in the authors' code
        count = reached.int().argmax(dim=-1, keepdim=True).clamp_max(most)
        place = torch.arange(shares.shape[1], device=shares.device)
        return torch.zeros_like(reached).scatter(1, order, place < count)


class Observed(NamedTuple):
    """What the observation window says of the tokens before it, whatever the budget.

    Attributes:
        worst: each token's worst case (step 1).
        average: attention, averaged over the group and the window.
        bias: what is subtracted from the coverage.
    """

    worst: Float[Tensor, "heads earlier"]
    average: Float[Tensor, "heads earlier"]
    bias: Float[Tensor, ""]


@shared
def observe(prefill: LayerPrefill, window: int, kernel: int, window_bias: WindowBias) -> Observed:
    """Attention of the last `window` queries, taken together; for the settings see `DefensiveKV`."""
    attention = prefill.attention(window)
    earlier = attention[..., :-window]
    smooth = torch.nn.functional.avg_pool1d(earlier.flatten(0, 1), kernel, stride=1, padding=kernel // 2)
    smooth = smooth.view_as(earlier)
    # attention that underflowed to zero everywhere stays zero
    smooth = smooth * earlier.sum(dim=-1, keepdim=True) / smooth.sum(dim=-1, keepdim=True).clamp_min(_TINY)
    worst = smooth.amax(dim=(1, 2))
    measured = earlier if window_bias == "author" else attention
    return Observed(
        worst=worst.maximum(worst.mean(dim=-1, keepdim=True)),
        average=earlier.mean(dim=(1, 2)),
        bias=measured[..., -window:].sum(dim=-1).mean(),
    )


@dataclass(frozen=True)
class LayerDefensiveKV(DefensiveKV):
    """DefensiveKV with one budget over all layers and heads, for one sequence.

    What stays in any case in DefensiveKV lies above the other tokens of its own layer only: as in the authors' code, a
    layer whose scores are low may lose even its observation window to others.
    """

    name: ClassVar[str] = "layerdefensivekv"
    source: ClassVar[str] = "FFY0/DefensiveKV, kvpress/presses/efficient_layer_defensivekv_press.py"
    pooled: ClassVar[bool] = True
    one_row: ClassVar[bool] = True

    def keep_pooled(self, prefills: Sequence[LayerPrefill], tokens: int) -> list[Kept]:
        """The best of all layers and heads together."""
        return best_of_all([self.scores(prefill, tokens) for prefill in prefills], tokens)


def best_of_all(scores: list[Float[Tensor, "heads tokens"]], tokens: int) -> list[Kept]:
    """The best of all heads of some layers: `tokens` of a head on average, any number of each."""
    heads, length = scores[0].shape
    device = scores[0].device
    flat = torch.cat([layer.to(device).flatten() for layer in scores])
    total = len(scores) * heads * tokens
    chosen = torch.zeros_like(flat, dtype=torch.bool).index_fill(0, best(flat[None], total)[0], True)
    return [
        [head.nonzero()[:, 0] for head in layer.to(own.device)]
        for layer, own in zip(chosen.view(len(scores), heads, length), scores, strict=True)
    ]
