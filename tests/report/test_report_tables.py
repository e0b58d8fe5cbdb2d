"""Tables laid out as the paper's, on numbers counted by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qevict.report import floor
from qevict.report.floor import select
from qevict.report.load import Section, join
from qevict.report.render import print_table, to_csv, to_html, to_markdown
from qevict.report.statistics import holm
from qevict.report.tables import Table, difference_table, result_tables
from qevict.report.values import AGREEMENT, GOLD_NLL, SCORE, Metric
from report.made import Folder, samples


def tables(path: Path, metric: Metric = SCORE) -> list[Table]:
    (section,) = join([path]).sections
    return result_tables(section, select(section), metric)


def cells(table: Table, block: str, row: str) -> list[tuple[str, str]]:
    """Text and mark of a row."""
    found = next(b for b in table.blocks if b.title == block)
    return [(entry.text, entry.mark) for entry in next(r for r in found.rows if r.label == row).entries]


def test_layout(run: Path) -> None:
    table, below = tables(run)
    assert [column.name for column in table.columns] == ["S-1", "VT", "Average of 2"]
    assert [block.title for block in table.blocks] == [
        "",
        "Eviction: 20 % budget",
        "Eviction: 10 % budget",
        "Quantization",
    ]
    assert [row.label for row in table.blocks[1].rows] == ["snapkv", "tova", "qevict"]
    assert [row.label for row in table.blocks[3].rows] == ["qevict 10 %", "qevict 20 %", "kivi-2", "kivi-4"]
    assert [(row.memory, row.protected) for row in table.blocks[3].rows] == [
        ("10.0%", "50%"),
        ("20.0%", "25%"),
        ("22.0%", "–"),
        ("33.0%", "–"),
    ]
    assert [column.name for column in below.columns] == ["CWE"]
    assert "no average" in below.title


def test_best_and_second_among_distinct_values(run: Path) -> None:
    table, _ = tables(run)
    assert cells(table, "", "full") == [("100.0", ""), ("100.0", ""), ("100.0", "")]
    group = "Eviction: 20 % budget"
    assert cells(table, group, "snapkv") == [
        ("100.0", "best"),
        ("50.0", "second"),
        ("75.0", "second"),
    ]
    assert cells(table, group, "qevict") == [("100.0", "best"), ("75.0", "best"), ("87.5", "best")]
    assert cells(table, group, "tova") == [("0.0", "second"), ("25.0", ""), ("12.5", "")]
    assert cells(table, "Quantization", "kivi-2") == [("25.0", "second"), ("50.0", "second"), ("37.5", "second")]
    assert cells(table, "Quantization", "kivi-4") == cells(table, "Quantization", "qevict 10 %")


def test_the_lowest_likelihood_loss_is_best(run: Path) -> None:
    table, _ = tables(run, GOLD_NLL)
    assert cells(table, "Eviction: 20 % budget", "qevict")[1] == ("1.000", "best")
    assert cells(table, "Eviction: 20 % budget", "tova")[1] == ("3.000", "")


def test_every_average_has_its_error(run: Path) -> None:
    table, _ = tables(run)
    snapkv = table.blocks[1].rows[0]
    # S-1: all right. VT: two of four, sqrt(.5 * .5 / 3) = .289; the average's is half of it.
    assert [entry.spread for entry in snapkv.entries] == ["±0.0", "±28.9", "±14.4"]


def test_cells_that_cannot_be(folder: Folder) -> None:
    table, *_ = tables(
        folder(
            "run",
            [
                *samples("full", None, [1.0, 1.0]),
                *samples("full", None, [1.0, 1.0], task="ruler/cwe"),
                *samples("snapkv", 0.1, [None, None]),
                *samples("snapkv", 0.1, [1.0, 1.0], task="ruler/cwe"),
                *samples("tova", 0.1, [1.0, None]),
                *samples("tova", 0.1, [0.0, 0.0], task="ruler/cwe"),
                *samples("qevict", 0.1, [0.0, 1.0]),
                *samples("qevict", 0.1, [0.0, 1.0], task="ruler/cwe"),
            ],
        )
    )
    snapkv, tova, qevict = table.blocks[1].rows
    assert [entry.text for entry in snapkv.entries] == ["100.0", "infeasible", "infeasible"]
    assert [(entry.note, entry.mark) for entry in tova.entries] == [("", ""), ("1 of 2", ""), ("partial", "")]
    assert [entry.mark for entry in qevict.entries] == ["second", "best", "best"]  # better means of fewer samples aside


def test_frozen_tasks_come_before_the_runs_own(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (section,) = join([run]).sections
    assert "selected on this run" in select(section).said
    (tmp_path / "floor.json").write_text(json.dumps({"threshold": 0.2, "tasks": {"model": ["ruler/cwe"]}}))
    monkeypatch.setattr(floor, "files", lambda package: tmp_path)
    chosen = select(section)
    assert [task.short for task in chosen.averaged] == ["CWE"]
    assert [task.short for task in chosen.apart] == ["S-1", "VT"]
    assert "frozen list" in chosen.said


def difference(section: Section, against: str = "qevict") -> Table:
    table = difference_table(section, select(section), SCORE, against)
    assert table is not None
    return table


def test_differences_are_paired_and_at_the_same_budget(run: Path) -> None:
    (section,) = join([run]).sections
    table = difference(section)
    assert [block.title for block in table.blocks] == ["minus qevict 20 %", "minus qevict 10 %"]
    assert [row.label for row in table.blocks[0].rows] == ["snapkv", "tova", "kivi-2", "kivi-4"]
    tova = table.blocks[0].rows[1]
    # S-1: 0 of 4 against 4 of 4. VT: wrong where qevict is right in two of four.
    assert [entry.text for entry in tova.entries] == ["-100.0", "-50.0", "-75.0", "-25.0"]
    assert tova.entries[0].spread == "[-100.0, -100.0]"
    assert [entry.mark for entry in tova.entries[:1]] == ["clear"]
    kivi = table.blocks[0].rows[3]
    assert (kivi.entries[0].text, kivi.entries[0].spread, kivi.entries[0].mark) == ("+0.0", "[+0.0, +0.0]", "")


def test_p_of_the_averages_is_corrected_for_all_rows_and_budgets(run: Path) -> None:
    (section,) = join([run]).sections
    table = difference(section)
    assert table.average == 2
    entries = [row.entries[2] for block in table.blocks for row in block.rows]
    assert len(entries) == 8
    corrected = holm([entry.p for entry in entries])
    assert corrected != [entry.p for entry in entries]
    assert [entry.note for entry in entries] == ["p < 0.001" if p < 0.001 else f"p = {p:.3f}" for p in corrected]
    assert all(not row.entries[column].note for block in table.blocks for row in block.rows for column in (0, 1))


def test_differences_only_where_both_have_the_sample(folder: Folder) -> None:
    (section,) = join(
        [
            folder(
                "run",
                [
                    *samples("full", None, [1.0, 1.0, 1.0]),
                    *samples("snapkv", 0.1, [1.0, None, 0.0]),
                    *samples("qevict", 0.1, [0.0, 1.0, 0.0]),
                ],
            )
        ]
    ).sections
    entry = difference(section).blocks[0].rows[0].entries[0]
    assert (entry.text, entry.note) == ("+50.0", "2 of 3")


def test_a_quantiser_or_full_kv_may_be_what_others_are_compared_with(run: Path) -> None:
    (section,) = join([run]).sections
    table = difference(section, "full")
    assert [block.title for block in table.blocks] == ["minus full"]
    assert len(table.blocks[0].rows) == 8
    assert difference_table(section, select(section), SCORE, "nobody") is None


def test_markdown(run: Path) -> None:
    text = to_markdown(tables(run)[0])
    assert "| Method | KV memory | Protected | S-1 | VT | Average of 2 |" in text
    assert "| snapkv | 20.0% | 25% | **100.0** ±0.0 | <u>50.0</u> ±28.9 | <u>75.0</u> ±14.4 |" in text
    assert "selected on this run" in text


def test_csv_holds_unrounded_numbers(run: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(tables(run)[0]))))
    (row,) = [row for row in rows if row["Method"] == "snapkv" and row["Group"] == "Eviction: 20 % budget"]
    assert float(row["VT"]) == 0.5
    assert float(row["VT standard error"]) == pytest.approx(0.28867513)
    assert row["KV memory"] == "20.0%"


def test_html_escapes_and_marks(run: Path) -> None:
    table = tables(run)[0]
    html = to_html(table)
    assert "<strong>100.0</strong><small>±0.0</small>" in html
    assert "<u>75.0</u>" in html
    assert "<" not in to_html(Table(SCORE, "", "<b>", [], [])).replace("<b>", "").split("<h3>")[1].split("</h3>")[0]


@pytest.mark.parametrize("width", [68, 200])
def test_a_narrow_terminal_cuts_nothing(run: Path, width: int) -> None:
    out: Any = io.StringIO()
    table = tables(run)[0]
    print_table(Console(file=out, width=width), table)
    text = out.getvalue()
    assert "…" not in text
    for column in table.columns[:2]:
        assert column.name in text
    assert ("(continued)" in text) == (width == 68)


def test_nothing_measured_makes_no_table(folder: Folder) -> None:
    lines = samples("full", None, [1.0, 1.0], agreement=None)
    assert tables(folder("run", lines), AGREEMENT) == []
