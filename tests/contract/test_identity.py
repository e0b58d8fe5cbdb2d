"""A budget that holds everything gives the uncompressed cache's tokens, on a real model and however one generates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import ROOMY, chunked_prefill_works, endless, forward, full_cache, generate, left_padded, prompt
from torch import Tensor
from transformers import PreTrainedModel

from qevict import Budget, QEvictCache, QEvictConfig

pytestmark = pytest.mark.contract

PROMPTS = (
    "The capital of France is",
    "Write one sentence about the sea.",
    "def fibonacci(n):\n    ",
    "1, 2, 4, 8, 16,",
    "Once upon a time there was a fox who could not sleep, because every night the moon asked it riddles. " * 3,
    "Translate to French: Good morning, my friends.",
    "A list of fruits:\n- apple\n- pear\n-",
    "Water boils at one hundred degrees because",
)
NEW = 24
BUDGETS = pytest.mark.parametrize("budget", [Budget(fraction=1.0), ROOMY], ids=["unlimited", "through-the-tiers"])
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 0},
    "beams": {"num_beams": 3},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


def seeded(model: PreTrainedModel, cache: Any, inputs: Any, new: int, **how: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return generate(model, cache, inputs, new, **how)


def encoded(tokenizer: Any, text: str) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


@pytest.mark.parametrize("text", PROMPTS, ids=range(len(PROMPTS)))
def test_real_model_greedy(smollm2: tuple[Any, Any], text: str) -> None:
    model, tokenizer = smollm2
    ids = encoded(tokenizer, text)
    expected = generate(model, full_cache(model), ids, NEW)
    for budget in (Budget(fraction=1.0), ROOMY):
        assert torch.equal(generate(model, QEvictCache(model, budget, max_new_tokens=NEW), ids, NEW), expected)


@BUDGETS
def test_real_model_left_padded_batch(smollm2: tuple[Any, Any], budget: Budget) -> None:
    model, tokenizer = smollm2
    inputs = left_padded([encoded(tokenizer, text) for text in PROMPTS[1:5]])
    expected = generate(model, full_cache(model), inputs, NEW)
    assert torch.equal(generate(model, QEvictCache(model, budget, max_new_tokens=NEW), inputs, NEW), expected)


@BUDGETS
def test_real_model_two_turns(smollm2: tuple[Any, Any], budget: Budget) -> None:
    model, tokenizer = smollm2
    answers = []
    for cache in (full_cache(model), QEvictCache(model, budget, max_new_tokens=NEW)):
        history = encoded(tokenizer, PROMPTS[0])
        for question in (" Next, the capital of Italy is", " And that of Spain is"):
            history = torch.cat([history, generate(model, cache, history, NEW // 2)], dim=1)
            history = torch.cat([history, encoded(tokenizer, question)], dim=1)
        answers.append(history)
    assert torch.equal(answers[0], answers[1])


@pytest.mark.parametrize("mode", ["beams", "prompt lookup"])
@BUDGETS
def test_real_model_beams_and_prompt_lookup(smollm2: tuple[Any, Any], budget: Budget, mode: str) -> None:
    model, tokenizer = smollm2
    ids = encoded(tokenizer, PROMPTS[6])
    expected = generate(model, full_cache(model), ids, NEW // 2, **MODES[mode])
    budget = Budget(tokens=256) if budget == ROOMY else budget  # beams copy all that is reserved at every step
    cache = QEvictCache(model, budget, max_new_tokens=NEW // 2)
    assert torch.equal(generate(model, cache, ids, NEW // 2, **MODES[mode]), expected)


@pytest.mark.parametrize("mode", MODES)
@BUDGETS
def test_every_mode_of_generate(budget: Budget, mode: str) -> None:
    model, ids = endless(), prompt(40).repeat(1, 2)  # repeated, so that prompt lookup finds drafts
    expected = seeded(model, full_cache(model), ids, 20, **MODES[mode])
    cache = QEvictCache(model, QEvictConfig(budget, window_size=4, recent_tokens=6), max_new_tokens=20)
    assert torch.equal(seeded(model, cache, ids, 20, **MODES[mode]), expected)


@BUDGETS
def test_assisted_decoding(budget: Budget) -> None:
    model, assistant, ids = endless(), endless(num_hidden_layers=1), prompt(40)
    expected = generate(model, full_cache(model), ids, 20)
    cache = QEvictCache(model, QEvictConfig(budget, window_size=4, recent_tokens=6), max_new_tokens=20)
    assert torch.equal(generate(model, cache, ids, 20, assistant_model=assistant), expected)


@pytest.mark.parametrize("ids", [prompt(40), prompt(1), prompt(3), prompt(4), prompt(5)], ids=lambda ids: ids.shape[1])
@BUDGETS
def test_every_prompt_length(budget: Budget, ids: Tensor) -> None:
    model = endless()
    config = QEvictConfig(budget, window_size=4, sink_tokens=5, recent_tokens=6)
    expected = generate(model, full_cache(model), ids, 20)
    assert torch.equal(generate(model, QEvictCache(model, config, max_new_tokens=20), ids, 20), expected)


@BUDGETS
def test_chunked_prefill(budget: Budget) -> None:
    if not chunked_prefill_works():
        pytest.skip("this Transformers gives chunks wrong positions, which the cache refuses")
    model, ids = endless(), prompt(50)
    expected = generate(model, full_cache(model), ids, 16)
    config = QEvictConfig(budget, window_size=4, recent_tokens=6)
    cache = QEvictCache(model, config, max_new_tokens=16, prompt_tokens=50)
    assert torch.equal(generate(model, cache, ids, 16, prefill_chunk_size=7), expected)


def test_unlimited_budget_quantizes_and_evicts_nothing_and_reports_full_kv() -> None:
    model, ids = endless(), prompt(60)
    cache = QEvictCache(model, 1.0)
    generate(model, cache, ids, 8)
    memory = cache.memory()
    assert cache.counts() == (0, 0, 0)
    assert memory.used == memory.full_kv == 67 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, head_dim, bytes
    assert memory.budget is None


def test_unlimited_budget_in_16_bit_storage_rounds_like_that_dtype() -> None:
    model, ids = endless(), prompt(60)
    cache = QEvictCache(model, QEvictConfig(1.0, store_dtype=torch.bfloat16))
    exact = forward(model, full_cache(model), ids)
    rounded = forward(model, cache, ids)
    assert not torch.equal(rounded, exact)
    assert cache.memory().used == 60 * 2 * 2 * 2 * 16 * 2
