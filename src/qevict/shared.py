"""Work on one prompt that many caches have in common, done once: the attention of its queries, above all.

work = SharedWork(tensors)
with work.active():
    ...  # a function marked `@shared` computes only once for the same views of these tensors
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from torch import Tensor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])


@runtime_checkable
class Shareable(Protocol):
    """An argument that is made of tensors and hashable values."""

    @property
    def shared_parts(self) -> tuple[Any, ...]:
        """Those that tell it from others."""
        ...


class SharedWork:
    """What `@shared` functions computed from views of the given tensors, which have to stay as they are.

    It holds the tensors' addresses, not the tensors: whoever owns both lets go of both.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.results: dict[Any, Any] = {}

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
            elif isinstance(value, Shareable):
                key = self.key(value.shared_parts)
                if key is None:
                    return None
                parts.append(key)
            else:
                parts.append(value)
        return tuple(parts)


_active: ContextVar[SharedWork | None] = ContextVar("shared work", default=None)


def shared(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Mark a pure function of tensors (`Shareable` objects, hashable values) whose result may be used again.

    The result is a tensor or a named tuple of some, of which every caller gets a copy of its own. Arguments have to be
    positional.
    """

    @functools.wraps(function)
    def remembered(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        work = _active.get()
        key = None if work is None or kwargs else work.key(args)
        if work is None or key is None:
            return function(*args, **kwargs)
        if (function, key) not in work.results:
            work.results[function, key] = function(*args, **kwargs)
        return _copy(work.results[function, key])

    return remembered


def _copy(result: Any) -> Any:
    return result.clone() if isinstance(result, Tensor) else type(result)(*(tensor.clone() for tensor in result))
