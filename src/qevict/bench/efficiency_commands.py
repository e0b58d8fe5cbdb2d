"""`qevict bench efficiency`: parses, calls, prints. Importing it adds the command to the group."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qevict.bench.commands import StoreDtype, app, named_methods, parse_budgets
from qevict.bench.study_commands import (
    BudgetsOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    StoreOption,
    ThreadsOption,
)
from qevict.console import console, fail, progress

__all__ = ["app"]


@app.command("efficiency")
def efficiency(
    methods: Annotated[str, typer.Option("--methods", help="Beside full KV; `qevict methods` lists them.")] = "qevict",
    budgets: BudgetsOption = "0.2",
    contexts: Annotated[str, typer.Option("--contexts", help="Tokens of the prompts.")] = "1024,4096",
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, help="Tokens that are timed.")] = 64,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Readings of each prompt with each method.")] = 3,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Peak memory, each method in a process of its own.")
    ] = True,
    attention: Annotated[str, typer.Option("--attention", help="The model's: sdpa, eager, ...")] = "sdpa",
    model: ModelOption = "smollm2-135m",
    store_dtype: StoreOption = StoreDtype.bfloat16,
    dtype: DtypeOption = StoreDtype.float32,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="What is read, from its beginning; left out: Python's reference.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file for the numbers, as JSON.")] = None,
) -> None:
    """Times and memory of decoding beside full KV: candidates take turns, so that ratios are of the same moments."""
    import torch

    from qevict.bench import efficiency as bench
    from qevict.bench.runner import ModelSpec

    spec = ModelSpec(model, getattr(torch, dtype.value), device, threads)
    store = getattr(torch, store_dtype.value)
    try:
        chosen = [bench.Candidate(bench.FULL), bench.Candidate(bench.BEST)]
        for method in named_methods(methods):
            own = parse_budgets(budgets) if method.takes_budget else [None]
            chosen += [bench.Candidate(method.label, budget) for budget in own]
        lengths = [int(length) for length in contexts.split(",")]
        load = partial(_load, spec, attention)
        results = []
        with progress.status(f"loading {model}") as status:
            loaded, tokenizer = load()
            for length in lengths:
                ids = bench.rows(tokenizer, text, batch, length)
                speeds = bench.measure(loaded, ids, chosen, new_tokens, rounds, store, status.update)
                peaks = {}
                for one in chosen if memory else []:
                    status.update(f"{one.label}: memory at {length} tokens")
                    peaks[one.label] = _apart(bench.peak_bytes, load, ids, one, new_tokens, store)
                results.append((length, speeds, peaks))
    except (ValueError, OSError) as error:
        fail(str(error))
    for length, speeds, peaks in results:
        console.print(bench.sheet(f"{model}, {batch} x {length} + {new_tokens} tokens", speeds, peaks, batch).rich())
    if out is not None:
        out.write_text(json.dumps(bench.as_json(results, batch)), encoding="utf8")


def _load(spec: Any, attention: str) -> tuple[Any, Any]:
    model, tokenizer = spec.load()
    model.set_attn_implementation(attention)
    return model, tokenizer


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, computed in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)
