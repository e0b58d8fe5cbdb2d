"""How cells are evaluated: what is compressed, what is fed to the compressed cache, and what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from qevict.bench.cells import Scope
from qevict.bench.prompt import prompt_ids
from qevict.bench.sample import Sample

Protocol = Literal["query-aware", "query-agnostic"]
FirstToken = Literal["compressed", "exact"]


@dataclass(frozen=True)
class Setting:
    """How cells are evaluated.

    Attributes:
        protocol: whether the question is part of what is compressed ("query-aware"), or comes afterwards, as new tokens
            in one forward ("query-agnostic").
        scope: of budgets; see `Budget`.
        store_dtype: of full-precision storage; None is the model's.
        first_token: where the first generated token comes from: the "compressed" cache, which is fed the prompt's last
            token; or the "exact" prefill, as in published numbers.
        batch: most forks decoded together.
    """

    protocol: Protocol = "query-aware"
    scope: Scope = "total"
    store_dtype: torch.dtype | None = torch.bfloat16
    first_token: FirstToken = "compressed"
    batch: int = 48

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}; it has to be at least 1")
        if self.first_token == "exact" and self.protocol != "query-aware":
            raise ValueError("the first token can be exact only where the question is seen (query-aware)")


@dataclass(frozen=True)
class Prompt:
    """A sample's prompt for a protocol.

    Attributes:
        compressed: tokens that are prefilled and compressed.
        pending: tokens fed to the compressed cache before the first one is generated; empty where that is exact.
        gold: the first gold answer, as it would follow; at most as long as an answer may be.
    """

    compressed: list[int]
    pending: list[int]
    gold: list[int]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.compressed) + len(self.pending)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, sample: Sample, setting: Setting) -> Prompt:
        """Raises ValueError if there is nothing to compress, or nothing to feed."""
        context, question = prompt_ids(tokenizer, sample)
        whole = context + question
        seen = len(context) if setting.protocol == "query-agnostic" else len(whole) - (setting.first_token != "exact")
        if seen < 1 or (seen == len(whole) and setting.first_token != "exact"):
            raise ValueError(
                f"sample {sample.id} of {sample.task} has {len(context)} tokens before its question and "
                f"{len(question)} in it; the protocol {setting.protocol} needs one to compress and one to feed"
            )
        return cls(whole[:seen], whole[seen:], gold_ids(tokenizer, sample, whole))


def gold_ids(tokenizer: PreTrainedTokenizerBase, sample: Sample, prompt: Sequence[int]) -> list[int]:
    """Tokens of the first gold answer behind a prompt, tokenized by itself; `sample.max_new_tokens` at most.

    A space stands before it unless the prompt ends with white space (as chat templates and "Answer:\\n" do), since that
    is how a text goes on behind a word.
    """
    if not sample.answers or not sample.answers[0]:
        return []
    ends_in_space = str(tokenizer.decode(prompt[-1:]))[-1:].isspace()
    text = sample.answers[0] if ends_in_space else f" {sample.answers[0]}"
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids[: sample.max_new_tokens]
