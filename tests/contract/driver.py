"""How the contract tests drive a model: the same calls for every cache, on every supported Transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from qevict import Budget, QEvictCache, QEvictConfig
from qevict.compat import cache_argument
from tiny import VOCAB, tiny_model

ROOMY = Budget(tokens=4096)
"""Everything fits, so nothing is quantized, but all of it goes through the tiers."""

TIGHT = QEvictConfig(budget=Budget(tokens=24), window_size=4, sink_tokens=2, recent_tokens=6, codec="allotted:3+3")
"""For tiny models: about 60 tokens fill all three tiers."""


def endless(family: str = "llama", **settings: Any) -> PreTrainedModel:
    """A tiny model that never stops by itself."""
    model = tiny_model(family, **settings)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = VOCAB  # assisted decoding on 5.2 wants one
    return model


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token ids `[batch, tokens]`, none of them special."""
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of rows `[1, tokens]` of different lengths."""
    width = max(row.shape[1] for row in rows)
    pads = [width - row.shape[1] for row in rows]
    ids = [torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)]
    mask = [torch.nn.functional.pad(torch.ones_like(row), (pad, 0)) for row, pad in zip(rows, pads, strict=True)]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(mask)}


def generate(model: PreTrainedModel, cache: Cache, inputs: Tensor | dict[str, Tensor], new: int, **how: Any) -> Tensor:
    """The `new` tokens that follow, greedy unless `how` says otherwise."""
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    settings = {"do_sample": False, "max_new_tokens": new} | how
    if isinstance(cache, QEvictCache) and how.keys() & {"assistant_model", "prompt_lookup_num_tokens"}:
        cache.activate_past_recording()  # 5.2 does not ask for it, though its first forward holds a draft already
    output = model.generate(**inputs, **cache_argument(cache), **settings)
    assert isinstance(output, torch.Tensor)
    return output[:, inputs["input_ids"].shape[1] :]


@torch.no_grad()
def forward(model: PreTrainedModel, cache: Cache | None, ids: Tensor, **settings: Any) -> Tensor:
    """Logits `[batch, tokens, vocabulary]` of one forward."""
    given = {} if cache is None else cache_argument(cache)
    logits: Tensor = model(ids, use_cache=cache is not None, **given, **settings).logits
    return logits


def step_by_step(model: PreTrainedModel, cache: Cache, ids: Tensor, prefill: int) -> Tensor:
    """Logits `[batch, tokens, vocabulary]` of a forward over `prefill` tokens and one for each of the others."""
    logits = [forward(model, cache, ids[:, :prefill])]
    logits += [forward(model, cache, ids[:, i : i + 1]) for i in range(prefill, ids.shape[1])]
    return torch.cat(logits, dim=1)


def full_cache(model: PreTrainedModel) -> DynamicCache:
    """Transformers' own uncompressed cache."""
    return DynamicCache(config=model.config)


@functools.cache
def chunked_prefill_works() -> bool:
    """Whether generate(prefill_chunk_size=...) is right with Transformers' own cache; 5.2 gives wrong positions."""
    model, ids = endless(), prompt(30)
    whole = generate(model, full_cache(model), ids, 6)
    return torch.equal(generate(model, full_cache(model), ids, 6, prefill_chunk_size=7), whole)


def within_budget(cache: QEvictCache) -> bool:
    """Whether the storages held obey the hard budget."""
    memory = cache.memory()
    assert memory.budget is not None
    return memory.used <= memory.reserved <= memory.budget
