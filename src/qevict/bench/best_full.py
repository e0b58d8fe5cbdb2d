"""Full KV as fast as torch can make it, so that speeds are compared with the best that full precision offers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from qevict.architectures import FULL, describe
from qevict.attention import AttentionCall, KVHandle, LazyMask, attach


class BestFullCache(Cache):
    """An uncompressed cache for one length: storages of that size, and one reading of each KV head a step.

    `DynamicCache` copies itself at every token. Here a token is written into its place, and a single token is attended
    with the query heads of a KV head as if they were queries, which torch does in two thirds of the time of
    `enable_gqa` in float32 and in a fifth in bfloat16.

    Args:
        tokens: the most that it will hold.

    Raises:
        ValueError: if the model has layers of another kind than full attention.
    """

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        kinds = set(describe(model).layer_types)
        if kinds != {FULL}:
            raise ValueError(f"a model whose layers are all {FULL} is needed, not {', '.join(sorted(kinds))}")
        attach(model)
        super().__init__(layers=[_Layer(tokens) for _ in range(describe(model).num_layers)])


class _Layer(DynamicLayer):
    keys: Tensor
    values: Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._storages: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Handles of all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            shape = (*key_states.shape[:2], self._tokens, key_states.shape[3])
            self._storages = [torch.empty(shape, dtype=t.dtype, device=t.device) for t in (key_states, value_states)]
            self._used = 0
        start, self._used = self._used, self._used + key_states.shape[2]
        for storage, new in zip(self._storages, (key_states, value_states), strict=True):
            storage[:, :, start : self._used] = new
        self.keys, self.values = (storage[:, :, : self._used] for storage in self._storages)
        handle = KVHandle(self, self.keys, self.values)
        return handle, handle

    def attend(
        self, module: nn.Module, query: Tensor, handle: KVHandle, mask: LazyMask | None, call: AttentionCall
    ) -> Tensor:
        """The model's own attention; see `BestFullCache` for a single token."""
        batch, heads, tokens, dim = query.shape
        shared = handle.keys.shape[1]
        if tokens > 1 or (mask is not None and mask.build() is not None):
            return call.exact(query, handle.keys, handle.values, mask)[0]
        folded = query.view(batch, shared, heads // shared, dim)
        output = scaled_dot_product_attention(folded, handle.keys, handle.values, scale=call.scaling)
        return output.view(batch, heads, 1, dim).transpose(1, 2)
