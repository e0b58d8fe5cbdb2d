"""`qevict bench`: parses, calls, prints. `qevict bench TASKS` runs tasks; other benchmarks are the group's commands."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from qevict.console import console, fail, progress


class _TasksOrCommand(TyperGroup):
    """What is no command of the group is the name of a task: `qevict bench ruler` is `qevict bench run ruler`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args and args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "run", self.commands["run"], args


app = typer.Typer(
    name="bench",
    cls=_TasksOrCommand,
    help="The paper's benchmarks. `qevict bench ruler --out DIR` is short for `qevict bench run ruler --out DIR`.",
    no_args_is_help=True,
)


class StoreDtype(str, Enum):
    """Dtype of full-precision storage, or of the model."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Question(str, Enum):
    """Whether the question is known while the context is compressed."""

    aware = "query-aware"
    agnostic = "query-agnostic"


class Of(str, Enum):
    """What a budget is a share of."""

    total = "total"
    prompt = "prompt"


class First(str, Enum):
    """Where the first new token comes from."""

    compressed = "compressed"
    exact = "exact"


class Where(str, Enum):
    """What evaluates the samples."""

    local = "local"
    ray = "ray"


@app.command("run")
def run_tasks(
    tasks: Annotated[
        str,
        typer.Argument(
            help="ruler, reworded, longbench, gsm8k, gsm8k-zero-shot, jsonl:PATH, or single tasks such as ruler/vt; "
            "several with commas between them."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the results; a run that was stopped goes on.")],
    methods: Annotated[
        str, typer.Option("--methods", help="Beside full KV, which is always run; `qevict methods` lists them.")
    ] = "qevict",
    budgets: Annotated[str, typer.Option("--budgets", "-b", help="Shares of full KV: 0.2,0.1 or 20%,10%.")] = "0.2",
    model: Annotated[str, typer.Option("--model", "-m", help="A local folder, a Hub id, or smollm2-135m.")] = (
        "smollm2-135m"
    ),
    length: Annotated[
        int | None, typer.Option("--length", help="Tokens of RULER's prompts; LongBench's are cut to it.")
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option("--new-tokens", min=1, help="Most tokens generated, whatever a task's own limit."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Samples of each task, at most.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Decides the samples.")] = 0,
    protocol: Annotated[
        Question, typer.Option(help="Whether the question is part of what is compressed.")
    ] = Question.aware,
    scope: Annotated[Of, typer.Option(help="What budgets are shares of: prompt and new tokens, or prompt.")] = Of.total,
    first_token: Annotated[
        First, typer.Option("--first-token", help="exact: from the prefill, only to compare with published numbers.")
    ] = First.compressed,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the benchmarks' data.", envvar="QEVICT_DATA")
    ] = None,
    store_dtype: Annotated[
        StoreDtype, typer.Option("--store-dtype", help="Dtype of full-precision storage.")
    ] = StoreDtype.bfloat16,
    dtype: Annotated[StoreDtype, typer.Option("--dtype", help="Dtype of the model.")] = StoreDtype.float32,
    device: Annotated[str | None, typer.Option("--device", help="cuda, cuda:1, ...; left out: the CPU.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Most caches decoded together.")] = 48,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of torch, for each model.")] = None,
    engine: Annotated[
        Where, typer.Option("--engine", help="ray: spread the samples over a Ray cluster.")
    ] = Where.local,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Ray: models at once.")] = 2,
    num_gpus: Annotated[float, typer.Option("--num-gpus", min=0, help="Ray: of a worker; may be fractions.")] = 0,
    address: Annotated[
        str | None, typer.Option("--address", help="Ray: an existing cluster's; left out: a local one.")
    ] = None,
) -> None:
    """Run tasks with methods at budgets into a folder, and go on where a run was stopped."""
    import torch

    from qevict.bench.cells import cells_of
    from qevict.bench.progress import Board, score_table
    from qevict.bench.protocol import Setting
    from qevict.bench.results import read_records
    from qevict.bench.runner import ModelSpec, Run, run

    place = device or ("cuda" if engine is Where.ray and num_gpus else None)
    board: Board | None = None
    try:
        plan = Run(
            tasks=tuple(split_tasks(tasks)),
            methods=tuple(named_methods(methods)),
            budgets=tuple(parse_budgets(budgets)),
            model=ModelSpec(model, getattr(torch, dtype.value), place, threads),
            samples=samples,
            length=length,
            new_tokens=new_tokens,
            seed=seed,
            setting=Setting(
                protocol=protocol.value,
                scope=scope.value,
                store_dtype=getattr(torch, store_dtype.value),
                first_token=first_token.value,
                batch=batch,
            ),
            data=data,
        )
        cells_of(plan.methods, plan.budgets)
        board = Board(progress, len(plan.find_tasks()) * samples)
        made, tokenizer = _ray(plan, workers, num_gpus, address) if engine is Where.ray else _local(plan)
        with board:
            run(plan, out, made, tokenizer, board.saw)
    except ValueError as error:
        if board is not None and board.evaluated:
            raise  # no longer a matter of what the user gave
        fail(str(error))
    except KeyboardInterrupt:
        progress.print(f"[yellow]stopped;[/] the same command goes on with {out}", highlight=False)
        raise typer.Exit(130) from None
    console.print(score_table(read_records(out)))


def _local(plan: Any) -> tuple[Any, Any]:
    from qevict.bench.runner import LocalEngine

    with progress.status(f"loading {plan.model.name}"):
        model, tokenizer = plan.model.load()
    return LocalEngine(model, tokenizer), tokenizer


def _ray(plan: Any, workers: int, num_gpus: float, address: str | None) -> tuple[Any, Any]:
    from qevict.bench.ray_engine import RayEngine

    return RayEngine(plan.model, workers, num_gpus, address), plan.model.load_tokenizer()


def split_tasks(text: str) -> list[str]:
    """Task specs with commas between them; a path may hold commas if it is the last."""
    head, own, path = text.partition("jsonl:")
    return [*(spec.strip() for spec in head.split(",") if spec.strip()), *([own + path] if own else [])]


def named_methods(text: str) -> list[Any]:
    """Methods by name, with commas between them; full KV need not be named."""
    from qevict.methods import get_method

    return [get_method(name.strip()) for name in text.split(",") if name.strip()]


def parse_budgets(text: str) -> list[float]:
    """Shares of full KV, with commas between them.

    Raises:
        ValueError: if one is something else.
    """
    from qevict.config import Budget

    parsed = [Budget.parse(part) for part in text.split(",") if part.strip()]
    if any(budget.fraction is None for budget in parsed):
        raise ValueError(f"budgets are {text!r}; a benchmark takes shares of full KV, such as 0.2,0.1 or 20%,10%")
    return [budget.fraction for budget in parsed if budget.fraction is not None]
