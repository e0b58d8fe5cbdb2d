"""`qevict report` and `qevict reproduce` as a user types them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qevict.bench.runner import ModelSpec
from qevict.cli import app
from qevict.report.build import build
from qevict.report.presets import PRESETS
from qevict.report.reproduce import plan
from report.made import Folder, record
from tiny import tiny_config


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "160"})


def test_report_in_the_terminal(run: Path) -> None:
    result = invoke("report", run)
    assert result.exit_code == 0, result.output
    assert "Eviction: 20 % budget" in result.output
    assert "minus qevict 10 %" in result.output
    assert "Negative log-likelihood" not in result.output
    assert "Negative log-likelihood" in invoke("report", run, "--all").output


def test_report_as_files(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    result = invoke("report", run, "--out", out, "--against", "snapkv")
    assert result.exit_code == 0, result.output
    html = (out / "report.html").read_text()
    assert html.count("<svg") == 2
    assert not re.search(r'(src|href)="(?!#)', html.replace("xlink:href", "")), "the page loads nothing"
    assert "<script" not in html
    assert "prefers-color-scheme: dark" in html
    assert len(html) < 3_000_000
    assert (out / "tables.md").read_text().count("### ") == 8
    assert (out / "tables" / "ruler-1024-query-aware-score.csv").exists()
    assert (out / "tables" / "ruler-1024-query-aware-score-minus-snapkv.csv").exists()
    assert sorted(path.name for path in (out / "pictures").iterdir()) == [
        "needle-depths-query-aware.png",
        "needle-depths-query-aware.svg",
        "ruler-1024-query-aware-pareto.png",
        "ruler-1024-query-aware-pareto.svg",
    ]


def test_report_without_pictures(run: Path, tmp_path: Path) -> None:
    assert invoke("report", run, "--out", tmp_path / "out", "--no-plots").exit_code == 0
    assert not (tmp_path / "out" / "pictures").exists()


def test_what_cannot_be_reported_is_one_line(folder: Folder, tmp_path: Path) -> None:
    runs = [folder("a", [record("full", None, 1.0)]), folder("b", [record("full", None, 1.0)], seed=1)]
    for words, says in (
        ([tmp_path / "nowhere"], "is no folder of results"),
        (runs, "differ in seed"),
        ([runs[0]], "no result of 'qevict'"),
    ):
        result = invoke("report", *words)
        assert result.exit_code == 2
        assert says in " ".join(result.output.split())


def test_nothing_but_full_kv_and_one_method_makes_a_report(folder: Folder) -> None:
    pytest.importorskip("matplotlib")
    report = build([folder("a", [record("full", None, 0.0), record("qevict", 0.2, 0.0)])])
    assert [table.average for table in report.tables if not table.against] == [None, None, None]
    assert report.chapters[0].pictures == []


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_runs_on_any_model(name: str, tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    made = plan(PRESETS[name], ModelSpec(str(tmp_path)), add=["h2o", "snapkv"], data=tmp_path)
    assert [method.label for method in made.methods].count("snapkv") == 1
    assert made.methods[-1].label == "h2o"
    assert len(made.find_tasks()) == {"table2": 13, "fig3": 1}.get(name, 12)
    paper = next(method for method in made.methods if method.label.startswith("qevict-paper"))
    assert paper.settings()["recent_tokens"] == {"table2": 64, "fig3": 0.25}.get(name, 128)


def test_a_preset_is_cut_to_the_models_positions(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.max_position_embeddings = 2048
    config.save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path))
    lengths = {name: plan(preset, spec, data=tmp_path).length for name, preset in PRESETS.items()}
    assert lengths == {"table2": 2048, "table3": 2048 - 700, "table6": 2048 - 700, "fig3": None}
    assert plan(PRESETS["table2"], spec, length=512, data=tmp_path).length == 512
