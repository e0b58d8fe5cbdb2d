"""Small models and caches for the runner's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qevict.compat import cache_argument
from qevict.config import Budget
from qevict.methods import get_method, make_cache
from qevict.trace import PrefillTrace
from tiny import VOCAB, tiny_model

SMALL = {"window_size": 4, "sink_tokens": 2, "recent_tokens": 6}
METHODS: dict[str, tuple[Any, float]] = {
    "full": (get_method("full"), 1.0),
    "qevict": (get_method("qevict", **SMALL), 0.5),
    "qevict tight": (get_method("qevict", **SMALL), 0.3),
    "qevict-paper": (get_method("qevict-paper", **SMALL), 0.4),
    "snapkv": (get_method("snapkv", window=8), 0.5),
    "snapkv tight": (get_method("snapkv", window=8), 0.35),
}
"""Methods with settings for prompts of some 60 to 90 tokens, and budgets, by a name."""


def endless(family: str = "llama", **settings: Any) -> PreTrainedModel:
    """A tiny model that never stops by itself."""
    model = tiny_model(family, **settings)
    model.generation_config.eos_token_id = None
    return model


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token ids `[batch, tokens]`, none of them special."""
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    """Logits `[batch, tokens, vocabulary]` of one forward."""
    given = {} if cache is None else cache_argument(cache)
    logits: Tensor = model(ids, use_cache=cache is not None, **given).logits
    return logits


def filled(model: PreTrainedModel, name: str, tokens: int, dtype: torch.dtype | None = None, new: int = 12) -> Any:
    """The cache of one of `METHODS`, which has read a prompt of so many tokens."""
    method, fraction = METHODS[name]
    cache = make_cache(model, method, Budget(fraction=fraction), max_new_tokens=new, store_dtype=dtype)
    return PrefillTrace.capture(model, prompt(tokens, seed=tokens)).fill(cache)
