"""Codecs: a window of keys and values to packed bytes and back. `base` says how to write one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from qevict.codecs.allotted import AllottedCodec
from qevict.codecs.base import Codec, FittedCodec, PromptCodec, Section, WindowLayout, WindowShape
from qevict.codecs.kivi import KiviCodec
from qevict.codecs.minmax import MinMaxCodec
from qevict.codecs.turboquant import TurboQuantCodec

__all__ = [
    "AllottedCodec",
    "Codec",
    "FittedCodec",
    "KiviCodec",
    "MinMaxCodec",
    "PromptCodec",
    "Section",
    "TurboQuantCodec",
    "WindowLayout",
    "WindowShape",
    "get_codec",
]

_CODECS: dict[str, Callable[[Any, int], Codec | PromptCodec]] = {
    "allotted": AllottedCodec,
    "minmax": MinMaxCodec,
    "kivi": KiviCodec,
    "turboquant": TurboQuantCodec,
}


def get_codec(name: str, bits: int) -> Codec | PromptCodec:
    """The codec of that name with `bits` bits for each key and each value element.

    A name may say the bits itself, those of keys and of values: "allotted:2.5+3".

    "minmax" is the paper's (keys per channel, values per token), "kivi" the same with values in groups of 32 channels,
    "turboquant" rotates every token by itself, "allotted" takes ranges and bits of key channels from the prompt.

    Raises:
        ValueError: no codec has that name, or the codec does not have that width.
    """
    name, _, widths = name.partition(":")
    if name not in _CODECS:
        raise ValueError(f"unknown codec {name!r}: the known ones are {', '.join(sorted(_CODECS))}; or pass a Codec")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\+(\d+)", widths or f"{bits}+{bits}")
    if match is None:
        raise ValueError(f"the bits of codec {name!r} are {widths!r}; write those of keys and of values, as in 3+2")
    return _CODECS[name](float(match[1]) if "." in match[1] else int(match[1]), int(match[2]))
