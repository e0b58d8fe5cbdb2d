"""Scores of a prompt from reading it twice: which of its tokens are looked at where it is to be said again.

After KVzip (Kim et al., 2025, arXiv 2505.23416). What a question will need is not known before it is asked, but
whatever it needs is part of the text, and a model that reads the text again attends to the places where it stood the
first time. A token's score in a KV head is the most attention that any query of the second reading pays it.

KVzip asks for the repetition in words, before chunks of 2K tokens. Here the text simply comes again, so that no
tokenizer is needed (with the words the scores were no better), and attention is shared among all tokens of the prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from qevict.architectures import check_length, decoder, describe, text_config
from qevict.attention import AttentionCall, KVHandle, LazyMask, attach, causal_mask
from qevict.compat import cache_argument
from qevict.handle_layer import HandleLayer
from qevict.kernels.reference import causal_weights

CHUNK = 2048
"""Tokens that are read again in one forward, right behind the prompt, so that positions grow by no more than that."""
CUE = 8
"""Tokens before a chunk that are read again with it, so that its first ones are recognised."""
LEAST_CHUNK = 64
"""Fewer tokens at a time than this are not worth a forward."""


@torch.no_grad()
def reconstruction_scores(
    model: PreTrainedModel,
    ids: Int[Tensor, " tokens"],
    keys: list[Float[Tensor, "kv_heads tokens dim"]],
    values: list[Float[Tensor, "kv_heads tokens dim"]],
) -> list[Float[Tensor, "kv_heads tokens"]]:
    """The most attention that each token of a prompt gets while it is read again, for every layer.

    Args:
        ids: of the prompt, padding left out; its positions begin with 0.
        keys, values: of every layer; keys rotated.

    Raises:
        ValueError: if the model has no positions left for a second reading.
    """
    architecture, tokens = describe(model), len(ids)
    chunk = min(CHUNK, tokens, _most_tokens(model) - tokens - CUE)
    if chunk < min(LEAST_CHUNK, tokens):
        raise ValueError(
            f"a prompt of {tokens} tokens is read again at positions behind it, and this {architecture.model_type} "
            f"model has {_most_tokens(model)}; leave {LEAST_CHUNK + CUE} of them, or choose another prompt_scorer"
        )
    check_length(architecture, tokens + CUE + chunk)
    attach(model)
    layers = [_ReadingLayer(*pair) for pair in zip(keys, values, strict=True)]
    for start in range(0, tokens, chunk):
        again = ids[max(0, start - CUE) : start + chunk][None].to(model.device)
        positions = torch.arange(tokens, tokens + again.shape[1], device=model.device)[None]
        decoder(model)(again, position_ids=positions, **cache_argument(Cache(layers=layers)))
    return [layer.scores for layer in layers]


def _most_tokens(model: PreTrainedModel) -> int:
    """Positions that the model has; without end if it does not say."""
    most = getattr(text_config(model), "max_position_embeddings", None)
    return 1 << 62 if most is None else int(most)


class _ReadingLayer(HandleLayer):
    """A layer that holds a prompt and takes nothing in: new tokens attend to it and to themselves.

    Attributes:
        scores: `[kv_heads, tokens]` the most attention so far.
    """

    def __init__(self, keys: Float[Tensor, "kv_heads tokens dim"], values: Tensor) -> None:
        super().__init__()
        self._keys, self._values = keys, values
        self.scores = torch.zeros(keys.shape[:2], device=keys.device)

    def get_seq_length(self, *args: Any) -> int:
        """Tokens of the prompt."""
        return self._keys.shape[1]

    def attend(
        self, module: nn.Module, query: Tensor, handle: KVHandle, mask: LazyMask | None, call: AttentionCall
    ) -> Tensor:
        """The model's own attention; what the prompt's tokens get of it counts."""
        keys = torch.cat([self._keys[None], handle.keys], dim=2)
        values = torch.cat([self._values[None], handle.values], dim=2)
        most = most_attention(query[0].unflatten(0, (keys.shape[1], -1)), keys[0], call.scaling)
        self.scores = torch.maximum(self.scores, most[:, : self._keys.shape[1]])
        return call.exact(query, keys, values, causal_mask(query, keys, call))[0]


def most_attention(
    query: Float[Tensor, "heads group new dim"], keys: Float[Tensor, "heads tokens dim"], scaling: float
) -> Float[Tensor, "heads tokens"]:
    """The most attention that each token gets from any of the last `new` ones, in any query head; causal, blockwise."""
    most = torch.zeros(keys.shape[:2], device=keys.device)
    for weights in causal_weights(query[None], keys[None], scaling, query.shape[2]):
        seen = most[:, : weights.shape[-1]]
        torch.maximum(seen, weights[0].flatten(1, 2).amax(dim=1), out=seen)
    return most
