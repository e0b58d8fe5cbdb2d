"""Conversations: several questions about one context, whose answers lie far from each other.

- `drift/facts`: numbers hidden in prose under different keys, one in each stretch of the text.
- `drift/squad`: questions of SQuAD about different paragraphs of one article.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qevict.bench import metrics
from qevict.bench.data import data_folder, find_file, read_rows
from qevict.bench.ruler import qa, wording
from qevict.bench.ruler.fit import largest, too_short
from qevict.bench.ruler.haystacks import essay_words, split_sentences
from qevict.bench.ruler.wordlists import hyphenated_pair
from qevict.bench.sample import generator, shuffled

_FACT_QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
_FACT_PREFIX = " The special magic number for {key} mentioned in the provided text is"
_FACT_TOKENS = 16
_TURN_HERE = ("<|the first turn goes here|>", "<|the answer goes here|>", "<|the next turn goes here|>")


@dataclass(frozen=True)
class Question:
    """One of the questions.

    Attributes:
        answer_prefix: how the assistant's answer begins.
        answers: gold ones, of which one is wanted.
        depth: where in the context the answer stands, from 0 to 1.
    """

    text: str
    answer_prefix: str
    answers: tuple[str, ...]
    depth: float


@dataclass(frozen=True)
class Conversation:
    """A context and questions about it, which may come in any order.

    Attributes:
        document: what clustered statistics group by.
        max_new_tokens: of one answer.
    """

    task: str
    id: str
    document: str
    context: str
    questions: tuple[Question, ...]
    max_new_tokens: int

    def score(self, prediction: str, question: Question) -> float:
        """From 0 to 1: facts by RULER's string match, SQuAD by the F1 of words."""
        if self.task == "drift/facts":
            return metrics.string_match_part(prediction, question.answers)
        return max(metrics.qa_f1(prediction, answer) for answer in question.answers)


@dataclass(frozen=True)
class Template:
    """What the chat template puts around turns; without one, an empty line parts them.

    Attributes:
        before: the first turn of the user.
        after: a turn of the user, up to where the assistant's begins.
        between: an answer and the next turn of the user, with the token that ends the answer.
        special: whether the tokenizer's own special tokens come first.
    """

    before: str
    after: str
    between: str
    special: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Template:
        """The tokenizer's.

        Raises:
            ValueError: if the template does not show turns as they are.
        """
        if tokenizer.chat_template is None:
            return cls("", "", "\n\n", special=True)
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, _TURN_HERE, strict=True)]
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if any(rendered.count(text) != 1 for text in _TURN_HERE):
            raise ValueError("the chat template does not show three turns as they are, so no conversation can be built")
        before, rest = rendered.split(_TURN_HERE[0])
        after, rest = rest.split(_TURN_HERE[1])
        return cls(before, after, rest.split(_TURN_HERE[2])[0], special=False)

    def context_ids(self, tokenizer: PreTrainedTokenizerBase, context: str) -> list[int]:
        """The context with all that stands before it."""
        return _ids(tokenizer, self.before + context, self.special)

    def question_ids(self, tokenizer: PreTrainedTokenizerBase, question: Question, first: bool) -> list[int]:
        """A question with all that stands between it and what was there before, up to where its answer begins."""
        between = "" if first else self.between
        return _ids(tokenizer, between + question.text + self.after + question.answer_prefix, special=False)


def answer_ids(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    """The first gold answer, behind a space, since answer prefixes end with a word."""
    return _ids(tokenizer, f" {question.answers[0]}", special=False)


def token_count(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> int:
    """Tokens of all turns with answers of `max_new_tokens`, which is what a conversation's length counts."""
    template = Template.of(tokenizer)
    turns = [
        len(template.question_ids(tokenizer, question, first=index == 0)) + conversation.max_new_tokens
        for index, question in enumerate(conversation.questions)
    ]
    return len(template.context_ids(tokenizer, conversation.context)) + sum(turns)


@dataclass(frozen=True)
class Wanted:
    """Which conversations are wanted.

    Attributes:
        count: at most so many; of SQuAD one an article.
        length: tokens of context, questions and answers together.
        questions: about each context, at least 2.
        seed: the only source of randomness.
        data: as for `find_tasks`.
    """

    count: int = 8
    length: int = 1024
    questions: int = 4
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.questions < 2:
            raise ValueError(f"Drift shows between questions, so there have to be 2 at least, not {self.questions}.")


def conversations(task: str, tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Iterator[Conversation]:
    """The conversations of a task.

    Raises:
        DataNotFoundError: a ValueError, if a file is missing.
        ValueError: if there is no such task, or the length cannot hold its questions.
    """
    if task not in TASKS:
        raise ValueError(f"There is no task {task!r}: name {', '.join(TASKS)}.")
    return TASKS[task](tokenizer, wanted)


def facts(tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Iterator[Conversation]:
    """Numbers in prose that begins anywhere in the book."""
    words = essay_words(data_folder(wanted.data))
    for index in range(wanted.count):
        rng = generator("drift/facts", wanted.seed, index)
        identity, start = f"{wanted.length}-{wanted.seed}-{index}", rng.randrange(len(words))
        build = partial(_facts, identity, wanted.questions, rng.getrandbits(64), words, start)
        size = _size(tokenizer, wanted, build)
        if size is None:
            raise too_short("drift/facts", wanted.length)
        yield build(size)


def _facts(identity: str, count: int, seed: int, words: Sequence[str], start: int, size: int) -> Conversation:
    rng = random.Random(seed)
    keys: list[str] = []
    while len(keys) < count:
        if (key := hyphenated_pair(rng)) not in keys:
            keys.append(key)
    values = rng.sample(range(1_000_000, 10_000_000), count)
    needles = [
        wording.NEEDLES.needle.format(kind="numbers", key=key, value=value)
        for key, value in zip(keys, values, strict=True)
    ]
    sentences = split_sentences(" ".join(words[(start + index) % len(words)] for index in range(size)))
    # Away from the borders of its stretch, so that no two of them lie together.
    places = [int(len(sentences) * (index + rng.uniform(0.2, 0.8)) / count) for index in range(count)]
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        sentences.insert(place, needle)
    context = wording.NEEDLES.context.format(kind="numbers", context=" ".join(sentences))
    questions = tuple(
        Question(
            _FACT_QUESTION.format(key=key),
            _FACT_PREFIX.format(key=key),
            (str(value),),
            context.index(needle) / len(context),
        )
        for key, value, needle in zip(keys, values, needles, strict=True)
    )
    return Conversation("drift/facts", identity, identity, context, questions, _FACT_TOKENS)


def squad(tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Iterator[Conversation]:
    """Articles in an order that the seed gives; those whose paragraphs are too long or too few are passed over."""
    task = next(t for t in qa.question_tasks(data_folder(wanted.data)) if t.name == "ruler/qa_1")
    asked = qa.read_squad(read_rows(find_file(task.data, task.patterns, task.source)))
    articles: dict[str, dict[str, list[qa.Question]]] = {}
    for question in asked:
        articles.setdefault(question.article, {}).setdefault(question.own[0], []).append(question)
    everything = [paragraph for paragraphs in articles.values() for paragraph in paragraphs]
    made = 0
    for article in shuffled(sorted(articles), "drift/squad", wanted.seed):
        paragraphs = articles[article]
        if made == wanted.count:
            return
        if len(paragraphs) < wanted.questions:
            continue
        rng = generator("drift/squad", wanted.seed, article)
        chosen = [rng.choice(paragraphs[own]) for own in rng.sample(list(paragraphs), wanted.questions)]
        own = {question.own[0] for question in chosen}
        near = [paragraph for paragraph in shuffled(list(paragraphs), rng.getrandbits(64)) if paragraph not in own]
        far = [paragraph for paragraph in shuffled(everything, rng.getrandbits(64)) if paragraph not in paragraphs]
        build = partial(_squad, f"{wanted.length}-{wanted.seed}-{article}", article, chosen, [*near, *far])
        size = _size(tokenizer, wanted, build)
        if size is not None:
            made += 1
            yield build(size)
    if wanted.count and not made:
        raise too_short("drift/squad", wanted.length)


def _squad(identity: str, article: str, chosen: list[qa.Question], fill: list[str], words: int) -> Conversation:
    others = qa.take_words(fill, words)
    documents: list[str] = []
    for index, question in enumerate(chosen):
        documents += [*others[index :: len(chosen)], question.own[0]]
    text = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
    context = qa.CONTEXT.format(context=text)
    questions = tuple(
        Question(
            qa.QUESTION.format(query=question.text),
            qa.ANSWER_PREFIX,
            question.answers,
            (context.index(question.own[0]) + question.own[0].index(question.answers[0])) / len(context),
        )
        for question in chosen
    )
    return Conversation("drift/squad", identity, article, context, questions, qa.MAX_NEW_TOKENS)


TASKS: dict[str, Callable[[PreTrainedTokenizerBase, Wanted], Iterator[Conversation]]] = {
    "drift/facts": facts,
    "drift/squad": squad,
}


def _size(tokenizer: PreTrainedTokenizerBase, wanted: Wanted, build: Callable[[int], Conversation]) -> int | None:
    """The words of filling with which a conversation comes to its length; None if it does not fit without any."""
    return largest(lambda size: token_count(tokenizer, build(size)) <= wanted.length, 0, wanted.length)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids) if text else []
