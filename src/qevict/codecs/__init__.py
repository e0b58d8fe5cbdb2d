"""Codecs: a window of keys and values to packed bytes and back. `base` says how to write one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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
    "get_codecs",
]

_CODECS: dict[str, Callable[[Any, int], Codec | PromptCodec]] = {
    "allotted": AllottedCodec,
    "minmax": MinMaxCodec,
    "kivi": KiviCodec,
    "turboquant": TurboQuantCodec,
}


_LADDERS = {"allotted": "4+4|3.5+3|3+3|2.5+3|2.5+2"}
"""What a name stands for that says no bits; for the others 4+4."""


def get_codecs(name: str, bits: int | None = None) -> Iterator[Codec | PromptCodec]:
    """The codecs that a name stands for, to be tried in this order; most names stand for one.

    Args:
        name: "minmax" is the paper's (keys per channel, values per token), "kivi" the same with values in groups of 32
            channels, "turboquant" rotates every token by itself, "allotted" takes ranges and bits of key channels from
            the prompt. It may say the bits of keys and of values, or several pairs of them: "allotted:3+3|2.5+3".
        bits: of keys and of values, where the name does not say them. None: the codec's usual ones.

    Raises:
        ValueError: no codec has that name, or the codec does not have that width.
    """
    name, _, widths = name.partition(":")
    if name not in _CODECS:
        raise ValueError(f"unknown codec {name!r}: the known ones are {', '.join(sorted(_CODECS))}; or pass a Codec")
    usual = _LADDERS.get(name, "4+4") if bits is None else f"{bits}+{bits}"
    for pair in (widths or usual).split("|"):
        yield _one(name, pair)


def _one(name: str, widths: str) -> Codec | PromptCodec:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\+(\d+)", widths)
    if match is None:
        raise ValueError(f"the bits of codec {name!r} are {widths!r}; write those of keys and of values, as in 3+2")
    return _CODECS[name](float(match[1]) if "." in match[1] else int(match[1]), int(match[2]))
