"""`answer`: the one-call helper, on the real model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from qevict import Budget, QEvictConfig, answer

CONTEXT = (
    "The lighthouse at Cape Sorrow was built by Ines Halvard. Its keeper feeds eleven cats. "
    + "The sea is grey and the wind is cold. " * 12
    + "The lamp was imported from Portugal."
)
QUESTIONS = ["Who built the lighthouse?", "From which country was the lamp imported?"]


def test_a_question_is_answered_from_the_context(smollm2: tuple[Any, Any]) -> None:
    result = answer(*smollm2, CONTEXT, QUESTIONS[0], budget=1.0, question_seen=True, max_new_tokens=16)
    assert "Halvard" in result.text
    assert "<|" not in result.text
    assert result.question == QUESTIONS[0]
    assert 0 < result.first_token_seconds <= result.seconds


def test_questions_on_one_compressed_context_do_not_influence_each_other(smollm2: tuple[Any, Any]) -> None:
    config = QEvictConfig(budget=Budget(tokens=120), window_size=8)
    options: dict[str, Any] = {"budget": config, "max_new_tokens": 8}
    together = answer(*smollm2, CONTEXT, QUESTIONS, **options)
    apart = [answer(*smollm2, CONTEXT, question, **options) for question in QUESTIONS]
    assert [a.text for a in together] == [a.text for a in apart]
    for result in together:
        assert result.counts.quantized > 0
        assert result.memory.overshoot == 0
    backwards = answer(*smollm2, CONTEXT, QUESTIONS[::-1], **options)
    assert [a.text for a in backwards[::-1]] == [a.text for a in together]


def test_a_hidden_question_is_answered_as_well_as_a_seen_one_without_a_limit(smollm2: tuple[Any, Any]) -> None:
    seen, hidden = (
        answer(*smollm2, CONTEXT, QUESTIONS[1], budget=1.0, question_seen=seen, max_new_tokens=8)
        for seen in (True, False)
    )
    assert seen.text == hidden.text
    assert seen.prompt_tokens == hidden.prompt_tokens


def test_an_answer_continues_its_prefix(smollm2: tuple[Any, Any]) -> None:
    prefix = "The lamp came from the country of"
    result = answer(
        *smollm2, CONTEXT, QUESTIONS[1], budget=1.0, question_seen=True, answer_prefix=prefix, max_new_tokens=3
    )
    assert result.text.startswith("Portugal")


def test_a_tokenizer_without_a_chat_template_is_given_the_plain_text(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    context, question = "Paris is the capital of", "France. Rome is the capital of"
    result = answer(model, plain, context, question, max_new_tokens=2, budget=1.0)
    assert result.prompt_tokens == len(plain(f"{context}\n\n").input_ids) + len(plain(question).input_ids)
    assert result.text.startswith("Italy")


def test_no_questions_no_answers(smollm2: tuple[Any, Any]) -> None:
    assert answer(*smollm2, CONTEXT, []) == []


def test_an_empty_prompt_is_refused(smollm2: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        answer(*smollm2, "", " ")


def test_other_methods_answer_too_with_budgets_of_their_own(smollm2: tuple[Any, Any]) -> None:
    for method, ratio in (("snapkv", 0.5), ("kivi-4", None)):
        result = answer(*smollm2, CONTEXT, QUESTIONS[0], method=method, budget=ratio, max_new_tokens=12)
        assert result.counts is None
        assert result.memory.overshoot == 0
        assert result.text
    with pytest.raises(ValueError, match="configures qevict, not snapkv"):
        answer(*smollm2, CONTEXT, QUESTIONS[0], budget=QEvictConfig(), method="snapkv")
