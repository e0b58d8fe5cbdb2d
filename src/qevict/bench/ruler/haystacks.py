"""What RULER hides its needles in, and how: repeated filler, an essay, or lines of other keys and values."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from qevict.bench.data import find_file, read_rows

FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")

# Forty depths from 0 to 100 %, as whole per cents.
_DEPTHS = tuple(round(100 * step / 39) for step in range(40))

_ESSAYS = ("PaulGrahamEssays.json", "haystack*.txt", "haystack*.jsonl")
_ESSAY_SOURCE = (
    "It is the text that needles are hidden in: RULER's own PaulGrahamEssays.json (github.com/NVIDIA/RULER, "
    "scripts/data/synthetic/json/download_paulgraham_essay.py), any text as haystack.txt, or a JSON line with a `text`."
)

_SENTENCE_END = re.compile(r"[.!?][\"'”’)]*\s+(?=[\"'“‘(]*[A-Z0-9])")
_NO_SENTENCE_END = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|No)|\b[A-Z])\.\s+$")


def filler_lines(sentences: int) -> list[str]:
    """So many sentences of filler, five to a line; the last line has what is left."""
    endless = [FILLER[index % len(FILLER)] for index in range(sentences)]
    return [" ".join(endless[start : start + len(FILLER)]) for start in range(0, sentences, len(FILLER))]


def hide_between_lines(lines: Sequence[str], statements: Sequence[str], rng: random.Random) -> str:
    """The lines with the statements between them, in the order given, no two side by side where there is a choice."""
    if len(lines) >= len(statements):
        places = rng.sample(range(len(lines)), len(statements))
    else:
        places = rng.choices(range(len(lines) + 1), k=len(statements))
    text = list(lines)
    for place, statement in reversed(list(zip(sorted(places), statements, strict=True))):
        text.insert(place, statement)
    return "\n".join(text)


def hide_in_essay(words: Sequence[str], count: int, statements: Sequence[str], rng: random.Random) -> str:
    """The first `count` words, over and over if there are fewer, with the statements between their sentences."""
    repeats = -(-count // len(words))
    sentences = split_sentences(" ".join((list(words) * repeats)[:count]))
    depths = sorted(rng.sample(_DEPTHS, len(statements)))
    places = [len(sentences) * depth // 100 for depth in depths]
    pieces: list[str] = []
    for start, end, statement in zip([0, *places], places, statements, strict=False):
        pieces += [*sentences[start:end], statement]
    return " ".join([*pieces, *sentences[places[-1] :]])


def split_sentences(text: str) -> list[str]:
    """Sentences by punctuation and capitals (RULER takes NLTK's), without the space between them."""
    cuts = [0]
    for end in _SENTENCE_END.finditer(text):
        if not _NO_SENTENCE_END.search(text, max(cuts[-1], end.end() - 10), end.end()):
            cuts.append(end.end())
    sentences = (text[start:end].strip() for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True))
    return [sentence for sentence in sentences if sentence]


def essay_words(folder: Path | None) -> tuple[str, ...]:
    """The words of the essay in the data folder."""
    return _read_words(find_file(folder, _ESSAYS, _ESSAY_SOURCE))


@lru_cache(maxsize=1)
def _read_words(path: Path) -> tuple[str, ...]:
    text = path.read_text(encoding="utf-8") if path.suffix == ".txt" else read_rows(path)[0].get("text", "")
    if not (words := tuple(text.split())):
        raise ValueError(f"{path} holds no text to hide needles in.")
    return words
