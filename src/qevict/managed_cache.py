"""ManagedCache: the cache half of the Transformers contract. A subclass says which layers it makes."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from qevict.architectures import FULL, Architecture, check_length, check_supported, managed_layers, text_config
from qevict.attention import attach
from qevict.budget import MemoryReport
from qevict.config import Budget
from qevict.geometry import KVGeometry
from qevict.managed_layer import ManagedLayer
from qevict.rope import Rope, rope_for_layers
from qevict.session import Session

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ManagedCache(Cache):
    """A cache whose full-attention layers are qevict's and whose other layers are Transformers' own.

    The model's attention implementation is set to qevict's, which behaves as before for every other cache. The cache
    keeps the model's config and copies of its rotary tables, never the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        limit: Budget,
        *,
        store_dtype: torch.dtype | None,
        allow_untested: bool,
        max_new_tokens: int | None,
        prompt_tokens: int | None,
    ) -> None:
        for name, value in (("max_new_tokens", max_new_tokens), ("prompt_tokens", prompt_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} is {value!r}; it has to be a whole number of at least 0")
        if limit.fraction is not None and not limit.unlimited and max_new_tokens is None:
            raise ValueError(
                f"a budget of {limit} is a share of prompt + new tokens: give max_new_tokens=, or an absolute budget, "
                "Budget(bytes=...) or Budget(tokens=...)"
            )
        if model.dtype not in _DTYPES:
            raise ValueError(f"the model's dtype is {model.dtype}; float32, bfloat16 and float16 are supported")
        self.architecture: Architecture = check_supported(model, allow_untested)
        self._session = self._new_session(
            limit=limit,
            store_dtype=store_dtype,
            architecture=self.architecture,
            model_config=weakref.ref(text_config(model)),
            max_new_tokens=max_new_tokens,
            prompt_tokens=prompt_tokens,
        )
        self._model_dtype = model.dtype
        self._ropes: list[Rope] = []
        # Transformers' own classes for the layers that are not managed.
        layers: list[Any] = DynamicCache(config=text_config(model)).layers
        if self._unmanaged:
            layers = [ExactLayer(store_dtype) if type(la) is DynamicLayer else la for la in layers]
        else:
            self._ropes = rope_for_layers(model)
            if prompt_tokens is not None and max_new_tokens is not None:
                self._settle_layers(prompt_tokens + max_new_tokens, layers)
            else:
                for index, kind in enumerate(self.architecture.layer_types):
                    if kind == FULL:
                        layers[index] = self._layer(index, self._ropes[index])
            attach(model)
        super().__init__(layers=layers)

    # -- what a subclass does --------------------------------------------------------------------------------------

    @abstractmethod
    def _layer(self, index: int, rope: Rope) -> ManagedLayer:
        """A layer of the cache's own."""

    @abstractmethod
    def _new_session(self, **announced: Any) -> Session:
        """What the layers share, from the fields of `Session`."""

    @property
    def reads_twice(self) -> bool:
        """Whether a prompt has to be given by `read_prompt`, which reads it twice."""
        return False

    @property
    def _unmanaged(self) -> bool:
        """Whether nothing is to be managed at all."""
        return False

    # -- the Transformers contract ---------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Hand new keys and values, `[batch, kv_heads, tokens, head_dim]`, to a layer.

        Returns:
            What the attention function is to be given: handles of a managed layer, tensors of any other.
        """
        self.settle_layers(key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, max_length: int) -> None:
        """Remove tokens from the end: a negative number removes that many, a positive one is the length to keep.

        Exact for the tokens of the last forward (an assistant's draft, say): they never score and nothing ages.

        Raises:
            ValueError: if older tokens were to be removed, which have been scored and routed.
        """
        removed = -max_length if max_length < 0 else max(0, self.get_seq_length() - max_length)
        if max_length == 0 or removed == 0:
            return
        for layer in self.layers:
            layer.crop(-removed)

    def reset(self) -> None:
        """Forget everything seen, to begin another sequence with the same settings."""
        super().reset()
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):  # before Transformers 5.24 it zeroes its tensors and keeps their length
                layer.keys = layer.values = None
                layer.is_initialized = False

    def activate_past_recording(self) -> None:
        """Keep every forward croppable, the prompt's too; assisted decoding calls this where Transformers has it."""
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def extend(self, tokens: int) -> None:
        """Announce another turn: derive the budget from `tokens` more tokens (prompt and answer) than were seen.

        Nothing changes for absolute budgets, which do not depend on the length.

        Raises:
            ValueError: if the model cannot go that far.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"tokens is {tokens!r}; it has to be a whole number of at least 1")
        if self._session.geometry is None:
            if self._session.max_new_tokens is not None:
                self._session.max_new_tokens += tokens
            return
        self._session.check_length(self.get_seq_length() + tokens)
        for layer in self.managed:
            layer.extend(tokens)

    # -- what users ask --------------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        """Bytes really held, term by term (Eq. 8), beside the budget and what full KV would take."""
        report = MemoryReport()
        for layer in self.layers:
            if isinstance(layer, ManagedLayer | ExactLayer):
                report += layer.memory()
            else:
                report += MemoryReport(unmanaged=sum(_nbytes(getattr(layer, n, None)) for n in ("keys", "values")))
        ropes = {id(layer.rope): layer.rope for layer in self.managed}
        return report + MemoryReport(workspace=sum(rope.workspace_bytes for rope in ropes.values()))

    @property
    def managed(self) -> list[ManagedLayer]:
        """The layers that qevict manages."""
        return [layer for layer in self.layers if isinstance(layer, ManagedLayer)]

    def settle_layers(self, columns: int) -> None:
        """Decide which layers are managed, before a first forward of so many columns; later it does nothing."""
        if self._unmanaged or self._session.geometry is not None:
            return
        new, prompt = self._session.max_new_tokens, self._session.prompt_tokens
        self._settle_layers(None if new is None else max(columns, prompt or 0) + new, self.layers)

    def _settle_layers(self, total: int | None, layers: list[Any]) -> None:
        """Decide which layers are managed, now that the announced length S is known (None: it never will be)."""
        flags = managed_layers(self.architecture, total)
        if total is not None:
            check_length(self.architecture, total)
        for index, managed in enumerate(flags):
            if managed and not isinstance(layers[index], ManagedLayer):
                layers[index] = self._layer(index, self._ropes[index])
        dtype = self._session.store_dtype
        architecture = self.architecture
        self._session.geometry = KVGeometry(
            layers=sum(flags),
            kv_heads=architecture.kv_heads,
            query_heads=architecture.query_heads,
            head_dim=architecture.head_dim,
            element_bytes=dtype.itemsize if dtype is not None else self._model_dtype.itemsize,
        )
        self._session.managed = flags


class ExactLayer(DynamicLayer):
    """A layer without a limit: everything stays in full precision, rounded to the storage dtype if one was chosen."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values so far, in the dtype of the new ones."""
        if self._dtype is None:
            return super().update(key_states, value_states)
        keys, values = super().update(key_states.to(self._dtype), value_states.to(self._dtype))
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def memory(self) -> MemoryReport:
        """Bytes of this layer; all of it is the protected recent region."""
        held = _nbytes(self.keys) + _nbytes(self.values)
        return MemoryReport(recent=held, reserved=held, full_kv=held)


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
