"""A row of a fork is that cache run alone: the same logits, the same bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import METHODS, endless, filled, forward, prompt

from qevict.attention import visible
from qevict.bench.decode import FORCED_CHUNK, Fork, decode, end_tokens, forced_nll
from qevict.bench.forks import ForkedCache, copies, fork_forward
from qevict.methods import make_cache
from qevict.trace import PrefillTrace


@pytest.fixture(scope="module")
def llama() -> Any:
    return endless("llama", num_attention_heads=6, num_key_value_heads=2, hidden_size=96)


def alone(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    return forward(model, cache, tokens[None])[0]


def agree(model: Any, members: list[Any], forwards: list[torch.Tensor], tolerance: float = 1e-4) -> None:
    """Decode the members together and apart, and compare after every forward."""
    apart = copies(members)
    for tokens in forwards:
        together = fork_forward(model, members, tokens, last_only=False)
        for row, cache in enumerate(apart):
            torch.testing.assert_close(together[row], alone(model, cache, tokens[row]), rtol=tolerance, atol=tolerance)
            assert members[row].memory() == cache.memory()
            assert members[row].get_seq_length() == cache.get_seq_length()


@settings(max_examples=5)
@given(
    rows=st.lists(st.tuples(st.sampled_from(sorted(METHODS)), st.integers(60, 90)), min_size=2, max_size=4),
    question=st.integers(1, 5),
)
def test_rows_are_the_caches_alone(llama: Any, rows: list[tuple[str, int]], question: int) -> None:
    members = [filled(llama, name, tokens) for name, tokens in rows]
    steps = [
        prompt(question, len(rows), seed=1),
        *(prompt(1, len(rows), seed=s) for s in range(3)),
        prompt(2, len(rows)),
    ]
    agree(llama, members, steps)


@pytest.mark.parametrize("family", ["gemma3", "cohere", "phi", "smollm3", "mistral"])
def test_families(family: str) -> None:
    """Sliding layers that keep Transformers' cache, interleaved and partial rotary, layers without."""
    model = endless(family)
    members = [filled(model, name, tokens) for name, tokens in [("full", 70), ("qevict", 64), ("snapkv", 81)]]
    agree(model, members, [prompt(5, 3), *(prompt(1, 3, seed=s) for s in range(2))])


def test_eager_attention_and_sixteen_bit_storage(llama: Any) -> None:
    model = endless("llama")
    model.set_attn_implementation("eager")
    members = [filled(model, name, 70, torch.bfloat16) for name in ("full", "qevict", "snapkv")]
    # Keys of a batch and of a row alone differ in their last bits, and a few then round to another bfloat16.
    agree(model, members, [prompt(3, 3), prompt(1, 3)], tolerance=5e-3)


def test_transformers_quantized_cache() -> None:
    pytest.importorskip("optimum.quanto")
    model = endless("llama", head_dim=64)
    trace = PrefillTrace.capture(model, prompt(70))
    members = [trace.fill(make_cache(model, "hf-quantized-4")), filled(model, "qevict", 80)]
    agree(model, members, [prompt(3, 2), prompt(1, 2), prompt(1, 2, seed=1)])


def test_an_empty_member_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match="member 1 is empty"):
        ForkedCache(llama, [filled(llama, "full", 60), make_cache(llama, "full")])


def test_visible_is_causal_and_slides() -> None:
    assert visible(2, 4, None, torch.device("cpu")).tolist() == [[True, True, True, False], [True] * 4]
    assert visible(2, 4, 2, torch.device("cpu")).tolist() == [[False, True, True, False], [False, False, True, True]]


# -- decoding ----------------------------------------------------------------------------------------------------------


def greedy(model: Any, cache: Any, pending: list[int], limit: int) -> tuple[list[int], float, int]:
    """Token by token, one cache: the tokens, the largest ratio and the most bytes held on the way."""
    reports, tokens, fed = [cache.memory()], [], torch.tensor(pending)
    for _ in range(limit):
        token = int(alone(model, cache, fed)[-1].argmax())
        tokens.append(token)
        reports.append(cache.memory())
        fed = torch.tensor([token])
        if token in end_tokens(model):
            break
    return tokens, max(r.ratio for r in reports), max(r.reserved for r in reports)


GROUPS = [
    [("full", 60, 1), ("qevict", 75, 1), ("snapkv", 61, 4), ("qevict tight", 60, 4)],
    [("full", 75, 1)],
    [("snapkv tight", 70, 2), ("qevict-paper", 66, 2), ("full", 66, 2)],
]
"""Rows by method, tokens of the prompt, tokens of the question."""


@pytest.fixture(scope="module")
def apart(llama: Any) -> tuple[Any, dict[Any, Any]]:
    """A model that ends some of the rows before the limit of nine tokens, and what it generates for each row alone."""
    model = copy.deepcopy(llama)
    starts = {row: prompt(row[2], seed=row[1])[0].tolist() for group in GROUPS for row in group}
    free, *_ = greedy(model, filled(model, "qevict", 75), starts["qevict", 75, 1], 9)
    model.generation_config.eos_token_id = [free[3], 127]
    return model, {row: (start, greedy(model, filled(model, *row[:2]), start, 9)) for row, start in starts.items()}


@pytest.mark.parametrize("batch", [4, 48])
def test_decoding_together_is_decoding_apart(apart: tuple[Any, dict[Any, Any]], batch: int) -> None:
    model, rows = apart
    forks = {row: Fork(filled(model, *row[:2]), start, limit=9) for row, (start, _) in rows.items()}
    done = list(decode(model, ([forks[row] for row in group] for group in GROUPS), batch))
    assert len(done) == len(forks) == len({id(fork) for fork in done})
    for row, fork in forks.items():
        assert (fork.tokens, fork.memory.ratio, fork.memory.bytes) == rows[row][1], row
        assert fork.seconds > 0
    assert {len(fork.tokens) for fork in done} != {9}


def test_a_row_ends_where_its_sample_is_finished(llama: Any) -> None:
    forks = [
        Fork(filled(llama, "full", 60), [5], limit=8, finished=lambda tokens: len(tokens) == 3),
        Fork(filled(llama, "full", 60), [5], limit=8),
    ]
    assert [len(fork.tokens) for fork in decode(llama, [forks])] == [3, 8]
    assert forks[0].tokens == forks[1].tokens[:3]


def test_groups_are_asked_for_only_when_there_is_room(llama: Any) -> None:
    asked: list[int] = []

    def groups() -> Any:
        for group in range(3):
            asked.append(group)
            yield [Fork(filled(llama, "full", 60), [5], limit=2 + 4 * group) for _ in range(2)]

    seen = [(len(fork.tokens), len(asked)) for fork in decode(llama, groups(), batch=4)]
    assert seen == [(2, 3), (2, 3), (6, 3), (6, 3), (10, 3), (10, 3)]
    asked.clear()
    assert next(iter(decode(llama, groups(), batch=2))).limit == 2
    assert asked == [0, 1]


def test_a_group_larger_than_the_batch_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match="a group of 2 forks is larger than a batch of 1"):
        list(decode(llama, [[Fork(filled(llama, "full", 60), [5], limit=1) for _ in range(2)]], batch=1))


@pytest.mark.parametrize("answer", [1, 2, FORCED_CHUNK + 1, FORCED_CHUNK + 2])
@pytest.mark.parametrize("pending", [1, 4])
def test_forced_nll(llama: Any, answer: int, pending: int) -> None:
    """Against full KV without any cache; and the forks themselves are left as they were."""
    caches = [filled(llama, "full", 60), filled(llama, "qevict", 60)]
    before = [cache.memory() for cache in caches]
    asked, gold = prompt(pending, seed=3)[0], prompt(answer, seed=4)[0]
    found = forced_nll(llama, caches, asked.tolist(), gold.tolist())
    whole = torch.cat([prompt(60, seed=60)[0], asked, gold])
    logits = forward(llama, None, whole[None])[0, -answer - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, gold)
    assert found[0] == pytest.approx(float(expected), rel=1e-4)
    assert found[1] != pytest.approx(found[0], rel=1e-5)
    assert [cache.memory() for cache in caches] == before
    assert [cache.get_seq_length() for cache in caches] == [60, 60]
