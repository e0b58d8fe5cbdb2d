"""The paper's tables 14, 15, 16 and 18 and figure 1(b) from a study's summaries, with the paper's own numbers beside.

Means are over articles, intervals 95 % (t) between articles. The paper's numbers are those that its text prints; the
cells of tables 14 to 16 are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from qevict.diagnostics.conditions import ONE_WAY
from qevict.diagnostics.intervals import Estimate, estimate, paired
from qevict.diagnostics.residency import EPISODE, EPISODES
from qevict.diagnostics.summary import LAGS, Summary

Summaries = Sequence[dict[str, Summary]]

PAPER_CHURN = {"R1": 0.017, "R3": 0.0012, "R4": 0.018}
PAPER_SHARES = {
    "R2": {"full": 0.333, "quantized": 0.0, "evicted": 0.648, "local": 0.019},
    "R3": {"full": 0.197, "quantized": 0.426, "evicted": 0.357, "local": 0.019},
}
PAPER_QSA = {"R3": 0.9824}
PAPER_LIR = {("R3", "oracle"): 0.0098, ("R3", "policy"): 0.0618}
PAPER_RETURN = {"R3": 8, "R4": 2}
PAPER_TRANSITIONS = {1: (0.0031, 0.0305), 8: (0.0239, 0.2212)}
PAPER_PROMOTION = {
    "fmm": (0.168, 0.161),
    "qsa": (0.947, 0.985),
    "ratio": (0.887, 0.955),
    "lir": (0.0, 0.066),
    "to_full": (0, 639),
}


class Table(NamedTuple):
    """A table of text cells."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """As Markdown, numbers to the right."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, *self.rows)]
        lines.insert(1, "|---" + "|---:" * (len(self.columns) - 1) + "|")
        return f"**{self.title}**\n\n" + "\n".join(lines)


def conditions_of(summaries: Summaries) -> list[str]:
    """Names of the conditions that every article has, in the order of the first."""
    if not summaries:
        raise ValueError("the study has no finished article yet")
    return [name for name in summaries[0] if all(name in summary for summary in summaries)]


def over(summaries: Summaries, name: str, value: Callable[[Summary], float]) -> Estimate:
    """Mean of something over articles."""
    return estimate([value(summary[name]) for summary in summaries])


def table14(summaries: Summaries) -> Table:
    """Future Missed Mass and churn."""
    rows = []
    for name in conditions_of(summaries):
        cell = partial(_value, summaries, name)
        paper = f"{PAPER_CHURN[name]}" if name in PAPER_CHURN else ""
        churn = (cell("churn", 4), paper, cell("churn_per_token", 5), cell("churn_32", 4))
        rows.append((name, cell("ratio", 1, 100.0), cell("fmm", 2, 100.0), *churn, cell("kl", 3)))
        if not math.isnan(over(summaries, name, lambda one: one["fmm_full_only"]).mean):
            rows.append((f"{name}, full precision only", "", cell("fmm_full_only", 2, 100.0), "", "", "", "", ""))
    columns = ("condition", "bytes, % of full KV", "FMM, %", "churn an event", "paper", "churn a token")
    return Table(
        "Table 14: Future Missed Mass (H = 32) and churn of the historical set",
        (*columns, "churn, events 32 tokens apart", "KL(full‖cache), nats"),
        rows,
    )


def shares_table(summaries: Summaries) -> Table:
    """Figure 1(b): where the reference's attention mass falls, with and without the prompt queries' mass."""
    rows = []
    for kind in ("with prompt", "decoding only"):
        for name in conditions_of(summaries):
            cells = [_share(summaries, name, kind, tier) for tier in ("full", "quantized", "evicted", "local")]
            rows.append((f"{name}, {kind}", *cells))
    for name, shares in PAPER_SHARES.items():
        rows.append((f"{name}, paper", *(f"{100 * share:.1f}" for share in shares.values())))
    return Table(
        "Figure 1(b): attention mass, % of all but the sinks'", ("", "full", "codes", "evicted", "local"), rows
    )


def table15(summaries: Summaries) -> Table:
    """Agreement of quantized and full scores."""
    rows = []
    for name in conditions_of(summaries):
        for kind in ("with prompt", "decoding only", "increments"):
            cells = [_agreement(summaries, name, kind, key) for key in ("cosine", "null", "spearman", "ratio")]
            if cells != ["–"] * len(cells):
                rows.append((f"{name}, {kind}", *cells))
    for name, qsa in PAPER_QSA.items():
        rows.append((f"{name}, paper", str(qsa), "", "", "below 1"))
    return Table(
        "Table 15: scores of the windows in codes, against full KV's",
        ("scores", "QSA (cosine)", "cosine, shuffled", "Spearman", "R_Q"),
        rows,
    )


def table16(summaries: Summaries) -> Table:
    """Global LIR of the policy's full-precision set and of the oracle's."""
    rows = []
    for name in conditions_of(summaries):
        if "oracle" not in summaries[0][name]["lir"]:
            continue
        for kind in ("oracle", "policy"):
            if not any(one[name]["lir"][kind][str(m)]["eligible"] for one in summaries for m in (*EPISODES, EPISODE)):
                continue
            rates = [_lir(summaries, name, kind, m, "rate") for m in (EPISODE, *EPISODES)]
            ever = _lir(summaries, name, kind, EPISODE, "rate_ever_selected")
            medians = [_median(summaries, name, kind, key) for key in ("departure", "eligibility")]
            paper = PAPER_LIR.get((name, kind))
            returns = str(PAPER_RETURN[name]) if kind == "policy" and name in PAPER_RETURN else ""
            paper_cells = ("" if paper is None else f"{100 * paper:.2f}", returns)
            rows.append((f"{name} {kind}", rates[0], paper_cells[0], ever, *rates[1:], *medians, paper_cells[1]))
    by_m = tuple(f"m = {m}" for m in EPISODES)
    columns = ("selection", "LIR, %, m = 3", "paper", "windows ever selected", *by_m)
    medians_of = ("events away, median", "after eligibility", "paper")
    return Table("Table 16: Global LIR", (*columns, *medians_of), rows)


def transitions_table(summaries: Summaries, name: str = "R3") -> Table:
    """Eq. 19 at every lag."""
    rows = []
    for kind in ("policy", "oracle"):
        for lag in LAGS:
            if str(lag) not in summaries[0][name]["transitions"].get(kind, {}):
                continue
            cells = [transition(summaries, name, kind, lag, a).text(2, 100.0) for a in (0, 1)]
            paper = PAPER_TRANSITIONS.get(lag) if (name, kind) == ("R3", "policy") else None
            rows.append((f"{kind}, Δ = {lag}", *cells, *(f"{100 * p:.2f}" if paper else "" for p in paper or (0, 0))))
    return Table(f"Eq. 19: lagged transitions of {name}, %", ("", "P01", "P10", "paper P01", "paper P10"), rows)


def table18(summaries: Summaries) -> Table:
    """Promotion against none, paired by article."""
    rows = []
    for name in conditions_of(summaries):
        without = name + ONE_WAY
        if without not in summaries[0]:
            continue
        for label, key, scale, digits, value in _PROMOTION:
            pair = [[value(summary[one]) for summary in summaries] for one in (without, name)]
            cells = [estimate(values).text(digits, scale) for values in pair]
            paper = (
                [f"{number * scale:.{digits}f}" for number in PAPER_PROMOTION[key]]
                if key in PAPER_PROMOTION
                else ["", ""]
            )
            rows.append((f"{name}: {label}", *cells, paired(*pair).text(digits, scale), *paper))
    return Table(
        "Table 18: one-way and bidirectional routing on the same articles",
        ("", "no promotion", "promotion", "difference", "paper, none", "paper, promotion"),
        rows,
    )


def transition(summaries: Summaries, name: str, kind: str, lag: int, a: int) -> Estimate:
    """P_ab (Eq. 19) for b the other state than a."""

    def share(one: Summary) -> float:
        row = one["transitions"][kind][str(lag)][a]
        return row[1 - a] / sum(row) if sum(row) else math.nan

    return over(summaries, name, share)


_PROMOTION: tuple[tuple[str, str, float, int, Callable[[Summary], float]], ...] = (
    ("FMM, %", "fmm", 100.0, 2, lambda one: one["fmm"]),
    ("QSA, with the prompt's mass", "qsa", 1.0, 4, lambda one: one["agreement"]["with prompt"]["cosine"]),
    ("QSA, event increments", "qsa increments", 1.0, 4, lambda one: one["agreement"]["increments"]["cosine"]),
    ("R_Q, with the prompt's mass, %", "ratio", 100.0, 2, lambda one: one["agreement"]["with prompt"]["ratio"]),
    ("R_Q, event increments, %", "ratio increments", 100.0, 2, lambda one: one["agreement"]["increments"]["ratio"]),
    ("Global LIR, m = 3, %", "lir", 100.0, 2, lambda one: one["lir"]["policy"][str(EPISODE)]["rate"]),
    ("Q to F transitions, all layers", "to_full", 1.0, 0, lambda one: float(one["to_full"])),
    ("KL(full‖cache), nats", "kl", 1.0, 3, lambda one: one["kl"]),
)


def _value(summaries: Summaries, name: str, key: str, digits: int, scale: float = 1.0) -> str:
    return over(summaries, name, lambda one: one[key]).text(digits, scale)


def _share(summaries: Summaries, name: str, kind: str, tier: str) -> str:
    return over(summaries, name, lambda one: one["shares"][kind][tier]).text(1, 100.0)


def _agreement(summaries: Summaries, name: str, kind: str, key: str) -> str:
    return over(summaries, name, lambda one: one["agreement"][kind][key]).text(4)


def _lir(summaries: Summaries, name: str, kind: str, m: int, key: str) -> str:
    return over(summaries, name, lambda one: one["lir"][kind][str(m)][key]).text(2, 100.0)


def _median(summaries: Summaries, name: str, kind: str, start: str) -> str:
    return over(summaries, name, lambda one: one["lir"][kind][str(EPISODE)][f"median_from_{start}"]).text(1)
