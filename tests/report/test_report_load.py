"""Joining runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qevict.report.load import Point, is_qevict, join
from report.made import Folder, record, samples


def test_methods_of_several_runs_stand_in_one_section(folder: Folder) -> None:
    joined = join(
        [
            folder("a", [record("full", None, 1.0), record("snapkv", 0.2, 0.5)]),
            folder("b", [record("qevict", 0.2, 1.0), record("kivi-2", None, 0.0)]),
        ]
    )
    (section,) = joined.sections
    assert section.points == [Point("full", None), Point("snapkv", 0.2), Point("qevict", 0.2), Point("kivi-2", None)]
    assert section.evictors(0.2) == [Point("snapkv", 0.2), Point("qevict", 0.2)]
    assert section.quantisers == [Point("kivi-2", None)]
    assert section.title == "model, RULER, 1,024 tokens, query-aware, 1 samples a task"


def test_protocols_lengths_and_benchmarks_become_sections(folder: Folder) -> None:
    joined = join(
        [
            folder("a", [record("full", None, 1.0), record("full", None, 1.0, task="longbench/trec")]),
            folder("b", [record("full", None, 1.0)], protocol="query-agnostic"),
            folder("c", [record("full", None, 1.0, length=2048)], length=2048),
        ]
    )
    assert [(s.suite, s.length, s.protocol) for s in joined.sections] == [
        ("longbench", 1024, "query-aware"),
        ("ruler", 1024, "query-agnostic"),
        ("ruler", 1024, "query-aware"),
        ("ruler", 2048, "query-aware"),
    ]


@pytest.mark.parametrize("key", ["model", "dtype", "store_dtype", "scope", "seed", "first_token"])
def test_runs_that_do_not_match_are_refused_by_the_keys_name(folder: Folder, key: str) -> None:
    runs = [folder("a", [record("full", None, 1.0)]), folder("b", [record("full", None, 1.0)], **{key: "other"})]
    with pytest.raises(ValueError, match=rf"differ in {key} \(.* and 'other'\)"):
        join(runs)


def test_a_method_with_other_settings_is_refused(folder: Folder) -> None:
    runs = [
        folder("a", [record("full", None, 1.0)]),
        folder("b", [record("full", None, 1.0)], methods={"snapkv": {"window": 64}}),
    ]
    with pytest.raises(ValueError, match="snapkv has other settings"):
        join(runs)


def test_the_run_named_first_counts_and_the_reader_is_told(folder: Folder) -> None:
    a = folder("a", samples("full", None, [1.0, 0.0]))
    b = folder("b", samples("full", None, [1.0, 1.0]), versions={"torch": "2.6"})
    joined = join([a, b])
    assert [r.score for r in joined.sections[0].records] == [1.0, 0.0]
    assert joined.notes == [
        "the runs differ in versions; see each run's manifest",
        "2 cells are in more than one run, 1 of them with another score; the run named first counts",
    ]
    assert join([a, a]).notes == []


def test_a_line_that_is_still_being_written_is_left_out(folder: Folder) -> None:
    path = folder("a", samples("full", None, [1.0, 0.0]))
    with (path / "results.jsonl").open("a") as file:
        file.write(json.dumps(record("full", None, 1.0, sample="9"))[:-5])
    assert len(join([path]).sections[0].records) == 2


def test_what_is_no_run_is_said(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder of results"):
        join([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no result in"):
        join([folder("empty", [])])
    with pytest.raises(ValueError, match="a record without document, method, sample, task"):
        join([folder("other", [{"budget": 1, "status": "ok"}])])


def test_qevict_by_any_of_its_names() -> None:
    assert all(map(is_qevict, ["qevict", "qevict-paper", "qevict[bits=2]", "qevict-paper[recent_tokens=64]"]))
    assert not any(map(is_qevict, ["snapkv", "qevictor", "qprune:snapkv+kivi-4"]))


def test_runs_that_generated_different_numbers_of_tokens_are_not_compared(folder: Folder) -> None:
    """Of one benchmark; others may have limits of their own."""
    few = folder("few", [record("full", None, 1.0)], new_tokens=48)
    many = folder("many", [record("full", None, 1.0, task="longbench/trec")], new_tokens=64)
    assert [section.title for section in join([few, many]).sections] == [
        "model, LongBench, 1,024 tokens, query-aware, 1 samples a task, at most 64 new tokens",
        "model, RULER, 1,024 tokens, query-aware, 1 samples a task, at most 48 new tokens",
    ]
    with pytest.raises(ValueError, match=r"differ in new_tokens \(48 and None\)"):
        join([few, folder("own", [record("snapkv", 0.2, 1.0)])])
