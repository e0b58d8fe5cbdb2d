"""Tiny random models of every family that qevict is tested with, and rope variants of Llama.

`tiny_model("qwen3")` is a seeded, reproducible causal language model in eval mode: 2 to 4 layers, GQA where the
family has it, a vocabulary of 128, weights large enough that attention is far from uniform.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 128
MAX_POSITIONS = 131072

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 16, "sliding_window": 8192},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 32,
    },
    "phi3": {"original_max_position_embeddings": MAX_POSITIONS},
    "gpt_neox": {"num_key_value_heads": None},
    "cohere": {"logit_scale": 1.0},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
    "phi": {},
    "stablelm": {},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.25},
    "starcoder2": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "helium": {"head_dim": 16},
    "nemotron": {"head_dim": 16},
    "gptj": {"rotary_dim": 8, "num_key_value_heads": None},
}

FAMILIES: tuple[str, ...] = tuple(_FAMILY)

MANAGED_FAMILIES: tuple[str, ...] = tuple(
    family
    for family in FAMILIES
    if hasattr(import_module(f"transformers.models.{family}.modeling_{family}"), "ALL_ATTENTION_FUNCTIONS")
)
"""Those that call a registered attention function in the Transformers at hand (5.2: neither Nemotron nor GPT-J)."""

ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
    },
}
"""Rope variants for head size 16 (a tiny Llama's); tests may give longrope another switch."""

ROPE_TYPES: tuple[str, ...] = tuple(ROPE_PARAMETERS)


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """The tiny config of a family; `rope="yarn"` selects one of `ROPE_TYPES`, other keywords replace config fields."""
    fields = {"model_type": family, **_COMMON, **_FAMILY[family]}
    if "rope" in overrides:
        fields["rope_parameters"] = dict(ROPE_PARAMETERS[overrides.pop("rope")])
    return AutoConfig.for_model(**{**fields, **overrides})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **config_overrides: Any) -> PreTrainedModel:
    """A tiny random model of one of `FAMILIES`, the same on every call; keywords as in `tiny_config`."""
    config = tiny_config(family, **config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # biases start at zero, which would hide a dropped one
                    parameter.normal_(std=0.3)
    return model.to(dtype).eval()
