"""Codecs: a window of keys and values to packed bytes and back. `base` says how to write one."""

from __future__ import annotations

from collections.abc import Callable

from qevict.codecs.base import Codec, Section, WindowLayout, WindowShape
from qevict.codecs.kivi import KiviCodec
from qevict.codecs.minmax import MinMaxCodec
from qevict.codecs.turboquant import TurboQuantCodec

__all__ = [
    "Codec",
    "KiviCodec",
    "MinMaxCodec",
    "Section",
    "TurboQuantCodec",
    "WindowLayout",
    "WindowShape",
    "get_codec",
]

_CODECS: dict[str, Callable[[int], Codec]] = {
    "minmax": lambda bits: MinMaxCodec(key_bits=bits, value_bits=bits),
    "kivi": lambda bits: KiviCodec(key_bits=bits, value_bits=bits),
    "turboquant": lambda bits: TurboQuantCodec(key_bits=bits, value_bits=bits),
}


def get_codec(name: str, bits: int) -> Codec:
    """The codec of that name with `bits` bits for each key and each value element.

    "minmax" is the paper's (keys per channel, values per token), "kivi" the same with values in groups of 32 channels,
    "turboquant" rotates every token by itself.

    Raises:
        ValueError: no codec has that name, or the codec does not have that width.
    """
    if name not in _CODECS:
        raise ValueError(f"unknown codec {name!r}: the known ones are {', '.join(sorted(_CODECS))}; or pass a Codec")
    return _CODECS[name](bits)
