"""Work on one prompt that many caches have in common, done once: the attention of all its queries, above all.

work = SharedWork(tensors)
with work.active():
    ...  # a function marked `@shared` computes only once for the same views of these tensors
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")


class SharedWork:
    """What `@shared` functions computed from views of the given tensors, which have to stay as they are.

    It holds the tensors' addresses, not the tensors: whoever owns both lets go of both.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.results: dict[Any, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, results are remembered and used again."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def key(self, values: Iterable[Any]) -> Any:
        """What tells the arguments apart; None if one of them is no view of a shared tensor."""
        parts: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                if value.untyped_storage().data_ptr() not in self._storages:
                    return None
                parts.append((value.data_ptr(), value.shape, value.stride(), value.dtype))
            else:
                parts.append(value)
        return tuple(parts)


_active: ContextVar[SharedWork | None] = ContextVar("shared work", default=None)


def shared(function: Callable[Parameters, Tensor]) -> Callable[Parameters, Tensor]:
    """Mark a pure function of tensors (and of hashable values) whose result may be used again where work is shared.

    Its arguments have to be positional. Every caller gets a copy of its own.
    """

    @functools.wraps(function)
    def remembered(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Tensor:
        work = _active.get()
        key = None if work is None or kwargs else work.key(args)
        if work is None or key is None:
            return function(*args, **kwargs)
        if (function, key) not in work.results:
            work.results[function, key] = function(*args, **kwargs)
        return torch.clone(work.results[function, key])

    return remembered
