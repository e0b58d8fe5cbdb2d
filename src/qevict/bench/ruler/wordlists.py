"""English words from the package `wonderwords`, as RULER uses them."""

from __future__ import annotations

import importlib.util
import random
from functools import lru_cache
from importlib import resources


def hyphenated_pair(rng: random.Random) -> str:
    """An adjective and a noun, such as `quizzical-yacht`: what RULER calls a word in its needles."""
    return f"{rng.choice(_read('adjective'))}-{rng.choice(_read('noun'))}"


@lru_cache(maxsize=1)
def all_words() -> tuple[str, ...]:
    """All nouns, adjectives and verbs, sorted, none twice."""
    return tuple(sorted({*_read("noun"), *_read("adjective"), *_read("verb")}))


@lru_cache(maxsize=3)
def _read(kind: str) -> tuple[str, ...]:
    if importlib.util.find_spec("wonderwords") is None:
        raise RuntimeError("RULER's words come from the package wonderwords: run `pip install 'qevict[bench]'`.")
    text = resources.files("wonderwords").joinpath(f"assets/{kind}list.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())
