"""Texts that fidelity is measured on: a context to be compressed, and what is forced, or generated, after it.

- `prose`: windows of Wikipedia articles and of a book.
- `copy`: windows of the same prose that end by quoting a passage which stands early in them. A cache that gave the
  passage up cannot foresee the quotation.
- `answers`: gold answers to the prompts of RULER and LongBench.
- `free`: windows as in `prose`, after which the model generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qevict.bench.data import data_folder, find_file, read_rows
from qevict.bench.prompt import prompt_ids
from qevict.bench.protocol import Protocol, gold_ids
from qevict.bench.sample import Sample, generator, shuffled
from qevict.bench.tasks import find_tasks

CUE_TOKENS = 8
"""Tokens of the passage that a copy begins with, which say what is being quoted."""
ANNOUNCEMENT = "\n\nOnce more, word for word, what was said above:\n\n"

_SOURCES: dict[str, tuple[tuple[str, ...], str]] = {
    "wikitext2": (
        ("wikitext2*.jsonl", "wikitext2*.txt"),
        "It is the test split of WikiText-2 raw: https://huggingface.co/datasets/Salesforce/wikitext, as JSON lines "
        "with a `text` (wikitext2.jsonl), or as wikitext2.txt.",
    ),
    "book": (
        ("haystack*.txt", "haystack*.jsonl"),
        "It is any long text in English, a book say: as haystack.txt, or a JSON line with a `text`.",
    ),
}


@dataclass(frozen=True)
class Text:
    """Tokens of one text.

    Attributes:
        id: unique within the corpus; the same for the same seed and lengths.
        document: what clustered statistics group by.
        context: what is compressed in any case.
        cue: what says how it goes on: a question, the beginning of a quotation, or just the next token of prose. Never
            empty. Its last token is always fed to the compressed cache, and with the protocol "query-agnostic" all of
            it is.
        forced: what comes then; empty where the model goes on by itself.
    """

    corpus: str
    id: str
    document: str
    context: tuple[int, ...]
    cue: tuple[int, ...]
    forced: tuple[int, ...]

    def split(self, protocol: Protocol) -> tuple[list[int], list[int]]:
        """What the cache compresses, and what it is fed next."""
        seen = len(self.cue) - 1 if protocol == "query-aware" else 0
        return [*self.context, *self.cue[:seen]], list(self.cue[seen:])


@dataclass(frozen=True)
class Wanted:
    """Which texts of a corpus are wanted.

    Attributes:
        count: at most so many; fewer where the source has fewer.
        prompt: tokens that are compressed with the protocol "query-aware"; prompts of `answers` are at most so long.
        forced: tokens after them; of `answers`, the first ones.
        seed: the only source of randomness.
        data: as for `find_tasks`.
        answered: tasks or benchmarks of `answers`.
    """

    count: int = 8
    prompt: int = 1024
    forced: int = 128
    seed: int = 0
    data: Path | None = None
    answered: tuple[str, ...] = ("ruler", "longbench")

    def __post_init__(self) -> None:
        if self.prompt < 2 or self.forced < 1:
            raise ValueError(
                f"A text needs 2 tokens to compress and 1 after them, not {self.prompt} and {self.forced}."
            )


def texts(corpus: str, tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Iterator[Text]:
    """The texts of a corpus.

    Raises:
        DataNotFoundError: a ValueError, if a file is missing.
        ValueError: if there is no such corpus, or it cannot be made to these lengths.
    """
    if corpus not in CORPORA:
        raise ValueError(f"There is no corpus {corpus!r}: name {', '.join(CORPORA)}.")
    return CORPORA[corpus](tokenizer, wanted)


def prose(tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Iterator[Text]:
    """Windows at seeded places, none overlapping another, from each source in turn."""
    begin = _beginning(tokenizer)
    for name, window in _windows(tokenizer, wanted, "prose", wanted.prompt + 1 + wanted.forced - len(begin)):
        tokens = [*begin, *window]
        context, cue, forced = tokens[: wanted.prompt], tokens[wanted.prompt], tokens[wanted.prompt + 1 :]
        yield Text("prose", name, name, tuple(context), (cue,), tuple(forced))


def free(tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Iterator[Text]:
    """The prompts of `prose`."""
    for text in prose(tokenizer, wanted):
        yield replace(text, corpus="free", forced=())


def copies(tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Iterator[Text]:
    """Windows of prose, an announcement, and a passage that began between 1/16 and 1/4 of the window again."""
    begin, announcement = _beginning(tokenizer), _ids(tokenizer, ANNOUNCEMENT)
    size = wanted.prompt - len(begin) - len(announcement) - (CUE_TOKENS - 1)
    passage_size = CUE_TOKENS + wanted.forced
    earliest, latest = size // 16, min(size // 4, size // 2 - passage_size)
    if latest < earliest:
        raise ValueError(
            f"A prompt of {wanted.prompt} tokens cannot hold a passage of {passage_size} tokens in its first half: "
            "choose a longer prompt, or force fewer tokens."
        )
    for name, window in _windows(tokenizer, wanted, "copy", size):
        start = generator("copy", wanted.seed, name).randint(earliest, latest)
        passage = window[start : start + passage_size]
        context = (*begin, *window, *announcement)
        yield Text("copy", name, name, context, tuple(passage[:CUE_TOKENS]), tuple(passage[CUE_TOKENS:]))


def answers(tokenizer: PreTrainedTokenizerBase, wanted: Wanted) -> Iterator[Text]:
    """The first gold answer after the prompts of benchmarks, a sample of each of their tasks in turn."""
    named = [task for name in wanted.answered for task in find_tasks(name, wanted.data)]
    tasks = shuffled(named, "answers", wanted.seed)
    each = -(-wanted.count // len(tasks))
    samples = (task.samples(tokenizer, each, length=wanted.prompt, seed=wanted.seed) for task in tasks)
    in_turn = (sample for of_each in zip_longest(*samples) for sample in of_each if sample is not None)
    for sample in islice((sample for sample in in_turn if any(sample.answers)), wanted.count):
        yield answered(tokenizer, sample, wanted.forced)


def answered(tokenizer: PreTrainedTokenizerBase, sample: Sample, forced: int) -> Text:
    """A benchmark's prompt and the first tokens of its first gold answer."""
    context, cue = prompt_ids(tokenizer, sample)
    if not cue:
        context, cue = context[:-1], context[-1:]
    gold = gold_ids(tokenizer, sample, [*context, *cue])[:forced]
    name, document = f"{sample.task}/{sample.id}", f"{sample.task}/{sample.document}"
    return Text("answers", name, document, tuple(context), tuple(cue), tuple(gold))


CORPORA: dict[str, Callable[[PreTrainedTokenizerBase, Wanted], Iterator[Text]]] = {
    "prose": prose,
    "copy": copies,
    "answers": answers,
    "free": free,
}


def _windows(
    tokenizer: PreTrainedTokenizerBase, wanted: Wanted, corpus: str, size: int
) -> Iterator[tuple[str, list[int]]]:
    """Names and tokens of windows of the sources' texts, a window of each source in turn."""
    folder = data_folder(wanted.data)
    tokens = {name: _tokens(tokenizer, find_file(folder, *where)) for name, where in _SOURCES.items()}
    starts = {name: places(len(ids), size, corpus, wanted.seed, name) for name, ids in tokens.items()}
    if not any(starts.values()):
        raise ValueError(f"No source of {corpus} has {size} tokens: choose a shorter prompt.")
    in_turn = chain.from_iterable(zip_longest(*starts.values()))
    named = ((name, start) for name, start in zip(cycle(starts), in_turn, strict=False) if start is not None)
    for name, start in islice(named, wanted.count):
        yield f"{name}-{start}-{size}", tokens[name][start : start + size]


def places(length: int, size: int, *key: object) -> list[int]:
    """Where windows of that size begin in a text of that length: all that fit side by side, in an order and with a
    shift that depend on the key alone."""
    rng = generator(*key)
    if length < size:
        return []
    shift = rng.randint(0, length % size)
    starts = list(range(shift, length - size + 1, size))
    rng.shuffle(starts)
    return starts


@lru_cache(maxsize=len(_SOURCES))
def _tokens(tokenizer: PreTrainedTokenizerBase, path: Path) -> list[int]:
    if path.suffix == ".jsonl":
        # The rows of WikiText are paragraphs; two line ends between them are what perplexity is usually taken with.
        return _ids(tokenizer, "\n\n".join(row.get("text") or "" for row in read_rows(path)))
    return _ids(tokenizer, path.read_text(encoding="utf-8"))


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer puts before every text, if it does."""
    first = tokenizer("a", verbose=False).input_ids[:1]
    return list(first) if first == [tokenizer.bos_token_id] else []


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
