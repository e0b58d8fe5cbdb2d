"""The small model's tokenizer, a made-up data folder in the benchmarks' formats, and the real one if there is one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from qevict import models


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """SmolLM2-135M-Instruct's, whose chat template has a system turn."""
    try:
        return AutoTokenizer.from_pretrained(models.resolve("smollm2-135m"), local_files_only=True)
    except models.ModelNotFoundError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The benchmarks' own data."""
    folder = os.environ.get("QEVICT_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("QEVICT_DATA names no folder with the benchmarks' data")
    return Path(folder)


@pytest.fixture(scope="session")
def made_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files in the formats of the real ones; every answer stands in its paragraph, and nowhere else."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "haystack.txt").write_text(
        "\n".join(
            f'On day {day} Mr. Tallow walked to the mill, and said: "It rains!" Nobody   answered. He went home.'
            for day in range(300)
        )
    )
    (folder / "squad.json").write_text(json.dumps({"version": "2.0", "data": [_article(n) for n in range(6)]}))
    (folder / "hotpotqa.jsonl").write_text("\n".join(json.dumps(_two_hops(n)) for n in range(8)) + "\n")
    (folder / "gsm8k_test.jsonl").write_text(
        "".join(
            json.dumps({"question": f"What is {n} times 500?", "answer": f"{n}*500\n#### {500 * n:,}"}) + "\n"
            for n in range(1, 9)
        )
    )
    return folder


def _paragraph(name: str, answer: str, words: int) -> str:
    return f"The keeper of {name} is {answer}. " + " ".join(f"Item {n} of {name} is dull." for n in range(words // 6))


def _article(number: int) -> dict[str, Any]:
    paragraphs = [
        {
            "context": _paragraph(f"hall {number}-{part}", f"Keeper{number}{part}", 60),
            "qas": [
                {
                    "id": f"q{number}{part}",
                    "question": f"Who keeps hall {number}-{part}?",
                    "answers": [{"text": f"Keeper{number}{part}", "answer_start": 0}] * 3,
                    "is_impossible": False,
                },
                {"id": f"x{number}{part}", "question": "Who?", "answers": [], "is_impossible": True},
            ],
        }
        for part in range(4)
    ]
    return {"title": f"Article {number}", "paragraphs": paragraphs}


def _two_hops(number: int) -> dict[str, Any]:
    context = [
        [f"Tower {number}-{part}", [_paragraph(f"tower {number}-{part}", f"Warden{number}{part}", 40), " End."]]
        for part in range(10)
    ]
    return {
        "_id": None if number % 2 else f"id{number}",
        "question": f"Who keeps both tower {number}-3 and tower {number}-7?",
        "answer": f"Warden{number}3",
        "supporting_facts": [[f"Tower {number}-3", 0], [f"Tower {number}-7", 0], [f"Tower {number}-3", 1]],
        "context": context,
    }
