"""What a plan comes to once a whole context has been seen; nothing here needs a model or its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qevict.budget import TierPlan
from qevict.config import QEvictConfig
from qevict.routing import FULL, QUANTIZED, Candidates, route_coverage, route_split


@dataclass(frozen=True)
class PlannedTiers:
    """Where the tokens of one sequence are, in each lane.

    Attributes:
        context: tokens of the sequence.
        sinks, recent: protected tokens.
        full, quantized: windows in either tier.
        window: tokens of a window.
    """

    context: int
    sinks: int
    recent: int
    full: int
    quantized: int
    window: int

    @property
    def kept(self) -> int:
        """Tokens that attention can still reach."""
        return self.sinks + self.recent + (self.full + self.quantized) * self.window


def planned_tiers(config: QEvictConfig, plan: TierPlan, context: int) -> PlannedTiers:
    """The tiers right after a routing event at `context` tokens, none of whose windows was quantized before."""
    sinks = min(plan.sink_tokens, context)
    windows = 0 if context <= plan.protected_slots else (context - plan.recent_tokens - sinks) // plan.window
    tier = assign(config, plan, _fresh(windows))
    return PlannedTiers(
        context=context,
        sinks=sinks,
        recent=context - sinks - windows * plan.window,
        full=int((tier == FULL).sum()),
        quantized=int((tier == QUANTIZED).sum()),
        window=plan.window,
    )


def assign(config: QEvictConfig, plan: TierPlan, pool: Candidates) -> torch.Tensor:
    """The new state of every candidate under a configuration's allocation."""
    if config.allocation == "split":
        return route_split(
            pool,
            plan.full_capacity,
            plan.code_capacity,
            promotion=config.promotion,
            dormant_extra=config.dormant == "extra",
        )
    return route_coverage(
        pool,
        plan.arena_bytes,
        plan.full_bytes,
        plan.code_bytes,
        plan.max_full,
        plan.max_codes,
        promotion=config.promotion,
    )


def _fresh(windows: int) -> Candidates:
    number = torch.arange(windows)[None]
    no = torch.zeros_like(number, dtype=torch.bool)
    return Candidates(number, torch.zeros(1, windows), no, no)
