"""A preset run, and its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from qevict.bench.progress import Board
from qevict.bench.protocol import Protocol, Setting
from qevict.bench.runner import LocalEngine, ModelSpec, Run, run
from qevict.methods.registry import get_method
from qevict.models import load_config
from qevict.report.presets import Preset

RUNS = "run"
"""Folder of the results inside of a reproduction's folder."""


def plan(
    preset: Preset,
    model: ModelSpec,
    *,
    add: Sequence[str] = (),
    length: int | None = None,
    samples: int = 50,
    seed: int = 0,
    protocol: Protocol = "query-aware",
    data: Path | None = None,
) -> Run:
    """The run of a preset on a model.

    Args:
        add: further methods, rows of the table.
        length: instead of the paper's, or of what the model has positions for where those are fewer.

    Raises:
        ValueError: if there is no such method.
    """
    if length is None and preset.room is not None:
        positions = load_config(model.name).get_text_config().max_position_embeddings
        most = positions - preset.room
        length = most if preset.length is None else min(preset.length, most)
    return Run(
        tasks=preset.tasks,
        methods=tuple(get_method(name) for name in dict.fromkeys([*preset.methods, *add])),
        budgets=preset.budgets,
        model=model,
        samples=samples,
        length=length,
        seed=seed,
        setting=dataclasses.replace(Setting(), protocol=protocol),
        data=data,
    )


def carry_out(made: Run, out: Path, progress: Console) -> Path:
    """Run it into a folder, going on where an earlier run was stopped; returns the folder of the results.

    Raises:
        ValueError: see `runner.run`.
    """
    total = len(made.find_tasks()) * made.samples
    with progress.status(f"loading {made.model.name}"):
        model, tokenizer = made.model.load()
    board = Board(progress, total)
    with board:
        run(made, out / RUNS, LocalEngine(model, tokenizer), tokenizer, board.saw)
    return out / RUNS
