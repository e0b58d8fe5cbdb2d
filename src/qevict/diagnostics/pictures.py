"""Figure 1 and its neighbours, with matplotlib: colours that all can tell apart, PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qevict.diagnostics.intervals import estimate
from qevict.diagnostics.mass import HORIZON
from qevict.diagnostics.policy import ABSENT, LOCAL, PolicyTrace
from qevict.diagnostics.residency import EPISODES
from qevict.diagnostics.summary import Summary
from qevict.diagnostics.tables import Summaries, conditions_of, over, transition
from qevict.diagnostics.trace import Trace
from qevict.kernels.reference import window_sums
from qevict.report.pictures import Picture, draw
from qevict.routing import EVICTED, FULL, QUANTIZED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours.
TIER_COLOURS = {FULL: "#0072B2", QUANTIZED: "#56B4E9", EVICTED: "#E8E4DC", LOCAL: "#E69F00"}
TIER_NAMES = {FULL: "full precision", QUANTIZED: "codes", EVICTED: "evicted", LOCAL: "recent"}
_LINES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")


def pictures(summaries: Summaries, subtitle: str) -> list[Picture]:
    """All that need no more than a study's summaries.

    Args:
        subtitle: model, lengths and articles, for every title.
    """
    names = conditions_of(summaries)
    paper = [name for name in names if name[:1] == "R" and name[1:].isdigit()]
    others = [name for name in names if name not in paper]
    made = [shares_picture(summaries, names, subtitle)]
    if paper:
        made.append(fmm_picture(summaries, paper, subtitle, "fmm"))
    if others:
        made.append(
            fmm_picture(summaries, [*(n for n in paper if n in ("R2", "R3")), *others], subtitle, "fmm-methods")
        )
    tiered = [name for name in names if "oracle" in summaries[0][name]["lir"] and summaries[0][name]["code_capacity"]]
    if tiered:
        made += [lir_picture(summaries, tiered, subtitle), transitions_picture(summaries, tiered, subtitle)]
    return made


def fmm_picture(summaries: Summaries, names: Sequence[str], subtitle: str, slug: str) -> Picture:
    """Figure 1(a): FMM over decoding; dashed where the low-bit tier is treated as inaccessible."""

    def onto(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, name in zip(_cycled(len(names)), names, strict=True):
            _curve(axes, [one[name] for one in summaries], "fmm", name, colour, "-")
            if summaries[0][name]["curve"]["full_only"]:
                label = f"{name}, codes inaccessible"
                _curve(axes, [one[name] for one in summaries], "full_only", label, colour, "--")
        axes.set(xlabel="decode step of the routing event", ylabel=f"Future Missed Mass, H = {HORIZON}", ylim=(0, None))
        axes.grid(axis="y")
        axes.legend(fontsize=7, ncols=2)
        axes.set_title(f"Attention that falls on what was given up\n{subtitle}")

    return draw(slug, "Future Missed Mass over decoding", (6.2, 3.8), onto)


def shares_picture(summaries: Summaries, names: Sequence[str], subtitle: str) -> Picture:
    """Figure 1(b): where the reference's cumulative attention falls."""

    def onto(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, kind in zip(panels, ("with prompt", "decoding only"), strict=True):
            for row, name in enumerate(reversed(names)):
                left = 0.0
                for tier in (FULL, QUANTIZED, LOCAL, EVICTED):
                    word = {FULL: "full", QUANTIZED: "quantized", LOCAL: "local", EVICTED: "evicted"}[tier]
                    width = 100 * over(summaries, name, partial(_share, kind, word)).mean
                    axes.barh(row, width, left=left, color=TIER_COLOURS[tier], edgecolor="white", linewidth=0.5)
                    if width > 7:
                        text = "white" if tier == FULL else "black"
                        axes.text(
                            left + width / 2, row, f"{width:.0f}", ha="center", va="center", fontsize=7, color=text
                        )
                    left += width
            axes.set_yticks(range(len(names)), list(reversed(names)))
            axes.set(xlim=(0, 100), xlabel="% of attention mass, sinks left out")
            axes.set_title("prompt queries counted" if kind == "with prompt" else "decode queries alone")
        figure.legend(handles=_tier_patches(), loc="outside lower center", ncols=4, fontsize=7)
        figure.suptitle(f"Where full KV's attention falls · {subtitle}", fontsize=9)

    return draw("shares", "Attention mass by tier", (7.4, 1.6 + 0.32 * len(names)), onto)


def lir_picture(summaries: Summaries, names: Sequence[str], subtitle: str) -> Picture:
    """Global LIR against m."""

    def onto(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, name in zip(_cycled(len(names)), names, strict=True):
            for kind, dashes in (("policy", "-"), ("oracle", ":")):
                values = [over(summaries, name, partial(_lir, kind, m)) for m in EPISODES]
                means = [100 * value.mean for value in values]
                bars = [0.0 if math.isnan(value.half) else 100 * value.half for value in values]
                axes.errorbar(EPISODES, means, bars, label=f"{name} {kind}", color=colour, ls=dashes, marker="o", ms=3)
        axes.set(xlabel="m, events of absence that make an episode eligible", ylabel="Global LIR, %", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(EPISODES, [str(m) for m in EPISODES])
        axes.legend(fontsize=7, ncols=2)
        axes.set_title(f"Inactive windows that come back\n{subtitle}")

    return draw("lir", "Global LIR against m", (5.2, 3.6), onto)


def transitions_picture(summaries: Summaries, names: Sequence[str], subtitle: str) -> Picture:
    """Lagged transitions (Eq. 19) of the full-precision sets."""

    def onto(figure: Figure) -> None:
        panels = figure.subplots(1, 2)
        for axes, a, label in zip(panels, (0, 1), ("P01: returns", "P10: departures"), strict=True):
            for colour, name in zip(_cycled(len(names)), names, strict=True):
                for kind, dashes in (("policy", "-"), ("oracle", ":")):
                    lags = [int(lag) for lag in summaries[0][name]["transitions"][kind]]
                    values = [100 * transition(summaries, name, kind, lag, a).mean for lag in lags]
                    axes.plot(lags, values, label=f"{name} {kind}", color=colour, ls=dashes, marker="o", ms=3)
            axes.set(xlabel="Δ, routing events", ylabel="%", ylim=(0, None), title=label, xticks=(1, 4, 8, 12, 16))
        panels[0].legend(fontsize=7)
        figure.suptitle(f"Lagged transitions of the full-precision set · {subtitle}", fontsize=9)

    return draw("transitions", "Lagged transition probabilities", (7.0, 3.2), onto)


def tier_map(trace: Trace, policy: PolicyTrace, place: int) -> Picture:
    """Windows down, routing events across, colour for the tier, dots where a window was promoted; beside it the
    reference's attention to each window between events.

    Args:
        place: of the layer among the traced ones. Its first lane is shown.
    """
    states = policy.windows(place)[:, 0]
    mass = between_events(trace, policy, place)
    title = f"{policy.header.name}, layer {trace.header.layers[place]} · {trace.header.title}"

    def onto(figure: Figure) -> None:
        from matplotlib.colors import ListedColormap, LogNorm

        tiers, attention = figure.subplots(1, 2, sharey=True)
        colours = [TIER_COLOURS[tier] for tier in (EVICTED, QUANTIZED, FULL, LOCAL)]
        cells = torch.where(states == ABSENT, torch.nan, states.float()).T.numpy()
        tiers.imshow(cells, aspect="auto", cmap=ListedColormap(colours), vmin=0, vmax=3, interpolation="nearest")
        event, window = ((states[:-1] == QUANTIZED) & (states[1:] == FULL)).nonzero(as_tuple=True)
        tiers.scatter((event + 1).numpy(), window.numpy(), s=4, color="black", linewidths=0)
        tiers.set(xlabel="routing event", ylabel=f"window of {policy.header.window} tokens")
        tiers.legend(handles=[*_tier_patches(), *_promotion_mark()], fontsize=6, loc="lower left", framealpha=0.9)
        shown = mass.clamp(min=1e-4).masked_fill(states == ABSENT, torch.nan).T.numpy()
        image = attention.imshow(
            shown,
            aspect="auto",
            cmap="viridis",
            norm=LogNorm(1e-4, max(1e-3, float(mass.max()))),
            interpolation="nearest",
        )
        attention.set(xlabel="routing event", title="full KV's attention per decode step")
        tiers.set_title("tier")
        figure.colorbar(image, ax=attention)
        figure.suptitle(title, fontsize=9)

    return draw(f"tiers-{policy.header.name}-layer-{place}", "Tier of every window at every event", (8.4, 4.6), onto)


def between_events(trace: Trace, policy: PolicyTrace, place: int) -> Float[Tensor, "events windows"]:
    """Reference attention of each whole window per decode step, mean over query heads, from each event to the next."""
    mass = trace.mass(trace.header.layers[place]).mean(dim=0)
    windows = window_sums(mass[:, policy.header.sinks :], policy.header.window)[:, : policy.windows(place).shape[2]]
    starts = (policy.lengths - trace.header.prefill).tolist()
    stops = [*starts[1:], trace.header.steps]
    return torch.stack([windows[a:b].mean(dim=0) for a, b in zip(starts, stops, strict=True)])


def _curve(axes: Axes, one: list[Summary], key: str, label: str, colour: str, dashes: str) -> None:
    steps = one[0]["curve"]["step"]
    values = [estimate([article["curve"][key][event] for article in one]) for event in range(len(steps))]
    means = np.array([value.mean for value in values])
    halves = np.nan_to_num([value.half for value in values])
    axes.plot(steps, means, label=label, color=colour, ls=dashes, lw=1.4)
    axes.fill_between(steps, means - halves, means + halves, color=colour, alpha=0.12, lw=0)


def _share(kind: str, tier: str, one: Summary) -> float:
    return one["shares"][kind][tier]


def _lir(kind: str, m: int, one: Summary) -> float:
    return one["lir"][kind][str(m)]["rate"]


def _cycled(count: int) -> list[str]:
    return [_LINES[index % len(_LINES)] for index in range(count)]


def _tier_patches() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=colour, label=TIER_NAMES[tier]) for tier, colour in TIER_COLOURS.items()]


def _promotion_mark() -> list[Any]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], color="black", marker=".", ls="", label="promoted")]
