"""A tiny model, a tokenizer of words, and articles for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qevict import QEvictConfig
from qevict.config import Budget
from qevict.diagnostics.articles import Article
from qevict.diagnostics.conditions import Condition
from qevict.methods.qevict import QEvict
from tiny import VOCAB

PREFILL, STEPS = 40, 24
TIGHT = QEvictConfig(
    codec="minmax",
    window_size=4,
    sink_tokens=2,
    recent_tokens=6,
    quantized_fraction=0.6,
    allocation="split",
    prompt_queries="all",
)


class Words(PreTrainedTokenizerBase):
    """One token for every word, by its spelling; words of the vocabulary look like `w17`."""

    bos_token_id = None

    def __init__(self) -> None:
        """Nothing: not a tokenizer of files."""

    def __call__(self, text: str, **settings: Any) -> Any:
        ids = [3 + sum(map(ord, word)) % (VOCAB - 3) for word in text.split()]
        return SimpleNamespace(input_ids=ids)

    def decode(self, tokens: list[int], **settings: Any) -> str:
        return " ".join(f"w{token}" for token in tokens)


def article(seed: int = 0, tokens: int = PREFILL + STEPS) -> Article:
    ids = torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Article(f"article {seed}", tuple(ids.tolist()))


def tight(name: str = "tight", budget: int = 32, **changes: Any) -> Condition:
    """QEvict with all three tiers in use; a budget of so many tokens."""
    return Condition(name, QEvict(TIGHT.replace(**changes)), Budget(tokens=budget))
