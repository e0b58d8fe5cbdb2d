"""`qevict diagnose`, `qevict ablate` and the presets `qevict reproduce fig1|table14|...`: parse, call, print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer.core import TyperGroup

from qevict.console import console, fail, progress

if TYPE_CHECKING:
    from qevict.diagnostics.study import StudySettings


ModelOption = Annotated[str, typer.Option("--model", "-m", help="A local folder, a Hub id, or smollm2-135m.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder of the results; a run that was stopped goes on.")]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Folder of the benchmarks' data.", envvar="QEVICT_DATA")
]
SourceOption = Annotated[
    str, typer.Option("--articles", help="Where texts come from: wikitext, book or longbench/TASK, in --data.")
]
CountOption = Annotated[int, typer.Option("--count", min=1, help="How many articles.")]
ForcedOption = Annotated[
    bool, typer.Option("--forced", help="Feed the text's own continuation, not what the model generates.")
]
PlotsOption = Annotated[bool, typer.Option("--plots/--no-plots", help="Pictures; they need matplotlib.")]
AddOption = Annotated[
    list[str] | None, typer.Option("--add", metavar="METHOD", help="Another condition: see qevict methods. Repeatable.")
]
KeepOption = Annotated[
    bool, typer.Option("--keep-traces/--drop-traces", help="Keep the reference traces of all articles.")
]


class Varied(str, Enum):
    """What an ablation varies."""

    window = "window"
    fraction = "fraction"
    bits = "bits"
    ranking = "ranking"
    promotion = "promotion"
    score_steps = "score-steps"


class Base(str, Enum):
    """What it starts from."""

    paper = "qevict-paper"
    default = "qevict"


def diagnose(
    out: OutOption,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="A file of plain text, an article each; repeatable.")
    ] = None,
    source: SourceOption = "wikitext",
    count: CountOption = 4,
    conditions: Annotated[
        str, typer.Option("--conditions", help="R1 to R4 of the paper, and methods by name, with commas between them.")
    ] = "R1,R2,R3,R4,qevict",
    model: ModelOption = "smollm2-135m",
    prefill: Annotated[int, typer.Option("--prefill", min=1, help="Tokens of the prompt.")] = 512,
    generate: Annotated[int, typer.Option("--generate", min=1, help="Decode steps.")] = 256,
    forced: ForcedOption = False,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Of the methods by name. R1 to R4 have the paper's own capacities.")
    ] = "0.2",
    of_prompt: Annotated[
        bool, typer.Option("--of-prompt", help="The budget is a share of the prompt; new tokens are exact and on top.")
    ] = False,
    data: DataOption = None,
    keep_traces: KeepOption = True,
    plots: PlotsOption = True,
) -> None:
    """See attention drift and what policies lose to it: trace full KV, force caches on it, write tables and a page."""
    from qevict.config import Budget
    from qevict.diagnostics.conditions import PAPER_CONDITIONS, method_condition, paper_conditions
    from qevict.diagnostics.study import StudySettings

    names = [name.strip() for name in conditions.split(",") if name.strip()]

    def chosen(loaded: Any) -> list[Any]:
        limit = Budget.parse(budget)
        limit = Budget(fraction=limit.fraction, scope="prompt") if of_prompt else limit
        paper = [name for name in names if name in PAPER_CONDITIONS]
        made = {one.name: one for one in paper_conditions(loaded, prefill + generate, paper)}
        return [made.get(name) or method_condition(name, limit) for name in names]

    settings = StudySettings(model, prefill, generate, forced)
    _study(settings, chosen, out, text or (), source, count, data, keep_traces, plots)


def ablate(
    what: Annotated[Varied, typer.Argument(help="What is varied; everything else stays as it is.")],
    out: OutOption,
    base: Annotated[Base, typer.Option("--base", help="What it starts from.")] = Base.paper,
    budgets: Annotated[str, typer.Option("--budgets", "-b", help="Shares of full KV: 0.05,0.1 or 5%,10%.")] = "0.05",
    measures: Annotated[
        str, typer.Option("--on", help="fidelity, ruler, longbench (where data is given), with commas between them.")
    ] = "fidelity,ruler",
    model: ModelOption = "smollm2-135m",
    texts: Annotated[int, typer.Option("--texts", min=1, help="Texts of each corpus of the fidelity measure.")] = 4,
    prompt: Annotated[int, typer.Option("--prompt", min=2, help="Tokens of them that are compressed.")] = 1024,
    forced: Annotated[int, typer.Option("--forced", min=2, help="Tokens that are fed after them.")] = 128,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Samples of each task, at most.")] = 5,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of a task's prompt.")] = 1024,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", min=1, help="Most tokens generated, whatever a task's own limit.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides texts and samples.")] = 0,
    data: DataOption = None,
) -> None:
    """The paper's ablations (appendices G, J, K): fidelity to full KV, RULER, and LongBench's four tasks."""
    from qevict.bench.commands import parse_budgets
    from qevict.bench.runner import ModelSpec
    from qevict.diagnostics.ablations import Ablation, carry_out

    try:
        plan = Ablation(
            what.value,
            base.value,
            tuple(parse_budgets(budgets)),
            tuple(part.strip() for part in measures.split(",") if part.strip()),
            texts=texts,
            prompt=prompt,
            forced=forced,
            samples=samples,
            length=length,
            new_tokens=new_tokens,
            seed=seed,
            data=data,
        )
        plan.variants()
        spec = ModelSpec(model)
        loaded, tokenizer = _load(model)
        with progress.status("measuring") as status:
            made = carry_out(plan, loaded, tokenizer, spec, out, lambda done: status.update(f"measured {done}"))
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        _stopped(out)
    _print(made)
    (out / "table.md").write_text(made.markdown() + "\n", encoding="utf-8")


def reproduce_group(benchmarks: Callable[..., None]) -> typer.Typer:
    """The group `qevict reproduce`: the diagnostics' presets, and for every other name the command for benchmarks."""
    group = typer.Typer(name="reproduce", cls=_PresetOrBenchmark, no_args_is_help=True)
    for name, explained in _PRESETS.items():
        group.command(name, help=explained)(_preset(name))
    group.command(_PresetOrBenchmark.other)(benchmarks)
    return group


class _PresetOrBenchmark(TyperGroup):
    """What is no preset of the diagnostics is a table or figure of benchmarks: `reproduce table2`."""

    other = "benchmark"

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args and args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return self.other, self.commands[self.other], args


_PRESETS = {
    "fig1": "Figure 1: FMM over decoding, and attention mass by tier (512 + 256 tokens, R1 to R4).",
    "table14": "Table 14: Future Missed Mass and churn (512 + 256 tokens, R1 to R4).",
    "table15": "Table 15: agreement of quantized scores (512 + 256 tokens, R1 to R4).",
    "table16": "Table 16: Global LIR and lagged transitions (512 + 256 tokens, R1 to R4).",
    "table18": "Table 18: promotion against none on the same articles (256 + 1024 tokens).",
}


def _preset(name: str) -> Callable[..., None]:
    def run(
        out: OutOption,
        model: ModelOption = "smollm2-135m",
        source: SourceOption = "wikitext",
        count: CountOption = 4,
        forced: ForcedOption = False,
        add: AddOption = None,
        data: DataOption = None,
        keep_traces: KeepOption = False,
        plots: PlotsOption = True,
    ) -> None:
        from qevict.config import Budget
        from qevict.diagnostics.conditions import method_condition, paper_conditions, promotion_conditions
        from qevict.diagnostics.study import StudySettings

        prefill, new = (256, 1024) if name == "table18" else (512, 256)

        def chosen(loaded: Any) -> list[Any]:
            own = promotion_conditions if name == "table18" else paper_conditions
            added = [method_condition(method, Budget(fraction=0.2)) for method in add or ()]
            return [*own(loaded, prefill + new), *added]

        shown = (name, "transitions") if name == "table16" else (name,)
        settings = StudySettings(model, prefill, new, forced)
        _study(settings, chosen, out, (), source, count, data, keep_traces, plots, shown)

    return run


def _study(
    settings: StudySettings,
    chosen: Callable[[Any], list[Any]],
    out: Path,
    text: Sequence[Path],
    source: str,
    count: int,
    data: Path | None,
    keep_traces: bool,
    plots: bool,
    shown: Sequence[str] = (),
) -> None:
    """Run a study, print its tables (`shown`, or all), and write all that it shows."""
    from qevict.diagnostics.articles import articles, from_files
    from qevict.diagnostics.reference import trace_header
    from qevict.diagnostics.show import tables, write_page, write_pictures, write_tables
    from qevict.diagnostics.study import Study
    from qevict.report.pictures import require_matplotlib

    try:
        if plots:
            require_matplotlib()
        study = Study.at(out, settings)
        loaded, tokenizer = _load(settings.model)
        tokens = settings.prefill + (settings.new if settings.forced else 0)
        found = from_files(text, tokenizer, tokens) if text else articles(source, tokenizer, tokens, count, data)
        header = trace_header(loaded, found[0].tokens[: settings.prefill], settings.new)
        kept = len(found) if keep_traces else 1
        progress.print(f"a reference trace takes {header.nbytes / 1e6:.0f} MB; {kept} stay in {out}", highlight=False)
        with progress.status("") as status:
            infeasible = study.run(
                loaded,
                found,
                chosen(loaded),
                keep_traces=keep_traces,
                report=lambda what, done: status.update(f"{what}, step {done} of {settings.new}"),
            )
            for name, reason in infeasible.items():
                progress.print(Text(f"{name} is infeasible: {reason}", style="yellow"))
            status.update("writing")
            made = tables(study)
            written = [write_tables(study, list(made.values())), write_page(study, tokenizer)]
            written += write_pictures(study) if plots else []
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        _stopped(out)
    for name, table in made.items():
        if not shown or name in shown:
            _print(table)
    progress.print(f"wrote {', '.join(path.name for path in written)} in {out}", highlight=False)


def _load(name: str) -> tuple[Any, Any]:
    from qevict.models import load

    with progress.status(f"loading {name}"):
        return load(name)


def _print(table: Any) -> None:
    from rich.table import Table

    shown = Table(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


def _stopped(out: Path) -> NoReturn:
    progress.print(f"[yellow]stopped;[/] the same command goes on with {out}", highlight=False)
    raise typer.Exit(130)
