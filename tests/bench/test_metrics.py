"""Metrics on cases worked by hand."""

from __future__ import annotations

import sys
from decimal import Decimal

import pytest

from qevict.bench import metrics


@pytest.mark.parametrize(
    ("prediction", "answers", "every", "any_of"),
    [
        ("It is 1234567.", ["1234567"], 1, 1),
        ("QUIZZICAL-yacht", ["quizzical-Yacht"], 1, 1),
        ("1 and 2", ["1", "2", "3", "4"], 0.5, 1),
        ("12", ["1", "2"], 1, 1),  # a part of a word is enough, as in the benchmark
        ("", ["1"], 0, 0),
        ("naïve café", ["CAFÉ", "tea"], 0.5, 1),
    ],
)
def test_string_match(prediction: str, answers: list[str], every: float, any_of: float) -> None:
    assert metrics.string_match_all(prediction, answers) == every
    assert metrics.string_match_part(prediction, answers) == any_of


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        ("The U.S. Army", "us army", 1),  # case, articles and punctuation do not count
        ("a cat", "the cat", 1),
        ("an", "the", 0),  # nothing is left of either
        ("", "cat", 0),
        ("cat", "", 0),
        ("theatre", "atre", 0),  # articles are whole words
        ("1,000 men", "1000 men", 1),
        ("the black cat sat", "a black dog", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("yes yes yes", "yes", 0.5),  # each word counts as often as both have it
        ("it's Zoë", "its zoë", 1),
        ("“cat”", "cat", 0),  # only ASCII punctuation is taken off
    ],
)
def test_qa_f1(prediction: str, answer: str, f1: float) -> None:
    assert metrics.qa_f1(prediction, answer) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("prediction", "answer", "f"),
    [
        ("the cat sat", "the cat sat", 1),
        ("the cat sat down", "the cat ran", 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),
        ("sat cat", "cat sat", 0.5),  # order counts
        ("The cat", "the cat", 0.5),  # case counts
        ("cats", "cat", 0),
        ("", "cat", 0),
        (" ", "cat", 0),
        ("...", "cat", 0),
        ("cat", "", 0),
    ],
)
def test_rouge_l(prediction: str, answer: str, f: float) -> None:
    pytest.importorskip("rouge")
    assert metrics.rouge_l(prediction, answer) == pytest.approx(f, abs=1e-6)


def test_rouge_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge", None)
    metrics._rouge.cache_clear()
    with pytest.raises(RuntimeError, match=r"qevict\[bench\]"):
        metrics.rouge_l("a", "b")


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("City", "City", 1),
        ("City or Country", "City", 0.5),
        ("Country", "City", 0),
        ("city", "City", 0),  # case counts
        ("City code", "City code", 1),  # that "City" is named too is the right name's own doing
        ("", "City", 0),
    ],
)
def test_classification(prediction: str, answer: str, score: float) -> None:
    assert metrics.classification(prediction, answer, ["City", "Country", "City code"]) == score


@pytest.mark.parametrize(
    ("prediction", "score"), [("7", 1), ("There are 7.", 1), ("7 or 8", 0.5), ("17", 0), ("seven", 0), ("", 0)]
)
def test_count_and_retrieval(prediction: str, score: float) -> None:
    assert metrics.count(prediction, "7") == score
    assert metrics.retrieval(prediction, "Paragraph 7") == score


def test_retrieval_wants_a_paragraph() -> None:
    with pytest.raises(ValueError, match="Paragraph 7"):
        metrics.retrieval("7", "7")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("So 3 + 4 = 7.\n#### 7\n5 apples", "7"),
        ("The answer is $1,234.50.", "1234.5"),
        ("the final answer is: 8 apples of 10", "8"),
        ("9 - 2 is 7. The answer is 7.\n\nThe answer is 3", "7"),
        ("first 5, then 12", "12"),
        ("that leaves 20-12", "12"),  # a subtraction, no sign
        ("it is -12", "-12"),
        ("-$3.5", "-3.5"),
        ("$-3", "-3"),
        ("in all 12,345,678", "12345678"),
        ("pages 3,4", "4"),  # no thousands
        ("about .5", "0.5"),
        ("18.00", "18"),
        ("#### none\n4", "4"),
        ("", None),
        ("no idea, really...", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert metrics.final_number(text) == (None if number is None else Decimal(number))


def test_same_number() -> None:
    assert metrics.same_number("The answer is 18.0", "18") == 1
    assert metrics.same_number("so it is $1,000.", "1000") == 1
    assert metrics.same_number("180", "18") == 0
    assert metrics.same_number("", "0") == 0


def test_first_line() -> None:
    assert metrics.first_line("\n\nParis\nLondon") == "Paris"
    assert metrics.first_line("") == ""
