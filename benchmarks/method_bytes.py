"""Measured bytes of every method: a prompt of 2K tokens and 64 new ones, the maximum over all steps.

    python benchmarks/method_bytes.py --out method_bytes.jsonl

One prefill feeds all caches; the new tokens are the text's own. Everything exact is stored in 16 bits. A run that was
stopped goes on where it was. The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qevict.bench.cells import Cell, Failure, build, capture, cells_of
from qevict.bench.decode import PeakMemory, force
from qevict.methods import get_method, method_names
from qevict.models import load

BUDGETS = (0.05, 0.1, 0.2)
TOGETHER = 24


def text_ids(tokenizer, tokens: int) -> list[int]:
    """The first tokens of the Python reference."""
    text = "\n".join(str(topic) for topic in pydoc_data.topics.topics.values())
    return tokenizer(text[: 12 * tokens], add_special_tokens=False, verbose=False).input_ids[:tokens]


def measure(model, trace, cells: list[Cell], new: torch.Tensor) -> Iterator[dict]:
    """Records of cells, whose caches are decoded together: the most that each held, or why there is none."""
    caches = {}
    for cell in cells:
        made = build(model, trace, cell, new.shape[1], scope="total", store_dtype=torch.bfloat16)
        if isinstance(made, Failure):
            yield {"method": cell.method.label, "budget": cell.budget, "status": made.status, "reason": made.reason}
        else:
            caches[cell] = made
    if not caches:
        return
    peaks = {cell: PeakMemory() for cell in caches}
    for _ in chain([None], force(model, list(caches.values()), new.expand(len(caches), -1), chunk=1)):
        for cell, cache in caches.items():
            peaks[cell].see(cache.memory())
    for cell, peak in peaks.items():
        record = {"method": cell.method.label, "budget": cell.budget, "status": "ok"}
        yield record | {"ratio": peak.ratio, "bytes": peak.bytes, "limit": peak.budget}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--methods", nargs="*", default=method_names())
    parser.add_argument("--out", type=Path, default=Path("method_bytes.jsonl"))
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["method"], row["budget"]): row for row in rows}

    model, tokenizer = load(options.model)
    ids = text_ids(tokenizer, options.prompt + options.new)
    cells = cells_of([get_method(name) for name in options.methods], BUDGETS)
    trace = capture(model, ids[: options.prompt], [cell.method for cell in cells])
    todo = [cell for cell in cells if cell.key not in done]
    with options.out.open("a") as out:
        for start in track(range(0, len(todo), TOGETHER), "methods", console=Console(stderr=True)):
            together = todo[start : start + TOGETHER]
            for record in measure(model, trace, together, torch.tensor([ids[options.prompt :]])):
                done[record["method"], record["budget"]] = record
                out.write(json.dumps(record) + "\n")
                out.flush()

    table = Table(title=f"most bytes held, {options.prompt} + {options.new} tokens, share of full KV's")
    for column in ("method", *(f"{budget:.0%}" for budget in BUDGETS), "own operating point"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for label in dict.fromkeys(cell.method.label for cell in cells):
        cases = [done.get((label, budget)) for budget in (*BUDGETS, None)]
        table.add_row(label, *("" if case is None else shown(case) for case in cases))
    Console().print(table)
    over = [row for row in done.values() if row.get("limit") and row["bytes"] > row["limit"]]
    print(json.dumps({"benchmark": "method_bytes", "cells": len(done), "above_budget": len(over)}))


def shown(record: dict) -> str:
    """A cell of the table."""
    return f"{record['ratio']:.2%}" if record["status"] == "ok" else record["status"]


if __name__ == "__main__":
    main()
