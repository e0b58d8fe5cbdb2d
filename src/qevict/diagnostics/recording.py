"""Runs real caches on a reference's tokens, all conditions together, and writes down what each kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from qevict.bench.cells import capture
from qevict.bench.forks import fork_forward
from qevict.budget import InfeasibleBudgetError, MemoryReport
from qevict.cache import QEvictCache
from qevict.config import Budget
from qevict.diagnostics.conditions import Condition, geometry_of, keeps_codes, plan_of
from qevict.diagnostics.policy import PolicyHeader, PolicyTrace
from qevict.diagnostics.trace import Trace
from qevict.diagnostics.watch import StoreWatcher, TierWatcher, Watcher, WholeWatcher
from qevict.layer import QEvictLayer
from qevict.methods.base import MeasuredCache
from qevict.methods.cache import MethodCache
from qevict.methods.qevict import QEvict
from qevict.methods.registry import make_cache
from qevict.trace import PrefillTrace

INTERVAL, SINKS, RECENT = 8, 5, 32
"""For methods without routing events: tokens between two looks, and how many are called sinks and recent ones."""


@dataclass
class _Run:
    condition: Condition
    cache: Any
    watcher: Watcher
    kl: list[float]
    peak: MemoryReport

    def see(self, step: int, kl: float) -> None:
        self.watcher.see(step)
        self.kl.append(kl)
        memory = self.cache.memory()
        self.peak = max(self.peak, memory, key=lambda report: report.reserved)


@torch.no_grad()
def record_policies(
    model: PreTrainedModel,
    trace: Trace,
    conditions: Sequence[Condition],
    *,
    interval: int = INTERVAL,
    store_dtype: torch.dtype | None = torch.bfloat16,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, PolicyTrace], dict[str, str]]:
    """Force a reference's tokens on a cache of each condition, beside one of full KV, as forks of one prefill.

    Args:
        interval: tokens between two looks at methods without routing events of their own.

    Returns:
        What each condition kept, and why others were infeasible, by name.
    """
    header = trace.header
    prefill = capture(model, header.tokens[: header.prefill], [condition.method for condition in conditions])
    runs, infeasible = [], {}
    for condition in conditions:
        try:
            runs.append(_run(model, trace, condition, prefill, interval, store_dtype))
        except InfeasibleBudgetError as error:  # noqa: PERF203
            infeasible[condition.name] = str(error)
    full = prefill.fill(_cache(model, Condition("full", QEvict(), Budget(fraction=1.0)), header.steps, store_dtype))
    members = [full, *(run.cache for run in runs)]
    for step, token in enumerate(header.tokens[header.prefill :]):
        logits = fork_forward(model, members, torch.full((len(members), 1), token))[:, -1]
        for run, kl in zip(runs, _kl(logits), strict=True):
            run.see(step, kl)
        progress(step + 1)
    return {run.condition.name: _finished(model, trace, run) for run in runs}, infeasible


def _run(
    model: PreTrainedModel,
    trace: Trace,
    condition: Condition,
    prefill: PrefillTrace,
    interval: int,
    store_dtype: torch.dtype | None,
) -> _Run:
    steps = trace.header.steps
    cache: Any = _cache(model, condition, steps, store_dtype)
    if isinstance(cache, MethodCache):
        cache.keep_trails()
    prefill.fill(cache)
    start = trace.header.prefill
    watcher: Watcher
    if isinstance(cache, MethodCache):
        watcher = StoreWatcher(cache, start, steps, interval, SINKS, RECENT)
    elif isinstance(cache, QEvictCache) and any(isinstance(layer, QEvictLayer) for layer in cache.layers):
        watcher = TierWatcher(cache, start, steps)
    else:
        watcher = WholeWatcher(len(trace.header.layers), start, steps, interval, keeps_codes(condition.method))
    return _Run(condition, cache, watcher, [], cache.memory())


def _cache(model: PreTrainedModel, condition: Condition, steps: int, dtype: torch.dtype | None) -> MeasuredCache:
    return make_cache(model, condition.method, condition.budget, max_new_tokens=steps, store_dtype=dtype)


def _kl(logits: Float[Tensor, "rows vocabulary"]) -> list[float]:
    """KL(first row || each other row) in nats; float32 log-probabilities, summed in float64."""
    log = logits.float().log_softmax(dim=-1).double()
    return ((log[0].exp() * (log[0] - log[1:])).sum(dim=-1)).tolist()


def _finished(model: PreTrainedModel, trace: Trace, run: _Run) -> PolicyTrace:
    header, condition, cache = trace.header, run.condition, run.cache
    plan = plan_of(condition, geometry_of(model, len(header.tokens)), len(header.tokens), header.prefill)
    tiered = plan is not None and isinstance(run.watcher, TierWatcher)
    queries = condition.method.observed_queries if isinstance(condition.method, QEvict) else None
    made = PolicyHeader(
        name=condition.name,
        label=condition.method.label,
        window=plan.window if plan is not None and tiered else 1,
        sinks=plan.sink_tokens if plan is not None and tiered else SINKS,
        recent=plan.recent_tokens if plan is not None and tiered else RECENT,
        full_capacity=plan.full_capacity if plan is not None else 0,
        code_capacity=plan.code_capacity if plan is not None else 0,
        prompt_queries=queries,
        ratio=run.peak.ratio,
        bytes=run.peak.reserved,
        promoted=cache.moves().promoted if isinstance(cache, QEvictCache) else 0,
        settings={name: str(value) for name, value in condition.method.settings().items()},
    )
    return PolicyTrace(
        header=made,
        lengths=torch.tensor(run.watcher.lengths),
        tiers=torch.stack(run.watcher.tiers, dim=1),
        kl=torch.tensor(run.kl),
        mass=run.watcher.mass,
    )
