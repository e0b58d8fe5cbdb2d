"""kvpress's presses as methods; runs where kvpress can be installed (Transformers below 5.3)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from qevict import Budget
from qevict.compat import cache_argument
from qevict.methods import get_method, make_cache
from qevict.testing import check_method, tiny_llama

kvpress = pytest.importorskip("kvpress")

IDS = torch.randint(3, 128, (1, 150), generator=torch.Generator().manual_seed(0))
NEXT = torch.tensor([[5]])


def next_logits(model: torch.nn.Module, cache: object) -> Tensor:
    return model(NEXT, position_ids=torch.tensor([[150]]), **cache_argument(cache)).logits


@pytest.mark.parametrize(
    "press", ["KnormPress", "SnapKVPress", "TOVAPress", "ExpectedAttentionPress", "ChunkKVPress(SnapKVPress)"]
)
@torch.no_grad()
def test_a_press_keeps_what_it_keeps_in_its_own_hooks(press: str) -> None:
    model = tiny_llama()
    cache = make_cache(model, f"kvpress:{press}", Budget(tokens=100 + 4), max_new_tokens=3)
    model(IDS, **cache_argument(cache))
    theirs = DynamicCache(config=model.config)
    inner, _, outer = press.rstrip(")").partition("(")[::-1]
    made = getattr(kvpress, inner or outer)(compression_ratio=1 - 100.5 / 150)
    with (getattr(kvpress, outer)(made) if inner else made)(model):
        model(IDS, **cache_argument(theirs))
    assert torch.allclose(next_logits(model, cache), next_logits(model, theirs), atol=1e-5)


@pytest.mark.parametrize("name", ["kvpress:KnormPress", "kvpress:SnapKVPress"])
def test_a_press_conforms(name: str) -> None:
    check_method(get_method(name))


@pytest.mark.parametrize(
    ("press", "says"),
    [
        ("NoSuchPress", "kvpress has no press 'NoSuchPress'"),
        ("KVzipPress", "does more than compress"),
        ("ChunkKVPress", "needs another press in brackets"),
    ],
)
def test_what_is_no_method_is_said(press: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        get_method(f"kvpress:{press}")


def test_a_press_that_only_masks_is_refused() -> None:
    model = tiny_llama()
    cache = make_cache(model, "kvpress:AdaKVPress(KnormPress)", 0.5, max_new_tokens=4)
    with pytest.raises(ValueError, match="it saves no memory"):
        model(IDS, **cache_argument(cache))


def test_a_cache_that_was_made_before_kvpress_was_imported_says_what_to_do() -> None:
    from kvpress.attention_patch import patch_attention_functions

    from qevict import attach

    model = tiny_llama()
    cache = make_cache(model, "snapkv", 0.6, max_new_tokens=4)
    patch_attention_functions()
    with pytest.raises(RuntimeError, match=r"call qevict.attach\(model\) again"):
        model(IDS, **cache_argument(cache))
    attach(model)
    cache.reset()
    assert model(IDS, **cache_argument(cache)).logits.isfinite().all()
