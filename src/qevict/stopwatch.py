"""Seconds of named parts of the work, for whoever listens; parts that nobody listens to cost next to nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_heard: ContextVar[dict[str, float] | None] = ContextVar("heard", default=None)


@contextmanager
def part(name: str) -> Iterator[None]:
    """What happens inside is part `name`."""
    heard = _heard.get()
    if heard is None:
        yield
        return
    start = time.perf_counter()
    yield
    heard[name] = heard.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def listening() -> Iterator[dict[str, float]]:
    """Seconds of every part that this thread comes to, by name. On a GPU it is the time to ask for the work."""
    heard: dict[str, float] = {}
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)
