"""Memory that is free but still the process's: the C library keeps it, and a layer's prompt leaves much of it behind.

What is kept of a layer comes to lie behind the large tensors of its forward. When these are freed, the heap has holes
that the next layer's do not fit, and it grows, until a process that holds a fifth of the cache is larger than one that
holds all of it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

WORTH = 1 << 22
"""Bytes of the keys of a layer's prompt from which on it is worth the time: memory has to be asked for anew."""
EVERY = 4
"""Layers after which it is done. After each of them it takes a fifth of the time to the first token."""


def give_back() -> None:
    """Return free memory of the heap to the system, where the C library can (glibc)."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # another system, or another C library
        return None
    return trim
