"""Means with their uncertainty. Samples that share a document are not independent, so documents are what is counted.

Documents are nested in tasks: equal names in different tasks are different documents.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
COVERAGE = 0.95


class Mean(NamedTuple):
    """A mean, its standard error (nan from a single document), and how many samples it is of."""

    value: float
    error: float
    samples: int


class Interval(NamedTuple):
    """A mean and its bootstrap interval (nan from a single document).

    Attributes:
        samples: how many it is of.
        p: two-sided, that the mean is 0: twice the smaller share of resamples on one side of 0, the mean itself counted
            among them, so that it is never 0.
    """

    value: float
    low: float
    high: float
    samples: int
    p: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval is on one side of 0."""
        return self.low > 0 or self.high < 0


class Values(NamedTuple):
    """Numbers of one task and the document that each is about."""

    values: Sequence[float]
    documents: Sequence[str]

    def sums(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Each document's sum and count."""
        _, which = np.unique(np.asarray(self.documents), return_inverse=True)
        sums = np.bincount(which, weights=np.asarray(self.values, dtype=float))
        return sums.astype(float), np.bincount(which).astype(float)


def clustered_mean(values: Values) -> Mean:
    """Mean over samples; its standard error between documents (linearised, with the C / (C - 1) correction).

    Raises:
        ValueError: if there is no value.
    """
    if not values.values:
        raise ValueError("the mean of no values")
    sums, counts = values.sums()
    total, documents = counts.sum(), len(sums)
    mean = sums.sum() / total
    if documents == 1:
        return Mean(float(mean), math.nan, int(total))
    residuals = sums - counts * mean
    error = math.sqrt(documents / (documents - 1) * float(residuals @ residuals)) / total
    return Mean(float(mean), float(error), int(total))


def macro_mean(means: Sequence[Mean]) -> Mean:
    """Mean of the tasks' means, each counting alike; tasks are independent."""
    if not means:
        raise ValueError("the mean of no tasks")
    value = sum(mean.value for mean in means) / len(means)
    error = math.sqrt(sum(mean.error**2 for mean in means)) / len(means)
    return Mean(value, error, sum(mean.samples for mean in means))


def bootstrap_mean(tasks: Mapping[str, Values], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Mean of the tasks' means with its percentile interval; each task's documents are drawn anew, with replacement.

    For paired differences the values are differences. A task with a single document has no interval, and so has no
    mean that it is part of.
    """
    if not tasks:
        raise ValueError("the mean of no tasks")
    value = sum(clustered_mean(values).value for values in tasks.values()) / len(tasks)
    samples = sum(len(values.values) for values in tasks.values())
    drawn: npt.NDArray[np.float64] = np.zeros(resamples)
    for task, values in tasks.items():
        sums, counts = values.sums()
        if len(sums) == 1:
            return Interval(value, math.nan, math.nan, samples, math.nan)
        weights = _draws(len(sums), task, seed, resamples)
        drawn += (weights @ sums) / (weights @ counts)
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(drawn / len(tasks), [tail, 1 - tail])
    one_sided = (1 + min((drawn <= 0).sum(), (drawn >= 0).sum())) / (1 + resamples)
    return Interval(value, float(low), float(high), samples, min(1.0, 2 * float(one_sided)))


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, 1979): whoever calls those below 0.05 different errs anywhere in at
    most 5 % of such families, however they depend on each other.
    """
    corrected, least = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        least = max(least, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = least
    return corrected


@lru_cache(maxsize=32)
def _draws(documents: int, task: str, seed: int, resamples: int) -> npt.NDArray[np.float64]:
    """How often each document is drawn in each resample; the same for every method, another for each task."""
    rng = np.random.default_rng([seed, zlib.crc32(task.encode()), documents])
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=resamples).astype(float)
