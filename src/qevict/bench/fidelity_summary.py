"""What fidelity records say: one row for each corpus, method and budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qevict.report.statistics import Values, clustered_mean

WEAKEST = "streamingllm"
"""The method that keeps the first and last tokens whatever they are; what it manages, any method should."""
CLAIM_FACTOR = 1.2
"""A corpus tells methods apart where the weakest one's mean KL is more than this multiple of the best one's."""

Record = Mapping[str, Any]


class Measured(NamedTuple):
    """A number and its standard error (nan from a single document)."""

    value: float
    error: float


@dataclass(frozen=True)
class FidelityRow:
    """One method at one budget on one corpus; a None does not apply.

    Attributes:
        corpus: or its name with the protocol, as records have it.
        budget: None for full KV and for methods with an operating point of their own.
        texts: that it was measured on.
        refused: texts where the cell could not be, and the last reason.
        steps: over all texts; the statistics of KL leave step 0 of every text out.
        kl, kl_median, kl_p99: KL(full KV || method) of the next-token distribution in nats.
        first_kl: the same at step 0, the first token that comes from the compressed cache.
        same: share of steps, step 0 included, whose most likely token is full KV's.
        perplexity: of the forced text; `full_perplexity` is full KV's on the same texts.
        agreement: share of full KV's greedy tokens that are the same at the same place.
        divergence: median over texts of the place of the first greedy token that differs; inf where most never do.
        ratio: the largest share of full KV's bytes at any step.
        claim: whether the corpus tells methods apart at this budget; None where that was not measured.
    """

    corpus: str
    method: str
    budget: float | None
    texts: int
    refused: int
    reason: str
    steps: int
    kl: Measured | None
    kl_median: float | None
    kl_p99: float | None
    first_kl: Measured | None
    same: Measured | None
    perplexity: Measured | None
    full_perplexity: Measured | None
    agreement: Measured | None
    divergence: float | None
    ratio: float | None
    claim: bool | None


def summarise(records: Iterable[Record]) -> list[FidelityRow]:
    """Rows in the order in which methods and budgets came, corpus by corpus.

    Standard errors are between documents, tokens of one text not being independent.
    """
    cells: dict[tuple[str, str, float | None], list[Record]] = {}
    for record in records:
        cells.setdefault((record["task"], record["method"], record["budget"]), []).append(record)
    full = {(r["task"], r["sample"]): r for (_, method, _), rs in cells.items() if method == "full" for r in rs}
    claims = {(corpus, budget): _claim(cells, corpus, budget) for corpus, _, budget in cells}
    corpora = list(dict.fromkeys(corpus for corpus, _, _ in cells))
    ordered = sorted(cells, key=lambda cell: corpora.index(cell[0]))
    return [_row(cell, cells[cell], full, claims[cell[0], cell[2]]) for cell in ordered]


def perplexity(nll: Values) -> Measured:
    """exp of the mean negative log-likelihood, and its standard error by the delta method.

    Errors are between the documents of `nll`; for the tokens of one text taken as independent, number them.
    """
    mean = clustered_mean(nll)
    value = math.exp(mean.value)
    return Measured(value, value * mean.error)


def _row(
    cell: tuple[str, str, float | None],
    records: Sequence[Record],
    full: Mapping[tuple[str, str], Record],
    claim: bool | None,
) -> FidelityRow:
    done = [record for record in records if record["status"] == "ok"]
    refused = [record for record in records if record["status"] != "ok"]
    forced = [record for record in done if record["kl"]]
    free = [record for record in done if record["agreement"] is not None]
    references = [full[r["task"], r["sample"]] for r in forced if (r["task"], r["sample"]) in full]
    later = [value for record in forced for value in record["kl"][1:]]
    corpus, method, budget = cell
    return FidelityRow(
        corpus=corpus,
        method=method,
        budget=budget,
        texts=len(done),
        refused=len(refused),
        reason=str(refused[-1]["reason"]) if refused else "",
        steps=sum(len(record["kl"]) for record in forced),
        kl=_mean([(record, record["kl"][1:]) for record in forced]),
        kl_median=float(np.median(later)) if later else None,
        kl_p99=float(np.quantile(later, 0.99)) if later else None,
        first_kl=_mean([(record, record["kl"][:1]) for record in forced]),
        same=_mean([(record, [float(mark) for mark in record["same"]]) for record in forced]),
        perplexity=_perplexity(forced),
        full_perplexity=_perplexity(references),
        agreement=_mean([(record, [record["agreement"]]) for record in free]),
        divergence=_median_divergence(free),
        ratio=max((record["ratio"] for record in done), default=None),
        claim=claim if forced and method != "full" else None,
    )


def _mean(values: Sequence[tuple[Record, Sequence[float]]]) -> Measured | None:
    pooled = _pool(values)
    if not pooled.values:
        return None
    mean = clustered_mean(pooled)
    return Measured(mean.value, mean.error)


def _perplexity(forced: Sequence[Record]) -> Measured | None:
    pooled = _pool([(record, record["nll"]) for record in forced])
    return perplexity(pooled) if pooled.values else None


def _pool(values: Sequence[tuple[Record, Sequence[float]]]) -> Values:
    return Values(
        [value for _, of_text in values for value in of_text],
        [record["document"] for record, of_text in values for _ in of_text],
    )


def _median_divergence(free: Sequence[Record]) -> float | None:
    if not free:
        return None
    places = sorted(math.inf if r["divergence"] is None else r["divergence"] for r in free)
    return float(places[(len(places) - 1) // 2])


def _claim(
    cells: Mapping[tuple[str, str, float | None], Sequence[Record]], corpus: str, budget: float | None
) -> bool | None:
    """Whether the weakest method's mean KL exceeds the best one's by enough, on the texts that both have."""
    weakest = _later_kl(cells.get((corpus, WEAKEST, budget), ()))
    others = [
        _later_kl(records)
        for (name, method, at), records in cells.items()
        if (name, at) == (corpus, budget) and method not in ("full", WEAKEST)
    ]
    pairs = [
        (_sum_over(weakest, shared), _sum_over(other, shared))
        for other in others
        if (shared := weakest.keys() & other.keys())
    ]
    return any(low > CLAIM_FACTOR * best for low, best in pairs) if pairs else None


def _later_kl(records: Iterable[Record]) -> dict[str, float]:
    """The sum of KL behind step 0, for each text."""
    return {r["sample"]: math.fsum(r["kl"][1:]) for r in records if r["status"] == "ok" and len(r["kl"] or ()) > 1}


def _sum_over(sums: Mapping[str, float], texts: Iterable[str]) -> float:
    return math.fsum(sums[text] for text in texts)
