"""What a study's folder shows: tables as Markdown, pictures, and the page of its first article."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qevict.diagnostics.page import page
from qevict.diagnostics.pictures import pictures, tier_map
from qevict.diagnostics.study import Study
from qevict.diagnostics.tables import Table, shares_table, table14, table15, table16, table18, transitions_table

PAGE_POLICIES = 8
"""Most policies of a page."""


def tables(study: Study) -> dict[str, Table]:
    """Every table that the study's conditions have rows for, by the preset that asks for it."""
    summaries = study.summaries()
    made = {
        "table14": table14(summaries),
        "fig1": shares_table(summaries),
        "table15": table15(summaries),
        "table16": table16(summaries),
        "table18": table18(summaries),
    }
    if "R3" in summaries[0]:
        made["transitions"] = transitions_table(summaries)
    return {name: table for name, table in made.items() if table.rows}


def write_tables(study: Study, made: Sequence[Table]) -> Path:
    """All tables in one Markdown file."""
    path = study.folder / "tables.md"
    path.write_text("\n\n".join(table.markdown() for table in made) + "\n", encoding="utf-8")
    return path


def write_pictures(study: Study, layer: int | None = None) -> list[Path]:
    """PNG and SVG of every picture.

    Args:
        layer: place of the layer of the tier maps; None takes the middle one.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    settings, summaries = study.settings, study.summaries()
    kind = "own continuation" if settings.forced else "greedy continuation"
    articles = f"{len(summaries)} article" + ("s" if len(summaries) > 1 else "")
    what = f"{settings.model}, {settings.prefill} + {settings.new} tokens, {articles}, {kind}"
    drawn = pictures(summaries, what)
    trace = study.trace(0)
    place = len(trace.header.layers) // 2 if layer is None else layer
    policies = study.policies(0).values()
    drawn += [tier_map(trace, policy, place) for policy in policies if policy.header.window > 1]
    for picture in drawn:
        picture.save(study.folder)
    return [study.folder / f"{picture.slug}.png" for picture in drawn]


def write_page(study: Study, tokenizer: PreTrainedTokenizerBase, names: Sequence[str] = ()) -> Path:
    """The page of the first article.

    Args:
        names: policies to show; none takes the first `PAGE_POLICIES`, those with windows first.
    """
    policies = study.policies(0)
    by_window = sorted(policies, key=lambda name: policies[name].header.window == 1)
    chosen = [policies[name] for name in names or by_window[:PAGE_POLICIES] if name in policies]
    path = study.folder / "page.html"
    path.write_text(page(study.trace(0), chosen, tokenizer), encoding="utf-8")
    return path
