"""The last forward of a cohort: taken in, but not counted yet, so that it can be undone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.budget import TierPlan
from qevict.config import QEvictConfig
from qevict.kernels.reference import prompt_mass, window_sums


@dataclass
class Pending:
    """The last forward, not settled yet.

    Attributes:
        count: its tokens.
        mass: `[lanes, steps, columns]`, one row for each of its queries or a single one with their sum; columns are
            full slots, code slots and local windows in use. None for a first forward.
        prompt: `[lanes, heads, group, tokens, dim]` queries of a first forward, whose masses are computed when it is
            settled. None for later forwards.
        scores: `[lanes, tokens]` what a `prompt_scorer` gave instead of these masses.
        scaling: factor on the logits of `prompt`.
        keys, values: its tokens where the protected storage has no room for them, else None.
    """

    count: int
    mass: Tensor | None = None
    prompt: Tensor | None = None
    scores: Tensor | None = None
    scaling: float = 1.0
    keys: Tensor | None = None
    values: Tensor | None = None

    def first(self, count: int) -> Pending:
        """The forward without its tokens from `count` on."""
        prompt = self.prompt
        return Pending(
            count,
            None if self.mass is None else self.mass[:, :count],
            None if prompt is None else prompt[:, :, :, : prompt.shape[3] - (self.count - count)],
            None if self.scores is None else self.scores[:, :count],
            self.scaling,
            None if self.keys is None else self.keys[:, :, :count],
            None if self.values is None else self.values[:, :, :count],
        )

    @property
    def nbytes(self) -> int:
        """Bytes that wait with it, beside the storages."""
        held = (self.mass, self.prompt, self.scores, self.keys, self.values)
        return sum(t.nbytes for t in held if t is not None)

    def take(self, lanes: Int[Tensor, " chosen"]) -> Pending:
        """The forward of the given lanes."""
        mass, prompt, scores, keys, values = (
            None if t is None else t[lanes] for t in (self.mass, self.prompt, self.scores, self.keys, self.values)
        )
        return Pending(self.count, mass, prompt, scores, self.scaling, keys, values)

    def masses(self, config: QEvictConfig, plan: TierPlan, due: bool) -> Float[Tensor, "lanes columns"]:
        """What it adds to the scores of the windows; `due` says whether a routing event follows."""
        if self.mass is not None:
            if config.score_steps == "every":
                return self.mass.sum(dim=1)
            return self.mass[:, -1] if due else torch.zeros_like(self.mass[:, 0])
        tokens = self.scores
        if tokens is None:
            assert self.prompt is not None
            assert self.keys is not None
            queries = config.prompt_queries
            tokens = prompt_mass(self.prompt, self.keys, self.scaling, None if queries == "all" else queries)
        return window_sums(tokens[:, plan.sink_tokens :], plan.window)
