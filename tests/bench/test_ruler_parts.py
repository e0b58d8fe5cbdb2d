"""What RULER's tasks are made of: the search for a size, haystacks, documents, prompts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qevict.bench import Sample, prompt_ids, token_count
from qevict.bench.ruler import haystacks, qa
from qevict.bench.ruler.fit import largest


@given(st.integers(0, 40), st.integers(0, 200), st.integers(0, 200))
def test_largest_is_the_largest(low: int, more: int, limit: int) -> None:
    high = low + more
    sizes = [size for size in range(low, high + 1) if size <= limit]
    assert largest(lambda size: size <= limit, low, high) == (max(sizes) if sizes else None)


@given(st.integers(0, 12), st.integers(0, 5), st.integers(0, 99))
def test_statements_stand_between_lines_in_order(lines: int, statements: int, seed: int) -> None:
    hidden = [f"statement {n}" for n in range(statements)]
    text = haystacks.hide_between_lines([f"line {n}" for n in range(lines)], hidden, random.Random(seed))
    got = text.split("\n") if text else []
    assert [line for line in got if line in hidden] == hidden
    assert [line for line in got if line not in hidden] == [f"line {n}" for n in range(lines)]


def test_sentences_end_where_they_do() -> None:
    text = 'Mr. Holmes, of St. James, came. "Well!" he said. "No?" J. Watson nodded... It was 3.5 miles. 7 left'
    assert haystacks.split_sentences(text) == [
        "Mr. Holmes, of St. James, came.",
        '"Well!" he said.',
        '"No?"',
        "J. Watson nodded...",
        "It was 3.5 miles.",
        "7 left",
    ]


def test_essays_keep_their_words(made_data: Path) -> None:
    words_of_essay = haystacks.essay_words(made_data)
    text = haystacks.hide_in_essay(words_of_essay, len(words_of_essay) + 7, ["@@ x.", "@@ y."], random.Random(0))
    bare = text.replace("@@ x. ", "").replace("@@ y. ", "").replace(" @@ x.", "").replace(" @@ y.", "")
    assert tuple(bare.split()) == (*words_of_essay, *words_of_essay[:7])


def test_documents_are_taken_word_by_word() -> None:
    documents = ["one two\nthree", "four  five"]
    assert [qa.take_words(documents, n) for n in range(7)] == [
        [],
        ["one"],
        ["one two"],
        ["one two\nthree"],
        ["one two\nthree", "four"],
        documents,
        documents,
    ]


def test_a_prompt_without_a_chat_template_has_the_tokenizers_own_beginning(tokenizer: Any) -> None:
    sample = Sample("t", "1", "1", "Some text. ", "A question?", " It is", ("x",), 8, chat=False)
    assert prompt_ids(tokenizer, sample) == (
        tokenizer("Some text. ").input_ids,
        tokenizer("A question? It is").input_ids,
    )
    assert token_count(tokenizer, sample) == sum(map(len, prompt_ids(tokenizer, sample))) + 8


def test_a_prompt_is_what_the_chat_template_makes_of_context_and_question(tokenizer: Any) -> None:
    sample = Sample("t", "1", "1", " Some text.\n", "A question? ", " It is", ("x",), 8)
    context, question = prompt_ids(tokenizer, sample)
    messages = [{"role": "user", "content": " Some text.\nA question? "}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(context + question) == f"{whole} It is"
    assert tokenizer.decode(context).endswith(" Some text.\n")


def test_a_prompt_may_have_no_context(tokenizer: Any) -> None:
    bare = Sample("t", "1", "1", "", "A question?", "", ("x",), 8, chat=False)
    assert prompt_ids(tokenizer, bare) == ([], tokenizer("A question?").input_ids)
