"""Expected attention: how much the queries to come will look at a key, if they are like those of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qevict.methods.base import LayerPrefill, Selector, best
from qevict.methods.store import Kept
from qevict.rope import Rope
from qevict.shared import shared


@dataclass(frozen=True)
class ExpectedAttention(Selector):
    """Queries are taken as normally distributed before their rotation; E exp(q k) is then a closed form.

    With m and C the mean and the covariance of a query head's un-rotated prompt queries (sinks left out), A the average
    of the rotations of the next `future` positions and c the factor on the logits, a token's score is the mean over the
    group of

        softmax over tokens of  c (A m) k + c^2 / 2  k' (A C A') k

    times the L2 norm of its value. The sinks always stay. Settings and definition are kvpress's.

    Attributes:
        future: positions behind the prompt over which the rotation is averaged.
        sinks: first tokens, which always stay and whose queries do not count.
        covariance: whether C is used.
        value_norm: whether the score is multiplied by the value's norm.
        epsilon: added to the score before that.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    name: ClassVar[str] = "expectedattention"
    paper: ClassVar[str] = "Expected Attention (Devoto et al., 2025, arXiv 2510.00636)"
    source: ClassVar[str] = "NVIDIA/kvpress, kvpress/presses/expected_attention_press.py"

    def __post_init__(self) -> None:
        if self.future < 1 or self.sinks < 0 or self.epsilon < 0:
            raise ValueError(
                f"future is {self.future}, sinks {self.sinks}, epsilon {self.epsilon}; future is at least 1, the "
                "others at least 0"
            )

    @property
    def observed_queries(self) -> int | None:
        """All of them."""
        return None

    @property
    def least_tokens(self) -> int:
        """The sinks, or one token."""
        return max(1, self.sinks)

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The `tokens` highest-scored of each head."""
        return best(self.scores(prefill), tokens)

    @shared
    def scores(self, prefill: LayerPrefill) -> Float[Tensor, "heads tokens"]:
        """Expected attention times value norm; infinite for the sinks."""
        rotation = self.average_rotation(prefill)
        scores = []
        for query, keys in zip(prefill.query[:, :, self.sinks :], prefill.keys[:, self.sinks :], strict=True):
            queries = prefill.rope.unrotate(query, prefill.positions[self.sinks :])
            mean = queries.mean(dim=1)
            logits = (mean @ rotation.T) @ keys.float().T * prefill.scaling
            if self.covariance:
                centred = (queries - mean[:, None]) @ rotation.T
                spread = centred.transpose(1, 2) @ centred / queries.shape[1]
                logits += ((keys.float() @ spread) * keys.float()).sum(dim=-1) * prefill.scaling**2 / 2
            scores.append(logits.softmax(dim=-1).mean(dim=0))
        expected = torch.stack(scores)
        if self.value_norm:
            expected = (expected + self.epsilon) * prefill.values[:, self.sinks :].float().norm(dim=-1)
        return torch.nn.functional.pad(expected, (self.sinks, 0), value=torch.inf)

    def average_rotation(self, prefill: LayerPrefill) -> Float[Tensor, "dim dim"]:
        """A: a query times its transpose is the average of that query rotated to the next positions."""
        rope: Rope = prefill.rope
        keys = prefill.keys
        end = prefill.first_position + prefill.tokens
        unit = torch.eye(keys.shape[2], device=keys.device)[:, None].expand(-1, self.future, -1)
        return rope.rotate(unit, torch.arange(end, end + self.future, device=keys.device)).mean(dim=1).T
