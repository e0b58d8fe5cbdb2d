"""A whole benchmark run in miniature: a random model in a folder, a tokenizer of characters, a user's data set."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qevict.bench.protocol import Setting
from qevict.bench.runner import LocalEngine, ModelSpec, Run
from qevict.methods import get_method
from tiny import VOCAB, tiny_model

METHODS = ("qevict", "snapkv")
SETTINGS: dict[str, dict[str, Any]] = {
    "qevict": {"window_size": 4, "sink_tokens": 2, "recent_tokens": 6},
    "snapkv": {"window": 8},
}


def save_model(folder: Path, family: str = "llama", **config: Any) -> Path:
    """A tiny random model and its tokenizer, as `qevict.models.load` reads them."""
    tiny_model(family, **config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character of ASCII."""
    characters = ["<pad>", "<s>", "</s>", "\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    assert len(vocabulary) <= VOCAB
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )


def save_data(path: Path, rows: int = 4, new: int = 6) -> Path:
    """Contexts of random letters, of different lengths, and questions about them."""
    rng = random.Random(0)
    with path.open("w") as file:
        for row in range(rows):
            letters = "".join(rng.choice("abcdefgh ") for _ in range(70 + 5 * row))
            columns = {
                "context": letters,
                "question": f"What is {rng.choice('abc')}?",
                "answer_prefix": "It is",
                "answer": letters[3:7].strip() or "a",
                "max_new_tokens": new,
            }
            file.write(json.dumps(columns) + "\n")
    return path


def plan(folder: Path, **changes: Any) -> Run:
    """A run of two methods at two budgets on the files that `folder` holds, made if they are not there."""
    model, data = folder / "model", folder / "letters.jsonl"
    if not model.exists():
        save_model(model)
        save_data(data)
    fields: dict[str, Any] = {
        "tasks": (f"jsonl:{data}",),
        "methods": tuple(get_method(name, **SETTINGS[name]) for name in METHODS),
        "budgets": (0.6, 0.4),
        "model": ModelSpec(str(model)),
        "setting": Setting(),
    }
    return Run(**{**fields, **changes})


def local(made: Run) -> LocalEngine:
    """The run's model, in this process."""
    return LocalEngine(*made.model.load())
