"""Means over articles. Layers, heads and events of one article are not independent, so articles are what is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Student's t, 97.5 %, for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Estimate(NamedTuple):
    """A mean over articles and half the width of its 95 % interval (nan from a single article)."""

    mean: float
    half: float
    articles: int

    def text(self, digits: int = 4, scale: float = 1.0) -> str:
        """`0.0123 ± 0.0012`, without the interval where there is none."""
        if math.isnan(self.mean):
            return "–"
        half = "" if math.isnan(self.half) else f" ± {self.half * scale:.{digits}f}"
        return f"{self.mean * scale:.{digits}f}{half}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one value an article with its t interval; articles without a value (nan) are left out."""
    known = [value for value in values if not math.isnan(value)]
    count = len(known)
    if not known:
        return Estimate(math.nan, math.nan, 0)
    mean = sum(known) / count
    if count == 1:
        return Estimate(mean, math.nan, 1)
    error = math.sqrt(sum((value - mean) ** 2 for value in known) / (count - 1) / count)
    return Estimate(mean, error * (_T[count - 2] if count - 1 <= len(_T) else 1.96), count)


def paired(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean of second - first, article by article."""
    return estimate([b - a for a, b in zip(first, second, strict=True)])
