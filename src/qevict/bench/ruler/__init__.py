"""RULER's thirteen tasks, generated to a length in tokens (Hsieh et al. 2024; github.com/NVIDIA/RULER); nine of them
also in other words (`reworded`).

A length counts the chat template, the prompt, the answer prefix and the tokens that the task lets a model generate.
Every sample takes that many tokens or up to 2 % fewer.
"""

from __future__ import annotations

from pathlib import Path

from qevict.bench.ruler.niah import needle_tasks, reworded_needle_tasks
from qevict.bench.ruler.qa import question_tasks
from qevict.bench.ruler.variables import VariableTask
from qevict.bench.ruler.wording import FREQUENT_WORDS_REWORDED
from qevict.bench.ruler.words import CommonWordsTask, FrequentWordsTask
from qevict.bench.sample import Task


def ruler_tasks(data: Path | None) -> list[Task]:
    """All thirteen; those of essays and documents read them from the data folder when they make samples."""
    return [*needle_tasks(data), VariableTask(), CommonWordsTask(), FrequentWordsTask(), *question_tasks(data)]


def reworded_tasks(data: Path | None) -> list[Task]:
    """The needle tasks and the frequent words in words that RULER does not use."""
    return [*reworded_needle_tasks(data), FrequentWordsTask(FREQUENT_WORDS_REWORDED)]
