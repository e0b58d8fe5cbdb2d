"""`qevict bench fidelity`, `drift` and `codecs`: parse, call, print. Importing it adds them to the group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from qevict.bench.commands import (
    Of,
    Question,
    StoreDtype,
    app,
    named_methods,
    parse_budgets,
)
from qevict.console import console, fail, progress

__all__ = ["app"]

OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder of the results; a run that was stopped goes on.")]
MethodsOption = Annotated[
    str, typer.Option("--methods", help="Beside full KV, which is always run; `qevict methods` lists them.")
]
BudgetsOption = Annotated[str, typer.Option("--budgets", "-b", help="Shares of full KV: 0.2,0.1 or 20%,10%.")]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="A local folder, a Hub id, or smollm2-135m.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Decides the texts.")]
ScopeOption = Annotated[Of, typer.Option(help="What budgets are shares of: prompt and new tokens, or prompt.")]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Folder of the benchmarks' data.", envvar="QEVICT_DATA")
]
StoreOption = Annotated[StoreDtype, typer.Option("--store-dtype", help="Dtype of full-precision storage.")]
DtypeOption = Annotated[StoreDtype, typer.Option("--dtype", help="Dtype of the model.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cuda, cuda:1, ...; left out: the CPU.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Most caches decoded together.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="Of torch.")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print the tables in Markdown.")]


@app.command("fidelity")
def fidelity(
    out: OutOption,
    methods: MethodsOption = "qevict",
    budgets: BudgetsOption = "0.2",
    corpora: Annotated[str, typer.Option("--corpora", help="Of prose, copy, answers and free.")] = (
        "prose,copy,answers,free"
    ),
    prompt: Annotated[int, typer.Option("--prompt", min=2, help="Tokens that are compressed.")] = 1024,
    forced: Annotated[int, typer.Option("--forced", min=1, help="Tokens after them, forced or generated.")] = 128,
    texts: Annotated[int, typer.Option("--texts", "-n", min=1, help="Texts of each corpus, at most.")] = 8,
    answered: Annotated[str, typer.Option("--answered", help="Tasks of the corpus answers.")] = "ruler,longbench",
    model: ModelOption = "smollm2-135m",
    seed: SeedOption = 0,
    protocol: Annotated[
        Question, typer.Option(help="Whether what says how the text goes on is part of what is compressed.")
    ] = Question.aware,
    scope: ScopeOption = Of.total,
    data: DataOption = None,
    store_dtype: StoreOption = StoreDtype.bfloat16,
    dtype: DtypeOption = StoreDtype.float32,
    device: DeviceOption = None,
    batch: BatchOption = 48,
    threads: ThreadsOption = None,
    markdown: MarkdownOption = False,
) -> None:
    """KL divergence from full KV at every token of real texts, top-1 agreement, perplexity.

    StreamingLLM is always run: a corpus on which it comes near the best method tells nothing.
    """
    from qevict.bench.corpora import Wanted
    from qevict.bench.fidelity import Fidelity, run
    from qevict.bench.fidelity_summary import WEAKEST, summarise
    from qevict.bench.study_tables import fidelity_sheets

    def plan() -> Fidelity:
        chosen = named_methods(methods)
        if all(method.label != WEAKEST for method in chosen):
            chosen += named_methods(WEAKEST)
        return Fidelity(
            methods=tuple(chosen),
            budgets=tuple(parse_budgets(budgets)),
            corpora=tuple(_names(corpora)),
            wanted=Wanted(texts, prompt, forced, seed, data, tuple(_names(answered))),
            model=_model(model, dtype, device, threads),
            setting=_setting(protocol, scope, store_dtype, batch),
        )

    _run(plan, run, out, lambda made: len(made.corpora) * texts)
    _show(fidelity_sheets(summarise(_records(out))), markdown)


@app.command("drift")
def drift(
    out: OutOption,
    methods: MethodsOption = "qevict",
    budgets: BudgetsOption = "0.2",
    tasks: Annotated[str, typer.Option("--tasks", help="Of drift/facts and drift/squad.")] = "drift/facts,drift/squad",
    length: Annotated[int, typer.Option("--length", help="Tokens of context, questions and answers together.")] = 1024,
    questions: Annotated[int, typer.Option("--questions", min=2, help="About each context.")] = 4,
    contexts: Annotated[int, typer.Option("--contexts", "-n", min=1, help="Contexts of each task, at most.")] = 8,
    model: ModelOption = "smollm2-135m",
    seed: SeedOption = 0,
    protocol: Annotated[
        Question, typer.Option(help="query-aware: the first question is part of what is compressed.")
    ] = Question.agnostic,
    scope: ScopeOption = Of.total,
    data: DataOption = None,
    store_dtype: StoreOption = StoreDtype.bfloat16,
    dtype: DtypeOption = StoreDtype.float32,
    device: DeviceOption = None,
    batch: BatchOption = 48,
    threads: ThreadsOption = None,
    markdown: MarkdownOption = False,
) -> None:
    """Several questions about one context, one after another on the same compressed cache, in balanced orders.

    The context is compressed before any question is known, whatever comes: drift is question-agnostic by construction,
    but for the first question with --protocol query-aware.
    """
    from qevict.bench.conversations import Wanted
    from qevict.bench.drift import Drift, run
    from qevict.bench.drift_summary import summarise
    from qevict.bench.study_tables import drift_sheets

    def plan() -> Drift:
        return Drift(
            methods=tuple(named_methods(methods)),
            budgets=tuple(parse_budgets(budgets)),
            tasks=tuple(_names(tasks)),
            wanted=Wanted(contexts, length, questions, seed, data),
            model=_model(model, dtype, device, threads),
            setting=_setting(protocol, scope, store_dtype, batch),
        )

    _run(plan, run, out, lambda made: len(made.tasks) * contexts)
    _show(drift_sheets(summarise(_records(out))), markdown)


@app.command("codecs")
def codecs(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the table and its picture.")] = None,
    codecs: Annotated[
        str | None, typer.Option("--codecs", help="Names with bits of keys and values, as minmax:4+4,allotted:2.5+3.")
    ] = None,
    windows: Annotated[str, typer.Option("--windows", help="Window sizes in tokens.")] = "8,16",
    text: Annotated[
        Path | None, typer.Option("--text", help="A text file, of which the beginning is taken; left out: prose.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Of each text.")] = 2048,
    texts: Annotated[int, typer.Option("--texts", "-n", min=1, help="Texts of prose.")] = 3,
    model: ModelOption = "smollm2-135m",
    seed: SeedOption = 0,
    data: DataOption = None,
    dtype: DtypeOption = StoreDtype.float32,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Whether to draw the picture.")] = True,
) -> None:
    """Bits against error of every codec on a text's real keys and values (rate and distortion)."""
    from qevict.bench import distortion
    from qevict.bench.corpora import Wanted, prose

    try:
        named = (codecs or distortion.USUAL).split(",")
        sizes = [int(size) for size in windows.split(",")]
        with progress.status(f"loading {model}"):
            loaded, tokenizer = _model(model, dtype, device, threads).load()
        if text is not None:
            samples = [tokenizer(text.read_text(encoding="utf8"))["input_ids"][:tokens]]
        else:
            wanted = Wanted(texts, tokens - 2, 1, seed, data)
            samples = [[*one.context, *one.cue, *one.forced] for one in prose(tokenizer, wanted)]
        with progress.status("measuring"):
            found = distortion.measure(loaded, samples, named, sizes)
        title = f"{model}, {text.name if text else 'prose'}, {len(samples)} x {len(samples[0])} tokens"
        if out is not None:
            distortion.save(found, title, out, plots)
    except (ValueError, OSError) as error:
        fail(str(error))
    console.print(distortion.sheet(found, title).rich())


def _run(plan: Callable[[], Any], run: Callable[..., None], out: Path, total: Callable[[Any], int]) -> None:
    """Carry a plan out with a progress bar; what the user gave wrong is one line."""
    from rich.progress import Progress

    begun = False
    try:
        made = plan()
        with progress.status(f"loading {made.model.name}"):
            model, tokenizer = made.model.load()
        with Progress(console=progress, transient=True) as bar:
            shown = bar.add_task("", total=total(made))

            def watch(name: str, records: list[Any]) -> None:
                nonlocal begun
                begun = begun or bool(records)
                bar.update(shown, advance=1, description=name)
                if records and not progress.is_terminal:
                    progress.print(f"{int(bar.tasks[0].completed)}/{total(made)}  {name}", highlight=False)

            run(made, out, model, tokenizer, watch)
    except ValueError as error:
        if begun:
            raise  # no longer a matter of what the user gave
        fail(str(error))
    except KeyboardInterrupt:
        progress.print(f"[yellow]stopped;[/] the same command goes on with {out}", highlight=False)
        raise typer.Exit(130) from None


def _show(sheets: list[Any], markdown: bool) -> None:
    for sheet in sheets:
        if markdown:
            typer.echo(sheet.markdown())
        else:
            console.print(sheet.rich())
            console.print()


def _records(out: Path) -> Any:
    from qevict.bench.results import read_records

    return read_records(out)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _model(name: str, dtype: StoreDtype, device: str | None, threads: int | None) -> Any:
    import torch

    from qevict.bench.runner import ModelSpec

    return ModelSpec(name, getattr(torch, dtype.value), device, threads)


def _setting(protocol: Question, scope: Of, store_dtype: StoreDtype, batch: int) -> Any:
    import torch

    from qevict.bench.protocol import Setting

    return Setting(
        protocol=protocol.value, scope=scope.value, store_dtype=getattr(torch, store_dtype.value), batch=batch
    )
