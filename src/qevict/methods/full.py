"""Full KV: the uncompressed reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from qevict.cache import QEvictCache
from qevict.config import Budget, QEvictConfig
from qevict.methods.base import Kind, MeasuredCache, OwnCache, Properties


@dataclass(frozen=True)
class FullKV(OwnCache):
    """Every token, exactly, in the storage dtype."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "the uncompressed cache"
    kind: ClassVar[Kind] = "full"
    properties: ClassVar[Properties] = Properties()

    def cache(
        self,
        model: PreTrainedModel,
        budget: Budget,
        *,
        max_new_tokens: int | None,
        store_dtype: torch.dtype | None,
        allow_untested: bool,
    ) -> MeasuredCache:
        """Transformers' own cache, rounded to the storage dtype.

        Raises:
            ValueError: if there is a limit.
        """
        if not budget.unlimited:
            raise ValueError(f"full KV has no budget; got {budget}")
        config = QEvictConfig(budget=budget, store_dtype=store_dtype, allow_untested=allow_untested)
        return QEvictCache(model, config, max_new_tokens=max_new_tokens)
