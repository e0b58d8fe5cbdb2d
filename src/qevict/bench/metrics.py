"""The benchmarks' metrics for one prediction, each from 0 to 1.

`string_match_all` and `string_match_part` are RULER's; `qa_f1`, `rouge_l`, `classification`, `count` and `retrieval`
LongBench's; `same_number` is for GSM8K.
"""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

# A minus sign counts where it cannot be a subtraction; commas where they part thousands.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-−])?\$?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?)"
)
_MARKED = re.compile(r"####\s*(.*)")
_ANNOUNCED = re.compile(r"the (?:final )?answer is:?\s*(.*)", re.IGNORECASE)


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that stand somewhere in the prediction, whatever the case."""
    said = prediction.lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if any of the answers stands somewhere in the prediction, whatever the case."""
    said = prediction.lower()
    return float(any(answer.lower() in said for answer in answers))


def qa_f1(prediction: str, answer: str) -> float:
    """F1 over words, without case, ASCII punctuation and English articles."""
    said, wanted = _bare_words(prediction), _bare_words(answer)
    shared = (Counter(said) & Counter(wanted)).total()
    return 2 * shared / (len(said) + len(wanted)) if shared else 0.0


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L's F by the `rouge` package, as LongBench has it; 0 where that package fails, as for an empty text.

    Raises:
        RuntimeError: if `rouge` is not installed.
    """
    try:
        scores = _rouge().get_scores([prediction], [answer], avg=True)
    except (ValueError, ZeroDivisionError, RecursionError):
        return 0.0
    return float(scores["rouge-l"]["f"])


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / (the number of classes that the prediction names) if it names the right one, else 0.

    A class whose name is a part of the right one's does not count as named.
    """
    named = [name for name in classes if name in prediction and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """The share of the prediction's integers that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """As `count`, for an answer of the form "Paragraph 7"."""
    paragraph = re.search(r"Paragraph (\d+)", answer)
    if paragraph is None:
        raise ValueError(f"the gold answer must read like 'Paragraph 7', not {answer!r}")
    return count(prediction, paragraph.group(1))


def same_number(prediction: str, answer: str) -> float:
    """1 if the number that the prediction arrives at equals the answer's, else 0; 18, 18.0 and $18. are equal."""
    said, wanted = final_number(prediction), final_number(answer)
    return float(said is not None and said == wanted)


def final_number(text: str) -> Decimal | None:
    """The number that a solution arrives at, or None without one.

    After "####" if that is there; else after the first "the answer is" or "the final answer is"; else the last number
    of all. The number may have a dollar sign, commas between thousands, and a full stop behind it.
    """
    for announcement in (_MARKED, _ANNOUNCED):
        if (found := announcement.search(text)) and (numbers := _numbers(found.group(1))):
            return numbers[0]
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def first_line(prediction: str) -> str:
    """The first line that is not empty; LongBench judges only that in its few-shot tasks."""
    return prediction.lstrip("\n").split("\n")[0]


def _numbers(text: str) -> list[Decimal]:
    found = (match for match in _NUMBER.finditer(text) if match["digits"])
    return [Decimal(("-" if match["sign"] else "") + match["digits"].replace(",", "")) for match in found]


def _bare_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


@lru_cache(maxsize=1)
def _rouge() -> Any:
    try:
        rouge = importlib.import_module("rouge")
    except ImportError as error:
        raise RuntimeError("ROUGE-L needs the package rouge: run `pip install 'qevict[bench]'`.") from error
    return rouge.Rouge(metrics=["rouge-l"])
