"""Drift's conversations: answers far from each other, lengths met, turns as the chat template has them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qevict.bench.conversations import TASKS, Conversation, Template, Wanted, answer_ids, conversations, token_count

LENGTH = 1000


def made(task: str, tokenizer: Any, data: Path, **changes: Any) -> list[Conversation]:
    return list(conversations(task, tokenizer, Wanted(**{"count": 3, "length": LENGTH, "data": data, **changes})))


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_alone_decides(task: str, tokenizer: Any, made_data: Path) -> None:
    first = made(task, tokenizer, made_data)
    assert first == made(task, tokenizer, made_data)
    assert first != made(task, tokenizer, made_data, seed=1)
    assert first[:2] == made(task, tokenizer, made_data, count=2)
    assert len({conversation.id for conversation in first}) == 3


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("questions", [2, 4])
def test_lengths_are_met_and_answers_lie_apart(task: str, questions: int, tokenizer: Any, made_data: Path) -> None:
    for conversation in made(task, tokenizer, made_data, questions=questions):
        assert 0.95 * LENGTH <= token_count(tokenizer, conversation) <= LENGTH
        assert len(conversation.questions) == questions
        places = [conversation.context.index(question.answers[0]) for question in conversation.questions]
        assert places == sorted(places)
        tokens = [len(tokenizer(conversation.context[:place]).input_ids) for place in places]
        assert all(later - earlier > 32 for earlier, later in pairwise(tokens))
        for question, place in zip(conversation.questions, places, strict=True):
            assert question.depth == pytest.approx(place / len(conversation.context), abs=0.05)
            assert conversation.context.count(question.answers[0]) == 1


def test_answers_are_scored_by_the_tasks_own_metric(tokenizer: Any, made_data: Path) -> None:
    fact, article = (made(task, tokenizer, made_data, count=1)[0] for task in TASKS)
    number, name = fact.questions[0], article.questions[0]
    assert fact.score(f"It is {number.answers[0]}, I think.", number) == 1
    assert fact.score(f"It is {fact.questions[1].answers[0]}.", number) == 0
    assert article.score(f" The {name.answers[0]}!", name) == 1
    assert article.score(f"{name.answers[0]} and nobody else", name) == pytest.approx(2 / 5)  # 2 · 1 / (1 + 4)


def test_turns_are_those_of_the_chat_template(tokenizer: Any, made_data: Path) -> None:
    """All parts one after the other are what the template makes of the whole conversation."""
    conversation = made("drift/facts", tokenizer, made_data, count=1)[0]
    first, second = conversation.questions[:2]
    template = Template.of(tokenizer)
    ids = template.context_ids(tokenizer, conversation.context)
    ids += template.question_ids(tokenizer, first, first=True) + answer_ids(tokenizer, first)
    ids += template.question_ids(tokenizer, second, first=False)
    messages = [
        {"role": "user", "content": conversation.context + first.text},
        {"role": "assistant", "content": f"{first.answer_prefix} {first.answers[0]}"},
        {"role": "user", "content": second.text},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == whole + second.answer_prefix


def test_without_a_chat_template_an_empty_line_parts_turns(tokenizer: Any, made_data: Path) -> None:
    conversation = made("drift/facts", tokenizer, made_data, count=1)[0]
    question = conversation.questions[0]
    template = Template("", "", "\n\n", special=True)
    assert tokenizer.decode(template.question_ids(tokenizer, question, first=False)) == (
        f"\n\n{question.text}{question.answer_prefix}"
    )
    assert template.context_ids(tokenizer, "A b.") == tokenizer("A b.").input_ids


def test_what_cannot_be_is_said(tokenizer: Any, made_data: Path) -> None:
    with pytest.raises(ValueError, match="no task 'drift/verse'"):
        conversations("drift/verse", tokenizer, Wanted())
    with pytest.raises(ValueError, match="2 at least, not 1"):
        Wanted(questions=1)
    for task in TASKS:
        with pytest.raises(ValueError, match="choose a greater length"):
            made(task, tokenizer, made_data, length=120)
