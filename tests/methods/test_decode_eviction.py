"""Methods that evict generated tokens, against a slow row that does it one token at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefills import DIM, allow, make_prefill, make_rope
from torch import Tensor

import reference.prompt_eviction as slow
from qevict.budget import InfeasibleBudgetError
from qevict.managed_layer import MAX_DRAFT
from qevict.methods.base import Allowance, LayerPrefill
from qevict.methods.evicting import DecodeSelector, EvictingStore, ScoredStore
from qevict.methods.h2o import H2O
from qevict.methods.store import POSITION_BYTES, ExactStore, RowStore
from qevict.methods.streaming import SlidingStore, StreamingLLM
from qevict.methods.tova import TOVA
from qevict.rope import Rope
from reference.decode_eviction import H2ORule, SlowRow, StreamingRule, Text, TOVARule

METHODS: list[DecodeSelector] = [
    H2O(),
    H2O(heavy=0.3),
    TOVA(),
    TOVA(keep_last=True),
    StreamingLLM(sinks=2),
    StreamingLLM(sinks=0),
    StreamingLLM(sinks=2, positions="original"),
]
ids = [f"{method.name}-{index}" for index, method in enumerate(METHODS)]
every = pytest.mark.parametrize("method", METHODS, ids=ids)

ROPES = [
    make_rope(),
    Rope(make_rope().inv_freq, scaling=1.3, layout="interleaved"),
    Rope(make_rope().inv_freq[:2]),
    Rope.identity(),
]


def make_text(heads: int, group: int, tokens: int, seed: int = 0, first: int = 0, rope: Rope | None = None) -> Text:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(heads, group, tokens, DIM, generator=generator)
    keys, values = torch.randn(2, heads, tokens, DIM, generator=generator)
    return Text(query, keys, values, first, rope or make_rope(), scaling=0.7)


def part(text: Text, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as the model rotates them, and values."""
    places = torch.arange(text.first + start, text.first + stop)
    query, keys = (text.rope.rotate(tensor[..., start:stop, :], places) for tensor in (text.query, text.keys))
    return query, keys, text.values[:, start:stop]


def prompt_of(text: Text, tokens: int) -> LayerPrefill:
    query, keys, values = part(text, 0, tokens)
    heads, group = text.query.shape[:2]
    empty = make_prefill(heads, group, tokens, first=text.first)
    return replace(empty, query=query, keys=keys, values=values, rope=text.rope, scaling=text.scaling)


def slow_row(method: DecodeSelector, text: Text, prefill: LayerPrefill, capacity: int) -> SlowRow:
    heads, tokens = range(prefill.keys.shape[0]), list(range(prefill.tokens))
    shared, inside = isinstance(method, TOVA), isinstance(method, StreamingLLM) and method.positions == "cache"
    rule: Any
    if isinstance(method, H2O):
        rule, scores = H2ORule(int(method.heavy * capacity)), slow.received(prefill)
    elif isinstance(method, TOVA):
        rule, scores = TOVARule(method.keep_last), [slow.last_attention(prefill) for _ in heads]
    else:
        assert isinstance(method, StreamingLLM)
        rule, scores = StreamingRule(method.sinks), [[] for _ in heads]
    row = SlowRow(
        text,
        rule,
        capacity,
        kept=[list(tokens) for _ in heads],
        scores=[dict(enumerate(row)) for row in scores],
        shared=shared,
        inside=inside,
    )
    row.settle(0)
    return row


def attend(store: RowStore, text: Text, start: int, count: int) -> Tensor:
    return store.attend(*part(text, start, start + count), text.scaling)


def make_store(method: DecodeSelector, prefill: LayerPrefill, allowance: Allowance) -> EvictingStore:
    store = method.compress([prefill], allowance)[0]
    assert isinstance(store, EvictingStore)
    return store


def reserved(store: RowStore) -> int:
    """With the row's first position, which the layer reports."""
    return store.memory().reserved + POSITION_BYTES


@every
@settings(max_examples=12)
@given(
    shape=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.integers(1, 12)),
    rope=st.sampled_from(ROPES),
    first=st.sampled_from([0, 5]),
    seed=st.integers(0, 10**6),
    budget=st.integers(6, 10),
    forwards=st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5]), st.integers(0, 5)), max_size=8),
)
def test_every_step_is_the_slow_rows(
    method: DecodeSelector,
    shape: tuple[int, int, int],
    rope: Rope,
    first: int,
    seed: int,
    budget: int,
    forwards: list[tuple[int, int]],
) -> None:
    heads, group, tokens = shape
    text = make_text(heads, group, tokens + 50, seed, first, rope)
    prefill = prompt_of(text, tokens)
    allowance = allow(prefill, budget, new=None)
    store = make_store(method, prefill, allowance)
    row = slow_row(method, text, prefill, store.capacity)
    for count, undone in forwards:
        start = row.kept[0][-1] + 1
        got, expected = attend(store, text, start, count), row.forward(count, start)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        undone = min(undone, count)
        store.undo(undone)
        row.undo(undone)
        assert store.buffer.used == len(row.kept[0])
        assert allowance.bytes is not None
        assert reserved(store) <= allowance.bytes
    store.settle(0)
    row.settle(0)
    for head, tokens_kept in enumerate(row.kept):
        assert torch.equal(store.buffer.values[head], text.values[head, tokens_kept])
        if isinstance(store, ScoredStore):
            expected = torch.tensor([row.scores[head][token] for token in tokens_kept])
            torch.testing.assert_close(store.scores[head % len(store.scores)], expected, rtol=1e-3, atol=1e-5)


@every
def test_the_budget_is_used_up_and_charged_with_all_that_is_held(method: DecodeSelector) -> None:
    """One more token would not fit; a token more is evicted than kept from then on."""
    prefill = make_prefill(heads=2, tokens=30)
    allowance = allow(prefill, 12, new=20)
    store = make_store(method, prefill, allowance)
    assert allowance.bytes is not None
    per_token = allowance.token_bytes + 8 * method.score_rows(2)
    assert allowance.bytes - per_token < reserved(store) <= allowance.bytes
    text = make_text(2, 2, 60)
    for step in range(20):
        attend(store, text, 30 + step, 1)
        memory = store.memory()
        assert store.buffer.used == store.capacity
        assert memory.used <= memory.reserved <= allowance.bytes - POSITION_BYTES
        assert memory.workspace == 0


@every
def test_a_draft_that_is_undone_leaves_no_trace(method: DecodeSelector) -> None:
    prefill, text = make_prefill(heads=2, tokens=20), make_text(2, 2, 60)
    plain, drafted = (make_store(method, prefill, allow(prefill, 10, new=None)) for _ in range(2))
    for step in range(8):
        attend(drafted, text, 40, 7)
        drafted.undo(7)
        expected, got = (attend(store, text, 20 + step, 1) for store in (plain, drafted))
        assert torch.equal(got, expected)
    assert torch.equal(drafted.buffer.keys, plain.buffer.keys)


@every
def test_a_draft_without_room_is_workspace_until_the_next_forward(method: DecodeSelector) -> None:
    prefill, text = make_prefill(heads=2, tokens=20), make_text(2, 2, 60)
    store = make_store(method, prefill, allow(prefill, 10, new=None))
    before = store.memory()
    attend(store, text, 20, 9)
    memory = store.memory()
    assert memory.reserved == before.reserved
    assert memory.used <= memory.reserved
    assert memory.workspace > 0
    attend(store, text, 29, 1)
    assert store.memory().reserved == before.reserved
    assert store.memory().workspace == 0


@every
def test_a_long_text_is_attended_whole_and_then_cut(method: DecodeSelector) -> None:
    """More queries than are observed at a time; the layer settles such a forward at once."""
    length = 2 * MAX_DRAFT + 9
    prefill, text = make_prefill(heads=2, tokens=8), make_text(2, 2, 8 + length)
    roomy = allow(prefill, 400, new=None)
    store, exact = make_store(method, prefill, roomy), ExactStore(*_everything(prefill), length, torch.float32)
    torch.testing.assert_close(attend(store, text, 8, length), attend(exact, text, 8, length), rtol=1e-4, atol=1e-5)

    small = make_store(method, prefill, allow(prefill, 10, new=None))
    attend(small, text, 8, length)
    small.settle(0)
    assert small.buffer.used == small.capacity
    assert small.memory().workspace == 0
    assert small.memory().reserved <= allow(prefill, 10).bytes  # type: ignore[operator]


@every
def test_announced_tokens_limit_what_is_reserved_but_not_what_is_kept(method: DecodeSelector) -> None:
    prefill, text = make_prefill(heads=2, tokens=8), make_text(2, 2, 60)
    allowance = allow(prefill, 30, new=2)
    store = make_store(method, prefill, allowance)
    assert store.slots == 10
    for step in range(40):
        attend(store, text, 8 + step, 1)
        assert reserved(store) <= allowance.bytes  # type: ignore[operator]
        assert store.buffer.used == min(9 + step, store.capacity)


@every
def test_where_generated_tokens_have_to_stay_none_is_evicted(method: DecodeSelector) -> None:
    """Scope "prompt", and no limit at all."""
    prefill, text = make_prefill(heads=2, tokens=20), make_text(2, 2, 60)
    for allowance, kept in ((allow(prefill, 16, new=6, exact=True), 10), (allow(prefill, None, new=6), 20)):
        store = method.compress([prefill], allowance)[0]
        for step in range(6):
            attend(store, text, 20 + step, 1)
        (block,) = store.blocks()
        assert block.keys.shape[1] == kept + 6
        assert torch.equal(block.values[:, kept:], part(text, 20, 26)[2])
        if allowance.bytes is not None:
            assert reserved(store) <= allowance.bytes


def test_sinks_move_once_where_generated_tokens_stay() -> None:
    text = make_text(2, 2, 40, first=3)
    prefill = prompt_of(text, 20)
    store = StreamingLLM(2).compress([prefill], allow(prefill, 16, new=6, exact=True))[0]
    row = slow_row(StreamingLLM(2), text, prefill, 10)
    row.capacity = 99
    for token in range(20, 26):
        torch.testing.assert_close(attend(store, text, token, 1), row.forward(1, token), rtol=1e-3, atol=1e-4)


def test_sinks_are_never_rotated_from_rotated_ones() -> None:
    """After 150 moves and more in bfloat16 a sink is as exact as after one."""
    text = make_text(2, 1, 200)
    prefill = prompt_of(text, 40)
    half = replace(prefill, keys=prefill.keys.bfloat16(), values=prefill.values.bfloat16())
    store = make_store(StreamingLLM(2), half, allow(half, 20, new=None))
    for token in range(40, 190):
        query, keys, values = (tensor.bfloat16() for tensor in part(text, token, token + 1))
        store.attend(query, keys, values, 0.7)
    assert isinstance(store, SlidingStore)
    assert store.evicted == 190 - store.capacity
    expected = text.rope.rotate(text.keys[:, :2], torch.arange(2) + store.evicted)
    torch.testing.assert_close(store.buffer.keys[:, :2].float(), expected, rtol=0.02, atol=0.02)


def test_a_copy_is_independent_and_shares_the_rotary_tables() -> None:
    prefill, text = make_prefill(heads=2, tokens=20), make_text(2, 2, 60)
    for method in METHODS:
        store = make_store(method, prefill, allow(prefill, 10, new=None))
        attend(store, text, 20, 1)
        other = store.copy()
        assert isinstance(other, EvictingStore)
        before = other.buffer.values.clone()
        for token in range(21, 30):
            attend(store, text, token, 1)
        assert torch.equal(other.buffer.values, before)
        if isinstance(store, SlidingStore):
            assert isinstance(other, SlidingStore)
            assert other.rope is store.rope


@every
def test_a_budget_without_room_for_a_new_token_is_refused(method: DecodeSelector) -> None:
    prefill = make_prefill(heads=2, tokens=20)
    with pytest.raises(InfeasibleBudgetError, match="beside a new one"):
        method.compress([prefill], allow(prefill, 1, new=4))


def _everything(prefill: LayerPrefill) -> tuple[Tensor, Tensor, list[Tensor]]:
    return prefill.keys, prefill.values, [torch.arange(prefill.tokens)] * prefill.keys.shape[0]
