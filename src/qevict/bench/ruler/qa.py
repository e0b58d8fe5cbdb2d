"""RULER's question answering: qa_1 over SQuAD's paragraphs, qa_2 over HotpotQA's.

Templates and settings: NVIDIA/RULER, scripts/data/synthetic/constants.py and qa.py. As there, a question's own
paragraphs come with distractors, first those nearest to it (SQuAD: of the same article; HotpotQA: the rest of its
ten). Differences: the last distractor that does not fit whole is cut at a word, so that lengths are met within 2 %;
HotpotQA's nearest distractors are left out where the length cannot hold all ten; questions whose own paragraphs do not
fit are passed over; questions come in an order that the seed gives; where a length holds more than the whole data set,
distractors are repeated, never the question's own paragraphs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qevict.bench import metrics
from qevict.bench.data import find_file, read_rows
from qevict.bench.ruler.fit import room, too_short
from qevict.bench.sample import Sample, generator, shuffled

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
CONTEXT = f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}\n\n"
QUESTION = f"{_INSTRUCTION}\n\nQuestion: {{query}}"
ANSWER_PREFIX = " Answer:"

MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Question:
    """A question of a data set.

    Attributes:
        article: what statistics cluster by.
        own: the paragraphs that hold the answer.
        near: the distractors to take first.
    """

    id: str
    article: str
    text: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    near: tuple[str, ...]


@dataclass(frozen=True)
class QuestionTask:
    """A question and documents, of which one or two hold the answer."""

    name: str
    patterns: tuple[str, ...]
    source: str
    read: Callable[[list[dict[str, Any]]], list[Question]]
    data: Path | None

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """See `Task.samples`."""
        space = room(tokenizer, length, self.name)
        questions, paragraphs = _load(find_file(self.data, self.patterns, self.source), self.read)
        made = 0
        for question in shuffled(questions, self.name, seed):
            if made == count:
                return
            rng = generator(self.name, seed, question.id)
            near = shuffled(question.near, rng.getrandbits(64))
            known = {*question.own, *question.near}
            far = [paragraph for paragraph in shuffled(paragraphs, rng.getrandbits(64)) if paragraph not in known]
            distractors = [*near, *far]
            build = partial(self._build, f"{length}-{seed}-{question.id}", question, distractors, rng.getrandbits(64))
            size = space.largest(build)
            if size is not None:
                made += 1
                yield build(size)
        if count and not made:
            raise too_short(self.name, space.tokens)

    def score(self, prediction: str, sample: Sample) -> float:
        return metrics.string_match_part(prediction, sample.answers)

    def _build(self, identity: str, question: Question, distractors: list[str], seed: int, words: int) -> Sample:
        documents = [*question.own, *take_words(chain(distractors, cycle(distractors)), words)]
        random.Random(seed).shuffle(documents)
        text = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
        return Sample(
            task=self.name,
            id=identity,
            document=question.article,
            context=CONTEXT.format(context=text),
            question=QUESTION.format(query=question.text),
            answer_prefix=ANSWER_PREFIX,
            answers=question.answers,
            max_new_tokens=MAX_NEW_TOKENS,
        )


def take_words(documents: Iterable[str], count: int) -> list[str]:
    """Whole documents as long as their words are wanted, and the beginning of the next for the rest."""
    taken = []
    for document in documents:
        if count <= 0:
            break
        ends = [word.end() for word in re.finditer(r"\S+", document)]
        taken.append(document if len(ends) <= count else document[: ends[count - 1]])
        count -= len(ends)
    return taken


@lru_cache(maxsize=2)
def _load(
    path: Path, read: Callable[[list[dict[str, Any]]], list[Question]]
) -> tuple[Sequence[Question], Sequence[str]]:
    """A file's questions, and all paragraphs of it."""
    questions = read(read_rows(path))
    if not questions:
        raise ValueError(f"{path} holds no question with an answer.")
    return questions, sorted({paragraph for question in questions for paragraph in (*question.own, *question.near)})


def read_squad(rows: list[dict[str, Any]]) -> list[Question]:
    """From SQuAD's own JSON, or from JSON lines of one paragraph each with its article's title."""
    articles: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for article in row.get("data", []):
            articles.setdefault(article["title"], []).extend(article["paragraphs"])
        if "context" in row:
            articles.setdefault(row["title"], []).append(row)
    return [
        Question(
            id=str(asked["id"]),
            article=title,
            text=asked["question"],
            answers=tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
            own=(paragraph["context"],),
            near=tuple(other["context"] for other in paragraphs if other["context"] != paragraph["context"]),
        )
        for title, paragraphs in articles.items()
        for paragraph in paragraphs
        for asked in paragraph["qas"]
        if asked["answers"] and not asked.get("is_impossible", False)
    ]


def read_hotpotqa(rows: list[dict[str, Any]]) -> list[Question]:
    """From HotpotQA's distractor setting, as JSON or as JSON lines."""
    questions = []
    for number, row in enumerate(rows):
        supporting = {title for title, _ in row["supporting_facts"]}
        paragraphs = [(title, f"{title}\n{''.join(sentences)}") for title, sentences in row["context"]]
        identity = str(row.get("_id") or number)
        questions.append(
            Question(
                id=identity,
                article=identity,
                text=row["question"],
                answers=(row["answer"],),
                own=tuple(text for title, text in paragraphs if title in supporting),
                near=tuple(text for title, text in paragraphs if title not in supporting),
            )
        )
    return questions


def question_tasks(data: Path | None) -> list[QuestionTask]:
    """The two of the benchmark."""
    return [
        QuestionTask(
            "ruler/qa_1",
            ("squad*.json", "squad*.jsonl"),
            "It is SQuAD's dev set: https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json, as squad.json.",
            read_squad,
            data,
        ),
        QuestionTask(
            "ruler/qa_2",
            ("hotpotqa*.json", "hotpotqa*.jsonl"),
            "It is HotpotQA's dev set: http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json, "
            "as hotpotqa.json.",
            read_hotpotqa,
            data,
        ),
    ]
