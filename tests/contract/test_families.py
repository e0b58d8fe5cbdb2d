"""Every supported family and rope type: the uncompressed cache's logits where all fits, sound output where not."""

from __future__ import annotations

import pytest
import torch
from driver import ROOMY, TIGHT, endless, forward, full_cache, generate, prompt, step_by_step, within_budget

from qevict import QEvictCache, QEvictConfig
from tiny import MANAGED_FAMILIES

pytestmark = pytest.mark.contract

ROPES = ("linear", "llama3", "yarn", "longrope")  # "default" is llama itself, "dynamic" is refused
VARIANTS = [*((family, {}) for family in MANAGED_FAMILIES), *(("llama", {"rope": rope}) for rope in ROPES)]
ALL_VARIANTS = pytest.mark.parametrize(
    ("family", "settings"), VARIANTS, ids=["-".join([family, *settings.values()]) for family, settings in VARIANTS]
)


@ALL_VARIANTS
def test_logits_are_the_uncompressed_caches_where_everything_fits(family: str, settings: dict[str, str]) -> None:
    model, ids = endless(family, **settings), prompt(24 + 40, batch=2)
    expected = step_by_step(model, full_cache(model), ids, prefill=24)
    cache = QEvictCache(model, QEvictConfig(ROOMY, window_size=4, sink_tokens=2, recent_tokens=6), max_new_tokens=40)
    logits = step_by_step(model, cache, ids, prefill=24)
    assert cache.counts().full > 0  # the tokens did go through the full tier
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@ALL_VARIANTS
def test_compression_stays_within_the_budget_and_finite(family: str, settings: dict[str, str]) -> None:
    model, ids = endless(family, **settings), prompt(60, batch=2)
    cache = QEvictCache(model, TIGHT.replace(codec="minmax"), max_new_tokens=12)
    tokens = generate(model, cache, ids, 12)
    assert tokens.shape == (2, 12)
    counts = cache.counts()
    assert counts.quantized > 0
    assert counts.evicted > 0
    assert within_budget(cache)
    assert forward(model, cache, tokens[:, -1:]).isfinite().all()
