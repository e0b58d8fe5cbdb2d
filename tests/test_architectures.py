"""Which models and layers qevict manages, and the sentence for each that it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qevict.architectures import (
    REFUSED,
    TESTED,
    Architecture,
    attention_modules,
    check_length,
    check_supported,
    decoder,
    describe,
    managed_layers,
    text_config,
)
from tiny import FAMILIES, MANAGED_FAMILIES, tiny_config, tiny_model

pytestmark = pytest.mark.contract


def any_model(model_type: str, **fields: Any) -> PreTrainedModel:
    """A tiny model of a type that is not among the families."""
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **fields}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_says_what_the_model_caches(family: str) -> None:
    model = tiny_model(family)
    architecture = describe(model)
    with torch.no_grad():
        layers = model(torch.tensor([[3, 4, 5]]), use_cache=True).past_key_values.layers
    assert len(layers) == architecture.num_layers
    for layer in layers:
        assert layer.keys.shape == layer.values.shape == (1, architecture.kv_heads, 3, architecture.head_dim)
    assert sorted(attention_modules(model)) == list(range(architecture.num_layers))
    assert describe(model.config) == architecture
    assert architecture.tested


@pytest.mark.parametrize("family", MANAGED_FAMILIES)
def test_tested_families_are_supported(family: str) -> None:
    model = tiny_model(family)
    assert check_supported(model) == describe(model)


def test_families_that_never_call_a_registered_attention_function_are_refused() -> None:
    for family in set(FAMILIES) - set(MANAGED_FAMILIES):
        with pytest.raises(ValueError, match="does not look its attention function up"):
            check_supported(tiny_model(family))


def test_the_table_is_the_families() -> None:
    assert {tiny_config(family).model_type for family in FAMILIES} == set(TESTED)
    assert not TESTED.keys() & REFUSED.keys()


def test_describe_reads_a_published_config_without_a_model() -> None:
    """Llama-3.1-8B's shape, as `qevict plan` gets it."""
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    assert describe(config) == Architecture(
        model_type="llama",
        num_layers=32,
        kv_heads=8,
        query_heads=32,
        head_dim=128,
        layer_types=("full_attention",) * 32,
        sliding_windows=(None,) * 32,
        max_tokens=None,
        tested=True,
    )
    assert managed_layers(describe(config)) == (True,) * 32


def test_a_multimodal_config_is_described_by_its_text_model_and_is_untested() -> None:
    config = AutoConfig.for_model("gemma3")
    architecture = describe(config)
    assert architecture.model_type == text_config(config).model_type == "gemma3_text"
    assert architecture.num_layers == config.text_config.num_hidden_layers
    assert not architecture.tested


def test_mistral_is_managed_while_its_window_holds_everything() -> None:
    huge = describe(tiny_config("mistral"))
    assert managed_layers(huge, total_tokens=8192) == (True, True)
    with pytest.raises(ValueError, match=r"its layers are sliding_attention \(window 8192, 8193 tokens announced\)"):
        managed_layers(huge, total_tokens=8193)
    with pytest.raises(ValueError, match="an unknown number of tokens announced"):
        managed_layers(huge)
    with pytest.raises(ValueError, match="no layer to manage in this mistral model"):
        managed_layers(describe(tiny_config("mistral", sliding_window=16)), total_tokens=100)
    assert managed_layers(describe(tiny_config("mistral", sliding_window=None))) == (True, True)


def test_gemma3_keeps_its_sliding_layers() -> None:
    architecture = describe(tiny_config("gemma3"))
    assert architecture.sliding_windows == (16, None, 16)
    assert managed_layers(architecture) == (False, True, False)
    assert managed_layers(architecture, total_tokens=17) == (False, True, False)
    assert managed_layers(architecture, total_tokens=16) == (True, True, True)


def test_chunked_and_linear_layers_are_never_managed() -> None:
    llama = describe(tiny_config("llama"))
    hybrid = dataclasses.replace(llama, layer_types=("linear_attention", "full_attention"))
    assert managed_layers(hybrid, total_tokens=1) == (False, True)
    chunked = describe(tiny_config("llama", attention_chunk_size=64))
    assert chunked.layer_types == ("chunked_attention",) * 2
    with pytest.raises(ValueError, match="its layers are chunked_attention, and only full-attention layers"):
        managed_layers(chunked, total_tokens=1)


def test_phi3_and_longrope_are_limited_to_the_length_below_their_switch() -> None:
    for config, limit in (
        (tiny_config("phi3", original_max_position_embeddings=64), 64),
        (tiny_config("llama", rope="longrope"), 32768),
    ):
        architecture = describe(config)
        check_length(architecture, limit)
        with pytest.raises(ValueError, match=f"changes its rotary embedding at {limit} tokens .* {limit + 1} tokens"):
            check_length(architecture, limit + 1)
    check_length(describe(tiny_config("llama", rope="yarn")), 10**6)


@pytest.mark.parametrize(
    ("model_type", "fields", "sentence"),
    [
        ("diffllama", {}, "cannot manage diffllama models: its layers split and repeat the values"),
        ("doge", {}, "cannot manage doge models: its layers compute a mask from the values"),
        ("bloom", {"n_layer": 1, "n_head": 2}, "cannot manage bloom models: its layers use ALiBi"),
        ("falcon", {}, "cannot manage falcon models: its layers read the shape of the keys"),
        ("gemma2", {"head_dim": 16}, "cannot manage gemma2 models: its layers cap the attention logits"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 2}, "cannot manage gpt_oss models: .* attention sinks"),
        (
            "deepseek_v3",
            {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
            r"cannot manage deepseek_v3 models: its layers use latent attention \(MLA\)",
        ),
    ],
)
def test_refused_model_types(model_type: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_supported(any_model(model_type, **fields), allow_untested=True)


def test_an_untested_type_needs_permission() -> None:
    model = any_model("olmo")
    with pytest.raises(ValueError, match=r"not tested with olmo models: use one of cohere, .*allow_untested=True"):
        check_supported(model)
    assert not check_supported(model, allow_untested=True).tested


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, r"cap the attention logits \(attn_logit_softcapping=50.0\)"),
        ("llama", {"rope": "dynamic"}, "its rotary embedding has the type dynamic"),
        ("llama", {"alibi": True}, r"add a position bias to the attention logits \(ALiBi\)"),
        ("llama", {"is_encoder_decoder": True}, "it is an encoder-decoder"),
        ("llama", {"kv_lora_rank": 8}, "latent attention"),
        ("qwen3", {"v_head_dim": 8}, r"its keys and values have different head sizes \(32 and 8\)"),
        ("llama", {"num_kv_shared_layers": 1}, "its last 1 layers use the keys and values of other layers"),
    ],
)
def test_refused_features_of_the_config(family: str, fields: dict[str, Any], sentence: str) -> None:
    model = tiny_model(family)
    model.config = tiny_config(family, **fields)
    with pytest.raises(ValueError, match=rf"cannot manage this {model.config.model_type} model: .*{sentence}"):
        check_supported(model, allow_untested=True)


def test_refused_layers_are_named() -> None:
    def with_sinks(layer: nn.Module) -> None:
        layer.self_attn.sinks = nn.Parameter(torch.zeros(4))

    def with_bias(layer: nn.Module) -> None:
        layer.self_attn.relative_attention_bias = nn.Embedding(4, 4)

    def with_more_heads(layer: nn.Module) -> None:
        layer.self_attn.k_proj = nn.Linear(64, 64)

    def with_wider_values(layer: nn.Module) -> None:
        layer.self_attn.v_proj = nn.Linear(64, 48)

    def without_attention(layer: nn.Module) -> None:
        del layer.self_attn

    for spoil, sentence in (
        (with_sinks, "it has attention sinks"),
        (with_bias, "it adds a position bias"),
        (with_more_heads, "k_proj makes 64 channels where 2 KV heads of size 16 make 32"),
        (with_wider_values, "v_proj makes 48 channels"),
        (without_attention, "it has no attention module with its layer index"),
    ):
        model = tiny_model("llama")
        spoil(decoder(model).layers[1])
        with pytest.raises(ValueError, match=f"cannot manage layer 1 of this llama model: {sentence}"):
            check_supported(model, allow_untested=True)


def test_a_config_without_one_number_of_heads_is_refused() -> None:
    config = PretrainedConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=[2, 4])
    with pytest.raises(ValueError, match=r"must give num_key_value_heads as one number for all layers, not \[2, 4\]"):
        describe(config)


def test_tiny_models_are_reproducible_and_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = tiny_model("llama"), tiny_model("llama")
    assert torch.equal(torch.get_rng_state(), before)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
