"""The output projection is found in every supported family, and refused where it is not what it should be."""

from __future__ import annotations

import pytest
import torch
from prefills import make_prefill
from torch import nn

import reference.prompt_eviction as slow
from qevict.architectures import attention_modules, describe
from qevict.methods.projection import output_norms, output_weight
from tiny import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_last_matrix_that_the_attention_module_applies(family: str) -> None:
    model = tiny_model(family)
    shape = describe(model)
    for module in attention_modules(model).values():
        applied: list[nn.Linear] = []
        hooks = [
            part.register_forward_hook(lambda linear, *_, applied=applied: applied.append(linear))
            for part in module.modules()
            if isinstance(part, nn.Linear)
        ]
        with torch.no_grad():
            model(torch.tensor([[3, 4, 5]]))
        for hook in hooks:
            hook.remove()
        found = output_weight(module, shape.query_heads * shape.head_dim)
        assert found.data_ptr() == applied[-1].weight.data_ptr()


@pytest.mark.parametrize(("heads", "group"), [(1, 4), (2, 2), (3, 1)])
def test_norms(heads: int, group: int) -> None:
    prefill = make_prefill(heads, group, tokens=5)
    torch.testing.assert_close(output_norms(prefill), torch.tensor(slow.output_norms(prefill)), rtol=1e-4, atol=1e-4)


def test_norms_of_more_tokens_than_are_projected_at_a_time() -> None:
    prefill = make_prefill(tokens=1100)
    norms = output_norms(prefill)
    assert norms.gt(0).all()
    tail = make_prefill(tokens=3)
    tail.values.copy_(prefill.values[:, -3:])
    tail.module.o_proj = prefill.module.o_proj
    torch.testing.assert_close(norms[:, -3:], output_norms(tail))


def test_what_is_no_projection_is_refused() -> None:
    module = nn.Module()
    with pytest.raises(ValueError, match="no output projection called o_proj, dense, out_proj"):
        output_weight(module, 8)
    module.o_proj = nn.Linear(6, 8)
    with pytest.raises(ValueError, match=r"weight of shape \(8, 6\).*takes 8 channels"):
        output_weight(module, 8)
    module.o_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="uint8"):
        output_weight(module, 8)
