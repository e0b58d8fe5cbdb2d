"""Studies: taken up where they stopped, their tables, their pictures, the commands."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_study import PREFILL, STEPS, Words, article, tight
from typer.testing import CliRunner

from qevict.bench.results import RECORDS
from qevict.bench.runner import ModelSpec
from qevict.cli import app
from qevict.diagnostics import ablations, commands
from qevict.diagnostics.ablations import Ablation, carry_out, table
from qevict.diagnostics.articles import articles, from_files
from qevict.diagnostics.conditions import one_way
from qevict.diagnostics.intervals import estimate, paired
from qevict.diagnostics.show import tables, write_page, write_pictures, write_tables
from qevict.diagnostics.study import Study, StudySettings
from qevict.diagnostics.tables import Table
from tiny import tiny_model

SETTINGS = StudySettings("tiny", PREFILL, STEPS, forced=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def study(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Study:
    made = Study.at(tmp_path_factory.mktemp("study"), SETTINGS)
    condition = tight("R3", ranking="decayed", prompt_queries=4)
    assert made.run(model, [article(0), article(1), article(2)], [condition, one_way(condition)]) == {}
    return made


def test_what_is_done_is_not_done_again(model: Any, study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, condition = [article(0), article(1), article(2)], tight("R3", ranking="decayed", prompt_queries=4)
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", lambda *args, **settings: pytest.fail("a forward was run"))
        study.run(model, texts, [condition, one_way(condition)])
    study.run(model, texts[:1], [tight("more", budget=40)])
    assert list(study.summaries()[0]) == ["R3", "R3 one-way", "more"]
    assert list(study.summaries()[1]) == ["R3", "R3 one-way"]


def test_another_studys_folder_is_refused(model: Any, study: Study) -> None:
    with pytest.raises(ValueError, match="a study with another new"):
        Study.at(study.folder, StudySettings("tiny", PREFILL, STEPS + 1, forced=True))
    with pytest.raises(ValueError, match="trace of another text"):
        study.run(model, [article(7)], [tight("other")])


def test_traces_but_the_first_can_be_dropped(model: Any, tmp_path: Path) -> None:
    study = Study.at(tmp_path, SETTINGS)
    study.run(model, [article(0), article(1)], [tight()], keep_traces=False)
    assert study.trace(0).header.title == "article 0"
    assert not (study.article(1) / "trace").exists()
    assert len(study.summaries()) == 2


def test_tables_pictures_and_page_of_a_study(study: Study) -> None:
    made = tables(study)
    assert list(made) == ["table14", "fig1", "table15", "table16", "table18", "transitions"]
    assert all(len(row) == len(table.columns) for table in made.values() for row in table.rows)
    names = [row[0] for row in made["table14"].rows]
    assert names == ["R3", "R3, full precision only", "R3 one-way", "R3 one-way, full precision only"]
    transitions = {row[0]: row for row in made["table18"].rows}["R3: Q to F transitions, all layers"]
    assert transitions[1] == "0 ± 0"
    text = write_tables(study, list(made.values())).read_text(encoding="utf-8")
    assert "0.9824" in text, "the paper's numbers stand beside"
    assert write_page(study, Words()).stat().st_size < 300_000
    pytest.importorskip("matplotlib")
    drawn = {path.stem for path in write_pictures(study)}
    assert {"shares", "fmm", "fmm-methods", "lir", "transitions", "tiers-R3-layer-1"} <= drawn
    assert all((study.folder / f"{name}.svg").stat().st_size for name in drawn)


def test_intervals_count_articles() -> None:
    got = estimate([1.0, 2.0, 3.0])
    assert (got.mean, got.articles) == (2.0, 3)
    assert got.half == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(estimate([1.0]).half)
    assert estimate([1.0, math.nan]).articles == 1
    assert math.isnan(estimate([math.nan]).mean)
    assert paired([1.0, 5.0], [2.0, 6.0])[:2] == (1.0, 0.0)
    assert estimate([0.5]).text(1, 100.0) == "50.0"


def test_diagnose_and_reproduce_from_the_command_line(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(commands, "_load", lambda name: (model, Words()))
    text = tmp_path / "story.txt"
    text.write_text(" ".join(f"word{index * index % 97}" for index in range(300)), encoding="utf-8")
    out = tmp_path / "out"
    runner = CliRunner()
    arguments = ["diagnose", "--text", str(text), "--prefill", "128", "--generate", "16", "--out", str(out)]
    done = runner.invoke(app, [*arguments, "--conditions", "R2,R3,h2o", "--budget", "0.5"])
    assert done.exit_code == 0, done.output
    assert "Future Missed Mass" in done.output
    assert {"tables.md", "page.html", "fmm.png", "shares.svg"} <= {path.name for path in out.iterdir()}
    assert list(json.loads((out / "article-00" / "summary.json").read_text())) == ["R2", "R3", "h2o"]

    short = runner.invoke(app, [*arguments[:3], "--prefill", "4000", "--out", str(tmp_path / "other")])
    assert short.exit_code == 2
    assert "the trace needs 4000" in short.output
    assert "fig1" in runner.invoke(app, ["reproduce", "--help"]).output


def test_articles_from_a_data_folder(tmp_path: Path) -> None:
    rows = ["", " = First = ", "", " a b c d e f ", " = = Part = = ", " g h ", " = Second = ", " i j k l m n o p q r "]
    lines = [json.dumps({"text": row}) for row in rows]
    (tmp_path / "wikitext2_test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = articles("wikitext", Words(), 8, 2, tmp_path)
    assert [(one.title, len(one.tokens)) for one in found] == [("First", 8), ("Second", 8)]
    with pytest.raises(ValueError, match="1 texts of at least 15 tokens; 2 were asked for"):
        articles("wikitext", Words(), 15, 2, tmp_path)
    with pytest.raises(ValueError, match="no source 'moon'"):
        articles("moon", Words(), 8, 2, tmp_path)
    book = "\n\n".join(f"Chapter {part}\n" + "word " * 40 for part in range(8))
    (tmp_path / "haystack.txt").write_text(book, encoding="utf-8")
    assert [one.title for one in articles("book", Words(), 30, 3, tmp_path)] == ["part 1", "part 2", "part 3"]
    with pytest.raises(ValueError, match="cannot read"):
        from_files([tmp_path / "missing.txt"], Words(), 8)


def test_ablations_vary_one_setting() -> None:
    kinds = {name: Ablation(name).variants() for name in ("window", "fraction", "bits", "ranking", "promotion")}
    assert [method.config.window_size for method in kinds["window"]] == [4, 8, 16, 32]
    assert {method.config.quantized_fraction for method in kinds["window"]} == {0.7}
    assert [method.config.quantized_fraction for method in kinds["fraction"]] == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert [method.config.bits for method in kinds["bits"]] == [2, 4]
    rankings = ["cumulative", "decayed", "decayed:0.5", "p-norm", "key-norm"]
    assert [method.config.ranking for method in kinds["ranking"]] == rankings
    assert Ablation("ranking", "qevict").compared_with == "qevict-ranking=decayed:0.5"
    assert Ablation("ranking").compared_with == "qevict-ranking=cumulative"
    assert [method.label for method in kinds["promotion"]] == ["qevict-promotion=True", "qevict-promotion=False"]
    assert [one.config.score_steps for one in Ablation("score-steps", "qevict").variants()] == ["every", "event"]
    for wrong in ({"name": "colour"}, {"name": "bits", "measures": ("taste",)}):
        with pytest.raises(ValueError, match="there are"):
            Ablation(**wrong)
    with pytest.raises(ValueError, match="starts from"):
        Ablation("bits", base="snapkv").variants()


def test_an_ablation_has_a_row_for_each_value_and_is_taken_up_again(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(f"word{index * index % 997}" for index in range(4000))
    (tmp_path / "wikitext2_test.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    (tmp_path / "haystack.txt").write_text(text[::-1], encoding="utf-8")
    plan = Ablation("bits", budgets=(0.5,), measures=("fidelity",), texts=1, prompt=128, forced=8, data=tmp_path)
    table = carry_out(plan, model, Words(), ModelSpec("tiny"), tmp_path / "out")
    assert table.columns == ("bits", "KL, prose", "KL, copy")
    assert [row[0] for row in table.rows] == ["bits=2, 50 %", "bits=4, 50 %"]
    assert all(float(cell.split()[0]) > 0 for row in table.rows for cell in row[1:])
    monkeypatch.setattr(type(model), "forward", lambda *args, **settings: pytest.fail("a forward was run"))
    assert carry_out(plan, model, Words(), ModelSpec("tiny"), tmp_path / "out") == table


def test_an_ablation_runs_tasks_of_the_length_and_answers_asked_for(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(ablations, "run", lambda plan, *rest: ran.append(plan))
    given: dict[str, Any] = {"samples": 3, "length": 300, "new_tokens": 7, "seed": 2}
    plan = Ablation("bits", measures=("ruler", "longbench"), **given)
    carry_out(plan, model, Words(), ModelSpec("tiny"), tmp_path)
    assert [one.tasks[0] for one in ran] == ["ruler", "longbench/narrativeqa"]
    assert all(getattr(one, name) == value for one in ran for name, value in given.items())


def test_ablate_from_the_command_line(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(plan: Ablation, *rest: Any) -> Table:
        asked.append(plan)
        return Table("Ablation", ("bits", "KL"), [("bits=2", "0.5")])

    monkeypatch.setattr(commands, "_load", lambda name: (model, Words()))
    monkeypatch.setattr(ablations, "carry_out", measured)
    options = "--budgets 5%,0.1 --on fidelity --texts 2 --prompt 64 --forced 16 --samples 3 --length 300 --new-tokens 7"
    (tmp_path / "out").mkdir()
    done = CliRunner().invoke(app, ["ablate", "bits", "--out", str(tmp_path / "out"), *options.split()])
    assert done.exit_code == 0, done.output
    wanted = Ablation("bits", "qevict-paper", (0.05, 0.1), ("fidelity",), 2, 64, 16, 3, 300, 7)
    assert asked == [dataclasses.replace(wanted, data=asked[0].data)]
    assert (tmp_path / "out" / "table.md").read_text(encoding="utf-8").startswith("**Ablation**")

    wrong = CliRunner().invoke(app, ["ablate", "bits", "--out", str(tmp_path), "--on", "taste"])
    assert wrong.exit_code == 2
    assert "cannot measure taste" in wrong.output


def test_variants_are_compared_on_the_samples_that_both_have(tmp_path: Path) -> None:
    def record(value: int, sample: str, score: float | None) -> str:
        fields = {"task": "ruler/vt", "sample": sample, "document": sample, "gold_nll": None, "score": score}
        ok = {"status": "infeasible" if score is None else "ok", "method": f"qevict-window_size={value}", "budget": 0.1}
        return json.dumps(fields | ok)

    scores: dict[tuple[int, str], float | None] = {
        (4, "a"): 0.3, (4, "b"): 0.5, (8, "a"): 0.2, (8, "b"): 0.2, (16, "a"): 0.9, (32, "a"): None,
    }  # fmt: skip
    (tmp_path / "ruler").mkdir()
    lines = [record(value, sample, score) for (value, sample), score in scores.items()]
    (tmp_path / "ruler" / RECORDS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    made = table(Ablation("window", budgets=(0.1, 0.2), measures=("ruler",)), tmp_path)
    assert "difference from window_size=8" in made.title
    cells = {row[0]: row[1] for row in made.rows}
    assert cells["window_size=8, 10 %"] == "20.0 ± 0.0"
    assert cells["window_size=4, 10 %"] == "40.0 (+20.0 ± 10.0)", "+10 and +30"
    assert cells["window_size=16, 10 %"] == "90.0 (+70.0)", "on the sample that both have"
    assert cells["window_size=32, 10 %"] == "infeasible"
    assert cells["window_size=8, 20 %"] == "–", "not measured"
