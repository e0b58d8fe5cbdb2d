"""Gradients, inference mode and interrupted forwards."""

from __future__ import annotations

import pytest
import torch
from driver import TIGHT, endless, forward, prompt

from qevict import QEvictCache
from qevict.compat import cache_argument

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("then", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_cache_filled_in_one_grad_mode_goes_on_in_another(first: type, then: type) -> None:
    model, ids = endless(), prompt(40)

    def logits(before: type, after: type) -> torch.Tensor:
        cache, out = QEvictCache(model, TIGHT), []
        for start, stop, mode in ((0, 20, before), *((i, i + 1, after) for i in range(20, 40))):
            with mode():
                out.append(model(ids[:, start:stop], **cache_argument(cache)).logits.detach())
        store = cache.layers[0].cohorts[0].store
        assert not store.keys.requires_grad
        assert store.counts()[1] > 0
        return torch.cat(out, dim=1)

    torch.testing.assert_close(logits(first, then), logits(torch.no_grad, torch.no_grad))


def test_an_interrupted_forward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = endless(), prompt(30)
    cache = QEvictCache(model, TIGHT)
    forward(model, cache, ids[:, :20])

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1], "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forward(model, cache, ids[:, 20:21])
    with pytest.raises(RuntimeError, match="a forward was interrupted between them"):
        forward(model, cache, ids[:, 21:22])
    cache.reset()
    forward(model, cache, ids)
