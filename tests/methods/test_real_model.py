"""Every method on the real model: one row, and a left-padded batch of three."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qevict.compat import cache_argument
from qevict.methods import get_method, make_cache, method_names
from qevict.methods.base import Method

TEXT = "The keeper of the lighthouse is called Ines Halvard, and she feeds eleven cats. The sea is grey and cold. " * 8
LENGTHS = (110, 98, 104)
NEW = 4


def generate(loaded: tuple[Any, Any], name: str, lengths: tuple[int, ...]) -> Tensor:
    model, tokenizer = loaded
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, : max(lengths)]
    mask = torch.ones(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    budget = 0.8 if get_method(name).takes_budget else 1.0
    cache = make_cache(model, name, budget, max_new_tokens=NEW, store_dtype=torch.bfloat16)
    output = model.generate(
        input_ids=ids.expand(len(lengths), -1),
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        **cache_argument(cache),
    )
    assert cache.memory().overshoot == 0
    return output[:, ids.shape[1] :]


@pytest.mark.parametrize("name", method_names())
def test_every_method_generates_on_the_real_model(name: str, smollm2: tuple[Any, Any]) -> None:
    alone = generate(smollm2, name, LENGTHS[:1])
    method = get_method(name)
    if isinstance(method, Method) and method.one_row:
        with pytest.raises(ValueError, match="defined for one sequence"):
            generate(smollm2, name, LENGTHS)
        return
    together = generate(smollm2, name, LENGTHS)
    assert together.shape == (3, NEW)
    if not name.startswith("hf-quantized"):  # Transformers quantises the padding with the text
        assert torch.equal(together[0], alone[0])
