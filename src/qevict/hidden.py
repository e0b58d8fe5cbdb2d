"""The hidden states that go into the attention modules, for the few methods that look at them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class AttentionInputs:
    """Collects the input of every attention module, `[batch, tokens, hidden]` by layer index, until it is closed.

    It hooks the modules until then, or until nobody refers to it any more.
    """

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        self.by_layer: dict[int, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(_keep(self.by_layer, index), with_kwargs=True)
            for index, module in modules.items()
        ]
        self._finalizer = weakref.finalize(self, _remove, hooks)

    def close(self) -> None:
        """Take the hooks off; what was collected stays."""
        self._finalizer()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: the hooks are those of the original."""
        return

    def __enter__(self) -> AttentionInputs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _keep(by_layer: dict[int, Tensor], index: int) -> Any:
    # Of the dictionary alone, so that a hook does not keep alive what would remove it.
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        by_layer[index] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).detach()

    return hook
