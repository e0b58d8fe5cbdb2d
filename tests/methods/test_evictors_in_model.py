"""What is particular to the eviction methods inside a model; what every method has to do is `check_method`'s."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from qevict.compat import cache_argument
from qevict.config import Budget
from qevict.methods.adakv import AdaKV
from qevict.methods.base import Selector
from qevict.methods.cache import MethodCache, MethodLayer
from qevict.methods.chunkkv import ChunkKV
from qevict.methods.criticalkv import CriticalAdaKV
from qevict.methods.defensivekv import DefensiveKV, LayerDefensiveKV
from qevict.methods.h2o import H2O
from qevict.methods.snapkv import SnapKV
from qevict.methods.store import ExactStore
from qevict.methods.streaming import StreamingLLM
from qevict.methods.tova import TOVA
from tiny import tiny_model

PROMPT, NEW = 60, 6


def run(method: Selector, budget: Budget, family: str = "llama", batch: int = 1, new: int = NEW) -> MethodCache:
    """The cache after a prompt and some new tokens, within its budget after each of them."""
    model = tiny_model(family)
    ids = torch.randint(3, 128, (batch, PROMPT + new), generator=torch.Generator().manual_seed(0))
    cache = MethodCache(model, method, budget, max_new_tokens=NEW)
    with torch.no_grad():
        for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + new))]:
            assert model(ids[:, start:stop], **cache_argument(cache)).logits.isfinite().all()
            memory = cache.memory()
            assert memory.budget is not None
            assert memory.used <= memory.reserved <= memory.budget
    return cache


def lengths(cache: MethodCache) -> list[list[int]]:
    """Tokens that each head of each layer holds."""
    result = []
    for layer in cache.managed:
        assert isinstance(layer, MethodLayer)
        store = layer.rows[0].store
        assert isinstance(store, ExactStore)
        result.append([buffer.used for heads, buffer in store.buffers for _ in range(*heads.indices(2))])
    return result


RAGGED = [AdaKV(4, 3), CriticalAdaKV(4, 3), DefensiveKV(4, 3), LayerDefensiveKV(4, 3)]


@pytest.mark.parametrize("method", RAGGED, ids=lambda method: method.name)
def test_ragged_heads_take_the_bytes_of_their_own_tokens(method: Selector) -> None:
    cache = run(method, Budget(fraction=0.4))
    held = lengths(cache)
    assert any(len(set(heads)) > 1 for heads in held)
    memory = cache.memory()
    token = 2 * 16 * 4  # keys and values of one head
    assert memory.full == token * sum(map(sum, held))
    # as many tokens as fit: another of each head would not
    assert memory.budget is not None
    assert memory.reserved + 2 * token * len(held) > memory.budget


def test_layers_share_one_budget_in_layer_defensivekv_only() -> None:
    even, pooled = (
        lengths(run(method, Budget(fraction=0.4))) for method in (DefensiveKV(4, 3), LayerDefensiveKV(4, 3))
    )
    assert sum(map(sum, even)) == sum(map(sum, pooled))
    assert sum(even[0]) == sum(even[1])
    assert sum(pooled[0]) != sum(pooled[1])


def test_layer_defensivekv_takes_one_sequence() -> None:
    with pytest.raises(ValueError, match="defined for one sequence; got a batch of 2 rows"):
        run(LayerDefensiveKV(4, 3), Budget(fraction=0.4), batch=2)


@pytest.mark.parametrize("method", [H2O(), TOVA(), StreamingLLM()], ids=lambda method: method.name)
def test_methods_that_evict_at_decode_need_no_room_for_new_tokens(method: Selector) -> None:
    """SnapKV would have to reserve what is generated; they go on for as long as anyone likes."""
    run(method, Budget(tokens=12), new=40)
    with pytest.raises(ValueError, match=r"bytes a layer cannot hold"):
        run(SnapKV(4, 3), Budget(tokens=6))


@pytest.mark.parametrize("family", ["llama", "phi", "cohere", "qwen3"])
@pytest.mark.parametrize("positions", ["cache", "original"])
def test_positions_inside_the_cache_are_those_of_a_text_without_the_evicted_tokens(
    family: str, positions: Literal["cache", "original"]
) -> None:
    """With one layer, keys depend on nothing but their token, so that such a text can be read from the start."""
    model = tiny_model(family, num_hidden_layers=1)
    ids = torch.randint(3, 128, (1, PROMPT + NEW), generator=torch.Generator().manual_seed(0))
    cache = MethodCache(model, StreamingLLM(positions=positions), Budget(tokens=14), max_new_tokens=NEW)
    with torch.no_grad():
        model(ids[:, :PROMPT], **cache_argument(cache))
        for stop in range(PROMPT + 1, PROMPT + NEW + 1):
            logits = model(ids[:, stop - 1 : stop], **cache_argument(cache)).logits[0, -1]
            store = cache.managed[0].rows[0].store
            short = torch.cat((ids[:, :4], ids[:, stop - store.buffer.used + 4 : stop]), dim=1)
            expected = model(short).logits[0, -1]
            assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-3) == (positions == "cache")


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8])
def test_kvpress_chunks_of_a_prompt_by_a_budget_in_tokens(ratio: float) -> None:
    """The recipe for comparing with kvpress: room for its chunks, one token for the metadata, and the new tokens."""
    method = ChunkKV(4, 3, "avg", 7)
    tokens = method.kvpress_tokens(PROMPT, ratio)
    held = lengths(run(method, Budget(tokens=tokens + 1 + NEW)))
    chunks = max(1, int(-(-PROMPT // 7) * (1 - ratio)))
    last = PROMPT % 7
    assert all(heads[0] - NEW in (7 * chunks, 7 * (chunks - 1) + last) for heads in held)
