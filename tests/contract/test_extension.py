"""What others can add, a codec of their own; and that only one layer at a time holds a prompt whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from driver import TIGHT, endless, forward, full_cache, prompt, step_by_step
from torch import Tensor

from qevict import Budget, QEvictCache, QEvictConfig
from qevict.codecs import Codec, WindowLayout, WindowShape

pytestmark = pytest.mark.contract


@dataclass(frozen=True)
class HalfPrecision:
    """Keys and values in float16: half the bytes of float32 storage, and hardly an error."""

    def layout(self, shape: WindowShape) -> WindowLayout:
        array = ((shape.heads, shape.tokens, shape.head_dim), torch.float16)
        return WindowLayout.build(codes={"keys": array, "values": array}, parameters={})

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        layout = self.layout(WindowShape(*keys.shape[-3:]))
        packed = torch.zeros(*keys.shape[:-3], layout.nbytes, dtype=torch.uint8)
        sections = layout.view(packed)
        sections["keys"].copy_(keys)
        sections["values"].copy_(values)
        return packed

    def decode(self, packed: Tensor, shape: WindowShape) -> tuple[Tensor, Tensor]:
        sections = self.layout(shape).view(packed)
        return sections["keys"].float(), sections["values"].float()


def test_a_codec_of_ones_own_serves_the_low_bit_tier() -> None:
    codec = HalfPrecision()
    assert isinstance(codec, Codec)
    model, ids = endless(), prompt(90)
    config = QEvictConfig(
        budget=Budget(tokens=60), window_size=4, sink_tokens=2, recent_tokens=6, codec=codec, store_dtype=torch.float32
    )
    cache = QEvictCache(model, config)
    logits = step_by_step(model, cache, ids, prefill=60)
    counts = cache.counts()
    assert counts.quantized > 0
    assert counts.evicted == 0
    torch.testing.assert_close(logits, step_by_step(model, full_cache(model), ids, prefill=60), rtol=0.02, atol=0.02)


def test_each_layer_has_compressed_the_prompt_before_the_next_one_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    seen: list[bool] = []
    first, second = cache.layers[:2]
    attend = second.attend

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        memory = first.memory()
        seen.append(memory.workspace == 0 and memory.reserved <= memory.budget)
        assert first.cohorts[0].store.counts()[1] > 0
        return attend(*args, **kwargs)

    monkeypatch.setattr(second, "attend", watched)
    forward(model, cache, prompt(200))
    assert seen == [True]
