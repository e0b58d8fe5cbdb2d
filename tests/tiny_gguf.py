"""A tiny Llama, and the GGUF file that a converter outside this project would make of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "t h", "th e", "Ġ the", "i n"]
CHAT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)


@cache
def tiny_llama() -> Any:
    """Two layers, four query and two KV heads, random weights; the same on every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@cache
def vocabulary() -> list[str]:
    """The control tokens, the 256 bytes in their printable form, and one token for each merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    return CONTROL + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]


def write_gguf(model: Any, path: Path, pre_tokenizer: str = "smollm") -> None:
    """Write `model` as float32 GGUF: its own tensor names, and rotary pairs interleaved instead of half-split."""
    from gguf import GGUFWriter, TokenType

    config, tokens = model.config, vocabulary()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)
    for name, tensor in gguf_tensors(model).items():
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: Any) -> dict[str, Tensor]:
    config = model.config
    tensors = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        parts = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": interleaved(attention.q_proj.weight, config.num_attention_heads),
            "attn_k": interleaved(attention.k_proj.weight, config.num_key_value_heads),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        tensors |= {f"blk.{index}.{part}.weight": tensor for part, tensor in parts.items()}
    return tensors


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection, from half-split rotary order to interleaved."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
