"""Session: what the layers of one cache share."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

from qevict.architectures import Architecture, check_length
from qevict.budget import TierPlan, plan_tiers
from qevict.codecs import Codec, PromptCodec
from qevict.config import Budget, QEvictConfig
from qevict.forward import Forward
from qevict.geometry import KVGeometry


@dataclass
class Session:
    """Announcements of one cache, and the forward that is under way.

    Attributes:
        limit: the budget of a row.
        store_dtype: of full-precision storage; None is the model's.
        model_config: the config of the model that the cache was made for, which tells it from other models.
        max_new_tokens, prompt_tokens: what was announced.
        geometry: of the managed layers; set at the first forward, when it is known which layers are managed.
        managed: which layers are managed, one flag a layer; set with `geometry`.
        forward: the current forward.
    """

    limit: Budget
    store_dtype: torch.dtype | None
    architecture: Architecture
    model_config: weakref.ref[PretrainedConfig]
    max_new_tokens: int | None
    prompt_tokens: int | None
    geometry: KVGeometry | None = field(default=None, kw_only=True)
    managed: tuple[bool, ...] = field(default=(), kw_only=True)
    forward: Forward | None = field(default=None, kw_only=True)

    @property
    def first_layer(self) -> int:
        """Index of the first managed layer, the one that reads a forward for all."""
        return self.managed.index(True)

    @property
    def last_layer(self) -> int:
        """Index of the last managed layer."""
        return len(self.managed) - 1 - self.managed[::-1].index(True)

    def announced(self, count: int, pads: int) -> int | None:
        """S of a row whose first forward has `count` tokens beside `pads` columns of padding; None if not known."""
        if self.max_new_tokens is None:
            return None
        return self.max_new_tokens + self.prompt(count, pads)

    def prompt(self, count: int, pads: int) -> int:
        """Tokens of the whole prompt of such a row."""
        return count if self.prompt_tokens is None else max(count, self.prompt_tokens - pads)

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


@dataclass
class TierSession(Session):
    """The session of a `QEvictCache`, with its settings and the plans made so far."""

    config: QEvictConfig
    plans: dict[tuple[Any, ...], TierPlan] = field(default_factory=dict, kw_only=True)

    @property
    def lanes_per_row(self) -> int:
        """Lanes of a row in a layer."""
        return self.architecture.kv_heads if self.config.granularity == "kv_head" else 1

    def plan(self, tokens: int | None, prompt: int = 0, codec: Codec | PromptCodec | None = None) -> TierPlan:
        """The plan of a row of S tokens, `prompt` of them its prompt (which matters to a budget of that scope only).

        Args:
            codec: what its windows are quantized with already.
        """
        key = (tokens, prompt if self.limit.scope == "prompt" else 0, codec)
        if key not in self.plans:
            assert self.geometry is not None
            if tokens is not None:
                self.check_length(tokens)
            self.plans[key] = plan_tiers(self.config, self.geometry, tokens, key[1], codec)
        return self.plans[key]
