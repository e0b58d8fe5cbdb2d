"""The small tables at the end of a fidelity or drift run."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console

from qevict.bench import drift_summary, fidelity_summary
from qevict.bench.study_tables import NO_CLAIM, drift_sheets, fidelity_sheets


def step_record(method: str, text: str, kl: list[float], **fields: Any) -> dict[str, Any]:
    return {
        "task": "fidelity/prose",
        "sample": text,
        "document": text,
        "method": method,
        "budget": None if method == "full" else 0.2,
        "status": "ok",
        "reason": None,
        "kl": kl,
        "nll": [math.log(4.0)] * len(kl),
        "same": "1" * len(kl),
        "agreement": None,
        "divergence": None,
        "ratio": 0.2,
    } | fields


def turn_record(method: str, sample: str, questions: tuple[int, int], scores: tuple[float, float]) -> dict[str, Any]:
    turns = zip(questions, scores, strict=True)
    return {
        "task": "drift/facts",
        "sample": sample,
        "document": sample.split("/")[0],
        "method": method,
        "budget": 0.1,
        "status": "ok",
        "reason": None,
        "ratio": 0.0987,
        "turns": [{"question": question, "score": score, "gold_nll": 1 - score} for question, score in turns],
    }


def cells(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.split("\n") if line[:1] == "|"]


def test_fidelity() -> None:
    records = [
        step_record("full", "a", [0.0, 0.0]),
        step_record("streamingllm", "a", [2.0, 0.1]),
        step_record("snapkv", "a", [1.0, 0.09]),
        step_record("h2o", "a", [], status="infeasible", reason="too small", ratio=None, nll=[], same=""),
        step_record("full", "a", [], task="fidelity/free", nll=[], same="", agreement=1.0),
        step_record("snapkv", "a", [], task="fidelity/free", nll=[], same="", agreement=0.25, divergence=12),
    ]
    forced, free = fidelity_sheets(fidelity_summary.summarise(records))
    table = cells(forced.markdown())
    assert table[0][:4] == ["method", "bytes", "KL", "median"]
    assert table[4] == ["snapkv 20 %", "20.0%", "0.09", "0.09", "0.09", "1", "100.0 %", "4", "4", NO_CLAIM]
    assert table[5][:3] == ["h2o 20 %", "–", "could not be (1×)"]
    assert all(len(row) == len(table[0]) for row in table)
    assert f"{NO_CLAIM}: streamingllm comes within 20%" in forced.markdown()
    assert cells(free.markdown())[2:] == [
        ["full", "20.0%", "100.0 %", "never"],
        ["snapkv 20 %", "20.0%", "25.0 %", "12"],
    ]


def test_drift() -> None:
    records = [
        turn_record("snapkv", f"{context}/{order}", questions, (1.0, last))
        for context, last in (("a", 0.0), ("b", 1.0))
        for order, questions in enumerate(((0, 1), (1, 0)))
    ]
    (sheet,) = drift_sheets(drift_summary.summarise(records))
    heads, _, row = cells(sheet.markdown())
    shown = dict(zip(heads, row, strict=True))
    assert shown["score at 1"] == "100.0 ± 0.0"
    assert shown["score at 2"] == "50.0 ± 50.0"
    assert shown["drift"] == "+50.0 [+0.0, +100.0]"
    assert shown["NLL drift"] == "-0.500 [-1.000, +0.000]" or shown["NLL drift"] == "-0.500 [-1.000, -0.000]"
    assert shown["beyond full KV"] == "–"


def test_the_terminal_shows_all_of_it() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(fidelity_sheets(fidelity_summary.summarise([step_record("full", "a", [0.0, 0.0])]))[0].rich())
    assert "fidelity/prose" in console.export_text()
