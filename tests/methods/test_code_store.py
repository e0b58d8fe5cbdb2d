"""Groups in codes and exact tokens behind them: TurboQuant, and evict-then-quantise with any selector and codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.driver import endless, forward, prompt
from methods.quantised import allow, feed, held, make_row
from qevict.budget import InfeasibleBudgetError
from qevict.codecs import WindowShape
from qevict.config import Budget
from qevict.methods.base import LayerPrefill, Selector
from qevict.methods.cache import MethodCache
from qevict.methods.code_store import FORMATS, CodeFormat, CodePlan, CodeStore, get_format
from qevict.methods.qprune import QPrune, parse
from qevict.methods.snapkv import SnapKV
from qevict.methods.store import ExactStore, Kept
from qevict.methods.turboquant import TurboQuant


@dataclass(frozen=True)
class Spread(Selector):
    """Evenly spread tokens; with `ragged`, heads and layers by turns keep more and fewer."""

    ragged: bool = False
    name = "spread"
    paper = "none"

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        kept, signs = [], torch.arange(prefill.keys.shape[0]) % 2 * 2 - 1
        if len(signs) % 2:
            signs[-1] = 0
        for sign in signs.tolist():
            count = tokens + sign * min(3, tokens - 1, prefill.tokens - tokens) * self.ragged
            kept.append(torch.linspace(0, prefill.tokens - 1, count).round().long())
        return kept


@dataclass(frozen=True)
class PooledSpread(Spread):
    """Layers by turns keep more and fewer."""

    pooled = True
    name = "pooled"

    def keep_pooled(self, prefills: Sequence[LayerPrefill], tokens: int) -> list[Kept]:
        shift = min(4, tokens - 1, prefills[0].tokens - tokens)
        return [self.keep(p, tokens + (shift if i % 2 else -shift)) for i, p in enumerate(prefills)]


def slow_tokens(
    prefill: LayerPrefill, kept: Kept, keys: Tensor, values: Tensor, plan: CodePlan, settled: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What each head holds: its kept tokens, then `keys` and `values`, of which `settled` are not fresh any more.

    A group takes the earliest exact tokens once `residual` ones are left behind it, one head after another.
    """
    group, codec = plan.format.group, plan.format.codec
    all_keys, all_values = [], []
    for head, index in enumerate(kept):
        positions = [prefill.first_position + int(i) for i in index]
        positions += [prefill.first_position + prefill.tokens + i for i in range(keys.shape[1])]
        head_keys = torch.cat([prefill.keys[head, index], keys[head]])
        head_values = torch.cat([prefill.values[head, index], values[head]])
        reach = len(index) if plan.exact_new else len(index) + settled
        start = 0
        while reach - start - group >= plan.residual:
            place = slice(start, start + group)
            own, at = head_keys[None, place], torch.tensor(positions[place])
            if not plan.format.rotated:
                own = prefill.rope.unrotate(own, at)
            packed = codec.encode(own, head_values[None, place])
            decoded = codec.decode(packed, WindowShape(1, group, keys.shape[2]))
            head_keys[place] = (decoded[0] if plan.format.rotated else prefill.rope.rotate(decoded[0], at))[0]
            head_values[place] = decoded[1][0]
            start += group
        all_keys.append(head_keys)
        all_values.append(head_values)
    return all_keys, all_values


def assert_close(mine: tuple[list[Tensor], list[Tensor]], expected: tuple[list[Tensor], list[Tensor]]) -> None:
    for these, those in zip(mine, expected, strict=True):
        for x, y in zip(these, those, strict=True):
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-5)


formats = st.sampled_from(
    [
        CodeFormat("k", get_format("kivi-4").codec, 4),
        CodeFormat("t", get_format("turboquant-3").codec, 3),
        CodeFormat("m", get_format("minmax-4").codec, 5, rotated=False),
    ]
)


@settings(max_examples=25)
@given(
    form=formats,
    heads=st.integers(1, 3),
    tokens=st.integers(2, 24),
    steps=st.lists(st.integers(1, 4), max_size=6),
    residual=st.integers(0, 5),
    exact=st.booleans(),
    ragged=st.booleans(),
    first=st.sampled_from([0, 9]),
    seed=st.integers(0, 99),
)
def test_every_step_holds_what_the_slow_definition_says(
    form: CodeFormat,
    heads: int,
    tokens: int,
    steps: list[int],
    residual: int,
    exact: bool,
    ragged: bool,
    first: int,
    seed: int,
) -> None:
    prefill, keys, values = make_row(heads=heads, tokens=tokens, new=sum(steps), seed=seed, first=first)
    kept = Spread(ragged).keep(prefill, max(1, tokens - 2))
    plan = CodePlan(form, residual, sum(steps), exact)
    store = CodeStore(prefill.keys, prefill.values, kept, plan, first, prefill.rope, torch.float32)
    assert_close(held(store), slow_tokens(prefill, kept, keys[:, :0], values[:, :0], plan, 0))
    seen, reserved = 0, store.memory().reserved
    assert reserved == plan.kept_bytes(kept, 8, torch.float32)
    for count in steps:
        feed(store, keys[:, seen : seen + count], values[:, seen : seen + count])
        seen += count
        assert_close(held(store), slow_tokens(prefill, kept, keys[:, :seen], values[:, :seen], plan, seen - count))
        memory = store.memory()
        assert memory.used <= memory.reserved == reserved
        assert memory.workspace == 0 or count > 1


@pytest.mark.parametrize("name", ["kivi-2", "minmax-4"])
def test_undone_tokens_leave_no_trace(name: str) -> None:
    prefill, keys, values = make_row(tokens=40, new=30)
    plan = CodePlan(FORMATS[name], 2, 30, exact_new=False)
    kept = Spread().keep(prefill, 35)
    store = CodeStore(prefill.keys, prefill.values, kept, plan, 0, prefill.rope, torch.float32)
    other = store.copy()
    feed(store, keys[:, :10], values[:, :10])
    store.undo(7)
    feed(other, keys[:, :3], values[:, :3])
    for token in range(3, 30):
        for each in (store, other):
            feed(each, keys[:, token : token + 1], values[:, token : token + 1])
    assert_close(held(store), held(other))
    assert store.memory() == other.memory()


def test_more_tokens_than_announced_are_taken() -> None:
    prefill, keys, values = make_row(tokens=9, new=20)
    [store] = TurboQuant(2).compress([prefill], allow(prefill, new=None))
    for token in range(20):
        feed(store, keys[:, token : token + 1], values[:, token : token + 1])
    assert len(held(store)[0][0]) == 29
    assert store.memory().used <= store.memory().reserved


# TurboQuant


@pytest.mark.parametrize("dim", [64, 80, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_turboquant_keeps_no_token_exactly_but_the_newest(dim: int, dtype: torch.dtype) -> None:
    prefill, keys, values = make_row(tokens=30, new=3, dim=dim, dtype=dtype)
    method = TurboQuant(3, value_bits=4)
    [store] = method.compress([prefill], allow(prefill, new=3))
    for token in range(3):
        feed(store, keys[:, token : token + 1], values[:, token : token + 1])
    codec = method._plan(0).format.codec
    all_keys, all_values = torch.cat([prefill.keys, keys], 1), torch.cat([prefill.values, values], 1)
    decoded = codec.decode(codec.encode(all_keys, all_values), WindowShape(2, 33, dim))
    for mine, codes, exact in zip(held(store), decoded, (keys, values), strict=True):
        assert torch.allclose(torch.stack(mine)[:, :-1].float(), codes[:, :-1], rtol=1e-2, atol=1e-5)
        assert torch.equal(torch.stack(mine)[:, -1], exact[:, -1])
    assert store.memory().full == 2 * 2 * dim * dtype.itemsize


def test_turboquant_names_and_settings() -> None:
    assert [method.label for method in TurboQuant().variants()] == ["turboquant-4", "turboquant-3", "turboquant-2"]
    assert TurboQuant(3, value_bits=4, residual=8).label == "turboquant-3[value_bits=4;residual=8]"
    with pytest.raises(ValueError, match="from 1 to 8"):
        TurboQuant(bits=0)
    with pytest.raises(ValueError, match="residual is -1"):
        TurboQuant(residual=-1)
    prefill, _, _ = make_row(dim=6)
    with pytest.raises(ValueError, match="multiple of 4"):
        TurboQuant().compress([prefill], allow(prefill))


# Evict, then quantise


@settings(max_examples=30)
@given(
    name=st.sampled_from(["kivi-4", "turboquant-2", "minmax-2"]),
    heads=st.integers(1, 3),
    share=st.floats(0.1, 0.95),
    new=st.integers(0, 30),
    residual=st.integers(0, 6),
    exact=st.booleans(),
    ragged=st.booleans(),
)
def test_as_many_tokens_as_fit(
    name: str, heads: int, share: float, new: int, residual: int, exact: bool, ragged: bool
) -> None:
    prefill, _, _ = make_row(heads=heads, tokens=150, dim=32, dtype=torch.float16)
    size = int(share * 150 * allow(prefill).token_bytes)
    allowance = allow(prefill, size, new, exact)
    method = QPrune(Spread(ragged), name, residual)
    try:
        [store] = method.compress([prefill], allowance)
    except InfeasibleBudgetError:
        plan = CodePlan(get_format(name), residual, new, exact)
        assert ragged or plan.bytes(heads, 32, torch.float16, 1) + 8 > size
        return
    assert store.memory().reserved + 8 <= size
    if isinstance(store, ExactStore):
        assert (150 + new) * allowance.token_bytes + 16 <= size
        return
    assert isinstance(store, CodeStore)
    tokens = len(held(store)[0][0])
    if not ragged and tokens < 150:
        more = [plan.bytes(heads, 32, torch.float16, tokens + i) for plan in [store.parts[0].plan] for i in (1, 2, 40)]
        assert all(needed + 8 > size for needed in more)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["kivi-4", "turboquant-4", "minmax-4"])
def test_a_pooled_selectors_layers_obey_together(name: str, exact: bool) -> None:
    rows = [make_row(tokens=200, dim=32, seed=layer, new=20, dtype=torch.float16) for layer in range(4)]
    prefills = [row[0] for row in rows]
    size = int(0.25 * 220 * allow(prefills[0]).token_bytes)
    method = QPrune(PooledSpread(), name, residual=4)
    assert method.pooled
    stores = method.compress(prefills, allow(prefills[0], size, 20, exact, layers=4))
    for token in range(20):
        for store, (_, keys, values) in zip(stores, rows, strict=True):
            feed(store, keys[:, token : token + 1], values[:, token : token + 1])
        assert sum(store.memory().reserved + 8 for store in stores) <= 4 * size
    counts = {len(held(store)[0][0]) for store in stores}
    assert len(counts) == 2


def test_without_a_limit_everything_stays_exactly() -> None:
    prefill, _, _ = make_row()
    [store] = QPrune(Spread()).compress([prefill], allow(prefill))
    assert torch.equal(torch.stack(held(store)[0]), prefill.keys)
    [store] = QPrune(Spread()).compress([prefill], allow(prefill, 10**6))
    assert torch.equal(torch.stack(held(store)[0]), prefill.keys)


def test_the_budget_has_to_hold_what_the_selector_needs() -> None:
    prefill, _, _ = make_row(tokens=100)
    with pytest.raises(InfeasibleBudgetError, match="keeps at least 8 prompt tokens"):
        QPrune(SnapKV(window=8)).compress([prefill], allow(prefill, 200))
    with pytest.raises(ValueError, match="max_new_tokens"):
        QPrune(SnapKV(window=8)).compress([prefill], allow(prefill, 4000, new=None))


@pytest.mark.parametrize("scope", ["total", "prompt"])
def test_the_budget_holds_at_every_step_of_a_model(scope: str) -> None:
    model, ids = endless("qwen2", head_dim=32), prompt(80, batch=2)
    method = QPrune(SnapKV(window=8), "minmax-4", residual=4)
    cache = MethodCache(model, method, Budget(fraction=0.5, scope=scope), max_new_tokens=24)
    logits = forward(model, cache, ids)
    for step in range(24):
        memory = cache.memory()
        assert memory.overshoot == 0, step
        assert memory.used <= memory.reserved
        logits = forward(model, cache, logits[:, -1:].argmax(-1))
    assert cache.memory().codes > 0


def test_specifications() -> None:
    selectors = {"spread": Spread(), "a+b": PooledSpread()}
    assert parse("qprune:spread+kivi-4", selectors) == QPrune(Spread(), "kivi-4")
    assert parse("a+b+minmax-3", selectors) == QPrune(PooledSpread(), "minmax-3")
    assert parse("spread+turboquant-2", selectors).label == "qprune:spread+turboquant-2"
    for spec, said in (
        ("qprune:spread", "write qprune:<selector>"),
        ("qprune:snap+kivi-4", "known selector; the known ones are a\\+b, spread"),
        ("spread+zip-4", "unknown codec 'zip-4': the known ones are kivi-2, kivi-4"),
    ):
        with pytest.raises(ValueError, match=said):
            parse(spec, selectors)
    with pytest.raises(ValueError, match="residual is -1"):
        QPrune(Spread(), residual=-1)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        CodeFormat("x", get_format("kivi-4").codec, 0)
