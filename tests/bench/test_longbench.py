"""LongBench: the official prompts letter by letter, cut in the middle as the official script cuts them, and scores."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from qevict.bench import DataNotFoundError, Sample, find_tasks
from qevict.bench.longbench import official_settings, truncate_middle

# First digits of SHA-256 of each prompt in LongBench/config/dataset2prompt.json, and dataset2maxlen.json.
OFFICIAL = {
    "narrativeqa": ("aada7ed24b06abac", 128),
    "qasper": ("0fbdd123fe7f83d6", 128),
    "multifieldqa_en": ("20b4666a2de8a1f7", 64),
    "hotpotqa": ("9ec4ae308865bd0c", 32),
    "2wikimqa": ("9ec4ae308865bd0c", 32),
    "musique": ("9ec4ae308865bd0c", 32),
    "gov_report": ("91c25d585b189ced", 512),
    "qmsum": ("dca23b678fe0183b", 512),
    "multi_news": ("2af3f28c40b902e6", 512),
    "trec": ("0eff8bebdba99d91", 64),
    "triviaqa": ("00a802e6377e72fc", 32),
    "samsum": ("a68d884234907eef", 128),
    "passage_count": ("986550b6c61009c6", 32),
    "passage_retrieval_en": ("39b96b7fa52bdd2a", 32),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One row for each data set; the text has what a template could trip over."""
    (tmp_path / "longbench").mkdir()
    for dataset in OFFICIAL:
        row = {
            "context": f"A text of {dataset} with {{braces}}, “quotes” and\n\n{'many words, ' * 300}end.\n",
            "input": "What is {it}?",
            "answers": ["Paragraph 7"] if dataset == "passage_retrieval_en" else ["City", "7"],
            "all_classes": ["City", "Date"] if dataset == "trec" else None,
            "_id": None if dataset == "qmsum" else f"id-{dataset}",
        }
        (tmp_path / "longbench" / f"{dataset}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return tmp_path


def one(folder: Path | None, tokenizer: Any, dataset: str, length: int | None = None) -> Sample:
    (task,) = find_tasks(f"longbench/{dataset}", folder)
    (sample,) = task.samples(tokenizer, 5, length=length, seed=0)
    return sample


def test_settings_are_the_official_ones() -> None:
    ours = official_settings()
    assert list(ours) == list(OFFICIAL)
    for dataset, (digest, max_new_tokens) in OFFICIAL.items():
        prompt = ours[dataset]["context"] + ours[dataset]["question"]
        assert hashlib.sha256(prompt.encode()).hexdigest().startswith(digest)
        assert ours[dataset]["max_new_tokens"] == max_new_tokens
        assert "{context}" in ours[dataset]["context"]
        assert "{input}" not in ours[dataset]["context"]


@pytest.mark.parametrize("dataset", OFFICIAL)
def test_the_prompt_is_the_official_one(folder: Path, tokenizer: Any, dataset: str) -> None:
    row = json.loads((folder / "longbench" / f"{dataset}.jsonl").read_text(encoding="utf-8"))
    template = official_settings()[dataset]["context"] + official_settings()[dataset]["question"]
    whole = template.replace("{input}", row["input"]).replace("{context}", row["context"])
    sample = one(folder, tokenizer, dataset)
    assert sample.context + sample.question == whole
    assert (row["input"] in sample.question) == ("{input}" in template)
    assert sample.answer_prefix == ""
    assert sample.chat == (dataset not in ("trec", "triviaqa", "samsum"))

    ids = tokenizer(whole).input_ids
    cut = one(folder, tokenizer, dataset, length=301)
    assert cut.context + cut.question == tokenizer.decode(ids[:150]) + tokenizer.decode(ids[-150:])
    assert cut.question == sample.question


def test_a_question_that_is_cut_itself_is_divided_at_the_cut(tokenizer: Any) -> None:
    question = "Who came first, who came second, and who came last of all the people that came?"
    ids = tokenizer("Some context. " + question).input_ids
    context, rest = truncate_middle(tokenizer, "Some context. ", question, 8)
    assert (context, rest) == (tokenizer.decode(ids[:4]), tokenizer.decode(ids[-4:]))
    assert truncate_middle(tokenizer, "Some context. ", question, len(ids)) == ("Some context. ", question)
    with pytest.raises(ValueError, match="greater length"):
        truncate_middle(tokenizer, "Some context. ", question, 1)


@pytest.mark.parametrize(
    ("dataset", "prediction", "score"),
    [
        ("qasper", "The city.\nMore words", 0.5),  # not a few-shot task: all of it counts
        ("qasper", "7", 1),  # the best of the gold answers
        ("triviaqa", "\nThe city.\nMore words", 1),
        ("triviaqa", "", 0),
        ("trec", "City\nType: Date", 1),
        ("trec", "City or Date", 0.5),
        ("samsum", "City\nDialogue: City City", 1),
        ("gov_report", "City", 1),
        ("gov_report", "", 0),
        ("passage_count", "7, or 8", 0.5),
        ("passage_retrieval_en", "Paragraph 7", 1),
        ("passage_retrieval_en", "Paragraph 17", 0),
    ],
)
def test_scores(folder: Path, tokenizer: Any, dataset: str, prediction: str, score: float) -> None:
    pytest.importorskip("rouge")
    (task,) = find_tasks(f"longbench/{dataset}", folder)
    assert task.score(prediction, one(folder, tokenizer, dataset)) == pytest.approx(score, abs=1e-6)


def test_few_shot_answers_end_with_their_line(folder: Path, tokenizer: Any) -> None:
    sample = one(folder, tokenizer, "samsum")
    assert not sample.finished("\n\nCity")
    assert sample.finished("\n\nCity\n")
    assert not one(folder, tokenizer, "qasper").finished("City\n")


def test_ids(folder: Path, tokenizer: Any) -> None:
    assert one(folder, tokenizer, "qasper").id == "id-qasper"
    assert one(folder, tokenizer, "qmsum").id == "0"
    assert one(folder, tokenizer, "trec").extra == {"all_classes": ["City", "Date"]}


def test_a_missing_data_set_is_named(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"longbench/qasper.jsonl.*huggingface.co/datasets/THUDM/LongBench"):
        one(tmp_path, tokenizer, "qasper")


def test_without_a_folder_data_comes_from_the_hub_s_cache(
    folder: Path, tokenizer: Any, hub_cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QEVICT_DATA", raising=False)
    repository = hub_cache / "datasets--THUDM--LongBench"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    with zipfile.ZipFile(repository / "snapshots" / ("0" * 40) / "data.zip", "w") as archive:
        archive.write(folder / "longbench" / "qasper.jsonl", "data/qasper.jsonl")
    assert one(None, tokenizer, "qasper") == one(folder, tokenizer, "qasper")
    with pytest.raises(DataNotFoundError, match=r"no data/trec\.jsonl in data\.zip of THUDM/LongBench"):
        one(None, tokenizer, "trec")


def test_without_a_folder_and_a_network_both_are_named(
    tokenizer: Any, hub_cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QEVICT_DATA", raising=False)
    with pytest.raises(DataNotFoundError, match=r"No data folder.*data\.zip of https://\S*/THUDM/LongBench.*cache"):
        one(None, tokenizer, "qasper")


@pytest.mark.parametrize("dataset", OFFICIAL)
def test_real_rows(real_data: Path, tokenizer: Any, dataset: str) -> None:
    """The gold answer has the best score there is; ids are unique; the same seed gives the same order."""
    (task,) = find_tasks(f"longbench/{dataset}", real_data)
    samples = list(task.samples(tokenizer, 3, length=2048, seed=0))
    assert samples == list(task.samples(tokenizer, 3, length=2048, seed=0))
    assert len({sample.id for sample in samples}) == len(samples) >= 2
    for sample in samples:
        assert len(tokenizer(sample.context + sample.question).input_ids) <= 2048 + 4  # the halves may join differently
        assert sample.question
        if dataset not in ("qmsum", "gov_report", "multi_news", "samsum"):
            assert task.score(sample.answers[0], sample) == 1
        assert task.score("", sample) == 0
