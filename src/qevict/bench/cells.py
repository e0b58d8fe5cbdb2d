"""A cell of a sweep: one method at one budget; and how a prompt becomes the cell's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from qevict.budget import InfeasibleBudgetError
from qevict.cache import QEvictCache
from qevict.config import Budget
from qevict.layer import QEvictLayer
from qevict.methods.base import Described, MeasuredCache
from qevict.methods.cache import MethodCache, MethodLayer
from qevict.methods.full import FullKV
from qevict.methods.registry import make_cache
from qevict.trace import PrefillTrace

Scope = Literal["total", "prompt"]
Status = Literal["ok", "infeasible", "refused"]


@dataclass(frozen=True)
class Cell:
    """A method at a budget, a fraction of full KV; None for methods that have an operating point of their own."""

    method: Described
    budget: float | None = None

    @property
    def key(self) -> tuple[str, float | None]:
        """What records name it by."""
        return self.method.label, self.budget

    @property
    def is_full(self) -> bool:
        """Whether this is full KV, which the others are compared with."""
        return self.method.kind == "full"


FULL = Cell(FullKV())


@dataclass(frozen=True)
class Failure:
    """A cell that cannot be.

    Attributes:
        status: "infeasible" where the budget cannot hold what the method must keep; "refused" where the method cannot
            serve the model or the settings for another reason.
    """

    status: Status
    reason: str


def cells_of(methods: Sequence[Described], budgets: Sequence[float]) -> list[Cell]:
    """Full KV, then every method at every budget, or once where it takes none.

    Raises:
        ValueError: if two methods have the same name, or a budget is no fraction.
    """
    for budget in budgets:
        Budget(fraction=budget)  # which says what is allowed
    cells = [FULL]
    for method in methods:
        if method.kind != "full":
            cells += [Cell(method, budget) for budget in budgets] if method.takes_budget else [Cell(method)]
    keys = [cell.key for cell in cells]
    if repeated := sorted({cell.method.label for cell in cells if keys.count(cell.key) > 1}):
        raise ValueError(f"{', '.join(repeated)}: each method and each budget can be named only once")
    return cells


def capture(model: PreTrainedModel, ids: Sequence[int], methods: Iterable[Described]) -> PrefillTrace:
    """One prefill with all that the methods look at."""
    methods = list(methods)
    observed = [method.observed_queries for method in methods]
    queries = None if None in observed else max((count for count in observed if count is not None), default=0)
    hidden = any(getattr(method, "needs_hidden", False) for method in methods)
    scores = any(getattr(method, "needs_scores", False) for method in methods)
    return PrefillTrace.capture(model, torch.tensor([list(ids)]), queries=queries, hidden=hidden, scores=scores)


def build(
    model: PreTrainedModel,
    trace: PrefillTrace,
    cell: Cell,
    new_tokens: int,
    *,
    scope: Scope,
    store_dtype: torch.dtype | None,
) -> MeasuredCache | Failure:
    """The cell's cache, which has read the traced prompt; or why there is none.

    Args:
        new_tokens: that will be fed after the prompt, at most.
    """
    budget = Budget(fraction=1.0) if cell.budget is None else Budget(fraction=cell.budget, scope=scope)
    try:
        made: Any = make_cache(model, cell.method, budget, max_new_tokens=new_tokens, store_dtype=store_dtype)
        if isinstance(made, MethodCache):
            made.keep_decoded()
        filled: MeasuredCache = trace.fill(made)
    except InfeasibleBudgetError as error:
        return Failure("infeasible", str(error))
    except ValueError as error:
        if cell.is_full:
            raise
        return Failure("refused", str(error))
    return filled


def protected_share(cache: MeasuredCache) -> float | None:
    """Share of the budget that goes to tokens kept whatever their score: sinks, recent tokens, an observation window,
    room for new tokens. None without a limit, or where it cannot be told.
    """
    layer = cache.managed[0] if isinstance(cache, QEvictCache | MethodCache) and cache.managed else None
    if isinstance(layer, QEvictLayer):
        plan = layer.cohorts[0].store.plan
        return 1 - plan.history_bytes / plan.budget_bytes
    if not isinstance(layer, MethodLayer):
        return None
    allowance = layer.rows[0].allowance
    if allowance.bytes is None:
        return None
    held = layer.session.method.protected_bytes(allowance)
    return None if held is None else held / allowance.bytes
