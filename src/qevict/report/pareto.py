"""Score against measured memory: which operating points no other one beats (the paper's Eq. 9, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qevict.report.families import TaskName
from qevict.report.floor import Selection
from qevict.report.load import FULL, Point, Section, is_qevict
from qevict.report.pictures import INK, PAPER, Look, Picture, draw, looks, wrapped
from qevict.report.values import SCORE, average, coverage, memory

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEGEND_CHARACTERS = 140
_LEGEND = "filled: on the Pareto frontier (Eq. 9); hollow: dominated; bars: standard error"


class OperatingPoint(NamedTuple):
    """A method's measured memory ratio and its score, from 0 to 1."""

    point: Point
    ratio: float
    score: float
    error: float

    def dominates(self, other: OperatingPoint) -> bool:
        """Eq. 9: no more memory and no lower a score, at least one of them strictly."""
        no_worse = self.ratio <= other.ratio and self.score >= other.score
        return no_worse and (self.ratio < other.ratio or self.score > other.score)


def frontier(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """The points that none dominates, by memory."""
    kept = [point for point in points if not any(other.dominates(point) for other in points)]
    return sorted(kept, key=lambda point: (point.ratio, -point.score))


def operating_points(section: Section, tasks: Sequence[TaskName], rows: Sequence[Point]) -> list[OperatingPoint]:
    """Of the rows that have all samples of all of the tasks; others do not compare."""
    found = []
    for row in rows:
        mean, ratio = average(section, tasks, row, SCORE), memory(section, row).ratio
        if mean is not None and ratio is not None and coverage(section, tasks, row, SCORE).whole:
            found.append(OperatingPoint(row, ratio, mean.value, mean.error))
    return found


def pareto_picture(section: Section, selection: Selection) -> Picture | None:
    """A row of two panels a task family, evictors and quantisers, and one for all averaged tasks.

    Only tasks that averages cover are drawn; QEvict is in both panels, full KV a dashed line.
    """
    families = {name: [t for t in selection.averaged if t.family == name] for name in _names(selection.averaged)}
    if len(families) > 1:
        families["All averaged tasks"] = selection.averaged
    evictors = [point for budget in section.budgets for point in section.evictors(budget)]
    quantisers = [*(point for point in evictors if is_qevict(point.method)), *section.quantisers]
    if not families or not (evictors or quantisers):
        return None
    look = looks(list(dict.fromkeys(point.method for point in section.points if point.method != FULL)))

    def onto(figure: Figure) -> None:
        axes = figure.subplots(len(families), 2, squeeze=False, sharey="row")
        for (family, tasks), panels in zip(families.items(), axes, strict=True):
            for panel, rows, kind in zip(panels, (evictors, quantisers), ("eviction", "quantization"), strict=True):
                _draw(panel, section, tasks, rows, look)
                panel.set_title(f"{_family_title(family, tasks)}: {kind}", loc="left")
            panels[0].set_ylabel("score, %")
        for panel in axes[-1]:
            panel.set_xlabel("measured KV memory, % of full KV")
        named: dict[str, Artist] = {}
        for panel in axes.flat:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                named.setdefault(label, handle)
        labels = [wrapped(label) for label in named]
        figure.legend(list(named.values()), labels, loc="outside lower center", ncols=_columns(labels), fontsize=8)
        figure.suptitle(f"{section.title}\n{_LEGEND}", fontsize=9)

    labels = [wrapped(method) for method in look]
    lines = -(-len(labels) // _columns(labels)) + sum("\n" in label for label in labels)
    size = (8.5, 1.5 + 0.17 * lines + 2.3 * len(families))
    return draw(f"{section.slug}-pareto", f"Score against measured memory. {_LEGEND}", size, onto)


def _draw(
    panel: Axes, section: Section, tasks: Sequence[TaskName], rows: Sequence[Point], look: dict[str, Look]
) -> None:
    points = operating_points(section, tasks, rows)
    best = frontier(points)
    panel.step([100 * p.ratio for p in best], [100 * p.score for p in best], where="post", color=INK, linewidth=0.6)
    for method in dict.fromkeys(point.point.method for point in points):
        line = sorted((p for p in points if p.point.method == method), key=lambda p: p.ratio)
        drawn, x, y = look[method], [100 * p.ratio for p in line], [100 * p.score for p in line]
        style: dict[str, Any] = {"color": drawn.colour, "marker": drawn.marker, "markersize": 5}
        panel.plot(x, y, linestyle=drawn.dashes, linewidth=drawn.width, label=method, **style)
        panel.errorbar(x, y, [100 * p.error for p in line], fmt="none", ecolor=drawn.colour, elinewidth=0.7, alpha=0.5)
        hollow = [p for p in line if p not in best]
        x, y = [100 * p.ratio for p in hollow], [100 * p.score for p in hollow]
        panel.plot(x, y, linestyle="none", markerfacecolor=PAPER, **style)
    full = average(section, tasks, Point(FULL, None), SCORE)
    if full is not None:
        panel.axhline(100 * full.value, color=INK, linestyle=(0, (6, 4)), linewidth=1, label="full KV")
    panel.set_xlim(left=0)
    top = panel.get_ylim()[1]
    panel.set_ylim(-0.04 * top, top)  # markers at 0 are seen whole
    panel.grid(visible=True)


def _columns(labels: Sequence[str]) -> int:
    """How many labels and their markers stand side by side in a legend."""
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    return max(1, _LEGEND_CHARACTERS // (longest + 11))


def _names(tasks: Sequence[TaskName]) -> list[str]:
    return list(dict.fromkeys(task.family for task in tasks))


def _family_title(family: str, tasks: Sequence[TaskName]) -> str:
    names = ", ".join(task.short for task in tasks)
    return f"{family or names}" if len(tasks) > 4 or not family else f"{family} ({names})"
