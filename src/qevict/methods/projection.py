"""What a value does to the residual stream: its norm after the output projection of its attention module."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qevict.methods.base import LayerPrefill
from qevict.shared import shared

_NAMES = ("o_proj", "dense", "out_proj")  # most families; GPT-NeoX and Phi; GPT-J
_BLOCK = 1024  # tokens projected at a time: the projections of a whole prompt would be larger than its values


def output_weight(module: nn.Module, channels: int) -> Float[Tensor, "hidden channels"]:
    """The weight of the attention module's output projection.

    Args:
        channels: query heads times head size, which it has to take.

    Raises:
        ValueError: if the module has none that is known, or if its weight is not a plain matrix of that width.
    """
    for name in _NAMES:
        weight = getattr(getattr(module, name, None), "weight", None)
        if weight is None:
            continue
        if weight.ndim != 2 or weight.shape[1] != channels or not weight.is_floating_point():
            raise ValueError(
                f"the output projection {name} of {type(module).__name__} has a weight of shape {tuple(weight.shape)} "
                f"and dtype {weight.dtype}; a floating-point matrix that takes {channels} channels is needed, so "
                "choose a method that does not look at it"
            )
        return weight.detach()
    raise ValueError(
        f"{type(module).__name__} has no output projection called {', '.join(_NAMES)}; choose a method that does not "
        "look at it"
    )


@shared
def output_norms(prefill: LayerPrefill) -> Float[Tensor, "heads tokens"]:
    """L1 norm of W_o v for every value, averaged over the query heads that share it; float32."""
    heads, tokens, dim = prefill.values.shape
    group = prefill.query.shape[1]
    weight = output_weight(prefill.module, heads * group * dim).unflatten(1, (heads, group, dim))
    norms = torch.zeros(heads, tokens, device=prefill.values.device)
    for head in range(heads):
        for member in range(group):
            projection = weight[:, head, member].T.float()
            for start in range(0, tokens, _BLOCK):
                block = slice(start, start + _BLOCK)
                norms[head, block] += (prefill.values[head, block].float() @ projection).abs().sum(dim=-1)
    return norms / group
