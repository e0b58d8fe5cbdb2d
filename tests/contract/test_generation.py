"""generate() under compression: every mode, setting and dtype runs, stays within the budget and is finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import TIGHT, chunked_prefill_works, endless, forward, full_cache, generate, prompt, within_budget
from torch import Tensor, nn

from qevict import Budget, QEvictCache, QEvictConfig
from qevict.ranking import RANKINGS

pytestmark = pytest.mark.contract

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 5},
    "chunked prefill": {"prefill_chunk_size": 11},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_runs_within_the_budget(mode: str) -> None:
    if mode == "chunked prefill" and not chunked_prefill_works():
        pytest.skip("this Transformers gives chunks wrong positions, which the cache refuses")
    model, ids = endless(), prompt(30).repeat(1, 2)
    cache = QEvictCache(model, TIGHT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        tokens = generate(model, cache, ids, 20, **MODES[mode])
    assert tokens.shape == (MODES[mode].get("num_return_sequences", 1), 20)
    counts = cache.counts()
    assert counts.quantized > 0
    assert counts.evicted > 0
    assert within_budget(cache)


def test_assisted_decoding_runs_within_the_budget() -> None:
    model, assistant, ids = endless(), endless(num_hidden_layers=1), prompt(60)
    cache = QEvictCache(model, TIGHT)
    assert generate(model, cache, ids, 20, assistant_model=assistant).shape == (1, 20)
    assert cache.counts().quantized > 0
    assert within_budget(cache)


def test_an_assistant_may_have_a_compressed_cache_of_its_own() -> None:
    """The assistant's cache changes which drafts are made, never what is accepted."""
    model, assistant, ids = endless(), endless(num_hidden_layers=1), prompt(60)
    expected = generate(model, full_cache(model), ids, 12)
    QEvictCache(assistant, TIGHT)  # attaches
    cache = QEvictCache(model, 1.0)
    assert torch.equal(generate(model, cache, ids, 12, assistant_model=assistant), expected)


def test_sampling_is_reproducible() -> None:
    model, ids = endless(), prompt(60)
    runs = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            runs.append(generate(model, QEvictCache(model, TIGHT), ids, 12, do_sample=True))
    assert torch.equal(*runs)


def test_beams_that_never_part_equal_greedy() -> None:
    """Beams are rows: with one beam kept in three copies, each row decodes as it would alone."""
    model, ids = endless(), prompt(60)
    greedy = generate(model, QEvictCache(model, TIGHT), ids, 12)
    rows = generate(model, QEvictCache(model, TIGHT), ids.repeat(3, 1), 12)
    assert torch.equal(rows, greedy.repeat(3, 1))


@pytest.mark.parametrize("prompt_tokens", [None, 60], ids=["absolute budget", "announced prompt"])
def test_chunked_prefill_compresses_chunk_by_chunk(prompt_tokens: int | None) -> None:
    if not chunked_prefill_works():
        pytest.skip("this Transformers gives chunks wrong positions, which the cache refuses")
    model, ids = endless(), prompt(60)
    config = TIGHT if prompt_tokens is None else TIGHT.replace(budget=0.35)
    cache = QEvictCache(model, config, max_new_tokens=12, prompt_tokens=prompt_tokens)
    tokens = generate(model, cache, ids, 12, prefill_chunk_size=16)
    assert tokens.shape == (1, 12)
    assert cache.get_seq_length() == 71
    assert cache.counts().quantized > 0
    assert within_budget(cache)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8], ids=lambda n: f"{n}-token prompt")
def test_short_prompts_grow_into_compression(tokens: int) -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    assert generate(model, cache, prompt(tokens), 60).shape == (1, 60)
    assert cache.counts().quantized > 0
    assert within_budget(cache)


@pytest.mark.parametrize("budget", [0.5, Budget(tokens=24)], ids=["fraction", "absolute"])
def test_more_new_tokens_than_announced_stay_within_the_budget(budget: float | Budget) -> None:
    model, ids = endless(), prompt(60)
    cache = QEvictCache(model, TIGHT.replace(budget=budget), max_new_tokens=4)
    expected = None
    for token in range(40):
        forward(model, cache, ids if token == 0 else prompt(1, seed=token))
        limit = cache.memory().budget
        expected = limit if expected is None else expected
        assert within_budget(cache)
        assert limit == expected


@pytest.mark.parametrize("ranking", [*RANKINGS, lambda state, mass: 0.5 * state + mass], ids=[*RANKINGS, "function"])
@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_every_ranking_and_granularity(granularity: Any, ranking: Any) -> None:
    model, ids = endless(), prompt(60, batch=2)
    cache = QEvictCache(model, TIGHT.replace(ranking=ranking, granularity=granularity))
    assert generate(model, cache, ids, 12).shape == (2, 12)
    assert cache.counts().quantized > 0
    assert within_budget(cache)


@pytest.mark.parametrize("settings", [{}, {"prompt_queries": "all"}, {"score_steps": "event"}, {"promotion": False}])
def test_settings_of_the_scores(settings: dict[str, Any]) -> None:
    model, ids = endless(), prompt(60)
    cache = QEvictCache(model, TIGHT.replace(**settings))
    assert generate(model, cache, ids, 12).shape == (1, 12)
    assert within_budget(cache)


def test_the_papers_settings_generate() -> None:
    model, ids = endless(), prompt(150)
    config = QEvictConfig.paper("diagnostics", 0.3, recent_tokens=16)
    cache = QEvictCache(model, config, max_new_tokens=20)
    assert generate(model, cache, ids, 20).shape == (1, 20)
    assert min(cache.counts()) > 0


def test_a_prompt_scorer_decides_what_is_kept() -> None:
    """A scorer with the signature that prompt-compression libraries use: only tokens 20 to 27 matter to it."""
    seen: list[tuple[int, ...]] = []

    def scorer(module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        seen.append(tuple(queries.shape))
        assert keys.shape == values.shape
        scores = torch.zeros(keys.shape[:3])
        scores[:, :, 20:28] = 1.0
        return scores

    model, ids = endless(), prompt(60)
    config = QEvictConfig(Budget(tokens=28), window_size=4, sink_tokens=4, recent_tokens=6, prompt_scorer=scorer)
    cache = QEvictCache(model, config.replace(quantized_fraction=0.0))  # room for two windows
    forward(model, cache, ids)
    assert seen == [(1, 4, 60, 16)] * 2  # query heads, once a layer
    for layer in cache.layers:
        kept = layer.cohorts[0].store.assignment()[0].nonzero()[:, 0]
        assert {4, 5} <= set(kept.tolist())  # windows of 4 tokens behind the 4 sinks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_model_dtype(dtype: torch.dtype) -> None:
    model, ids = endless(dtype=dtype), prompt(60)
    cache = QEvictCache(model, TIGHT.replace(budget=Budget(tokens=26)))
    logits = forward(model, cache, ids)
    for token in range(12):
        logits = forward(model, cache, prompt(1, seed=token))
        assert logits.dtype == dtype
        assert logits.isfinite().all()
    assert cache.counts().quantized > 0
    assert within_budget(cache)


def test_16_bit_storage_in_a_32_bit_model_halves_the_bytes() -> None:
    model, ids = endless(), prompt(60)
    config = TIGHT.replace(budget=Budget(tokens=26))
    caches = [QEvictCache(model, config.replace(store_dtype=dtype)) for dtype in (None, torch.bfloat16)]
    for cache in caches:
        assert generate(model, cache, ids, 12).shape == (1, 12)
        assert cache.counts().quantized > 0
        assert within_budget(cache)
    wide, narrow = (cache.memory().budget for cache in caches)
    assert wide == 2 * narrow  # type: ignore[operator]


def test_a_huge_key_bias_and_constant_keys_stay_finite() -> None:
    model, ids = endless("qwen2"), prompt(60)
    with torch.no_grad():
        projections = [layer.self_attn.k_proj for layer in model.model.layers]
        projections[0].bias.fill_(300.0)
        projections[0].bias[::3] = -6e3
        projections[1].weight.zero_()  # constant keys
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cache = QEvictCache(model.to(dtype), TIGHT.replace(budget=Budget(tokens=26)))
        forward(model, cache, ids)
        for token in range(12):
            assert forward(model, cache, prompt(1, seed=token)).isfinite().all()
        assert cache.counts().quantized > 0
