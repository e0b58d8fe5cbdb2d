"""Runs full KV once and writes what its attention was: the paper's condition R0 (appendix I.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from qevict.architectures import describe, managed_layers
from qevict.compat import cache_argument
from qevict.diagnostics.trace import Trace, TraceHeader, TraceWriter
from qevict.methods.base import Allowance, Kind, LayerPrefill, Method, Properties, everything
from qevict.methods.cache import MethodCache
from qevict.methods.store import ExactStore, RowStore

Progress = Callable[[int], None]
"""Told how many decode steps are done."""


def trace_header(
    model: PreTrainedModel,
    prompt: Sequence[int],
    new: int,
    *,
    title: str = "",
    name: str = "",
    forced: bool = False,
    chunk: int = 64,
    prompt_queries: Iterable[int] = (32,),
) -> TraceHeader:
    """The header of a trace to come, from which its size is known; tokens that are still to be generated are 0.

    Args:
        prompt_queries: numbers of last prompt queries whose mass is wanted, beside that of all: what the conditions to
            come begin their scores with.

    Raises:
        ValueError: if the model has no layer that qevict manages, or there is nothing to trace.
    """
    architecture = describe(model)
    flags = managed_layers(architecture, len(prompt) + new)
    layers = tuple(index for index, managed in enumerate(flags) if managed)
    tokens = (*prompt, *([0] * new))
    return TraceHeader(
        title=title,
        model=name,
        tokens=tokens,
        prefill=len(prompt),
        layers=layers,
        query_heads=architecture.query_heads,
        kv_heads=architecture.kv_heads,
        prompt_queries=tuple(sorted(set(prompt_queries))),
        chunk=chunk,
        forced=forced,
    )


@torch.no_grad()
def record_reference(
    model: PreTrainedModel,
    header: TraceHeader,
    folder: Path,
    *,
    continuation: Sequence[int] | None = None,
    store_dtype: torch.dtype | None = torch.bfloat16,
    progress: Progress = lambda done: None,
) -> Trace:
    """Prefill the header's prompt in one forward, then feed one token a step, and keep every step's attention.

    The continuation is generated greedily (the paper does not say how), and an end of sequence does not end it: all
    decode steps are traced. Full KV is kept in the storage dtype that the compressed caches will have.

    Args:
        header: from `trace_header`.
        continuation: tokens to feed instead of generated ones.
    """
    if continuation is not None and len(continuation) != header.steps:
        raise ValueError(
            f"the trace is to have {header.steps} steps, but the continuation has {len(continuation)} tokens"
        )
    prompt, ended = list(header.tokens[: header.prefill]), _end_tokens(model)
    writer = TraceWriter(folder, header)
    cache = MethodCache(model, _Traced(writer), max_new_tokens=header.steps, store_dtype=store_dtype)
    logits = _logits(model, cache, prompt)
    fed: list[int] = []
    for step in range(header.steps):
        logits[ended] = -torch.inf
        fed.append(int(logits.argmax()) if continuation is None else continuation[step])
        logits = _logits(model, cache, fed[-1:])
        progress(step + 1)
    writer.header = replace(header, tokens=(*prompt, *fed))
    return writer.close()


def _logits(model: PreTrainedModel, cache: MethodCache, tokens: list[int]) -> Float[Tensor, " vocabulary"]:
    ids = torch.tensor([tokens], device=model.device)
    return model(ids, use_cache=True, logits_to_keep=1, **cache_argument(cache)).logits[0, -1].float()


def _end_tokens(model: PreTrainedModel) -> list[int]:
    config: Any = model.generation_config
    end = None if config is None else config.eos_token_id
    tokens = [] if end is None else [end] if isinstance(end, int) else list(end)
    return [token for token in tokens if token < model.config.vocab_size]


@dataclass(frozen=True)
class _Traced(Method):
    """Full KV that writes down its attention."""

    writer: TraceWriter = field(repr=False)

    name: ClassVar[str] = "reference"
    paper: ClassVar[str] = "the uncompressed cache"
    kind: ClassVar[Kind] = "full"
    properties: ClassVar[Properties] = Properties()
    one_row: ClassVar[bool] = True

    @property
    def observed_queries(self) -> int | None:
        """All of them."""
        return None

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """Everything, exactly; the prompt's masses are written on the way."""
        for prefill in prefills:
            for queries in (None, *self.writer.header.prompt_queries):
                total = torch.zeros(self.writer.header.query_heads, prefill.tokens, device=prefill.keys.device)
                for block in prefill.attention_blocks(queries):
                    total += block.sum(dim=2).flatten(0, 1)
                self.writer.add_prompt(prefill.index, queries, total.cpu())
        return [_TracedStore(prefill, allowance, self.writer) for prefill in prefills]


class _TracedStore(ExactStore):
    """An exact store that shows its attention to a writer."""

    observes: ClassVar[bool] = True

    def __init__(self, prefill: LayerPrefill, allowance: Allowance, writer: TraceWriter) -> None:
        super().__init__(prefill.keys, prefill.values, everything(prefill), allowance.new_tokens or 0, allowance.dtype)
        self.layer, self.writer = prefill.index, writer

    def observe(self, heads: slice, weights: Float[Tensor, "heads group some tokens"]) -> None:
        """One step of all heads: an exact store of everything is a single block."""
        self.writer.add_step(self.layer, weights[:, :, 0].flatten(0, 1))
