"""RULER's tasks: lengths, needles, determinism, and answers that a plain program finds in the prompt."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qevict.bench import DataNotFoundError, Sample, Task, find_tasks
from qevict.bench.ruler import qa, variables, wording, wordlists, words

pytest.importorskip("wonderwords")

NAMES = [
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
]
LENGTHS = [512, 1024, 2048]
Generated = Callable[[str, int], list[Sample]]


def task(name: str, data: Path) -> Task:
    (found,) = find_tasks(f"ruler/{name}", data)
    return found


@pytest.fixture(scope="module")
def generated(tokenizer: Any, made_data: Path) -> Generated:
    """Two samples of a task at a length, generated once."""
    known: dict[tuple[str, int], list[Sample]] = {}

    def get(name: str, length: int) -> list[Sample]:
        if (name, length) not in known:
            known[name, length] = list(task(name, made_data).samples(tokenizer, 2, length=length, seed=3))
        return known[name, length]

    return get


def tokens(tokenizer: Any, sample: Sample) -> int:
    """The definition: what the chat template makes of the turn, the answer prefix, and what is to be generated."""
    (before, after) = tokenizer.apply_chat_template(
        [{"role": "user", "content": "@@@"}], tokenize=False, add_generation_prompt=True
    ).split("@@@")
    texts = [before + sample.context, sample.question + after + sample.answer_prefix]
    return sum(len(tokenizer(text).input_ids) for text in texts) + sample.max_new_tokens


def test_the_benchmark_has_its_thirteen_tasks(made_data: Path) -> None:
    assert [found.name for found in find_tasks("ruler", made_data)] == [f"ruler/{name}" for name in NAMES]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_met_within_two_per_cent(generated: Generated, tokenizer: Any, name: str, length: int) -> None:
    samples = generated(name, length)
    assert len(samples) == 2
    for sample in samples:
        assert 0.98 * length <= tokens(tokenizer, sample) <= length


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_program_finds_the_answers(generated: Generated, made_data: Path, name: str, length: int) -> None:
    for sample in generated(name, length):
        found = solve(name, sample)
        assert Counter(found) == Counter(sample.answers)
        ruler = task(name, made_data)
        assert ruler.score(f"They are {', '.join(found)}.".upper(), sample) == 1
        assert ruler.score("", sample) == 0


def solve(name: str, sample: Sample) -> list[str]:
    family = name.split("_")[0]
    return {"niah": solve_needles, "vt": solve_variables, "cwe": solve_common, "fwe": solve_frequent, "qa": solve_qa}[
        family
    ](sample)


def solve_needles(sample: Sample) -> list[str]:
    hidden = re.findall(r"One of the special magic (?:numbers|uuids) for (.+?) is: (\S+)\.", sample.context)
    (query,) = re.findall(r" for (.+) mentioned in the provided text\?$", sample.question)
    asked = re.split(r", and |, ", query)
    return [value for wanted in asked for key, value in hidden if key == wanted]


def solve_variables(sample: Sample) -> list[str]:
    own = sample.context[sample.context.rindex("Memorize and track") :]
    (value,) = re.findall(r"the value (\d+) in the text above", sample.question)
    holders = re.findall(rf"VAR (\w+) = {value}\b", own)
    for holder in holders:
        holders += re.findall(rf"VAR (\w+) = VAR {holder}\b", own)
    return holders


def solve_common(sample: Sample) -> list[str]:
    own = sample.context[sample.context.rindex("Below is a numbered list") :].partition("\n")[2].strip()
    ranked = Counter(re.split(r"(?:^| )\d+\. ", own)[1:]).most_common()
    assert ranked[9][1] > ranked[10][1]
    return [word for word, _ in ranked[:10]]


def solve_frequent(sample: Sample) -> list[str]:
    own = sample.context.partition("coded words. ")[2]
    ranked = [(word, n) for word, n in Counter(own.split()).most_common(5) if word != "..."]
    assert ranked[2][1] > ranked[3][1]
    return [word for word, _ in ranked[:3]]


def solve_qa(sample: Sample) -> list[str]:
    (place,) = re.findall(r"keeps (?:both )?(\S+ \S+?)(?:\?| and)", sample.question)
    return re.findall(rf"The keeper of {place} is (\w+)\.", sample.context)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("name", "needles", "answers"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multikey_2", None, 1),
        ("niah_multikey_3", None, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_are_there_once(
    generated: Generated, name: str, needles: int | None, answers: int, length: int
) -> None:
    for sample in generated(name, length):
        text = sample.context
        hidden = re.findall(r"One of the special magic \w+ for .+? is: \S+\.", text)
        assert len(hidden) == len(set(hidden)) == (needles or len(hidden))
        assert len(set(sample.answers)) == len(sample.answers) == answers
        assert all(text.count(answer) == 1 for answer in sample.answers)
        assert not any(answer in sample.question + sample.answer_prefix for answer in sample.answers)
        assert all(0 <= depth < 1 for depth in sample.extra["depths"])
        haystack = text.partition("\n")[2].removesuffix("\n")
        for depth, answer in zip(sample.extra["depths"], sample.answers, strict=True):
            needle = haystack.rindex("One of the special", 0, haystack.index(answer))
            assert depth == pytest.approx(needle / len(haystack))


def test_one_answer_is_asked_for_in_the_singular(generated: Generated) -> None:
    (one, *_), (four, *_) = generated("niah_single_1", 512), generated("niah_multivalue", 512)
    assert one.context.startswith("A special magic number is hidden within")
    assert one.question.startswith("What is the special magic number for")
    assert one.answer_prefix.endswith("mentioned in the provided text is")
    assert four.context.startswith("Some special magic numbers are hidden within")
    assert four.question.startswith("What are all the special magic numbers for")
    assert four.answer_prefix.endswith("mentioned in the provided text are")


@pytest.mark.parametrize("name", NAMES)
def test_samples_depend_on_the_seed_alone(tokenizer: Any, made_data: Path, name: str) -> None:
    ruler = task(name, made_data)
    random.seed(0)
    once = list(ruler.samples(tokenizer, 2, length=600, seed=1))
    random.seed(1)
    assert list(ruler.samples(tokenizer, 3, length=600, seed=1))[:2] == once
    other = list(ruler.samples(tokenizer, 2, length=600, seed=2))
    assert len({sample.id for sample in once + other}) == 4
    assert len({sample.context for sample in once + other}) == 4


def test_templates_are_the_benchmarks() -> None:
    """First digits of SHA-256 of template and answer prefix in RULER's scripts/data/synthetic/constants.py."""
    ours = {
        "d285336585494ddc": _whole(wording.NEEDLES).replace("{kind}", "{type_needle_v}"),
        "2cb3a86e01be9650": variables.CONTEXT + variables.QUESTION + variables.ANSWER_PREFIX,
        "c2426f94a28fc3a2": words.COMMON_CONTEXT + words.COMMON_QUESTION + words.COMMON_ANSWER_PREFIX,
        "0bfad42dcc7b1cff": _whole(wording.FREQUENT_WORDS),
        "15017066bdc1a167": qa.CONTEXT + qa.QUESTION + qa.ANSWER_PREFIX,
    }
    for digest, template in ours.items():
        assert hashlib.sha256(template.encode()).hexdigest().startswith(digest)


def _whole(templates: wording.Wording) -> str:
    return templates.context + templates.question + templates.answer_prefix


REWORDED = ["niah_single_1", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multivalue", "fwe"]


@pytest.mark.parametrize("name", REWORDED)
def test_reworded_tasks_ask_for_the_same_in_other_words(tokenizer: Any, made_data: Path, name: str) -> None:
    (found,) = find_tasks(f"reworded/{name}", made_data)
    for sample in found.samples(tokenizer, 2, length=1024, seed=3):
        assert 0.98 * 1024 <= tokens(tokenizer, sample) <= 1024
        if name == "fwe":
            (own,) = re.findall(r"several times:\n\n(.*)\n\nThat was all\.\n$", sample.context)
            counts = Counter(word for word in own.split() if word != "...")
            assert [word for word, _ in counts.most_common(3)] == list(sample.answers)
        else:
            hidden = re.findall(r"Note that the locker (?:numbers|uuids) of (\S+) include (\S+)\.", sample.context)
            (query,) = re.findall(r" give for (.+)\?$", sample.question)
            asked = re.split(r", and |, ", query)
            found_values = [value for wanted in asked for key, value in hidden if key == wanted]
            assert sorted(found_values) == sorted(sample.answers)
            assert sample.answer_prefix.endswith(" are" if len(sample.answers) > 1 else " is")
        (same,) = find_tasks(f"ruler/{name}", made_data)
        theirs = next(iter(same.samples(tokenizer, 1, length=1024, seed=3)))
        assert not set(sample.question.split(". ")) & set(theirs.question.split(". "))


def test_variable_tracking_comes_with_a_solved_example(generated: Generated, tokenizer: Any) -> None:
    for length, limit in (512, 512 // 3), (2048, 500):
        for sample in generated("vt", length):
            example = sample.context[: sample.context.rindex("Memorize and track")]
            size = len(tokenizer(example).input_ids)
            assert limit - 30 < size <= limit
            (solution,) = re.findall(r"they are: +([A-Z ]+)\n\n$", example)
            (value,) = re.findall(r"the value (\d+) in the text above", example)
            assert (
                solve_variables(Sample("", "", "", example, f"the value {value} in the text above", "", (), 0))
                == solution.split()
            )
            assert value not in sample.question


@pytest.mark.parametrize(
    ("length", "common", "uncommon", "solved"), [(512, 4, 1, 0), (1024, 6, 1, 1), (4096, 30, 3, 1)]
)
def test_common_words_repeat_as_the_length_allows(
    tokenizer: Any, made_data: Path, length: int, common: int, uncommon: int, solved: int
) -> None:
    (sample,) = task("cwe", made_data).samples(tokenizer, 1, length=length, seed=0)
    own = sample.context[sample.context.rindex("Below is a numbered list") :].partition("\n")[2].strip()
    counts = Counter(re.split(r"(?:^| )\d+\. ", own)[1:])
    assert sorted(set(counts.values())) == [uncommon, common]
    assert sample.context.count(sample.answer_prefix) == solved


def test_own_paragraphs_come_once_and_distractors_fill_the_rest(generated: Generated) -> None:
    for name, own in ("qa_1", 1), ("qa_2", 2):
        for sample in generated(name, 2048):
            documents = re.split(r"\n\n?Document \d+:\n", sample.context)[1:]
            assert len(documents) > own
            assert sum(sample.answers[0] in document for document in documents) == 1
            assert re.findall(r"Document (\d+):", sample.context) == [str(n + 1) for n in range(len(documents))]


def test_nearest_distractors_come_first(tokenizer: Any, made_data: Path) -> None:
    (sample,) = task("qa_1", made_data).samples(tokenizer, 1, length=1024, seed=0)
    article = sample.document.removeprefix("Article ")
    halls = re.findall(r"The keeper of hall (\d+)-\d is", sample.context)
    assert halls.count(article) == 4  # its own paragraph, and all of the others in its article
    assert len(set(halls)) > 1


def test_questions_that_do_not_fit_are_passed_over(tokenizer: Any, made_data: Path) -> None:
    """Two own paragraphs of 40 words fit; the ten that the data set gives do not."""
    samples = list(task("qa_2", made_data).samples(tokenizer, 100, length=512, seed=0))
    assert len({sample.id for sample in samples}) == len(samples) == 8  # all that there are
    assert all("Document 10" not in sample.context for sample in samples)


def test_lengths_that_cannot_be_are_refused(tokenizer: Any, made_data: Path) -> None:
    for length in None, 511:
        with pytest.raises(ValueError, match="512 tokens at least"):
            next(iter(task("vt", made_data).samples(tokenizer, 1, length=length, seed=0)))


def test_missing_data_is_named(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QEVICT_DATA", raising=False)
    wanted = {"niah_single_2": "haystack.*PaulGraham", "qa_1": r"squad\*.json.*dev-v2.0.json", "qa_2": "hotpotqa.*dev"}
    for name, message in wanted.items():
        for data in None, tmp_path:
            with pytest.raises(DataNotFoundError, match=message):
                next(iter(find_tasks(f"ruler/{name}", data)[0].samples(tokenizer, 1, length=512, seed=0)))


def test_missing_words_say_what_to_install(tokenizer: Any, made_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wordlists.all_words.cache_clear()
    wordlists._read.cache_clear()
    with pytest.raises(RuntimeError, match=r"qevict\[bench\]"):
        next(iter(task("cwe", made_data).samples(tokenizer, 1, length=512, seed=0)))


def test_real_paragraphs(real_data: Path, tokenizer: Any) -> None:
    for name in "qa_1", "qa_2", "niah_multikey_1":
        for sample in task(name, real_data).samples(tokenizer, 3, length=1024, seed=0):
            assert 0.98 * 1024 <= tokens(tokenizer, sample) <= 1024
            if name == "qa_1":
                assert all(answer in sample.context for answer in sample.answers)
