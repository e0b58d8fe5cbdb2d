"""QEvictCache: the Transformers `Cache` that holds a model's keys and values in three tiers under a byte budget."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedModel

from qevict.config import RECONSTRUCTION, Budget, QEvictConfig, as_config
from qevict.layer import QEvictLayer
from qevict.managed_cache import ManagedCache
from qevict.migration import Moves
from qevict.rope import Rope
from qevict.session import Session, TierSession


class TierCounts(NamedTuple):
    """Windows in each state, over all layers and rows (and KV heads with granularity "kv_head")."""

    full: int
    quantized: int
    evicted: int


class QEvictCache(ManagedCache):
    """A drop-in key-value cache with three tiers under a hard byte budget.

    ```python
    cache = QEvictCache(model, 0.2, max_new_tokens=128)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=128)
    print(cache.memory())
    ```

    The model's attention implementation is set to qevict's, which behaves as before for every other cache. The cache
    keeps the model's config and copies of its rotary tables, never the model.

    Args:
        model: a decoder-only model.
        config: settings, or only a budget: a fraction of full KV, `Budget(bytes=...)` or `Budget(tokens=...)`. Budgets
            are for each row of a batch. 1.0 means no limit.
        max_new_tokens: tokens that will be generated; a fractional budget needs it, as it is a share of prompt + new.
        prompt_tokens: tokens of the whole prompt, padding included; only for prompts that arrive in chunks.

    Raises:
        ValueError: if the model or the budget cannot be supported, in one sentence that says why.
    """

    _session: TierSession

    def __init__(
        self,
        model: PreTrainedModel,
        config: QEvictConfig | Budget | float = 0.2,
        *,
        max_new_tokens: int | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        self.config = as_config(config)
        super().__init__(
            model,
            self.config.limit,
            store_dtype=self.config.store_dtype,
            allow_untested=self.config.allow_untested,
            max_new_tokens=max_new_tokens,
            prompt_tokens=prompt_tokens,
        )

    def counts(self) -> TierCounts:
        """Windows in each state now."""
        full = quantized = evicted = 0
        for layer in self._tier_layers:
            for cohort in layer.cohorts:
                f, q, e = cohort.store.counts()
                full, quantized, evicted = full + f, quantized + q, evicted + e
        return TierCounts(full, quantized, evicted)

    def moves(self) -> Moves:
        """Windows moved since the beginning, over all layers and rows."""
        stores = (cohort.store for layer in self._tier_layers for cohort in layer.cohorts)
        return sum((moves for store in stores for moves in store.moves), start=Moves())

    def __repr__(self) -> str:
        return f"QEvictCache({self.config.limit}, {len(self.managed)} of {len(self.layers)} layers managed)"

    def _new_session(self, **announced: Any) -> Session:
        return TierSession(**announced, config=self.config)

    def _layer(self, index: int, rope: Rope) -> QEvictLayer:
        return QEvictLayer(self._session, index, rope)

    @property
    def reads_twice(self) -> bool:
        """Whether a prompt has to be given by `read_prompt`, which reads it twice."""
        return self.config.prompt_scorer == RECONSTRUCTION and not self._unmanaged

    @property
    def _unmanaged(self) -> bool:
        return self.config.limit.unlimited

    @property
    def _tier_layers(self) -> list[QEvictLayer]:
        return [layer for layer in self.layers if isinstance(layer, QEvictLayer)]
