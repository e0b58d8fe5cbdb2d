"""Records of results as the runner writes them, small enough to be counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Folder = Callable[..., Path]

MANIFEST = {
    "model": "tiny/model",
    "dtype": "float32",
    "store_dtype": "bfloat16",
    "length": 1024,
    "protocol": "query-aware",
    "scope": "total",
    "seed": 0,
    "first_token": "compressed",
    "methods": {"qevict": {"bits": 4}, "snapkv": {"window": 32}},
    "versions": {"torch": "2.9"},
}


def record(method: str, budget: float | None, score: float | None, **changes: Any) -> dict[str, Any]:
    """One line of results."""
    ok = score is not None
    return {
        "task": "ruler/vt",
        "sample": "0",
        "document": "0",
        "length": 1024,
        "method": method,
        "budget": budget,
        "status": "ok" if ok else "infeasible",
        "reason": None if ok else "too small",
        "prediction": "",
        "score": score,
        "gold_nll": 1.0 if ok else None,
        "agreement": 0.5 if ok else None,
        "ratio": (budget or 1.0) if ok else None,
        "protected_share": None,
        "extra": {},
        **changes,
    }


def samples(method: str, budget: float | None, scores: list[float | None], **changes: Any) -> list[dict[str, Any]]:
    """A record for each score, each of a document of its own."""
    return [
        record(method, budget, s, **{"sample": str(i), "document": str(i), **changes}) for i, s in enumerate(scores)
    ]
