"""The demo: a long real document that every Python carries, a needle hidden in it, and two questions about it."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qevict.answer import Answer, answer
from qevict.config import QEvictConfig
from qevict.needle import INTRODUCTION, Needle, hide

_TOPICS = (
    "assert",
    "assignment",
    "break",
    "continue",
    "del",
    "global",
    "if",
    "pass",
    "raise",
    "return",
    "while",
    "with",
)

NEEDLE = Needle.random(seed=7)
"""What `run` hides."""


@dataclass(frozen=True)
class Question:
    """A question of the demo, how its answer begins, and what a right answer holds."""

    text: str
    answer_prefix: str
    expected: str


def document(tokenizer: PreTrainedTokenizerBase, tokens: int, needle: Needle) -> str:
    """The first `tokens` tokens of the Python reference on statements, with a needle a third of the way down.

    It begins with the benchmark's announcement that a number is hidden: without it a small model does not find it.
    """
    text = "\n".join(str(pydoc_data.topics.topics[topic]) for topic in _TOPICS)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:tokens]
    return f"{INTRODUCTION}\n{hide(str(tokenizer.decode(ids)), needle, depth=1 / 3)}"


def questions(needle: Needle) -> tuple[Question, ...]:
    """What is asked: one question about the text, one for the needle."""
    return (
        Question(
            "Which exception does an assert statement raise when its condition is false?",
            "When its condition is false, an assert statement raises",
            "AssertionError",
        ),
        Question(needle.question, needle.answer_prefix, str(needle.number)),
    )


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    configs: dict[str, QEvictConfig],
    tokens: int,
    max_new_tokens: int,
) -> Iterator[tuple[str, Question, Answer]]:
    """Ask every question of every configuration; results come as they are ready."""
    text = document(tokenizer, tokens, NEEDLE)
    for name, config in configs.items():
        for question in questions(NEEDLE):
            yield (
                name,
                question,
                answer(
                    model,
                    tokenizer,
                    text,
                    question.text,
                    budget=config,
                    max_new_tokens=max_new_tokens,
                    question_seen=True,
                    answer_prefix=question.answer_prefix,
                ),
            )
