"""GSM8K: prompts, the gold number, and which number of an answer counts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from qevict.bench import find_tasks
from qevict.bench.gsm8k import worked_examples
from qevict.bench.metrics import final_number


def test_eight_worked_examples_come_before_the_question(made_data: Path, tokenizer: Any) -> None:
    (task,) = find_tasks("gsm8k", made_data)
    samples = list(task.samples(tokenizer, 100, length=None, seed=0))
    assert sorted(sample.id for sample in samples) == [str(n) for n in range(8)]
    for sample in samples:
        number = int(sample.id) + 1
        assert sample.context == worked_examples()
        assert sample.context.count("Q: ") == sample.context.count("\nA: ") == 8
        assert sample.question == f"Q: What is {number} times 500?\nA:"
        assert sample.answers == (f"{500 * number:,}",)


def test_the_worked_examples_are_the_standard_ones() -> None:
    """First digits of SHA-256 of those in lm-evaluation-harness, gsm8k-cot.yaml."""
    assert hashlib.sha256(worked_examples().encode()).hexdigest().startswith("3d55795c084e26f6")


def test_zero_shot_has_no_context(made_data: Path, tokenizer: Any) -> None:
    (task,) = find_tasks("gsm8k-zero-shot", made_data)
    (sample,) = task.samples(tokenizer, 1, length=None, seed=0)
    assert sample.context == ""
    assert sample.question.endswith("?\nA: Let's think step by step.")


def test_what_follows_the_answer_does_not_count(made_data: Path, tokenizer: Any) -> None:
    (task,) = find_tasks("gsm8k", made_data)
    sample = next(iter(task.samples(tokenizer, 1, length=None, seed=0)))
    right = sample.answers[0]
    assert task.score(f" It is ${right}.\n\nQ: And 3?\nA: The answer is 3.", sample) == 1
    assert task.score(f" It is {right.replace(',', '')}.00", sample) == 1
    assert task.score(f" It is 1.\n\nQ: And?\nA: {right}", sample) == 0
    assert task.score("", sample) == 0
    assert sample.finished(f" It is {right}.\n\nQ:")
    assert not sample.finished(f" It is {right}.\n\n")


def test_seeds_give_orders(made_data: Path, tokenizer: Any) -> None:
    (task,) = find_tasks("gsm8k", made_data)
    one, again, other = (
        [sample.id for sample in task.samples(tokenizer, 8, length=None, seed=seed)] for seed in (1, 1, 2)
    )
    assert one == again != other
    assert sorted(one) == sorted(other)


def test_real_answers_are_numbers(real_data: Path, tokenizer: Any) -> None:
    (task,) = find_tasks("gsm8k", real_data)
    samples = list(task.samples(tokenizer, 2000, length=None, seed=0))
    assert len({sample.id for sample in samples}) == len(samples) > 100
    assert all(final_number(f"#### {sample.answers[0]}") is not None for sample in samples)
