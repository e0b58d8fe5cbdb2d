"""What fidelity and drift share: the forks of a prompt in groups that fit a batch, and what records say of a cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from qevict.bench.cells import Cell, Failure, build, protected_share
from qevict.bench.decode import PeakMemory
from qevict.bench.protocol import Setting
from qevict.methods.base import MeasuredCache
from qevict.trace import PrefillTrace

KEY = ("task", "sample", "method", "budget")
"""Fields that tell records apart."""


@dataclass(frozen=True)
class Built:
    """A cell's cache, which has read its prompt, or why there is none.

    Attributes:
        protected: see `protected_share`.
    """

    cell: Cell
    cache: MeasuredCache | None
    failure: Failure | None = None
    protected: float | None = None

    def fields(self, memory: PeakMemory | None) -> dict[str, Any]:
        """What a record says of the cell, and of the most that its cache held."""
        method, budget = self.cell.key
        return {
            "method": method,
            "budget": budget,
            "status": "ok" if self.failure is None else self.failure.status,
            "reason": None if self.failure is None else self.failure.reason,
            "ratio": None if memory is None else round(memory.ratio, 6),
            "bytes": None if memory is None else memory.bytes,
            "budget_bytes": None if memory is None else memory.budget,
            "protected_share": None if self.protected is None else round(self.protected, 6),
        }


def build_groups(
    model: PreTrainedModel,
    trace: PrefillTrace,
    cells: Iterable[Cell],
    new_tokens: int,
    setting: Setting,
    size: int,
) -> Iterator[list[Built]]:
    """Cells in their order, in groups of at most `size` caches, which are built when their group is asked for."""
    group: list[Built] = []
    for cell in cells:
        made = build(model, trace, cell, new_tokens, scope=setting.scope, store_dtype=setting.store_dtype)
        if isinstance(made, Failure):
            group.append(Built(cell, None, made))
            continue
        if sum(built.cache is not None for built in group) == size:
            yield group
            group = []
        group.append(Built(cell, made, protected=protected_share(made)))
    yield group
