"""A model that has qevict attached behaves as before with every other cache, and nothing else on it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver import TIGHT, endless, forward, full_cache, generate, left_padded, prompt, step_by_step
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from qevict import QEvictCache, attach
from tiny import tiny_model

pytestmark = pytest.mark.contract

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "gemma3": {},
    "cohere": {},
    "gpt_neox": {},
}
EVERY_MODEL = pytest.mark.parametrize("family", MODELS)
CACHES: dict[str, Callable[[PreTrainedModel], Cache | None]] = {
    "no cache": lambda model: None,
    "bare dynamic": lambda model: DynamicCache(),
    "dynamic": full_cache,
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
}


def with_implementation(family: str, implementation: str) -> PreTrainedModel:
    model = tiny_model(family, **MODELS[family])
    model.set_attn_implementation(implementation)
    return model


def logits(model: PreTrainedModel, cache: Cache | None) -> Tensor:
    """Of a left-padded batch: the prompt and, where there is a cache, six more steps. Padding left out."""
    inputs = left_padded([prompt(30), prompt(21, seed=1)])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    prefill = forward(model, cache, ids, attention_mask=mask, position_ids=positions)
    steps = [prefill[mask.bool()]]
    for token in range(6 if cache is not None else 0):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        new = prompt(1, batch=2, seed=token)
        position = mask.sum(dim=1, keepdim=True) - 1
        steps.append(forward(model, cache, new, attention_mask=mask, position_ids=position).flatten(0, 1))
    return torch.cat(steps)


@pytest.mark.parametrize("cache", CACHES)
@IMPLEMENTATIONS
@EVERY_MODEL
def test_other_caches_give_the_previous_logits(family: str, implementation: str, cache: str) -> None:
    model = with_implementation(family, implementation)
    expected = logits(model, CACHES[cache](model))
    attach(model)
    torch.testing.assert_close(logits(model, CACHES[cache](model)), expected, rtol=1e-5, atol=1e-5)


@EVERY_MODEL
def test_other_caches_generate_the_previous_tokens(family: str) -> None:
    model = endless(family, **MODELS[family])
    inputs = left_padded([prompt(30), prompt(21, seed=1)])
    expected = [generate(model, CACHES[cache](model), inputs, 10) for cache in ("dynamic", "static")]
    attach(model)
    for cache, tokens in zip(("dynamic", "static"), expected, strict=True):
        assert torch.equal(generate(model, CACHES[cache](model), inputs, 10), tokens)


def test_unpadded_prompts_stay_exact_after_a_cache_was_used() -> None:
    model, ids = endless(), prompt(40)
    expected = step_by_step(model, full_cache(model), ids, prefill=30)
    generate(model, QEvictCache(model, TIGHT), ids, 5)
    torch.testing.assert_close(step_by_step(model, full_cache(model), ids, prefill=30), expected, rtol=1e-5, atol=1e-5)


def test_eager_still_returns_its_attention_weights() -> None:
    model, ids = with_implementation("llama", "eager"), prompt(12)
    expected = model(ids, output_attentions=True).attentions
    attach(model)
    got = model(ids, output_attentions=True).attentions
    assert len(got) == 2
    for before, after in zip(expected, got, strict=True):
        torch.testing.assert_close(after, before)


def test_a_finished_mask_is_passed_on() -> None:
    model, ids = tiny_model("llama"), prompt(12)
    mask = torch.zeros(1, 1, 12, 12).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
    mask[..., 2] = -torch.inf  # nobody sees the third token, which then sees the first two
    expected = forward(model, None, ids, attention_mask=mask)
    attach(model)
    torch.testing.assert_close(forward(model, None, ids, attention_mask=mask), expected)


def test_training_gradients_are_the_previous_ones() -> None:
    gradients = []
    for attached in (False, True):
        model, ids = tiny_model("llama"), prompt(12)
        if attached:
            attach(model)
        model(ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_attaching_twice_changes_nothing_more() -> None:
    model = tiny_model("llama")
    attach(model)
    implementation, expected = model.config._attn_implementation, logits(model, full_cache(model))
    attach(model)
    QEvictCache(model, TIGHT)
    assert model.config._attn_implementation == implementation == "qevict_sdpa"
    assert torch.equal(logits(model, full_cache(model)), expected)


def test_two_models_at_once_keep_to_themselves() -> None:
    first, second, ids = endless("llama"), endless("cohere"), prompt(50)
    alone = [generate(model, QEvictCache(model, TIGHT), ids, 12) for model in (first, second)]
    caches = [QEvictCache(model, TIGHT) for model in (first, second)]
    together = [ids, ids]
    for _ in range(12):  # their steps interleaved
        for i, model in enumerate((first, second)):
            new = together[i] if together[i].shape[1] == 50 else together[i][:, -1:]
            chosen = forward(model, caches[i], new)[:, -1:].argmax(dim=-1)
            together[i] = torch.cat([together[i], chosen], dim=1)
    assert torch.equal(together[0][:, 50:], alone[0])
    assert torch.equal(together[1][:, 50:], alone[1])


def test_an_unattached_model_of_the_same_class_is_left_alone() -> None:
    attached, other = tiny_model("llama"), tiny_model("llama")
    attach(attached)
    assert other.config._attn_implementation == "sdpa"
    assert not hasattr(type(other), "_qevict")
    assert torch.equal(logits(attached, full_cache(attached)), logits(other, full_cache(other)))


def belongings(model: nn.Module) -> dict[str, Any]:
    """Everything that hangs on the modules and their classes, by identity."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            entries = list(value.items()) if isinstance(value, dict) else [("", value)]
            found |= {f"{name}.{key}.{inner}": id(entry) for inner, entry in entries if not isinstance(entry, int)}
        found |= {f"class {type(module).__qualname__}.{key}": id(entry) for key, entry in vars(type(module)).items()}
    return found


def test_nothing_is_left_on_the_model() -> None:
    model, ids = endless(), prompt(50)
    forward(model, full_cache(model), ids)  # Transformers fills lazy attributes of its own
    before, config = belongings(model), model.config.to_dict()
    names = set(vars(model.config))
    cache = QEvictCache(model, TIGHT)
    forward(model, cache, ids)
    forward(model, cache, ids[:, :1])
    assert belongings(model) == before
    assert model.config.to_dict() == config
    assert set(vars(model.config)) == names
