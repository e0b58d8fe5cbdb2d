"""Session: what the layers of one cache share."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from qevict.architectures import Architecture, check_length
from qevict.budget import TierPlan, plan_tiers
from qevict.config import QEvictConfig
from qevict.forward import Forward
from qevict.geometry import KVGeometry


@dataclass
class Session:
    """Settings, announcements and plans of one cache, and the forward that is under way.

    Attributes:
        model_config: the config of the model that the cache was made for, which tells it from other models.
        max_new_tokens, prompt_tokens: what was announced.
        geometry: of the managed layers; set at the first forward, when it is known which layers are managed.
        first_layer: index of the first managed layer, the one that reads a forward for all.
        forward: the current forward.
    """

    config: QEvictConfig
    architecture: Architecture
    model_config: weakref.ref[PretrainedConfig]
    max_new_tokens: int | None
    prompt_tokens: int | None
    geometry: KVGeometry | None = None
    first_layer: int = 0
    forward: Forward | None = None
    plans: dict[int | None, TierPlan] = field(default_factory=dict)

    @property
    def lanes_per_row(self) -> int:
        """Lanes of a row in a layer."""
        return self.architecture.kv_heads if self.config.granularity == "kv_head" else 1

    def plan(self, tokens: int | None) -> TierPlan:
        """The plan of a row of S tokens."""
        if tokens not in self.plans:
            assert self.geometry is not None
            if tokens is not None:
                check_length(self.architecture, tokens)
            self.plans[tokens] = plan_tiers(self.config, self.geometry, tokens)
        return self.plans[tokens]
