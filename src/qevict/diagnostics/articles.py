"""Texts to diagnose: the user's files, or articles from the data folder. The article is the unit of statistics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qevict.bench.data import data_folder, find_file, read_rows

WIKITEXT, BOOK, LONGBENCH = "wikitext", "book", "longbench"
_HEADING = re.compile(r"\s*= ([^=].*?) =\s*")
_PATTERNS: dict[str, tuple[tuple[str, ...], str]] = {
    WIKITEXT: (("wikitext2*.jsonl", "wiki.test.raw"), "It is the test split of WikiText-2 raw."),
    BOOK: (("haystack*.txt", "haystack*.jsonl"), "It is any long text in English."),
}


@dataclass(frozen=True)
class Article:
    """The first tokens of a text, as many as were asked for."""

    title: str
    tokens: tuple[int, ...]


def articles(
    source: str, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, data: Path | None = None
) -> list[Article]:
    """The first `count` texts of a source that are at least `tokens` tokens long, cut to that length.

    Args:
        source: `wikitext` (whole articles from their beginning), `book` (stretches of one book, evenly spread),
            `longbench/TASK` (contexts of that task).
        data: the data folder; None takes QEVICT_DATA.

    Raises:
        DataNotFoundError: a ValueError, if the file is missing.
        ValueError: if there is no such source, or it has too few such texts.
    """
    found = []
    for title, text in _texts(source, data_folder(data), count):
        ids = encode(tokenizer, text)
        if len(ids) >= tokens:
            found.append(Article(title, tuple(ids[:tokens])))
        if len(found) == count:
            return found
    raise ValueError(f"{source} has {len(found)} texts of at least {tokens} tokens; {count} were asked for")


def from_files(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[Article]:
    """Files of plain text, each an article.

    Raises:
        ValueError: if one cannot be read or is shorter than `tokens` tokens.
    """
    found = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
        ids = encode(tokenizer, text)
        if len(ids) < tokens:
            raise ValueError(f"{path} has {len(ids)} tokens; the trace needs {tokens}: choose a shorter --prefill")
        found.append(Article(path.stem, tuple(ids[:tokens])))
    return found


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids as the tokenizer begins a text, without a chat template: articles are continued, not answered."""
    return list(tokenizer(text, verbose=False).input_ids)


def _texts(source: str, folder: Path | None, count: int) -> Iterator[tuple[str, str]]:
    name, _, task = source.partition("/")
    if name == LONGBENCH and task:
        wanted = (f"longbench/{task}.jsonl", f"{task}.jsonl")
        path = find_file(folder, wanted, "It is a task of LongBench, a JSON line a sample with a `context`.")
        yield from ((f"{task} {index}", row["context"]) for index, row in enumerate(read_rows(path)))
    elif name in _PATTERNS and not task:
        path = find_file(folder, *_PATTERNS[name])
        text = path.read_text(encoding="utf-8") if path.suffix != ".jsonl" else ""
        rows = [row.get("text") or "" for row in read_rows(path)] if path.suffix == ".jsonl" else text.splitlines()
        yield from _wikitext(rows) if name == WIKITEXT else _stretches("\n".join(rows), count)
    else:
        raise ValueError(f"there is no source {source!r}; there are {WIKITEXT}, {BOOK} and {LONGBENCH}/TASK")


def _wikitext(rows: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Articles with their titles; the rows are paragraphs and headings."""
    title, paragraphs = "", list[str]()
    for row in rows:
        if (heading := _HEADING.fullmatch(row)) is not None:
            if paragraphs:
                yield title, "\n".join(paragraphs)
            title, paragraphs = heading[1], []
        if row.strip():
            paragraphs.append(row.strip())
    if paragraphs:
        yield title, "\n".join(paragraphs)


def _stretches(text: str, count: int) -> Iterator[tuple[str, str]]:
    """Equal parts of a book, each from the beginning of a paragraph."""
    size = len(text) // max(1, count)
    for index in range(count):
        start = text.find("\n\n", index * size)
        yield f"part {index + 1}", text[max(0, start) : (index + 1) * size].strip()
