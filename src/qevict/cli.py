"""The command line: parses, calls, prints."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qevict.bench.efficiency_commands import app as bench
from qevict.console import console, fail, progress
from qevict.diagnostics.commands import ablate, diagnose, reproduce_group
from qevict.report.commands import report, reproduce

if TYPE_CHECKING:
    from qevict.answer import Answer

app = typer.Typer(
    name="qevict",
    help="A KV cache in three tiers (full precision, recoverable low-bit, evicted) under a hard byte budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)
app.command()(report)
app.add_typer(reproduce_group(reproduce))
app.command()(diagnose)
app.command()(ablate)


class StoreDtype(str, Enum):
    """Dtype of full-precision storage."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class PaperTask(str, Enum):
    """What the paper has settings for."""

    default = "default"
    longbench = "longbench"
    ruler = "ruler"
    gsm8k = "gsm8k"
    diagnostics = "diagnostics"


ModelOption = Annotated[str, typer.Option("--model", "-m", help="A local folder, a Hub id, or smollm2-135m.")]
_BUDGET = typer.Option("--budget", "-b", help="0.2 or 20% of full KV, or absolute: 512tokens, 24MB, 1000000bytes.")
BudgetOption = Annotated[str, _BUDGET]
MethodOption = Annotated[str, typer.Option("--method", help="What compresses the cache: see qevict methods.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method; repeatable.")
]
PaperOption = Annotated[PaperTask | None, typer.Option("--paper", help="The paper's settings for a task.")]
WindowOption = Annotated[int | None, typer.Option("--window-size", help="Tokens of a window.")]
BitsOption = Annotated[int | None, typer.Option("--bits", help="Bits of a code; left out: as the budget allows.")]
FractionOption = Annotated[
    float | None, typer.Option("--quantized-fraction", "-q", help="Most of the history bytes that codes may take.")
]
RecentOption = Annotated[int | None, typer.Option("--recent-tokens", help="Last tokens kept in full precision.")]
DtypeOption = Annotated[StoreDtype, typer.Option("--store-dtype", help="Dtype of full-precision storage.")]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The context. Left out: --file, or standard input.")] = None,
    question: Annotated[str, typer.Option("--question", help="Asked after the context.")] = "",
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the context from a file.")] = None,
    model: ModelOption = "smollm2-135m",
    budget: Annotated[str | None, _BUDGET] = None,
    method: MethodOption = "qevict",
    settings: SetOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")] = 128,
    question_hidden: Annotated[
        bool, typer.Option("--question-hidden", help="Compress the context before the question is known.")
    ] = False,
    paper: PaperOption = None,
    window_size: WindowOption = None,
    bits: BitsOption = None,
    quantized_fraction: FractionOption = None,
    recent_tokens: RecentOption = None,
    store_dtype: DtypeOption = StoreDtype.bfloat16,
) -> None:
    """Answer a prompt, or a question about a file, streaming tokens; ends with the memory that it took."""
    import torch
    from transformers import TextStreamer

    from qevict.answer import answer
    from qevict.config import Budget
    from qevict.report.terminal import answer_summary

    context = _context(prompt, file)
    options = {
        "window_size": window_size,
        "bits": bits,
        "quantized_fraction": quantized_fraction,
        "recent_tokens": recent_tokens,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with _readable_errors():
        chosen = _method(method, settings, paper, given)
        limit = None if budget is None else Budget.parse(budget)
    loaded, tokenizer = _load(model)
    with _readable_errors():
        result = answer(
            loaded,
            tokenizer,
            context,
            question,
            budget=limit,
            method=chosen,
            store_dtype=getattr(torch, store_dtype.value),
            max_new_tokens=max_new_tokens,
            question_seen=not question_hidden,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    progress.print(answer_summary(result))


@app.command()
def methods(
    match: Annotated[
        str | None,
        typer.Option("--match", help="A share of full KV's bytes, 0.2 or 20%: what of each method meets it."),
    ] = None,
    method: Annotated[list[str] | None, typer.Option("--method", help="Only these; repeatable.")] = None,
    model: ModelOption = "smollm2-135m",
    context: Annotated[int, typer.Option("--context", "-c", min=1, help="Tokens of the prompt, for --match.")] = 2048,
    new: Annotated[int, typer.Option("--max-new-tokens", "-n", min=0, help="Tokens after it, for --match.")] = 64,
    store_dtype: DtypeOption = StoreDtype.bfloat16,
) -> None:
    """The methods with their papers, settings and properties; or, with --match, what of each meets a byte ratio."""
    from qevict.methods.registry import get_method, method_names
    from qevict.report.terminal import methods_table

    with _readable_errors():
        chosen = {name: get_method(name) for name in method or method_names()}
    if match is None:
        console.print(methods_table(chosen))
        return
    import torch

    from qevict.config import Budget
    from qevict.methods.matching import Matcher
    from qevict.models import load_config
    from qevict.report.terminal import match_table

    with _readable_errors():
        ratio = Budget.parse(match).fraction
        if ratio is None:
            fail(f"--match is {match!r}; give a share of full KV's bytes, 0.2 or 20%")
        matcher = Matcher(load_config(model), context, new, getattr(torch, store_dtype.value))
        matches = {}
        with progress.status("measuring") as status:
            for name, each in chosen.items():
                status.update(f"measuring {name}")
                matches[name] = matcher.match(each, ratio)
        console.print(match_table(ratio, matches))


@app.command()
def plan(
    context: Annotated[int, typer.Option("--context", "-c", min=1, help="Tokens of the sequence, new ones included.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only its config is read.")] = None,
    layers: Annotated[int | None, typer.Option(help="Instead of --model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Instead of --model.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Instead of --model.")] = None,
    budget: BudgetOption = "0.2",
    paper: PaperOption = None,
    window_size: WindowOption = None,
    bits: BitsOption = None,
    quantized_fraction: FractionOption = None,
    recent_tokens: RecentOption = None,
    dtype: Annotated[StoreDtype, typer.Option(help="Dtype of full-precision storage.")] = StoreDtype.bfloat16,
) -> None:
    """What a budget holds of a context: tokens and bytes of each tier. Needs a model's config, or its three sizes."""
    import torch

    from qevict.architectures import describe, managed_layers
    from qevict.budget import plan_tiers
    from qevict.geometry import KVGeometry
    from qevict.models import load_config
    from qevict.planning import planned_tiers
    from qevict.report.terminal import plan_table

    sizes = (layers, kv_heads, head_dim)
    if (model is None) == (None in sizes):
        fail("give either --model, or all of --layers, --kv-heads and --head-dim")
    config = _config(
        budget,
        paper,
        dtype,
        window_size=window_size,
        bits=bits,
        quantized_fraction=quantized_fraction,
        recent_tokens=recent_tokens,
    )
    element_bytes = getattr(torch, dtype.value).itemsize
    with _readable_errors():
        if model is not None:
            architecture = describe(load_config(model))
            managed = sum(managed_layers(architecture, context))
            geometry = KVGeometry(
                managed, architecture.kv_heads, architecture.query_heads, architecture.head_dim, element_bytes
            )
        else:
            assert layers is not None
            assert kv_heads is not None
            assert head_dim is not None
            geometry = KVGeometry(layers, kv_heads, kv_heads, head_dim, element_bytes)
        if config.limit.unlimited:
            fail("a budget of 1.0 means no limit, so there is nothing to plan; give a smaller one")
        made = plan_tiers(config, geometry, context)
        console.print(plan_table(geometry, made, planned_tiers(config, made, context), lanes=1))


@app.command()
def demo(
    model: ModelOption = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=200, help="Length of the document.")] = 3000,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2)] = 16,
) -> None:
    """Full KV against qevict at 20 % and 10 % on a long real document: answers, bytes, speed, tiers."""
    import torch

    from qevict import demo as the_demo
    from qevict.config import QEvictConfig
    from qevict.report.terminal import demo_table, memory_bar

    store = torch.bfloat16
    configs = {
        "full KV": QEvictConfig(budget=1.0, store_dtype=store),
        "qevict 20 %": QEvictConfig(budget=0.2, store_dtype=store),
        "qevict 10 %": QEvictConfig(budget=0.1, store_dtype=store),
        "paper() 20 %": QEvictConfig.paper(budget=0.2, store_dtype=store),
    }
    loaded, tokenizer = _load(model)
    answers: dict[str, list[Answer]] = {name: [] for name in configs}
    with _readable_errors(), progress.status("full KV: reading the document") as status:
        for name, question, result in the_demo.run(loaded, tokenizer, configs, tokens, max_new_tokens):
            answers[name].append(result)
            progress.print(f"{name}: {question.text} [bold]{_first_line(result.text)}[/]", highlight=False)
            status.update("reading the document again")
    asked = the_demo.questions(the_demo.NEEDLE)
    console.print(demo_table(f"{tokens} tokens of the Python reference, cache in 16 bits", asked, answers))
    for name, results in answers.items():
        console.print(f"\n[bold]{name}[/]")
        console.print(memory_bar(results[-1].memory))


def _first_line(text: str) -> str:
    return text.splitlines()[0][:60] if text else ""


def _context(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        fail("give the context either as an argument or with --file, not both")
    if prompt is not None:
        return prompt
    if file is not None:
        try:
            return file.read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            fail(f"cannot read {file}: {error}")
    return "" if sys.stdin.isatty() else sys.stdin.read()


def _config(budget: str, paper: PaperTask | None, store_dtype: StoreDtype, **changes: Any) -> Any:
    import torch

    from qevict.config import Budget, QEvictConfig

    given = {name: value for name, value in changes.items() if value is not None}
    with _readable_errors():
        limit = Budget.parse(budget)
        dtype = getattr(torch, store_dtype.value)
        if paper is not None:
            return QEvictConfig.paper(paper.value, budget=limit, store_dtype=dtype, **given)
        return QEvictConfig(budget=limit, store_dtype=dtype, **given)


def _method(name: str, settings: list[str] | None, paper: PaperTask | None, given: dict[str, Any]) -> Any:
    """A method with the settings of --set, and the options that are qevict's alone."""
    from qevict.config import QEvictConfig
    from qevict.methods.qevict import QEvict
    from qevict.methods.registry import get_method, parse_settings

    changes = given | parse_settings(settings or [])
    chosen = get_method(name)
    if paper is not None:
        if not isinstance(chosen, QEvict):
            raise ValueError(f"--paper has settings for qevict, not for {name}")
        chosen = QEvict(QEvictConfig.paper(paper.value), preset="paper")
    return chosen.with_settings(**changes) if changes else chosen


def _load(name: str) -> Any:
    from qevict.models import load

    with _readable_errors(), progress.status(f"loading {name}"):
        return load(name)


class _readable_errors:
    """Turns the exceptions that are meant for users into one line and exit code 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ValueError | TypeError | RuntimeError) and not isinstance(error, NotImplementedError):
            fail(str(error))
