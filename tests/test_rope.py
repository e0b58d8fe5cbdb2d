"""Un-rotated keys are those that the model had before its own rotary call, for every family and rope type.

A round trip proves nothing (two wrongs cancel), so the truth here is recorded from the running model: what its rotary
function received, and what the model put into its own cache.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from qevict.architectures import attention_modules
from qevict.rope import Rope, TableRope, rope_for_layers
from tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.contract

TOKENS = 12
PADDING = 5  # of the second row, on the left


def relative_error(given: Tensor, expected: Tensor) -> float:
    assert given.shape == expected.shape
    assert torch.isfinite(given).all()
    return float((given.float() - expected.float()).abs().max() / expected.float().abs().max())


def padded_batch(offset: int) -> dict[str, Tensor]:
    """Two rows, the second left-padded, whose first real tokens stand at position `offset`."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :PADDING] = 0
    positions = (mask.cumsum(-1) - 1 + offset).masked_fill(mask == 0, 0)
    ids = torch.randint(3, 128, (2, TOKENS), generator=torch.Generator().manual_seed(offset))
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def record(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Runs the model; by layer, the key channels its rotary function received, and the keys it cached."""
    received: dict[int, Tensor] = {}
    layer = -1
    attentions = attention_modules(model)
    modeling = sys.modules[type(attentions[0]).__module__]
    own = modeling.apply_rotary_pos_emb

    def entering(module: Any, *_: Any) -> None:
        nonlocal layer
        layer = module.layer_idx

    def recording(*args: Any, **kwargs: Any) -> Any:
        if model.config.model_type == "gptj":  # one call for the keys, then one for the queries: [B, T, H, D]
            received.setdefault(layer, args[0].transpose(1, 2).clone())
        else:
            received[layer] = args[1].clone()
        return own(*args, **kwargs)

    hooks = [module.register_forward_pre_hook(entering) for module in attentions.values()]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(modeling, "apply_rotary_pos_emb", recording)
        cache = model(**batch, use_cache=True).past_key_values
    for hook in hooks:
        hook.remove()
    return received, [layer.keys for layer in cache.layers]


def assert_undone(model: PreTrainedModel, offset: int, tolerance: float) -> None:
    ropes = rope_for_layers(model)
    batch = padded_batch(offset)
    received, cached = record(model, batch)
    positions = batch["position_ids"][:, None]
    for index, (rope, rotated) in enumerate(zip(ropes, cached, strict=True)):
        if index not in received:
            assert rope.rotary_dim == 0, f"layer {index} has no rotary embedding, but qevict would undo one"
            continue
        original = rotated.clone()
        original[..., : received[index].shape[-1]] = received[index]
        assert relative_error(rope.unrotate(rotated, positions), original) < tolerance, f"layer {index}, unrotate"
        assert relative_error(rope.rotate(original, positions), rotated) < tolerance, f"layer {index}, rotate"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_before_and_after_the_models_own_rotary_call(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = tiny_model(family, dtype)
    for offset in (0, 100_000):
        assert_undone(model, offset, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn", "longrope"])
def test_rope_types(rope: str, dtype: torch.dtype, tolerance: float) -> None:
    model = tiny_model("llama", dtype, rope=rope)
    far = 30_000 if rope == "longrope" else 100_000  # longrope switches at 32768
    for offset in (0, far):
        assert_undone(model, offset, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_tables_are_the_models_own_to_the_last_bit(rope: str, dtype: torch.dtype) -> None:
    """The keys of a 16-bit model are too coarse to show a cosine that was not rounded as the model rounds it."""
    model = tiny_model("llama", dtype, rope=rope)
    positions = torch.cat((torch.arange(500), torch.arange(99_500, 100_000)))
    with torch.no_grad():
        theirs = model.model.rotary_emb(torch.zeros(1, 1, 1, dtype=dtype), positions[None])
    ours = rope_for_layers(model)[0].tables(100_000, torch.device("cpu"))
    for mine, table in zip(ours, theirs, strict=True):
        assert mine.dtype == table.dtype
        different = mine[positions] != table[0, :, : mine.shape[1]]
        assert different.float().mean() < 0.01  # vectorised cosines may differ in float32's last bit


def test_the_families_cover_what_differs() -> None:
    """Guards the test above against families that a new Transformers makes alike."""
    layouts = {family: rope_for_layers(tiny_model(family))[0] for family in ("llama", "cohere", "gpt_neox", "gptj")}
    assert layouts["llama"].layout == "half"
    assert layouts["cohere"].layout == "interleaved"
    assert layouts["gpt_neox"].rotary_dim == 4
    assert isinstance(layouts["gptj"], TableRope)
    assert rope_for_layers(tiny_model("llama", rope="yarn"))[0].scaling > 1.1
    assert [rope.rotary_dim for rope in rope_for_layers(tiny_model("smollm3"))] == [16, 0, 16, 0]
    gemma = rope_for_layers(tiny_model("gemma3"))
    assert gemma[0] is gemma[2]
    assert gemma[0] is not gemma[1]


def test_longrope_below_its_switch_after_a_call_above_it() -> None:
    """A long call leaves the long frequencies in the module; the next short one uses the short ones."""
    model = tiny_model("llama", rope="longrope")
    with torch.no_grad():
        model(**padded_batch(100_000))
    assert_undone(model, 0, 1e-4)


def slow_rotate(keys: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Channel by channel and position by position, in float64, from the formula."""
    out = keys.double().clone()
    half = rope.rotary_dim // 2
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            a, b = (pair, pair + half) if rope.layout == "half" else (2 * pair, 2 * pair + 1)
            angle = position * rope.inv_freq[pair].double()
            x, y = keys[..., token, a].double(), keys[..., token, b].double()
            out[..., token, a] = rope.scaling * (x * angle.cos() - y * angle.sin())
            out[..., token, b] = rope.scaling * (y * angle.cos() + x * angle.sin())
    return out


@st.composite
def ropes(draw: st.DrawFn) -> Rope:
    inv_freq = torch.tensor(draw(st.lists(st.floats(2**-13, 1.0, width=32), min_size=0, max_size=5)))
    return Rope(
        inv_freq,
        scaling=draw(st.sampled_from([1.0, 1.25])),
        layout=draw(st.sampled_from(["half", "interleaved"])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )


@settings(max_examples=60)
@given(
    rope=ropes(),
    batch=st.lists(st.integers(1, 3), max_size=2),
    positions=st.lists(st.integers(0, 2000), max_size=5),
    passing=st.integers(0, 3),
)
def test_against_the_formula(rope: Rope, batch: list[int], positions: list[int], passing: int) -> None:
    keys = torch.randn(*batch, len(positions), rope.rotary_dim + passing, generator=torch.Generator().manual_seed(0))
    at = torch.tensor(positions, dtype=torch.long)
    rotated = rope.rotate(keys, at)
    # float32 angles up to 2000 are off by 1e-4, 16-bit tables by 2^-8
    tolerance = 1e-3 if rope.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(rotated.double(), slow_rotate(keys, at, rope), rtol=0, atol=tolerance)
    torch.testing.assert_close(rope.unrotate(rotated, at), keys, rtol=1e-5, atol=1e-5)


def test_positions_broadcast_over_heads_and_differ_by_row() -> None:
    rope = Rope(torch.tensor([1.0, 0.1]))
    keys = torch.randn(2, 3, 4, 4)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 50, 51]])
    together = rope.rotate(keys, positions[:, None])
    for row in range(2):
        for head in range(3):
            assert torch.equal(together[row, head], rope.rotate(keys[row, head], positions[row]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_keys_come_back_in_float32_and_stay_as_they_were(dtype: torch.dtype) -> None:
    rope = Rope(torch.tensor([1.0, 0.1]))
    keys = torch.randn(3, 4).to(dtype)
    before = keys.clone()
    rotated = rope.rotate(keys, torch.tensor([0, 7, 9]))
    assert rotated.dtype == torch.float32
    assert torch.equal(rotated, rope.rotate(keys.float(), torch.tensor([0, 7, 9])))
    assert torch.equal(keys, before)


def test_tables_grow_without_changing_what_they_held() -> None:
    rope = Rope(torch.tensor([1.0, 0.1, 0.01]), scaling=1.5, dtype=torch.bfloat16)
    device = torch.device("cpu")
    assert rope.workspace_bytes == 0
    short = [table.clone() for table in rope.tables(10, device)]
    long = rope.tables(5000, device)
    fresh = Rope(rope.inv_freq, scaling=1.5, dtype=torch.bfloat16).tables(5000, device)
    for before, after, expected in zip(short, long, fresh, strict=True):
        assert len(after) >= 5000
        assert after.dtype == torch.bfloat16
        assert torch.equal(after[: len(before)], before)
        assert torch.equal(after, expected)
    assert rope.workspace_bytes == 2 * len(long[0]) * 3 * 2
    assert rope.tables(3000, device)[0] is long[0]


def test_a_deep_copy_shares_nothing_and_the_model_is_not_held() -> None:
    model = tiny_model("gptj")
    rope, plain = rope_for_layers(model)[0], rope_for_layers(tiny_model("llama"))[0]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    for original in (rope, plain):
        original.tables(10, torch.device("cpu"))
        fork = copy.deepcopy(original)
        mine = {table.data_ptr() for table in original.tables(10, torch.device("cpu"))}
        assert mine.isdisjoint(table.data_ptr() for table in fork.tables(10, torch.device("cpu")))
        keys = torch.randn(4, original.rotary_dim)
        assert torch.equal(fork.rotate(keys, torch.arange(4)), original.rotate(keys, torch.arange(4)))


def test_frequencies_are_a_copy_of_the_models_as_it_was() -> None:
    model = tiny_model("llama")
    rope = rope_for_layers(model)[0]
    before = rope.inv_freq.clone()
    model.model.rotary_emb.inv_freq.zero_()
    assert torch.equal(rope.inv_freq, before)


def test_positions_are_checked() -> None:
    rope = Rope(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="must not be negative, but the lowest is -1"):
        rope.rotate(torch.zeros(2, 2), torch.tensor([-1, 3]))
    tables = rope_for_layers(tiny_model("gptj", max_position_embeddings=64))[0]
    with pytest.raises(ValueError, match="rotary tables for 64 positions, and 65 were asked for"):
        tables.rotate(torch.zeros(1, 16), torch.tensor([64]))


def test_dynamic_is_refused() -> None:
    with pytest.raises(ValueError, match="rope type is dynamic"):
        rope_for_layers(tiny_model("llama", rope="dynamic"))


@pytest.mark.parametrize("fault", ["layout", "sign", "shape"])
def test_a_rotation_that_neither_layout_reproduces_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    modeling = sys.modules[type(attention_modules(model)[0]).__module__]
    own = modeling.apply_rotary_pos_emb
    wrong = {
        "layout": lambda q, k, cos, sin: own(q.flip(-1), k.flip(-1), cos, sin),
        "sign": lambda q, k, cos, sin: own(q, k, cos, -sin),
        "shape": lambda q, k, cos, sin: own(q[..., :1], k[..., :1], cos[..., :1], sin[..., :1]),
    }[fault]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", wrong)
    with pytest.raises(ValueError, match="cannot reproduce the rotary embedding of LlamaAttention"):
        rope_for_layers(model)


def test_tables_that_are_not_what_the_frequencies_say_are_refused() -> None:
    model = tiny_model("llama")
    model.model.rotary_emb.register_forward_hook(lambda module, args, tables: (tables[0] * 2, tables[1] * 2))
    with pytest.raises(ValueError, match="cannot reproduce"):
        rope_for_layers(model)


def test_a_missing_function_a_missing_module_and_two_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules[type(attention_modules(model)[0]).__module__], "apply_rotary_pos_emb")
        with pytest.raises(ValueError, match="finds no apply_rotary_pos_emb beside LlamaAttention"):
            rope_for_layers(model)
    rotary = model.model.rotary_emb
    model.model.rotary_emb_local = copy.deepcopy(rotary)
    with pytest.raises(ValueError, match="has 2 rotary modules"):
        rope_for_layers(model)
    del model.model.rotary_emb, model.model.rotary_emb_local
    with pytest.raises(ValueError, match="finds no rotary module"):
        rope_for_layers(model)
