"""`answer`: questions about a context in one call, for people who do not want to write generate().

Two protocols. With `question_seen` every question is part of the prompt that is compressed, as in the paper. Without it
the context is compressed once, before any question is known, and each question arrives as new tokens on a fork of the
compressed cache.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import overload

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from qevict.budget import MemoryReport
from qevict.cache import QEvictCache, TierCounts
from qevict.compat import cache_argument
from qevict.config import Budget, QEvictConfig
from qevict.methods.base import Described, MeasuredCache
from qevict.methods.qevict import QEvict
from qevict.methods.registry import get_method, make_cache
from qevict.migration import Moves
from qevict.trace import read_prompt, reads_twice

DEFAULT_BUDGET = 0.2
_QUESTION_HERE = "<|the question goes here|>"


@dataclass(frozen=True)
class Answer:
    """An answer, and what it took.

    Attributes:
        text: the generated text, without special tokens.
        prompt_tokens, new_tokens: context and question; generated.
        first_token_seconds: from the start of this answer to its first token (the compression of a shared context is
            in none of the answers).
        seconds: to its end.
        memory: of the cache at the end.
        counts, moves: likewise; None for methods without tiers.
    """

    question: str
    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float
    memory: MemoryReport
    counts: TierCounts | None
    moves: Moves | None

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, by the time they took; 0 for a single token."""
        spent = self.seconds - self.first_token_seconds
        return (self.new_tokens - 1) / spent if self.new_tokens > 1 and spent > 0 else 0.0


@overload
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: str,
    question: str,
    *,
    budget: float | Budget | QEvictConfig | None = ...,
    method: str | Described = ...,
    store_dtype: torch.dtype | None = ...,
    max_new_tokens: int = ...,
    question_seen: bool = ...,
    answer_prefix: str = ...,
    streamer: BaseStreamer | None = ...,
) -> Answer: ...
@overload
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: str,
    question: list[str] | tuple[str, ...],
    *,
    budget: float | Budget | QEvictConfig | None = ...,
    method: str | Described = ...,
    store_dtype: torch.dtype | None = ...,
    max_new_tokens: int = ...,
    question_seen: bool = ...,
    answer_prefix: str = ...,
    streamer: BaseStreamer | None = ...,
) -> list[Answer]: ...
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: str,
    question: str | list[str] | tuple[str, ...],
    *,
    budget: float | Budget | QEvictConfig | None = None,
    method: str | Described = "qevict",
    store_dtype: torch.dtype | None = None,
    max_new_tokens: int = 64,
    question_seen: bool = False,
    answer_prefix: str = "",
    streamer: BaseStreamer | None = None,
) -> Answer | list[Answer]:
    """Answer one or several questions about a context, greedily, on a compressed cache.

    The tokenizer's chat template is used if it has one.

    Args:
        budget: a fraction of full KV (1.0: no limit), a `Budget`, or a whole configuration of qevict's. None is 0.2,
            or no budget for the methods that take none.
        method: what compresses the cache, by name (`qevict methods` lists them) or as an object.
        store_dtype: of full-precision storage; None is the model's, or the configuration's.
        question_seen: whether the question is known while the context is compressed.
        answer_prefix: how the answer begins; the model continues it.
        streamer: is shown the tokens as they come, as by `generate`.

    Returns:
        An `Answer`, or a list of them for a sequence of questions.

    Raises:
        ValueError: if context and question are both empty, or the budget or the model cannot be supported.
    """
    questions = [question] if isinstance(question, str) else list(question)
    prompts = [_Prompt.build(tokenizer, context, q, answer_prefix) for q in questions]
    if not prompts:
        return []
    make = _maker(model, method, budget, store_dtype)
    answers = []
    shared: MeasuredCache | None = None
    if not question_seen and prompts[0].context.shape[1]:
        longest = max(p.question.shape[1] for p in prompts)
        shared = make(longest + max_new_tokens)
        read_prompt(model, shared, prompts[0].context)
    for index, prompt in enumerate(prompts):
        if shared is None:
            cache = make(max_new_tokens)
            if reads_twice(cache):
                read_prompt(model, cache, torch.cat([prompt.context, prompt.question], dim=1)[:, :-1])
        else:
            cache = shared if index == len(prompts) - 1 else copy.deepcopy(shared)
        answers.append(_generate(model, tokenizer, cache, questions[index], prompt, max_new_tokens, streamer))
    return answers[0] if isinstance(question, str) else answers


def _maker(
    model: PreTrainedModel,
    method: str | Described,
    budget: float | Budget | QEvictConfig | None,
    store_dtype: torch.dtype | None,
) -> Callable[[int], MeasuredCache]:
    """What makes an empty cache for so many new tokens."""
    chosen = get_method(method) if isinstance(method, str) else method
    untested = False
    if isinstance(budget, QEvictConfig):
        if chosen != QEvict():
            raise ValueError(f"a QEvictConfig configures qevict, not {chosen.label}; give a fraction or a Budget")
        chosen, store_dtype, untested = QEvict(budget), store_dtype or budget.store_dtype, budget.allow_untested
        budget = budget.limit
    elif budget is None:
        budget = DEFAULT_BUDGET if chosen.takes_budget else 1.0
    limit = budget
    return lambda new: make_cache(
        model, chosen, limit, max_new_tokens=new, store_dtype=store_dtype, allow_untested=untested
    )


@dataclass(frozen=True)
class _Prompt:
    """Token ids `[1, tokens]` of the context with all that stands before it, and of the rest.

    The two are tokenized apart in either protocol, so that both see the same tokens.
    """

    context: Int[Tensor, "one context"]
    question: Int[Tensor, "one question"]

    @classmethod
    def build(cls, tokenizer: PreTrainedTokenizerBase, context: str, question: str, answer_prefix: str) -> _Prompt:
        if not (context.strip() or question.strip()):
            raise ValueError("the prompt is empty: give a context, a question, or both")
        content = f"{context}\n\n{_QUESTION_HERE}" if context.strip() else _QUESTION_HERE
        special = tokenizer.chat_template is None
        if not special:
            messages = [{"role": "user", "content": content}]
            content = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        head, tail = content.split(_QUESTION_HERE)
        return cls(
            _ids(tokenizer, head, special), _ids(tokenizer, f"{question}{tail}{answer_prefix}", special and not head)
        )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> Int[Tensor, "one tokens"]:
    ids = tokenizer(text, add_special_tokens=special, verbose=False).input_ids if text else []
    return torch.tensor([ids], dtype=torch.long)


@dataclass
class _Clock(BaseStreamer):
    """Notes when the first token comes; passes everything on."""

    inner: BaseStreamer | None
    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    prompt_seen: bool = False

    def put(self, value: Tensor) -> None:
        if self.prompt_seen and self.first is None:
            self.first = time.perf_counter()
        self.prompt_seen = True
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: MeasuredCache,
    question: str,
    prompt: _Prompt,
    max_new_tokens: int,
    streamer: BaseStreamer | None,
) -> Answer:
    ids = torch.cat([prompt.context, prompt.question], dim=1).to(model.device)
    clock = _Clock(streamer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
        streamer=clock,
        **cache_argument(cache),
    )
    end = time.perf_counter()
    new = output[0, ids.shape[1] :]
    return Answer(
        question=question,
        text=tokenizer.decode(new, skip_special_tokens=True).strip(),
        prompt_tokens=ids.shape[1],
        new_tokens=len(new),
        first_token_seconds=(clock.first or end) - clock.start,
        seconds=end - clock.start,
        memory=cache.memory(),
        counts=cache.counts() if isinstance(cache, QEvictCache) else None,
        moves=cache.moves() if isinstance(cache, QEvictCache) else None,
    )
