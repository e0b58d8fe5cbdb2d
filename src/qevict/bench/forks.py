"""ForkedCache: caches of any methods, one row each, decoded together in one batch.

Decoding is bound by reading the model's weights, so the forks of one prompt cost little more together than one of them
alone. Attention is each member's own; everything else of a forward (projections, MLPs, the head) is one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from qevict.attention import AttentionCall, KVHandle, LazyMask, attach, causal_mask
from qevict.compat import cache_argument
from qevict.handle_layer import HandleLayer
from qevict.managed_layer import ManagedLayer


class ForkedCache(Cache):
    """A batch whose row i is `members[i]`, a cache of batch 1 that has read its prompt.

    Members may have seen different numbers of tokens. There are no padding columns: a forward brings equally many
    tokens for every row, and positions `[rows, tokens]` have to be given. `fork_forward` does that.

    Args:
        model: that the members were made for.
        members: any mixture of managed caches and Transformers' own. They keep their state; this is only a view.

    Raises:
        ValueError: if there is no member, or one of them is empty.
    """

    layers: list[Any]

    def __init__(self, model: PreTrainedModel, members: Sequence[Cache]) -> None:
        if not members:
            raise ValueError("a forked cache needs at least one member")
        for row, member in enumerate(members):
            if not member.get_seq_length():
                raise ValueError(f"member {row} is empty; give it its prompt first, by PrefillTrace.fill or a forward")
        attach(model)
        self.members = list(members)
        count = max(len(member.layers) for member in members)
        super().__init__(layers=[_ForkedLayer(self.members, index) for index in range(count)])

    def next_positions(self, tokens: int) -> Int[Tensor, "rows tokens"]:
        """Positions of the next tokens of every row."""
        seen = torch.tensor([member.get_seq_length() for member in self.members])
        return seen[:, None] + torch.arange(tokens)


def copies(caches: Sequence[Any]) -> list[Any]:
    """Independent copies of caches."""
    # Transformers' quantised tensors refuse to be copied, but are replaced as a whole and never written to.
    held = (tensor for cache in caches for layer in cache.layers for tensor in vars(layer).values())
    shared = {id(tensor): tensor for tensor in held if hasattr(tensor, "__tensor_flatten__")}
    return copy.deepcopy(list(caches), shared)


@torch.no_grad()
def fork_forward(
    model: PreTrainedModel, members: Sequence[Cache], tokens: Int[Tensor, "rows tokens"], *, last_only: bool = True
) -> Float[Tensor, "rows kept vocabulary"]:
    """Logits of the next tokens of caches decoded together, row i for `members[i]`; the caches take the tokens in.

    Args:
        last_only: whether to compute those of the last token only.
    """
    forked = ForkedCache(model, members)
    output = model(
        tokens.to(model.device),
        position_ids=forked.next_positions(tokens.shape[1]).to(model.device),
        use_cache=True,
        logits_to_keep=1 if last_only else 0,
        **cache_argument(forked),
    )
    logits: Tensor = output.logits
    return logits


class _ForkedLayer(HandleLayer):
    """One layer of all members."""

    supports_early_init = False

    def __init__(self, members: list[Cache], index: int) -> None:
        super().__init__()
        self._members, self._index = members, index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Handles that lead the attention function here."""
        if key_states.shape[0] != len(self._members):
            raise ValueError(f"{len(self._members)} caches are decoded together; got {key_states.shape[0]} rows")
        return super().update(key_states, value_states)

    def get_seq_length(self, *args: Any) -> int:
        """Tokens that the longest row has seen."""
        return max(member.get_seq_length() for member in self._members)

    def attend(
        self,
        module: nn.Module,
        query: Float[Tensor, "rows query_heads tokens dim"],
        handle: KVHandle,
        mask: LazyMask | None,
        call: AttentionCall,
    ) -> Float[Tensor, "rows tokens query_heads dim"]:
        """Every row's own attention."""
        outputs = []
        rows = zip(query.split(1), handle.keys.split(1), handle.values.split(1), strict=True)
        for row, (member, (asking, keys, values)) in enumerate(zip(self._members, rows, strict=True)):
            layer = member.layers[self._index]
            if isinstance(layer, ManagedLayer):
                # Its first managed layer reads the positions for all of them.
                own = _of_row(call, row) if self._index == layer.session.first_layer else call
                outputs.append(layer.attend(module, asking, KVHandle(layer, keys, values), None, own))
            else:
                keys, values = member.update(keys, values, self._index)
                own = _of_row(call, row)
                outputs.append(own.exact(asking, keys, values, causal_mask(asking, keys, own))[0])
        return torch.cat(outputs)


def _of_row(call: AttentionCall, row: int) -> AttentionCall:
    """The call with the positions of one row."""
    own = copy.copy(call)
    positions = call.settings.get("position_ids")
    own.settings = {**call.settings, "position_ids": None if positions is None else positions[row : row + 1]}
    return own
