"""A cache layer that attends by itself and is no cache of its own: what views and recorders have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from qevict.attention import KVHandle


class HandleLayer(CacheLayerMixin):
    """Hands out handles of new keys and values, which lead the attention function to the subclass's `attend`."""

    is_sliding = False
    is_compileable = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Handles that lead the attention function here."""
        handle = KVHandle(self, key_states, value_states)
        return handle, handle

    @abstractmethod
    def get_seq_length(self, *args: Any) -> int:
        """Tokens before the new ones."""

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Length and offset of the mask."""
        return self.get_seq_length() + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length
