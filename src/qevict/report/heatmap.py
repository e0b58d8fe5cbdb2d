"""How deep a needle lay, how long the text was, and whether it was found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qevict.report.load import FULL, Point, Section, model_name, percent
from qevict.report.pictures import Picture, draw, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

DEPTH_BINS = 5


class Found(NamedTuple):
    """Samples with a single needle: how many, and the sum of their scores."""

    samples: int
    score: float


def grid(sections: Sequence[Section], point: Point) -> dict[tuple[int, int], Found]:
    """By length and depth bin. Samples with several needles say nothing of any one depth and stay out."""
    cells: dict[tuple[int, int], Found] = {}
    for section in sections:
        for record in section.rows.get(point, []):
            depths: list[float] = record.extra.get("depths") or []
            if section.length is None or len(depths) != 1 or record.score is None:
                continue
            key = section.length, min(int(depths[0] * DEPTH_BINS), DEPTH_BINS - 1)
            known = cells.get(key, Found(0, 0.0))
            cells[key] = Found(known.samples + 1, known.score + record.score)
    return cells


def needle_pictures(sections: Sequence[Section]) -> list[Picture]:
    """One for each protocol: a line a method, a panel a budget; columns are depths, length after length."""
    made = []
    for protocol in dict.fromkeys(section.protocol for section in sections):
        picture = _picture([section for section in sections if section.protocol == protocol], protocol)
        if picture is not None:
            made.append(picture)
    return made


def _picture(sections: Sequence[Section], protocol: str) -> Picture | None:
    points = dict.fromkeys(point for section in sections for point in section.points)
    grids = {point: cells for point in points if (cells := grid(sections, point))}
    if not grids:
        return None
    lengths = sorted({length for cells in grids.values() for length, _ in cells})
    panels = [(title, rows) for title, rows in _panels(list(grids)) if rows]
    counts = [cell.samples for cells in grids.values() for cell in cells.values()]
    spread = " to ".join(map(str, sorted({min(counts), max(counts)})))
    model = model_name(sections[0].settings)
    title = f"{model}, single needles, {protocol}, {spread} samples a cell"

    def onto(figure: Figure) -> None:
        heights = [len(rows) for _, rows in panels]
        axes = list(figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights).flat)
        for (name, rows), panel in zip(panels, axes, strict=True):
            colours = _draw(panel, rows, grids, lengths)
            panel.set_title(name, loc="left", fontsize=8)
        _label_columns(axes[-1], lengths)
        figure.colorbar(colours, ax=axes, label="score, %", shrink=0.4, aspect=30)
        figure.suptitle(f"{title}\ncolumns: depth in the text in %, length after length", fontsize=9)

    size = (2.6 + max(2.6, 0.45 * DEPTH_BINS * len(lengths)), 1.4 + sum(0.3 + 0.19 * len(rows) for _, rows in panels))
    return draw(f"needle-depths-{protocol}", f"{title}, by depth in the text and length of the text", size, onto)


def _panels(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Full KV and methods with an operating point of their own first, then a panel a budget."""
    free = sorted((p for p in points if p.budget is None), key=lambda p: p.method != FULL)
    budgets = sorted({p.budget for p in points if p.budget is not None}, reverse=True)
    named = [(f"{percent(budget)} budget", [p for p in points if p.budget == budget]) for budget in budgets]
    return [("Full KV and quantizers", free), *named]


def _draw(
    panel: Axes,
    rows: Sequence[Point],
    grids: Mapping[Point, Mapping[tuple[int, int], Found]],
    lengths: Sequence[int],
) -> ScalarMappable:
    """A line a method. What has no sample stays grey."""
    values = [
        [_share(grids[row].get((length, depth))) for length in lengths for depth in range(DEPTH_BINS)] for row in rows
    ]
    panel.set_facecolor("0.75")
    colours = panel.pcolormesh(values, cmap="cividis", vmin=0, vmax=100, clip_on=False)
    panel.invert_yaxis()
    for line, numbers in enumerate(values):
        for column, number in enumerate(numbers):
            if not math.isnan(number):
                colour = "black" if number > 60 else "white"
                at = (column + 0.5, line + 0.5)
                panel.text(*at, f"{number:.0f}", ha="center", va="center", fontsize=6, color=colour)
    for border in range(1, len(lengths)):
        panel.axvline(border * DEPTH_BINS, color="white", linewidth=3)
    panel.set_yticks([line + 0.5 for line in range(len(rows))], [wrapped(row.method) for row in rows], fontsize=6)
    return colours


def _share(found: Found | None) -> float:
    return math.nan if found is None else 100 * found.score / found.samples


def _label_columns(panel: Axes, lengths: Sequence[int]) -> None:
    """Depths below each column, and the length below the middle one of its depths."""
    step = 100 // DEPTH_BINS
    labels = [f"{depth * step}–{(depth + 1) * step}" for _ in lengths for depth in range(DEPTH_BINS)]
    for place, length in enumerate(lengths):
        labels[place * DEPTH_BINS + DEPTH_BINS // 2] += f"\n{length:,} tokens"
    panel.set_xticks([column + 0.5 for column in range(len(labels))], labels, fontsize=6)
