"""`qevict report` and `qevict reproduce`: parse, call, print."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from qevict.console import console, fail, progress


class What(str, Enum):
    """What of the paper is reproduced."""

    table2 = "table2"
    table3 = "table3"
    table6 = "table6"
    fig3 = "fig3"


class Dtype(str, Enum):
    """Dtype of the model."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of results; runs that match are joined.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write HTML, Markdown, CSV, PNG and SVG here. Left out: print only."),
    ] = None,
    against: Annotated[
        str, typer.Option("--against", help="The method that paired differences are taken to.")
    ] = "qevict",
    every: Annotated[
        bool, typer.Option("--all", help="Print every table, not scores and averaged differences alone.")
    ] = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Pictures; they need matplotlib.")] = True,
) -> None:
    """Tables and pictures from the results of qevict bench, as in the paper's tables 2, 3 and 6."""
    write_report(runs, out, against, plots=plots, every=every)


def reproduce(
    what: Annotated[What, typer.Argument(help="Of the paper: RULER, LongBench (tables 3 and 6), GSM8K over budgets.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of results and report; a stopped run goes on.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A local folder, a Hub id, or smollm2-135m.")] = (
        "smollm2-135m"
    ),
    add: Annotated[
        list[str] | None, typer.Option("--add", metavar="METHOD", help="Another row: see qevict methods. Repeatable.")
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", help="Tokens of a prompt; left out: the paper's, or the model's most.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Samples of each task, at most.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Decides the samples.")] = 0,
    agnostic: Annotated[
        bool, typer.Option("--query-agnostic", help="Compress the context before the question is known.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the benchmarks' data.", envvar="QEVICT_DATA")
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Dtype of the model.")] = Dtype.float32,
    device: Annotated[str | None, typer.Option("--device", help="cuda, cuda:1, ...; left out: the CPU.")] = None,
) -> None:
    """Run a table or figure of the paper on a model, and write its report; --add METHOD adds a row."""
    import torch

    from qevict.bench.runner import ModelSpec
    from qevict.report.pictures import require_matplotlib
    from qevict.report.presets import PRESETS
    from qevict.report.reproduce import carry_out, plan

    try:
        require_matplotlib()
        made = plan(
            PRESETS[what.value],
            ModelSpec(model, getattr(torch, dtype.value), device),
            add=add or (),
            length=length,
            samples=samples,
            seed=seed,
            protocol="query-agnostic" if agnostic else "query-aware",
            data=data,
        )
        results = carry_out(made, out, progress)
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        progress.print(f"[yellow]stopped;[/] the same command goes on with {out}", highlight=False)
        raise typer.Exit(130) from None
    write_report([results], out, "qevict")


def write_report(runs: list[Path], out: Path | None, against: str, *, plots: bool = True, every: bool = False) -> None:
    """Print a report's tables, and write all of it where a folder is given."""
    from qevict.report.build import build
    from qevict.report.render import print_table

    try:
        with progress.status("reading results"):
            made = build(runs, against, plots and out is not None)
        for note in made.joined.notes:
            progress.print(f"[yellow]note:[/] {note}", highlight=False)
        for table in made.tables if every else made.brief():
            print_table(console, table)
        if out is not None:
            with progress.status("writing"):
                files = made.write(out)
            progress.print(f"wrote {', '.join(map(str, files))} and their parts", highlight=False)
    except (ValueError, OSError) as error:
        fail(str(error))
