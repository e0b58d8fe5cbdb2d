"""Drift: what a compressed cache forgets from one question about a context to the next.

The context is compressed once, before any question is known (protocol "query-agnostic"), or together with the first
question ("query-aware"). Then several questions are asked one after another on the same cache, in which each question
and the answer that was generated to it stay, as in a conversation. The answers lie far from each other, so what a cache
adapts to one question is no help with the next. Orders come from a Latin square: every question is asked at every place
once, the first included, and is compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qevict.bench.cells import Cell, capture, cells_of
from qevict.bench.conversations import TASKS, Conversation, Template, Wanted, answer_ids, conversations
from qevict.bench.decode import Fork, PeakMemory, decode, end_tokens, forced_nll
from qevict.bench.forks import fork_forward
from qevict.bench.manifest import GROWS, data_files, described, plain, software
from qevict.bench.protocol import Setting
from qevict.bench.results import ResultsFolder
from qevict.bench.runner import ModelSpec
from qevict.bench.study import KEY, Built, build_groups
from qevict.methods.base import Described, MeasuredCache
from qevict.trace import PrefillTrace


@dataclass(frozen=True)
class Drift:
    """Everything that decides the results.

    Attributes:
        methods: beside full KV, which is always run.
        tasks: of `conversations.TASKS`.
        wanted: conversations of each task.
    """

    methods: tuple[Described, ...]
    budgets: tuple[float, ...] = (0.2,)
    tasks: tuple[str, ...] = tuple(TASKS)
    wanted: Wanted = field(default_factory=Wanted)
    model: ModelSpec = field(default_factory=ModelSpec)
    setting: Setting = field(default_factory=lambda: Setting(protocol="query-agnostic"))

    def manifest(self) -> dict[str, Any]:
        """What the results depend on."""
        cells, wanted = cells_of(self.methods, self.budgets), self.wanted
        return {
            **software(),
            "model": self.model.name,
            "device": self.model.device_type,
            "dtype": plain(self.model.dtype),
            "store_dtype": plain(self.setting.store_dtype),
            "tasks": list(self.tasks),
            "length": wanted.length,
            "questions": wanted.questions,
            "samples": wanted.count,
            "seed": wanted.seed,
            "methods": described(list({cell.method.label: cell.method for cell in cells}.values())),
            "budgets": list(self.budgets),
            "protocol": self.setting.protocol,
            "scope": self.setting.scope,
            "first_token": "compressed",
            "data": data_files(self.tasks, wanted.data),
        }


Watcher = Callable[[str, list[dict[str, Any]]], None]
"""Shown a task and the new records of one conversation; no records where all of them were there already."""


def run(
    plan: Drift,
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    watch: Watcher = lambda task, records: None,
) -> None:
    """Hold the conversations that the folder does not hold yet.

    Raises:
        ValueError: if the plan contradicts itself or the folder, or data is missing.
    """
    cells = cells_of(plan.methods, plan.budgets)
    for task in plan.tasks:  # what is missing shows now, not after hours
        next(iter(conversations(task, tokenizer, plan.wanted)), None)
    with ResultsFolder(out, plan.manifest(), KEY, GROWS) as folder:
        for task in plan.tasks:
            for conversation in conversations(task, tokenizer, plan.wanted):
                missing = {
                    order: [
                        cell for cell in cells if (task, sample_id(conversation, order), *cell.key) not in folder.done
                    ]
                    for order in range(plan.wanted.questions)
                }
                new = []
                for record in hold(model, tokenizer, conversation, missing, plan.setting):
                    folder.append(record)
                    new.append(record)
                watch(task, new)


def sample_id(conversation: Conversation, order: int) -> str:
    """What records call a conversation in one of its orders."""
    return f"{conversation.id}/{order}"


def latin_square(size: int) -> list[list[int]]:
    """Orders of `size` things in which each is at every place once.

    For an even size each also follows each other one exactly once, so no question has a predecessor of its own.
    """
    steps = [-(index // 2) if index % 2 == 0 else index // 2 + 1 for index in range(size)]
    return [[(start + step) % size for step in steps] for start in range(size)]


@dataclass(frozen=True)
class Asked:
    """A turn of the user, in tokens.

    Attributes:
        question: its place among the conversation's questions.
        pending: what is fed before the answer.
        gold: the gold answer.
    """

    question: int
    pending: list[int]
    gold: list[int]


@dataclass
class Told:
    """What one cache had to say.

    Attributes:
        answers: tokens of each turn.
        gold_nll: of each turn.
        memory: the most held in all turns.
    """

    answers: list[list[int]] = field(default_factory=list)
    gold_nll: list[float] = field(default_factory=list)
    memory: PeakMemory = field(default_factory=PeakMemory)


def hold(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    wanted: Mapping[int, Sequence[Cell]],
    setting: Setting,
) -> Iterator[dict[str, Any]]:
    """Hold a conversation in some of its orders with some cells; yields a record for each.

    Args:
        wanted: cells by the number of an order of the Latin square.
    """
    methods = list({cell.key: cell.method for cells in wanted.values() for cell in cells}.values())
    template, orders = Template.of(tokenizer), latin_square(len(conversation.questions))
    context = template.context_ids(tokenizer, conversation.context)
    trace: PrefillTrace | None = None
    for number, cells in wanted.items():
        if not cells:
            continue
        asked = [
            Asked(
                question=index,
                pending=template.question_ids(tokenizer, conversation.questions[index], first=place == 0),
                gold=answer_ids(tokenizer, conversation.questions[index]),
            )
            for place, index in enumerate(orders[number])
        ]
        compressed = context
        if setting.protocol == "query-aware":
            compressed = context + asked[0].pending[:-1]
            asked[0] = Asked(asked[0].question, asked[0].pending[-1:], asked[0].gold)
        if trace is None or setting.protocol == "query-aware":
            trace = capture(model, compressed, methods)
        new_tokens = sum(len(turn.pending) + conversation.max_new_tokens for turn in asked)
        for group in build_groups(model, trace, cells, new_tokens, setting, setting.batch):
            caches = [built.cache for built in group if built.cache is not None]
            told = iter(converse(model, caches, asked, conversation.max_new_tokens))
            for built in group:
                said = Told() if built.cache is None else next(told)
                head = {
                    "task": conversation.task,
                    "sample": sample_id(conversation, number),
                    "document": conversation.document,
                    "prompt_tokens": len(compressed),
                }
                yield head | _record(tokenizer, conversation, asked, built, said) | {"new_tokens": new_tokens}


def converse(
    model: PreTrainedModel, caches: Sequence[MeasuredCache], asked: Sequence[Asked], max_new_tokens: int
) -> list[Told]:
    """Ask all questions, of all caches together; the caches take questions and answers in."""
    ends, told = end_tokens(model), [Told() for _ in caches]
    for turn in asked if caches else ():
        for said, nll in zip(told, forced_nll(model, caches, turn.pending, turn.gold), strict=True):
            said.gold_nll.append(nll)
        forks = [
            Fork(cache, list(turn.pending), max_new_tokens, memory=said.memory)
            for cache, said in zip(caches, told, strict=True)
        ]
        for _ in decode(model, [forks], batch=len(forks)):
            pass
        for said, fork in zip(told, forks, strict=True):
            said.answers.append(fork.tokens)
        # The last token of an answer was not fed. Where it is the end of the turn, the template brings it.
        unfed = [fork for fork in forks if fork.tokens[-1] not in ends]
        if unfed:
            fork_forward(model, [fork.cache for fork in unfed], torch.tensor([fork.tokens[-1:] for fork in unfed]))
        for fork in unfed:
            fork.memory.see(fork.cache.memory())
    return told


def _record(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    asked: Sequence[Asked],
    built: Built,
    told: Told,
) -> dict[str, Any]:
    turns = []
    for turn, tokens, nll in zip(asked, told.answers, told.gold_nll, strict=False):
        question = conversation.questions[turn.question]
        prediction = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        turns.append(
            {
                "question": turn.question,
                "depth": round(question.depth, 3),
                "prediction": prediction,
                "score": round(conversation.score(str(prediction), question), 6),
                "gold_nll": round(nll, 6),
            }
        )
    return {
        **built.fields(told.memory if turns else None),
        "score": _mean([turn["score"] for turn in turns]),
        "gold_nll": _mean([turn["gold_nll"] for turn in turns]),
        "turns": turns,
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None
