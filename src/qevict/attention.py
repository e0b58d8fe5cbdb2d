"""The registered attention functions: what a model calls instead of its own attention.

A managed layer's `update` returns a `KVHandle` in place of keys and values; the attention function recognises it and
lets the layer attend. Anything else (another cache, a layer that keeps Transformers' own cache, no cache) goes to the
implementation that the model had before, with the mask that it would have had. One function is registered for each
previous implementation: `qevict_sdpa`, `qevict_eager`, `qevict_flash_attention_2`, ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qevict.architectures import text_config

PREFIX = "qevict_"

_NOT_ATTACHED = (
    "a managed cache was used by a model that does not call its attention function; keep the attention implementation "
    "that making the cache sets, or call qevict.attach(model) again"
)


@runtime_checkable
class AttendingLayer(Protocol):
    """What the attention function needs of a cache layer."""

    def attend(
        self, module: nn.Module, query: Tensor, handle: KVHandle, mask: LazyMask | None, call: AttentionCall
    ) -> Tensor:
        """Attention output `[batch, tokens, query_heads, head_dim]` of the new tokens."""
        ...


class KVHandle:
    """Stands for the keys and values of a managed layer between `update` and the attention function."""

    __slots__ = ("keys", "layer", "values")

    def __init__(self, layer: AttendingLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(_NOT_ATTACHED)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """A torch function was given the handle as if it were a tensor."""
        raise RuntimeError(_NOT_ATTACHED)


class AttentionCall:
    """The previous implementation's function with the settings of this call; `exact` runs it on plain tensors."""

    def __init__(self, module: nn.Module, previous: str, settings: dict[str, Any]) -> None:
        self._module, self._previous, self.settings = module, previous, settings

    @property
    def implementation(self) -> str:
        """The name of the previous implementation."""
        return self._previous

    @property
    def scaling(self) -> float:
        """The factor on the attention logits."""
        given = self.settings.get("scaling")
        return float(self._module.head_dim**-0.5 if given is None else given)  # type: ignore[operator]

    def exact(self, query: Tensor, keys: Tensor, values: Tensor, mask: LazyMask | Tensor | None) -> tuple[Tensor, Any]:
        """What the model would have computed without qevict."""
        if isinstance(mask, LazyMask):
            mask = mask.build()
        function = _previous_function(self._module, self._previous)
        result: tuple[Tensor, Any] = function(self._module, query, keys, values, mask, **self.settings)
        return result


class LazyMask:
    """The arguments of a mask, built only where the previous implementation needs it, once a forward.

    A managed layer reads nothing but `padding`.
    """

    ndim = 4  # Transformers asks, to tell a finished mask from a padding mask

    def __init__(self, previous: str, arguments: dict[str, Any]) -> None:
        self._previous, self._arguments = previous, arguments
        self._built: list[Any] = []

    @property
    def padding(self) -> Tensor | None:
        """`[batch, tokens]` true where there is a token; None if there is no padding mask."""
        padding: Tensor | None = self._arguments.get("attention_mask")
        return padding

    def build(self) -> Any:
        """The mask of the previous implementation."""
        if not self._built:
            self._built.append(ALL_MASK_ATTENTION_FUNCTIONS[self._previous](**self._arguments))
        return self._built[0]


def causal_mask(query: Tensor, keys: Tensor, call: AttentionCall) -> Tensor | None:
    """The mask `[1, 1, tokens, keys]` of rows without padding; None where everything is seen.

    The keys are those of the tokens up to the last query, be they all or a sliding layer's last ones.
    """
    seen = visible(query.shape[2], keys.shape[2], call.settings.get("sliding_window"), query.device)
    # Flash attention aligns its own causal mask with the last key.
    if bool(seen.all()) or call.implementation.startswith("flash"):
        return None
    if call.implementation == "eager":
        return torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, torch.finfo(query.dtype).min)[None, None]
    return seen[None, None]


def visible(new: int, total: int, window: int | None, device: torch.device) -> Bool[Tensor, "new total"]:
    """Which of `total` consecutive tokens each of the last `new` attends to, in a layer that slides over `window`."""
    place = torch.arange(total, device=device)
    own = place[total - new :, None]
    causal = place <= own
    return causal if window is None else causal & (place > own - window)


def attach(model: PreTrainedModel) -> None:
    """Let the model call qevict's attention function. Nothing changes for other caches.

    Making a cache does this; it is needed again only after the attention implementation was set anew.

    Raises:
        ValueError: if the model does not look up its attention function, so that it cannot be replaced.
    """
    config = text_config(model)
    previous = (config._attn_implementation or "eager").removeprefix(PREFIX)
    name = PREFIX + previous
    function = partial(_attention, previous)
    AttentionInterface.register(name, function)
    if ALL_ATTENTION_FUNCTIONS[name] is not function:  # kvpress puts a wrapper before every function when imported
        ALL_ATTENTION_FUNCTIONS[name] = function
    AttentionMaskInterface.register(name, partial(_mask, previous))
    if config._attn_implementation == name:
        return
    model.set_attn_implementation(name)
    if config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} does not look up its attention function, so qevict cannot attend for it; "
            "a newer version of Transformers may"
        )


def _attention(
    previous: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor | KVHandle,
    value: Tensor | KVHandle,
    attention_mask: LazyMask | Tensor | None,
    **settings: Any,
) -> tuple[Tensor, Any]:
    call = AttentionCall(module, previous, settings)
    if not isinstance(key, KVHandle):
        assert isinstance(value, torch.Tensor)
        return call.exact(query, key, value, attention_mask)
    if isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"this cache takes a 2-D padding mask [batch, tokens]; got a mask of shape {tuple(attention_mask.shape)}"
        )
    return key.layer.attend(module, query, key, attention_mask, call), None


def _mask(previous: str, **arguments: Any) -> Any:
    padding = arguments.get("attention_mask")
    if isinstance(padding, LazyMask):  # made beforehand, as generate() does for static caches
        return padding
    mask = LazyMask(previous, arguments)
    return mask.build() if torch.compiler.is_compiling() else mask


def _previous_function(module: nn.Module, previous: str) -> Callable[..., tuple[Tensor, Any]]:
    if previous != "eager":
        function: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS[previous]
        return function
    # Each modeling file has its own eager function; a subclass from elsewhere uses that of the class it extends.
    for cls in type(module).__mro__:
        own = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if own is not None:
            return own
    raise ValueError(f"{type(module).__name__} has no eager attention function beside it to fall back to")
