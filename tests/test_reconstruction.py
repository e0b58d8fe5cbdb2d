"""Scores from reading a prompt twice: against plain loops and the model's own probabilities; what they are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from qevict import Budget, QEvictCache, QEvictConfig, answer, read_prompt, reconstruction
from qevict.architectures import describe, managed_layers
from qevict.bench.cells import Cell, build, capture
from qevict.cache import TierCounts
from qevict.compat import cache_argument
from qevict.demo import NEEDLE, document
from qevict.kernels import reference
from qevict.methods import get_method
from qevict.reconstruction import CUE, most_attention, reconstruction_scores
from qevict.trace import PrefillTrace
from tiny import MANAGED_FAMILIES, tiny_model

TWICE = QEvictConfig(0.4, window_size=4, sink_tokens=2, recent_tokens=4, prompt_scorer="reconstruction")


@settings(max_examples=30)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    old=st.integers(0, 9),
    new=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    elements=st.sampled_from([1, 40, 1 << 20]),
    seed=st.integers(0, 2**31),
)
def test_most_attention(
    heads: int, group: int, old: int, new: int, dtype: torch.dtype, elements: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, group, new, 8, generator=generator).to(dtype)
    keys = torch.randn(heads, old + new, 8, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_CPU_BLOCK_ELEMENTS", elements)
        most = most_attention(query, keys, 0.7)
    for head in range(heads):
        expected = torch.zeros(old + new)
        for member in range(group):
            for token in range(new):
                seen = keys[head, : old + token + 1].float()
                weights = (seen @ query[head, member, token].float() * 0.7).softmax(dim=0)
                expected[: len(weights)] = torch.maximum(expected[: len(weights)], weights)
        torch.testing.assert_close(most[head], expected, rtol=1e-5, atol=1e-6)


def by_the_model(model: PreTrainedModel, ids: Tensor, chunk: int) -> list[Tensor]:
    """The same from the model's own probabilities of `ids` and behind them a chunk again, chunk by chunk."""
    tokens, kv_heads = len(ids), describe(model).kv_heads
    scores = [torch.zeros(kv_heads, tokens) for _ in range(model.config.num_hidden_layers)]
    for start in range(0, tokens, chunk):
        again = ids[max(0, start - CUE) : start + chunk]
        with torch.no_grad():
            attentions = model(torch.cat([ids, again])[None], output_attentions=True).attentions
        for layer, weights in zip(scores, attentions, strict=True):
            received = weights[0, :, tokens:, :tokens].unflatten(0, (kv_heads, -1)).amax(dim=(1, 2))
            layer.copy_(torch.maximum(layer, received))
    return scores


def reread(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    trace = PrefillTrace.capture(model, ids[None], scores=True)
    return [prefill.scores[0] for prefill in trace.prefills if prefill.scores is not None]


@pytest.mark.parametrize(
    ("family", "implementation", "chunk"),
    [
        *((family, "sdpa", 16) for family in MANAGED_FAMILIES),
        *(("llama", implementation, chunk) for implementation in ("sdpa", "eager") for chunk in (9, 40, 2048)),
    ],
)
def test_scores_are_the_model_s_own_probabilities(
    family: str, implementation: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of managed layers, in which everything is seen."""
    monkeypatch.setattr(reconstruction, "CHUNK", chunk)
    monkeypatch.setattr(reconstruction, "LEAST_CHUNK", 1)
    ids = torch.randint(3, 60, (40,), generator=torch.Generator().manual_seed(1))
    model = tiny_model(family, attn_implementation=implementation)
    expected = by_the_model(tiny_model(family, attn_implementation="eager"), ids, chunk)
    managed, scores = managed_layers(describe(model), 2 * len(ids)), reread(model, ids)
    compared = [pair for of_ours, *pair in zip(managed, scores, expected, strict=True) if of_ours]
    assert compared
    for layer, of_layer in compared:
        torch.testing.assert_close(layer, of_layer, rtol=1e-4, atol=1e-5)


def test_rows_are_scored_by_themselves_and_padding_not_at_all() -> None:
    model = tiny_model("llama")
    long, short = (torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (30, 21))
    padded = torch.stack([long, torch.cat([torch.zeros(9, dtype=torch.long), short])])
    mask = torch.ones_like(padded)
    mask[1, :9] = 0
    trace = PrefillTrace.capture(model, padded, mask, scores=True)
    for index, prefill in enumerate(trace.prefills):
        assert prefill.scores is not None
        torch.testing.assert_close(prefill.scores[0], reread(model, long)[index], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(prefill.scores[1, :, 9:], reread(model, short)[index], rtol=1e-4, atol=1e-6)
        assert bool((prefill.scores[1, :, :9] == 0).all())


def generated(model: PreTrainedModel, cache: QEvictCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, **cache_argument(cache)
    )
    return output[:, ids.shape[1] :]


def test_generate_goes_on_behind_a_prompt_that_was_read_twice() -> None:
    model = tiny_model("llama")
    ids = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    cache = QEvictCache(model, TWICE, max_new_tokens=12)
    read_prompt(model, cache, ids[:, :56], mask[:, :56])
    assert cache.get_seq_length() == 56
    assert cache.counts() != TierCounts(0, 0, 0)
    assert generated(model, cache, ids, mask).shape == (2, 8)
    memory = cache.memory()
    assert memory.overshoot == 0


def test_what_is_kept_follows_the_scores() -> None:
    """Windows stay in the order of their sums; with room for few, the best are there and the worst are not."""
    model = tiny_model("llama")
    ids = torch.randint(3, 90, (80,), generator=torch.Generator().manual_seed(4))
    config = TWICE.replace(budget=Budget(tokens=26), quantized_fraction=0.0)
    cache = QEvictCache(model, config)
    read_prompt(model, cache, ids[None])
    for index, layer in enumerate(cache.layers):
        kept = layer.cohorts[0].store.assignment()[0] > 0
        assert 0 < int(kept.sum()) < len(kept)
        sums = reread(model, ids)[index].mean(dim=0)[2 : 2 + 4 * len(kept)].unflatten(0, (-1, 4)).sum(dim=1)
        assert float(sums[kept].min()) >= float(sums[~kept].max())


def test_a_codec_is_fitted_to_the_prompt_s_queries_whoever_scores() -> None:
    model, ids = tiny_model("llama"), torch.randint(3, 90, (1, 80), generator=torch.Generator().manual_seed(6))
    bits = []
    for scorer in (None, "reconstruction", lambda module, queries, keys, values, scaling: keys.norm(dim=-1)):
        cache = QEvictCache(model, TWICE.replace(prompt_scorer=scorer), max_new_tokens=9)
        read_prompt(model, cache, ids)
        bits.append([layer.cohorts[0].store.codec.bits for layer in cache.layers])
    assert len(bits[0][0].unique()) > 1
    for of_scorer in bits[1:]:
        assert all(torch.equal(layer, default) for layer, default in zip(of_scorer, bits[0], strict=True))


def test_a_benchmark_s_cache_is_the_one_that_read_prompt_fills() -> None:
    model = tiny_model("llama")
    ids = torch.randint(3, 90, (60,), generator=torch.Generator().manual_seed(5))
    method = get_method("qevict[window_size=4;sink_tokens=2;recent_tokens=4;prompt_scorer=reconstruction]")
    trace = capture(model, ids.tolist(), [get_method("snapkv"), method])
    filled = build(model, trace, Cell(method, 0.4), 12, scope="total", store_dtype=None)
    cache = QEvictCache(model, TWICE, max_new_tokens=12)
    read_prompt(model, cache, ids[None])
    more = torch.cat([ids, ids[:1]])[None]
    assert torch.equal(generated(model, filled, more), generated(model, cache, more))  # type: ignore[arg-type]


def test_a_forward_alone_cannot_read_twice() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"reads the prompt twice.*read_prompt\(model, cache, input_ids\)"):
        generated(model, QEvictCache(model, TWICE, max_new_tokens=8), torch.arange(3, 63)[None])


def test_without_a_limit_nothing_has_to_be_scored() -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 63)[None]
    cache = QEvictCache(model, TWICE.replace(budget=1.0))
    assert generated(model, cache, ids).shape == (1, 8)


def test_other_caches_read_once() -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 63)[None]
    once, plain = (QEvictCache(model, TWICE.replace(prompt_scorer=None), max_new_tokens=9) for _ in range(2))
    read_prompt(model, once, ids[:, :-1])
    with torch.no_grad():
        model(ids[:, :-1], **cache_argument(plain))
    assert once.memory() == plain.memory()
    assert torch.equal(generated(model, once, ids), generated(model, plain, ids))
    with pytest.raises(ValueError, match=r"has seen .* tokens already; give an empty one"):
        read_prompt(model, once, ids)


def test_a_prompt_that_leaves_no_positions_is_refused() -> None:
    model = tiny_model("llama", max_position_embeddings=128)
    ids = torch.randint(3, 90, (100,))
    keys = [torch.zeros(2, 100, 16)] * 2
    with pytest.raises(ValueError, match=r"a prompt of 100 tokens is read again .* has 128; leave 72 of them"):
        reconstruction_scores(model, ids, keys, keys)


def test_a_question_that_nobody_knew_is_answered(smollm2: tuple[Any, Any]) -> None:
    """A tenth of full KV's bytes for a text that was compressed before the question came."""
    config = QEvictConfig(0.1, store_dtype=torch.bfloat16, prompt_scorer="reconstruction")
    text = document(smollm2[1], 1500, NEEDLE)
    found = answer(*smollm2, text, NEEDLE.question, budget=config, max_new_tokens=24)
    assert NEEDLE.found(found.text)
    assert found.memory.overshoot == 0


def test_a_question_that_is_known_may_be_read_twice_with_the_text(smollm2: tuple[Any, Any]) -> None:
    config = QEvictConfig(0.3, store_dtype=torch.bfloat16, prompt_scorer="reconstruction")
    text = document(smollm2[1], 300, NEEDLE)
    found = answer(*smollm2, text, NEEDLE.question, budget=config, max_new_tokens=24, question_seen=True)
    assert NEEDLE.found(found.text)
    assert found.memory.overshoot == 0
