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
        managed: which layers are managed, one flag a layer; set with `geometry`.
        forward: the current forward.
    """

    config: QEvictConfig
    architecture: Architecture
    model_config: weakref.ref[PretrainedConfig]
    max_new_tokens: int | None
    prompt_tokens: int | None
    geometry: KVGeometry | None = None
    managed: tuple[bool, ...] = ()
    forward: Forward | None = None
    plans: dict[int | None, TierPlan] = field(default_factory=dict)

    @property
    def lanes_per_row(self) -> int:
        """Lanes of a row in a layer."""
        return self.architecture.kv_heads if self.config.granularity == "kv_head" else 1

    @property
    def first_layer(self) -> int:
        """Index of the first managed layer, the one that reads a forward for all."""
        return self.managed.index(True)

    def check_length(self, tokens: int) -> None:
        """Refuse a row of so many tokens if the model would attend to them in a way that the cache does not know.

        Raises:
            ValueError: if the model would switch its rotary tables, or if a sliding layer that is managed as a full one
                would begin to slide.
        """
        check_length(self.architecture, tokens)
        for index, (managed, window) in enumerate(zip(self.managed, self.architecture.sliding_windows, strict=True)):
            if managed and window is not None and tokens > window:
                raise ValueError(
                    f"layer {index} attends to the last {window} tokens only and was managed because no more were "
                    f"announced; {tokens} tokens need a new cache"
                )

    def plan(self, tokens: int | None) -> TierPlan:
        """The plan of a row of S tokens."""
        if tokens not in self.plans:
            assert self.geometry is not None
            if tokens is not None:
                self.check_length(tokens)
            self.plans[tokens] = plan_tiers(self.config, self.geometry, tokens)
        return self.plans[tokens]
