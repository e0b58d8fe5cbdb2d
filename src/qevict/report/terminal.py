"""Tables and bars for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qevict.answer import Answer
from qevict.budget import MemoryReport, TierPlan
from qevict.demo import Question
from qevict.geometry import KVGeometry
from qevict.methods.base import Described, Properties
from qevict.methods.matching import Match
from qevict.planning import PlannedTiers

_WIDTH = 48
_COLOURS = {
    "sink": "bright_blue",
    "recent": "blue",
    "full": "green",
    "codes": "yellow",
    "parameters": "dark_orange",
    "position + ledger": "magenta",
    "reserved, unused": "bright_black",
}


def size(count: int) -> str:
    """Bytes for people: 1 MB is a million bytes."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"


def memory_bar(report: MemoryReport) -> RenderableType:
    """Full KV above, what is measured below on the same scale, and what it consists of."""
    terms = {
        "sink": report.sink,
        "recent": report.recent,
        "full": report.full,
        "codes": report.codes,
        "parameters": report.parameters,
        "position + ledger": report.position + report.ledger,
        "reserved, unused": report.reserved - report.used,
    }
    scale = max(report.full_kv, report.reserved, 1)
    bar, legend = Text(), Text()
    filled = total = 0
    for name, amount in terms.items():
        if amount <= 0:
            continue
        total += amount
        cells = round(_WIDTH * total / scale) - filled
        filled += cells
        bar.append("█" * cells, style=_COLOURS[name])
        legend.append("■ ", style=_COLOURS[name]).append(f"{name} {size(amount)}  ")
    table = Table.grid(padding=(0, 1))
    table.add_row("full KV", Text("█" * round(_WIDTH * report.full_kv / scale), style="white"), size(report.full_kv))
    table.add_row("measured", bar, f"{size(report.reserved)} = {report.ratio:.1%}")
    lines: list[RenderableType] = [table, legend]
    if report.budget is not None:
        verdict = f"over by {size(report.overshoot)}" if report.overshoot else "kept"
        lines.append(Text(f"budget {size(report.budget)}: {verdict}"))
    if report.unmanaged:
        lines.append(Text(f"outside the budget: {size(report.unmanaged)} in sliding-window layers"))
    return Group(*lines)


def answer_summary(result: Answer) -> RenderableType:
    """What an answer took: memory, tokens, time, and tiers if the method has them."""
    line = (
        f"{result.prompt_tokens} + {result.new_tokens} tokens, first after {result.first_token_seconds:.1f} s, then "
        f"{result.tokens_per_second:.1f} tokens/s"
    )
    if result.counts is not None and result.moves is not None:
        line += (
            f"; windows (over layers): {result.counts.full} full, {result.counts.quantized} low-bit, "
            f"{result.counts.evicted} evicted, {result.moves.promoted} promotions"
        )
    return Group(memory_bar(result.memory), Text(line))


def plan_table(geometry: KVGeometry, plan: TierPlan, planned: PlannedTiers, lanes: int) -> RenderableType:
    """What a budget holds of a context, tier by tier, over all layers of one sequence."""
    context, scale = planned.context, geometry.layers * lanes
    table = Table(title=f"one sequence of {context:,} tokens, {geometry.layers} managed layers")
    for column in ("tier", "tokens", "share of context", "bytes", "share of budget"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    rows: Iterable[tuple[str, int, int]] = (
        ("sinks", planned.sinks, planned.sinks * plan.token_bytes),
        ("recent", planned.recent, planned.recent * plan.token_bytes),
        ("full", planned.full * plan.window, planned.full * plan.full_bytes),
        ("low-bit", planned.quantized * plan.window, planned.quantized * plan.code_bytes),
    )
    budget = plan.budget_bytes * scale
    for name, tokens, amount in rows:
        amount *= scale
        table.add_row(name, f"{tokens:,}", f"{tokens / context:.1%}", size(amount), f"{amount / budget:.1%}")
    table.add_section()
    reserved = plan.reserved_bytes * scale
    table.add_row(
        "kept", f"{planned.kept:,}", f"{planned.kept / context:.1%}", size(reserved), f"{reserved / budget:.1%}"
    )
    table.add_row("evicted", f"{context - planned.kept:,}", f"{1 - planned.kept / context:.1%}", "0 B", "")
    full = geometry.full_bytes(context)
    table.add_row("full KV", f"{context:,}", "100.0%", size(full), f"{full / budget:.1%}")
    protected = (plan.budget_bytes - plan.history_bytes) * scale
    notes = (
        f"protected tokens (sinks, recent and its growth) take {protected / budget:.1%} of the budget; "
        f"windows of {plan.window}: {planned.full} full, {planned.quantized} low-bit a lane; "
        f"a full window takes {size(plan.full_bytes)}, a low-bit one {size(plan.code_bytes)}"
    )
    over = Text(f"reserved storages pass the budget by {size(reserved - budget)}") if reserved > budget else Text()
    return Group(table, Text(notes), over)


def demo_table(title: str, asked: Sequence[Question], answers: Mapping[str, Sequence[Answer]]) -> RenderableType:
    """One row a cache: its answers, right or wrong, and what they took (memory and tiers after the last one)."""
    table = Table(title=title)
    table.add_column("cache")
    for question in asked:
        table.add_column(question.text, max_width=30)
    for column in ("bytes", "tokens/s", "windows"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, results in answers.items():
        shown = [_marked(q.expected, result.text) for q, result in zip(asked, results, strict=True)]
        last = results[-1]
        table.add_row(
            name,
            *shown,
            f"{size(last.memory.reserved)}\n{last.memory.ratio:.1%}",
            f"{last.tokens_per_second:.1f}",
            _tiers(results),
            end_section=True,
        )
    return table


def _tiers(results: Sequence[Answer]) -> str:
    counts, moves = results[-1].counts, [result.moves for result in results]
    if counts is None:
        return ""
    promoted = sum(m.promoted for m in moves if m is not None)
    return f"{counts.full} full\n{counts.quantized} low-bit\n{counts.evicted} evicted\n{promoted} promoted"


def methods_table(methods: Mapping[str, Described]) -> RenderableType:
    """Every method with its kind, the properties of the paper's table 1, its paper, and below that its settings."""
    names = [name.replace("_", " ") for name in Properties._fields]
    initials = " ".join(name[0].upper() for name in names)
    table = Table(title="methods", caption=", ".join(f"{name[0].upper()}: {name}" for name in names))
    for column in ("name", "kind", initials):
        table.add_column(column, no_wrap=True)
    table.add_column("paper and settings", overflow="fold")
    for name, method in methods.items():
        marks = " ".join("[green]✓[/]" if holds else "[red]✗[/]" for holds in method.properties)
        settings = _settings(method)
        about = Text(method.paper).append(f"\n{settings}" if settings else "", style="dim")
        table.add_row(Text(name), method.kind, marks, about)
    return table


def match_table(ratio: float, matches: Mapping[str, Match]) -> RenderableType:
    """What of each method meets a ratio."""
    table = Table(title=f"at most {ratio:.1%} of full KV's bytes, maximum over steps")
    for column in ("name", "measured", "settings"):
        table.add_column(column, justify="right" if column == "measured" else "left", overflow="fold")
    for name, match in matches.items():
        measured = "" if match.ratio is None else f"{match.ratio:.1%}"
        # As it is: labels hold brackets, which markup would swallow.
        table.add_row(Text(name), measured, Text(match.reason or f"{match.method.label}: {_settings(match.method)}"))
    return table


def _settings(method: Described) -> str:
    return ", ".join(f"{name}={value}" for name, value in method.settings().items() if value is not None)


def _marked(expected: str, text: str) -> Text:
    right = expected in text
    mark = Text("✓ ", style="green") if right else Text("✗ ", style="red")
    return mark.append(text.split("\n")[0][:40], style="default")
