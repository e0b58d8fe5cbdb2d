"""A cache built from a trace of the prompt is the one that the model builds, on every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver import TIGHT, endless, forward, full_cache, left_padded, prompt
from torch import Tensor
from transformers import PreTrainedModel

from qevict import QEvictCache
from qevict.methods import get_method, make_cache
from qevict.trace import PrefillTrace
from tiny import MANAGED_FAMILIES

pytestmark = pytest.mark.contract

MAKERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "full": full_cache,
    "qevict": lambda model: QEvictCache(model, TIGHT, max_new_tokens=4),
    "paper": lambda model: QEvictCache(model, TIGHT.replace(prompt_queries="all"), max_new_tokens=4),
    "snapkv": lambda model: make_cache(model, get_method("snapkv", window=8), 0.5, max_new_tokens=4),
}


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def next_logits(model: PreTrainedModel, cache: Any, mask: Tensor) -> Tensor:
    """Logits of one more token of each row."""
    longer = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], dim=1)
    return forward(
        model, cache, prompt(1, len(mask), seed=7), attention_mask=longer, position_ids=positions(longer)[:, -1:]
    )


@pytest.mark.parametrize("family", MANAGED_FAMILIES)
def test_filled_from_a_trace_or_by_the_model(family: str) -> None:
    model = endless(family)
    inputs = left_padded([prompt(60), prompt(41, seed=1), prompt(50, seed=2)])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    trace = PrefillTrace.capture(model, ids, mask)
    for make in MAKERS.values():
        made, filled = make(model), trace.fill(make(model))
        forward(model, made, ids, attention_mask=mask, position_ids=positions(mask))
        assert filled.get_seq_length() == made.get_seq_length() == 60
        assert torch.equal(next_logits(model, filled, mask), next_logits(model, made, mask))
        if hasattr(made, "memory"):
            assert filled.memory() == made.memory()


def test_only_the_queries_that_are_looked_at_have_to_be_kept() -> None:
    model, ids = endless(), prompt(60)
    mask = torch.ones_like(ids)
    whole, short = PrefillTrace.capture(model, ids), PrefillTrace.capture(model, ids, queries=32)
    assert short.nbytes < whole.nbytes
    caches = [trace.fill(MAKERS["snapkv"](model)) for trace in (whole, short)]
    assert torch.equal(*(next_logits(model, cache, mask) for cache in caches))
    with pytest.raises(ValueError, match="last 32 tokens were kept, but the codec is fitted to those of all 60"):
        short.fill(MAKERS["qevict"](model))
    with pytest.raises(ValueError, match="queries of the last 32 tokens were kept, but those of 60"):
        short.fill(MAKERS["paper"](model))


def test_the_trace_knows_the_first_token_of_the_uncompressed_cache() -> None:
    model, ids = endless(), prompt(30)
    trace = PrefillTrace.capture(model, ids)
    head = model.get_output_embeddings()
    assert torch.allclose(head(trace.last_hidden), forward(model, None, ids)[:, -1])


def test_hidden_states_are_the_attention_modules_inputs_and_no_hook_stays() -> None:
    model, ids = endless(), prompt(30)
    trace = PrefillTrace.capture(model, ids, hidden=True)
    first = model.model.layers[0]
    expected = first.input_layernorm(model.model.embed_tokens(ids))
    assert trace.prefills[0].hidden is not None
    assert torch.allclose(trace.prefills[0].hidden, expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_trace_is_for_an_empty_cache_of_the_same_model() -> None:
    model, other, ids = endless(), endless(), prompt(60)
    trace = PrefillTrace.capture(model, ids)
    cache = trace.fill(MAKERS["qevict"](model))
    with pytest.raises(ValueError, match="has seen 60 tokens already"):
        trace.fill(cache)
    with pytest.raises(ValueError, match="made for another model"):
        trace.fill(MAKERS["qevict"](other))
