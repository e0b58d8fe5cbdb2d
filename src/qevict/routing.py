"""Routing (Algorithm 1, Eqs. 4-6) as pure functions: scores, states and capacities in, the new assignment out.

Everything is vectorised over lanes; a lane is what is ranked together: one batch row of a layer, or one KV head of it.
Columns are candidate windows in any order; a window number of -1 marks an empty column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EVICTED, QUANTIZED, FULL = 0, 1, 2
"""The three states of a window outside the protected region."""


class Candidates(NamedTuple):
    """The candidate pool of a routing event (Eq. 4).

    Attributes:
        window: window numbers, -1 where a lane has fewer candidates than columns.
        score: what they are ranked by; higher is kept.
        in_codes: windows that are in the low-bit tier now, and only there.
        has_codes: windows with a ledger entry, active (`in_codes`) or dormant (in full precision after a promotion).
    """

    window: Int[Tensor, "lanes windows"]
    score: Float[Tensor, "lanes windows"]
    in_codes: Bool[Tensor, "lanes windows"]
    has_codes: Bool[Tensor, "lanes windows"]


def _ranked(candidates: Candidates) -> tuple[Int[Tensor, "lanes windows"], Bool[Tensor, "lanes windows"]]:
    """Column order from the best window to the worst, and which of the ordered columns hold a window.

    Ties go to the later window. A score that is not a number ranks last.
    """
    present = candidates.window >= 0
    score = torch.nan_to_num(candidates.score.float(), nan=-torch.inf).masked_fill(~present, -torch.inf)
    late_first = candidates.window.argsort(dim=-1, descending=True, stable=True)
    by_score = score.gather(-1, late_first).argsort(dim=-1, descending=True, stable=True)
    order = late_first.gather(-1, by_score)
    # A window scored -inf must still come before an empty column.
    order = order.gather(-1, (~present.gather(-1, order)).byte().argsort(dim=-1, stable=True))
    return order, present.gather(-1, order)


def _first(mask: Bool[Tensor, "lanes windows"], count: Int[Tensor, "lanes 1"] | int) -> Bool[Tensor, "lanes windows"]:
    """The first `count` true columns of each lane."""
    return mask & (mask.cumsum(dim=-1) <= count)


def _unsorted(tier: Int[Tensor, "lanes windows"], order: Int[Tensor, "lanes windows"]) -> Int[Tensor, "lanes windows"]:
    return torch.empty_like(tier).scatter_(-1, order, tier)


def route_split(
    candidates: Candidates,
    full_capacity: int,
    code_capacity: int,
    *,
    promotion: bool = True,
    dormant_extra: bool = False,
) -> Int[Tensor, "lanes windows"]:
    """Algorithm 1 to the letter: the best K_f windows in full precision, the next K_q in codes, the rest evicted.

    Args:
        full_capacity: K_f.
        code_capacity: K_q.
        promotion: whether a window that is in codes may return to full precision (appendix K switches it off).
        dormant_extra: whether the codes kept for promoted windows come on top of K_q, as the paper counts; otherwise
            each takes one of the K_q slots.

    Returns:
        The new state of every candidate; EVICTED in empty columns.
    """
    order, present = _ranked(candidates)
    in_codes, has_codes = candidates.in_codes.gather(-1, order), candidates.has_codes.gather(-1, order)
    full = _first(present if promotion else present & ~in_codes, full_capacity)
    dormant = 0 if dormant_extra else (full & has_codes).sum(dim=-1, keepdim=True)
    quantized = _first(present & ~full, code_capacity - dormant)
    return _unsorted(full.long() * FULL + quantized.long() * QUANTIZED, order)


def route_coverage(
    candidates: Candidates,
    arena_bytes: int,
    full_bytes: int,
    code_bytes: int,
    max_full: int,
    max_codes: int,
    *,
    promotion: bool = True,
) -> Int[Tensor, "lanes windows"]:
    """As many windows as possible are kept, as many of them as possible in full precision.

    Nothing is evicted while its codes would fit in the low-bit share, and nothing is quantized while every window has
    a place. A promoted window costs full-precision bytes for a low-bit approximation, so full-precision slots go to
    windows that were never quantized first, and promotion is paid from bytes that are left over after that.

    Args:
        arena_bytes: bytes that full slots and code slots share.
        full_bytes, code_bytes: bytes of one window in each form.
        max_full, max_codes: most windows in each form; `max_codes` is what the low-bit share q allows.
        promotion: whether a window that is in codes may return to full precision.

    Returns:
        The new state of every candidate; EVICTED in empty columns.
    """
    order, present = _ranked(candidates)
    has_codes = candidates.has_codes.gather(-1, order)
    codes = min(max_codes, arena_bytes // code_bytes) if max_codes else 0
    kept = _first(present, codes + min(max_full, (arena_bytes - codes * code_bytes) // full_bytes))
    count = kept.sum(dim=-1, keepdim=True)
    fresh = kept & ~has_codes
    if max_codes:
        affordable = (arena_bytes - count * code_bytes).div(full_bytes - code_bytes, rounding_mode="floor")
    else:
        affordable = torch.full_like(count, max_full)
    full_count = torch.minimum(affordable.clamp(0, max_full), fresh.sum(dim=-1, keepdim=True))
    full = _first(fresh, full_count)
    if promotion and max_codes:
        spare = arena_bytes - full_count * full_bytes - (count - full_count) * code_bytes
        room = torch.minimum(spare // full_bytes, max_full - full_count)
        full = full | _first(kept & has_codes, room)
    return _unsorted(full.long() * FULL + (kept & ~full).long() * QUANTIZED, order)
