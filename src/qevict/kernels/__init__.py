"""Decode attention over the tiers. `reference` is the definition; faster kernels have its signature and its results."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from qevict.kernels import reference
from qevict.kernels.reference import Attended, History, TierView, prompt_mass

__all__ = ["Attended", "History", "TierView", "attend", "prompt_mass"]


def attend(
    query: Float[Tensor, "lanes heads group queries dim"], view: TierView, scaling: float, count_last: int | None = None
) -> Attended:
    """`reference.attend`, by the fastest kernel that knows the tiers."""
    # Kernels are imported when they are needed: Numba takes a while, and whoever only plans a cache needs none.
    if query.device.type == "cuda":
        from qevict.kernels import gpu

        attended = gpu.attend(query, view, scaling, count_last)
    else:
        from qevict.kernels import cpu

        attended = cpu.attend(query, view, scaling, count_last)
    return reference.attend(query, view, scaling, count_last) if attended is None else attended
