"""A needle in a haystack, in RULER's phrasing: a number hidden in a text, and the question that asks for it."""

from __future__ import annotations

import random
from dataclasses import dataclass

_ADJECTIVES = (
    "quiet",
    "amber",
    "hollow",
    "silver",
    "eager",
    "narrow",
    "gentle",
    "crimson",
    "distant",
    "rapid",
    "sturdy",
)
_NOUNS = (
    "river",
    "lantern",
    "meadow",
    "anchor",
    "orchard",
    "falcon",
    "harbor",
    "compass",
    "glacier",
    "violin",
    "cottage",
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""What RULER's simplest haystack repeats."""
INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards."
)


@dataclass(frozen=True)
class Needle:
    """A key and the number to be found under it."""

    key: str
    number: int

    @classmethod
    def random(cls, seed: int) -> Needle:
        """The needle of a seed: two words and seven digits."""
        generator = random.Random(seed)
        key = f"{generator.choice(_ADJECTIVES)}-{generator.choice(_NOUNS)}"
        return cls(key, generator.randrange(1_000_000, 10_000_000))

    @property
    def sentence(self) -> str:
        """What is hidden in the text."""
        return f"One of the special magic numbers for {self.key} is: {self.number}."

    @property
    def question(self) -> str:
        """What is asked afterwards."""
        return f"What is the special magic number for {self.key} mentioned in the provided text?"

    @property
    def answer_prefix(self) -> str:
        """How the answer begins."""
        return f" The special magic number for {self.key} mentioned in the provided text is"

    def found(self, answer: str) -> bool:
        """Whether an answer holds the number."""
        return str(self.number) in answer


def hide(text: str, needle: Needle, depth: float) -> str:
    """The text with the needle's sentence put between two lines or sentences, `depth` (0 to 1) of the way down."""
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth!r}; it has to be from 0 to 1")
    target = round(depth * len(text))
    for mark in ("\n", ". "):
        place = text.rfind(mark, 0, target)
        if place >= 0:
            place += len(mark)
            return f"{text[:place]}{needle.sentence}{mark[-1]}{text[place:]}"
    return f"{needle.sentence}\n{text}"
