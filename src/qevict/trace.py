"""PrefillTrace: one exact prefill, from which the cache of any method and budget can be built.

Prefill is exact and the same for every method, so it need not be repeated for each: `capture` runs the model once and
keeps what its attention layers computed, `fill` hands it to an empty cache, which compresses it with the very code that
it runs inside the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from qevict.architectures import attention_modules, decoder, describe
from qevict.attention import AttentionCall, KVHandle, LazyMask, attach
from qevict.compat import cache_argument
from qevict.forward import Forward
from qevict.handle_layer import HandleLayer
from qevict.hidden import AttentionInputs
from qevict.managed_cache import ManagedCache
from qevict.managed_layer import ManagedLayer, Prefill
from qevict.reconstruction import reconstruction_scores
from qevict.shared import SharedWork

AnyCache = TypeVar("AnyCache", bound=Cache)


@dataclass(frozen=True)
class PrefillTrace:
    """What the attention layers of a model computed for a prompt.

    Attributes:
        prefills: of every layer, in order.
        last_hidden: output of the decoder at the last column of each row; the head turns it into the logits of the
            first new token, as the uncompressed cache gives them.
    """

    prefills: tuple[Prefill, ...]
    last_hidden: Float[Tensor, "batch hidden"]

    @classmethod
    @torch.no_grad()
    def capture(
        cls,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch tokens"] | None = None,
        *,
        queries: int | None = None,
        hidden: bool = False,
        scores: bool = False,
    ) -> PrefillTrace:
        """Run a prompt, rows padded on the left, through the model once.

        Args:
            queries: how many of the last queries to keep; None for all. `needed_queries` says how many some methods
                look at.
            hidden: whether to keep the input of the attention modules as well.
            scores: whether to read the prompt a second time, for `prompt_scorer="reconstruction"`.

        Raises:
            ValueError: if the model has layers that hold no keys and values of the usual kind, or no positions for a
                second reading.
        """
        count = describe(model).num_layers
        modules = attention_modules(model)
        if len(modules) != count:
            raise ValueError(f"{count - len(modules)} of the {count} layers have no attention; they cannot be traced")
        attach(model)
        recorder = _Recorder(count, queries)
        ids, mask, positions = _on_device(model, input_ids, attention_mask)
        with AttentionInputs(modules if hidden else {}) as inputs:
            output = decoder(model)(ids, attention_mask=mask, position_ids=positions, **cache_argument(recorder))
        prefills = [layer.recorded() for layer in recorder.layers]
        if hidden:
            prefills = [p._replace(hidden=inputs.by_layer[index]) for index, p in enumerate(prefills)]
        if scores:
            prefills = _scored(model, ids, prefills)
        return cls(tuple(prefills), output.last_hidden_state[:, -1])

    @property
    def columns(self) -> int:
        """Columns of the prompt, padding included."""
        return self.prefills[0].forward.columns

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds of the layers."""
        held = (t for p in self.prefills for t in (p.query, p.keys, p.values, p.hidden, p.scores))
        return [t for t in held if t is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that the trace holds."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def _work(self) -> SharedWork:
        """What one cache computed from the prompt alone and the next can use."""
        return SharedWork(self.tensors)

    def fill(self, cache: AnyCache) -> AnyCache:
        """Give the prompt to an empty cache, as if its model had just read it.

        Raises:
            ValueError: if the cache is not empty, or was made for another model.
        """
        if cache.get_seq_length():
            raise ValueError(f"the cache has seen {cache.get_seq_length()} tokens already; give an empty one")
        if isinstance(cache, ManagedCache):
            cache.settle_layers(self.columns)
        with torch.inference_mode(False), torch.no_grad(), self._work.active():
            for index, prefill in enumerate(self.prefills):
                layer = cache.layers[index] if index < len(cache.layers) else None
                if not isinstance(layer, ManagedLayer):
                    cache.update(prefill.keys, prefill.values, index)
                    continue
                layer.check_module(prefill.module)
                if index == layer.session.first_layer:
                    layer.session.forward = prefill.forward
                    layer.check(prefill.forward)
                layer.take_prefill(prefill)
        return cache


@torch.no_grad()
def read_prompt(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch tokens"] | None = None,
) -> None:
    """Let an empty cache read a prompt; twice where its settings are `prompt_scorer="reconstruction"`.

    `model.generate(ids, past_key_values=cache)` then goes on behind it: `ids` are the prompt's and at least one more.
    A prompt that is read twice is held uncompressed, in all layers, until it has been.

    Args:
        attention_mask: rows are padded on the left.

    Raises:
        ValueError: if the cache is not empty or was made for another model, or the model cannot read the prompt twice.
    """
    if reads_twice(cache):
        PrefillTrace.capture(model, input_ids, attention_mask, scores=True).fill(cache)
        return
    if cache.get_seq_length():
        raise ValueError(f"the cache has seen {cache.get_seq_length()} tokens already; give an empty one")
    ids, mask, positions = _on_device(model, input_ids, attention_mask)
    decoder(model)(ids, attention_mask=mask, position_ids=positions, **cache_argument(cache))


def reads_twice(cache: Cache) -> bool:
    """Whether a cache takes its prompt from `read_prompt` alone, which reads it twice."""
    return isinstance(cache, ManagedCache) and cache.reads_twice


def _on_device(
    model: PreTrainedModel, ids: Int[Tensor, "batch tokens"], mask: Int[Tensor, "batch tokens"] | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Ids, mask and positions of a first forward of rows padded on the left."""
    mask = None if mask is None else mask.to(model.device)
    positions = None if mask is None else (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    return ids.to(model.device), mask, positions


def _scored(model: PreTrainedModel, ids: Int[Tensor, "batch tokens"], prefills: list[Prefill]) -> list[Prefill]:
    """The prefills with the scores of a second reading, row by row; padding has none."""
    scores = [p.keys.new_zeros(p.keys.shape[:3], dtype=torch.float32) for p in prefills]
    for row in range(len(ids)):
        valid = prefills[0].forward.valid
        own = slice(None) if valid is None else valid[row]
        keys, values = [p.keys[row][:, own] for p in prefills], [p.values[row][:, own] for p in prefills]
        for layer, of_row in zip(scores, reconstruction_scores(model, ids[row, own], keys, values), strict=True):
            layer[row, :, own] = of_row
    return [p._replace(scores=layer) for p, layer in zip(prefills, scores, strict=True)]


class _RecordingLayer(HandleLayer):
    """Attends exactly and keeps what it was given."""

    def __init__(self, queries: int | None) -> None:
        super().__init__()
        self._queries = queries
        self._prefill: Prefill | None = None

    def get_seq_length(self, *args: Any) -> int:
        """Always empty: a trace is of one forward."""
        return 0

    def attend(
        self, module: nn.Module, query: Tensor, handle: KVHandle, mask: LazyMask | None, call: AttentionCall
    ) -> Tensor:
        """The model's own attention."""
        output = call.exact(query, handle.keys, handle.values, mask)[0]
        batch, columns = handle.keys.shape[0], handle.keys.shape[2]
        forward = Forward.read(mask, call.settings.get("position_ids"), batch, columns, 0, handle.keys.device)
        kept = query if self._queries is None else query[:, :, max(0, columns - self._queries) :].clone()
        self._prefill = Prefill(module, kept, handle.keys, handle.values, forward, call.scaling)
        return output

    def recorded(self) -> Prefill:
        """What it was given."""
        assert self._prefill is not None
        return self._prefill


class _Recorder(Cache):
    """One `_RecordingLayer` for each layer."""

    layers: list[Any]

    def __init__(self, count: int, queries: int | None) -> None:
        super().__init__(layers=[_RecordingLayer(queries) for _ in range(count)])
