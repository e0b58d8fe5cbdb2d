"""Fidelity's texts: seeded, apart from each other, and what they claim to be."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict.bench import DataNotFoundError
from qevict.bench.corpora import CORPORA, CUE_TOKENS, Text, Wanted, places, texts

WANTED = {"count": 6, "prompt": 300, "forced": 40, "seed": 3, "answered": ("ruler/niah_single_1", "ruler/qa_1")}


@pytest.fixture(scope="module")
def data(made_data: Path) -> Path:
    rows = [{"text": f" Paragraph {n} of a made-up article says that {n * n} is a square . \n"} for n in range(400)]
    (made_data / "wikitext2_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made_data


def made(corpus: str, tokenizer: Any, data: Path, **changes: Any) -> list[Text]:
    return list(texts(corpus, tokenizer, Wanted(**{**WANTED, "data": data, **changes})))


@pytest.mark.parametrize("corpus", ["prose", "copy", "free"])
def test_lengths_are_those_wanted(corpus: str, tokenizer: Any, data: Path) -> None:
    for text in made(corpus, tokenizer, data):
        prompt, fed = text.split("query-aware")
        assert len(prompt) == 300
        assert fed == [text.cue[-1]]
        assert len(text.forced) == (0 if corpus == "free" else 40)
        assert text.split("query-agnostic") == (list(text.context), list(text.cue))


@pytest.mark.parametrize("corpus", CORPORA)
def test_the_seed_alone_decides(corpus: str, tokenizer: Any, data: Path) -> None:
    length = {"prompt": 600} if corpus == "answers" else {}
    first = made(corpus, tokenizer, data, **length)
    assert first == made(corpus, tokenizer, data, **length)
    assert first != made(corpus, tokenizer, data, **length, seed=4)
    assert len({text.id for text in first}) == len(first) == 6
    # A longer run begins with the shorter one, so that samples can be added to a folder.
    assert made(corpus, tokenizer, data, **length, count=8)[:6] == first


def test_prose_is_the_sources_text_and_windows_do_not_overlap(tokenizer: Any, data: Path) -> None:
    book = tokenizer((data / "haystack.txt").read_text(), verbose=False).input_ids
    found = made("prose", tokenizer, data, count=100)
    windows = [(*text.context, *text.cue, *text.forced) for text in found if text.id.startswith("book")]
    starts = [int(text.id.split("-")[1]) for text in found if text.id.startswith("book")]
    assert len(starts) > 5
    assert all(list(window) == book[start : start + 341] for window, start in zip(windows, starts, strict=True))
    ordered = sorted(starts)
    assert all(later - earlier >= 341 for earlier, later in pairwise(ordered))
    assert {text.id.split("-")[0] for text in found[:2]} == {"wikitext2", "book"}


def test_a_copy_repeats_an_early_passage(tokenizer: Any, data: Path) -> None:
    for text in made("copy", tokenizer, data):
        quoted = [*text.cue, *text.forced]
        assert len(quoted) == CUE_TOKENS + 40
        places_of_it = [
            start
            for start in range(len(text.context) - len(quoted) + 1)
            if list(text.context[start : start + len(quoted)]) == quoted
        ]
        assert places_of_it
        assert places_of_it[0] <= 300 / 4
        assert places_of_it[0] + len(quoted) <= 300 / 2


def test_answers_follow_their_prompts(tokenizer: Any, data: Path) -> None:
    found = made("answers", tokenizer, data, prompt=600, forced=4)
    assert {text.id.rsplit("/", 1)[0] for text in found[:2]} == {"ruler/niah_single_1", "ruler/qa_1"}
    for text in found:
        prompt = tokenizer.decode([*text.context, *text.cue])
        answer = tokenizer.decode(text.forced)
        assert answer.startswith(" ")
        assert answer.strip() in prompt
        assert 0 < len(text.forced) <= 4
        assert prompt.endswith((" is", " Answer:"))


def test_what_cannot_be_is_said(tokenizer: Any, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no corpus 'verse'"):
        texts("verse", tokenizer, Wanted())
    with pytest.raises(ValueError, match="cannot hold a passage of 208 tokens"):
        made("copy", tokenizer, data, forced=200)
    with pytest.raises(ValueError, match="choose a shorter prompt"):
        made("prose", tokenizer, data, prompt=10**6)
    with pytest.raises(ValueError, match="2 tokens to compress"):
        Wanted(prompt=1)
    with pytest.raises(DataNotFoundError, match="WikiText-2"):
        made("prose", tokenizer, tmp_path)


@given(st.integers(0, 300), st.integers(1, 60), st.integers())
def test_places_fill_the_text_without_overlap(length: int, size: int, seed: int) -> None:
    starts = sorted(places(length, size, seed))
    assert len(starts) == length // size
    assert all(later - earlier == size for earlier, later in pairwise(starts))
    assert not starts or (starts[0] >= 0 and starts[-1] + size <= length)
