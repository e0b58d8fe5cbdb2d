"""What qevict knows of a model: its attention layers, which of them it can manage, and what it must refuse.

`describe` reads a model or a bare config, `check_supported` raises one clear sentence where the cache would be wrong,
`managed_layers` says which layers the tiers take over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"

TESTED: dict[str, str] = {
    "llama": "all rope types but dynamic",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "keys are normalised before rope",
    "mistral": "sliding window at least as long as the prompt and the new tokens",
    "gemma3_text": "hybrid: the full-attention layers are managed, the sliding ones keep Transformers' cache",
    "phi3": "up to original_max_position_embeddings tokens",
    "gpt_neox": "partial rotary",
    "cohere": "interleaved rotary",
    "smollm3": "layers without rotary embedding included",
    "phi": "partial rotary",
    "stablelm": "partial rotary",
    "glm": "partial interleaved rotary",
    "glm4": "partial interleaved rotary",
    "olmo2": "rotary tables in float32",
    "granite": "attention multiplier",
    "starcoder2": "sliding window at least as long as the prompt and the new tokens",
    "mixtral": "mixture of experts",
    "helium": "interleaved rotary",
    "nemotron": "partial rotary; needs a Transformers whose Nemotron looks its attention function up",
    "gptj": "partial interleaved rotary; needs a Transformers whose GPT-J looks its attention function up",
}
"""Model types (of the text model) that the tests run, each with a note for the reader."""

REFUSED: dict[str, str] = {
    "diffllama": "its layers split and repeat the values after the cache returned them",
    "doge": "its layers compute a mask from the values that the cache returned",
    "bloom": "its layers use ALiBi and reshape the keys after the cache returned them",
    "falcon": "its layers read the shape of the keys that the cache returned",
    "mpt": "its layers use ALiBi and multiply the keys after the cache returned them",
    "idefics": "its layers normalise the keys after the cache returned them",
    "deepseek_v2": "its layers use latent attention (MLA), whose keys and values have different head sizes",
    "deepseek_v3": "its layers use latent attention (MLA), whose keys and values have different head sizes",
    "gemma2": "its layers cap the attention logits (attn_logit_softcapping)",
    "gpt_oss": "its layers have attention sinks (a learned logit for each head)",
}
"""Model types that no setting can make work, each with the reason."""


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder's attention, read from its config.

    `layer_types` and `sliding_windows` have one entry a layer; a window is in tokens, None for a layer that does not
    slide. `max_tokens` is the length, in tokens, above which the model switches its rotary tables (longrope) or drops
    the cache (Phi-3); None when there is no such length. `tested` is whether qevict's tests run this model type.
    """

    model_type: str
    num_layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_windows: tuple[int | None, ...]
    max_tokens: int | None
    tested: bool


def text_config(model_or_config: PreTrainedModel | PretrainedConfig) -> PretrainedConfig:
    """The config of the text decoder (of a multimodal model: its language model's)."""
    config = getattr(model_or_config, "config", model_or_config)
    return cast(PretrainedConfig, config.get_text_config(decoder=True))


def decoder(model: PreTrainedModel) -> nn.Module:
    """The stack of decoder layers, without the language-model head."""
    return cast(nn.Module, model.get_decoder())


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The decoder's attention modules by layer index; layers of other kinds (Mamba, ...) are absent."""
    modules: dict[int, nn.Module] = {}
    for module in decoder(model).modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "Attention" in type(module).__name__:
            modules.setdefault(index, module)  # the outermost module of a layer comes first
    return modules


def describe(model_or_config: PreTrainedModel | PretrainedConfig) -> Architecture:
    """Reads an `Architecture` from a model or from a config alone.

    Raises ValueError when the config does not give one number of layers, KV heads and head size.
    """
    outer = getattr(model_or_config, "config", model_or_config)
    config = text_config(outer)
    query_heads = _whole(config, "num_attention_heads")
    # an absent or None number of KV heads means as many as query heads (GPT-NeoX, Nemotron)
    kv_heads = query_heads if _get(config, "num_key_value_heads") is None else _whole(config, "num_key_value_heads")
    given_head_dim = _get(config, "head_dim") is not None
    layer_types = _layer_types(config)
    return Architecture(
        model_type=config.model_type,
        num_layers=len(layer_types),
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=_whole(config, "head_dim") if given_head_dim else _whole(config, "hidden_size") // query_heads,
        layer_types=layer_types,
        sliding_windows=tuple(_get(config, "sliding_window") if t == SLIDING else None for t in layer_types),
        max_tokens=_max_tokens(config),
        # the outer type counts: a multimodal wrapper of a tested text model is another model
        tested=outer.model_type in TESTED,
    )


def check_supported(model: PreTrainedModel, allow_untested: bool = False) -> Architecture:
    """Returns the model's `Architecture` if its full-attention layers can be managed.

    Raises ValueError, naming the layer or feature and why, for model types in `REFUSED`, for those not in `TESTED`
    unless `allow_untested`, and for features that would make the cache wrong.
    """
    for config in (model.config, text_config(model)):
        if config.model_type in REFUSED:
            raise ValueError(f"qevict cannot manage {config.model_type} models: {REFUSED[config.model_type]}.")
    _check_config(model.config)
    _check_config(text_config(model))
    architecture = describe(model)
    _check_layers(architecture, attention_modules(model))
    if not (architecture.tested or allow_untested):
        raise ValueError(
            f"qevict was not tested with {model.config.model_type} models: use one of {', '.join(sorted(TESTED))}, "
            "or pass allow_untested=True and compare its output at a budget of 1.0 with the uncompressed cache's."
        )
    return architecture


def check_length(architecture: Architecture, total_tokens: int) -> None:
    """Raises ValueError when the model would switch its rotary tables, or drop the cache, within `total_tokens`.

    `total_tokens` is the longest row's prompt plus the new tokens announced.
    """
    if architecture.max_tokens is not None and total_tokens > architecture.max_tokens:
        raise ValueError(
            f"this {architecture.model_type} model changes its rotary embedding at {architecture.max_tokens} tokens "
            f"(original_max_position_embeddings) and then needs a new cache, but {total_tokens} tokens were announced: "
            "shorten the prompt or announce fewer new tokens."
        )


def managed_layers(architecture: Architecture, total_tokens: int | None = None) -> tuple[bool, ...]:
    """Which layers the tiers take over, one flag a layer.

    Full-attention layers; and sliding ones whose window holds all of `total_tokens` (prompt plus new tokens), which
    then attend like full ones. With `total_tokens` unknown no sliding layer is managed.
    Raises ValueError when no layer is left.
    """
    flags = tuple(
        layer_type == FULL or (window is not None and total_tokens is not None and total_tokens <= window)
        for layer_type, window in zip(architecture.layer_types, architecture.sliding_windows, strict=True)
    )
    if any(flags):
        return flags
    kinds = ", ".join(sorted(set(architecture.layer_types)))
    windows = [window for window in architecture.sliding_windows if window is not None]
    hint = f" (window {max(windows)}, {total_tokens or 'an unknown number of'} tokens announced)" if windows else ""
    raise ValueError(
        f"qevict has no layer to manage in this {architecture.model_type} model: its layers are {kinds}{hint}, and "
        "only full-attention layers, or sliding ones with a window as long as everything announced, can be managed."
    )


def rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The config's rope parameters as a list: one dict, or one for each layer type (Gemma 3), or none."""
    parameters = _get(config, "rope_parameters") or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or ([parameters] if parameters else [])


def _get(config: PretrainedConfig, name: str) -> Any:
    return getattr(config, name, None)


def _whole(config: PretrainedConfig, name: str) -> int:
    value = _get(config, name)
    if not isinstance(value, int):
        raise ValueError(f"the {config.model_type} config must give {name} as one number for all layers, not {value}.")
    return value


def _layer_types(config: PretrainedConfig) -> tuple[str, ...]:
    """As Transformers' own caches infer them when the config does not list them."""
    if _get(config, "layer_types") is not None:
        return tuple(config.layer_types)
    if _get(config, "sliding_window") is not None:
        kind = SLIDING
    else:
        kind = FULL if _get(config, "attention_chunk_size") is None else CHUNKED
    return (kind,) * _whole(config, "num_hidden_layers")


def _max_tokens(config: PretrainedConfig) -> int | None:
    switches = [
        parameters.get("original_max_position_embeddings") or _get(config, "original_max_position_embeddings")
        for parameters in rope_parameters(config)
        if parameters.get("rope_type") == "longrope"
    ]
    if config.model_type == "phi3":  # drops the cache there whatever its rope type
        switches.append(_get(config, "original_max_position_embeddings"))
    return min((int(switch) for switch in switches if switch is not None), default=None)


def _check_config(config: PretrainedConfig) -> None:
    for reason in _config_refusals(config):
        raise ValueError(f"qevict cannot manage this {config.model_type} model: {reason}.")


def _config_refusals(config: PretrainedConfig) -> Iterator[str]:
    if _get(config, "is_encoder_decoder"):
        yield "it is an encoder-decoder, and only decoder-only models are supported"
    if _get(config, "attn_logit_softcapping") is not None:
        yield f"its layers cap the attention logits (attn_logit_softcapping={config.attn_logit_softcapping})"
    if _get(config, "alibi") or getattr(_get(config, "attn_config"), "alibi", False):
        yield "its layers add a position bias to the attention logits (ALiBi)"
    if _get(config, "kv_lora_rank") is not None:
        yield "its layers use latent attention (MLA), whose keys and values have different head sizes"
    if _get(config, "v_head_dim") not in (None, _get(config, "head_dim")):
        yield f"its keys and values have different head sizes ({_get(config, 'head_dim')} and {config.v_head_dim})"
    if _get(config, "num_kv_shared_layers"):
        yield f"its last {config.num_kv_shared_layers} layers use the keys and values of other layers"
    if any(parameters.get("rope_type") == "dynamic" for parameters in rope_parameters(config)):
        yield "its rotary embedding has the type dynamic, which changes the tables of past keys as the text grows"


def _check_layers(architecture: Architecture, modules: dict[int, nn.Module]) -> None:
    for index, layer_type in enumerate(architecture.layer_types):
        if layer_type not in (FULL, SLIDING):
            continue
        module = modules.get(index)
        reason = "it has no attention module with its layer index" if module is None else _refusal(architecture, module)
        if reason is not None:
            raise ValueError(f"qevict cannot manage layer {index} of this {architecture.model_type} model: {reason}.")


def _refusal(architecture: Architecture, module: nn.Module) -> str | None:
    if getattr(module, "sinks", None) is not None:
        return "it has attention sinks (a learned logit for each head)"
    if getattr(module, "relative_attention_bias", None) is not None:
        return "it adds a position bias to the attention logits"
    if not hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"):
        return "in this version of Transformers it does not look its attention function up, so qevict's is never called"
    expected = architecture.kv_heads * architecture.head_dim
    for name in ("k_proj", "v_proj"):
        size = getattr(getattr(module, name, None), "out_features", expected)  # fused projections have neither
        if size != expected:
            return (
                f"{name} makes {size} channels where {architecture.kv_heads} KV heads of size {architecture.head_dim} "
                f"make {expected}, and all managed layers must have keys and values of one shape"
            )
    return None
