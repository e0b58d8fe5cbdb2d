"""All metrics of one article: a JSON-able dictionary for each condition, averaged over layers, heads and events.

The paper computes its diagnostics for each layer and head and aggregates over events and traces. Means here are over
every eligible event, head and layer with equal weight; counts (Eqs. 18 and 19) are added up over layers. What is chosen
layer by layer (full-precision sets, quantized windows, the oracle) is compared layer by layer, with scores that are
means over the lane's query heads, since that is what the cache ranks by (Eq. 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qevict.diagnostics.agreement import Agreement, event_sums, score_agreement
from qevict.diagnostics.mass import (
    SHARES,
    cumulative_scores,
    events_apart,
    future_missed_mass,
    selection_churn,
    tier_mass,
)
from qevict.diagnostics.policy import LOCAL, STATES, PolicyTrace
from qevict.diagnostics.residency import (
    EPISODE,
    EPISODES,
    Revival,
    global_lir,
    median_return,
    movements,
    oracle_selection,
    transitions,
)
from qevict.diagnostics.trace import Trace
from qevict.kernels.reference import window_sums
from qevict.routing import FULL, QUANTIZED

LAGS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Delta of Eq. 19, in routing events."""
STRETCH = 32
"""Tokens between the events of the churn that compares policies with different routing intervals."""

Summary = dict[str, Any]


def summarise(trace: Trace, policies: dict[str, PolicyTrace]) -> dict[str, Summary]:
    """Every metric of every condition; each layer of the trace is read once.

    Raises:
        ValueError: if a condition's scores begin with prompt queries whose mass the trace did not keep.
    """
    parts: dict[str, list[_Layer]] = {name: [] for name in policies}
    for place, layer in enumerate(trace.header.layers):
        mass = trace.mass(layer)
        counted = {None, *(policy.header.prompt_queries for policy in policies.values())}
        prompts = {queries: trace.prompt(layer, queries) for queries in counted}
        for name, policy in policies.items():
            parts[name].append(_Layer(policy, place, mass, prompts, trace.header.prefill))
    return {name: _joined(policy, parts[name], trace.header.prefill) for name, policy in policies.items()}


class _Layer:
    """The metrics of one layer under one policy."""

    def __init__(
        self,
        policy: PolicyTrace,
        place: int,
        mass: Float[Tensor, "heads steps tokens"],
        prompts: dict[int | None, Float[Tensor, "heads tokens"]],
        prefill: int,
    ) -> None:
        self.policy, self.place, self.mass, self.prefill = policy, place, mass, prefill
        self.prompt = prompts[None]
        self.ranking_prompt = prompts[policy.header.prompt_queries]
        lengths, tiers = policy.lengths, policy.tiers[place]
        self.coded = bool((tiers == QUANTIZED).any())
        self.fmm = future_missed_mass(mass, policy.accessible(place), lengths, prefill)
        exact = policy.accessible(place, quantized=False)
        self.fmm_full_only = future_missed_mass(mass, exact, lengths, prefill) if self.coded else None
        retained = policy.retained(place)
        self.churn = selection_churn(retained)
        self.stretch_churn = selection_churn(retained[events_apart(lengths, STRETCH)])
        self.shares = {
            "with prompt": tier_mass(cumulative_scores(mass, lengths, prefill, self.prompt), tiers),
            "decoding only": tier_mass(cumulative_scores(mass, lengths, prefill), tiers),
        }
        self.windows = policy.windows(place)
        self.selected = (self.windows == FULL).flatten(1)
        self.present = (self.windows < LOCAL).flatten(1)
        self.to_full = movements((self.windows == QUANTIZED).flatten(1), self.selected)
        self.agreement = self._agreement() if self.coded and policy.mass is not None else {}
        self.oracle = self._oracle() if policy.header.full_capacity else None

    def _window_mass(self, tokens: Float[Tensor, "heads *rest tokens"]) -> Float[Tensor, "lanes *rest windows"]:
        """Reference mass of whole windows, averaged over the lane's query heads."""
        lanes, header = self.windows.shape[1], self.policy.header
        by_lane = tokens.unflatten(0, (lanes, -1)).mean(dim=1)
        return window_sums(by_lane[..., header.sinks :], header.window)[..., : self.windows.shape[2]]

    def _agreement(self) -> dict[str, list[Agreement]]:
        """Of each lane: on cumulative scores with the prompt's mass, without it, and on event increments."""
        assert self.policy.mass is not None
        lengths = self.policy.lengths
        full, prompt = self._window_mass(self.mass), self._window_mass(self.ranking_prompt)
        ours = self.policy.mass[self.place].transpose(0, 1)[..., : self.windows.shape[2]]
        found: dict[str, list[Agreement]] = {}
        for lane in range(len(full)):
            member = self.windows[:, lane] == QUANTIZED
            for name, increments, start in (
                ("with prompt", False, prompt[lane]),
                ("decoding only", False, torch.zeros_like(prompt[lane])),
                ("increments", True, torch.zeros_like(prompt[lane])),
            ):
                sums = [start + event_sums(m[lane], lengths, self.prefill, increments=increments) for m in (ours, full)]
                # Before the first decode step there is nothing but the prompt's mass, which is the same for both.
                some = slice(0, None) if increments else slice(1, None)
                found.setdefault(name, []).append(score_agreement(sums[0][some], sums[1][some], member[some]))
        return found

    def _oracle(self) -> Bool[Tensor, "events windows"]:
        scores = cumulative_scores(self.mass, self.policy.lengths, self.prefill, self.ranking_prompt)
        by_window = self._window_mass(scores.transpose(0, 1)).transpose(0, 1)
        present, capacity = self.windows < LOCAL, self.policy.header.full_capacity
        lanes = [oracle_selection(by_window[:, i], present[:, i], capacity) for i in range(by_window.shape[1])]
        return torch.stack(lanes, dim=1).flatten(1)


def _joined(policy: PolicyTrace, layers: list[_Layer], prefill: int) -> Summary:
    header = policy.header
    events = len(policy.lengths)
    interval = (policy.lengths.diff()).float().mean() if events > 1 else torch.tensor(torch.nan)
    churn = _mean([layer.churn for layer in layers])
    summary: Summary = {
        "label": header.label,
        "window": header.window,
        "full_capacity": header.full_capacity,
        "code_capacity": header.code_capacity,
        "ratio": header.ratio,
        "bytes": header.bytes,
        "events": events,
        "kl": float(policy.kl.mean()),
        "fmm": _mean([layer.fmm for layer in layers]),
        "fmm_full_only": _mean([part for layer in layers if (part := layer.fmm_full_only) is not None]),
        "curve": {
            "step": (policy.lengths - prefill).tolist(),
            "fmm": _by_event([layer.fmm for layer in layers]),
            "full_only": _by_event([layer.fmm_full_only for layer in layers if layer.fmm_full_only is not None]),
        },
        "churn": churn,
        "churn_per_token": churn / float(interval),
        "churn_32": _mean([layer.stretch_churn for layer in layers]),
        "shares": {
            kind: dict(zip((STATES[tier] for tier in SHARES), _shares(layers, kind), strict=True))
            for kind in ("with prompt", "decoding only")
        },
        "agreement": {kind: _agreed(layers, kind) for kind in ("with prompt", "decoding only", "increments")},
        "lir": {"policy": _revivals([(la.selected, la.present) for la in layers])},
        "transitions": {"policy": _transitions([(la.selected, la.present) for la in layers])},
        "to_full": sum(layer.to_full for layer in layers),
    }
    oracles = [(layer.oracle, layer.present) for layer in layers if layer.oracle is not None]
    if oracles:
        summary["lir"]["oracle"] = _revivals(oracles)
        summary["transitions"]["oracle"] = _transitions(oracles)
    return summary


def _mean(parts: Sequence[Tensor]) -> float:
    """Over everything that is not nan."""
    return float(torch.cat([part.flatten() for part in parts]).nanmean()) if parts else math.nan


def _by_event(parts: Sequence[Float[Tensor, "events heads"]]) -> list[float]:
    return torch.cat(list(parts), dim=1).nanmean(dim=1).tolist() if parts else []


def _shares(layers: list[_Layer], kind: str) -> list[float]:
    return torch.cat([layer.shares[kind].flatten(0, 1) for layer in layers]).nanmean(dim=0).tolist()


def _agreed(layers: list[_Layer], kind: str) -> dict[str, float]:
    found = [agreement for layer in layers for agreement in layer.agreement.get(kind, [])]
    return {name: _mean([getattr(one, name) for one in found]) for name in Agreement._fields}


def _revivals(histories: Sequence[tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """By m: the rate, with and without windows never selected, the counts, and the median times to return."""
    rows = {}
    for m in sorted({*EPISODES, EPISODE}):
        total = sum((global_lir(*history, m=m) for history in histories), start=Revival(0, 0, ()))
        ever = sum((global_lir(*h, m=m, never_selected=False) for h in histories), start=Revival(0, 0, ()))
        departure, eligibility = median_return(total, m)
        rows[str(m)] = {
            "rate": total.rate,
            "rate_ever_selected": ever.rate,
            "eligible": total.eligible,
            "rescued": total.rescued,
            "median_from_departure": departure,
            "median_from_eligibility": eligibility,
        }
    return rows


def _transitions(histories: Sequence[tuple[Tensor, Tensor]]) -> dict[str, list[list[int]]]:
    """Counts by lag."""
    events = histories[0][0].shape[0]
    counts = {lag: [transitions(*history, lag=lag) for history in histories] for lag in LAGS if lag < events}
    return {str(lag): torch.stack(parts).sum(dim=0).tolist() for lag, parts in counts.items()}
