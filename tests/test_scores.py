"""Window scores inside a real model, against its own attention matrices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from qevict import routing
from qevict.cache import QEvictCache
from qevict.compat import cache_argument
from qevict.config import Budget, QEvictConfig
from qevict.layer import QEvictLayer
from qevict.tiers import TierStore
from reference.naive_cache import CODES, EVICTED, FULL, NaiveLane
from tiny import VOCAB, tiny_model

PROMPT, STEPS = 45, 17
WINDOW, SINKS = 4, 3
NAMES = {routing.FULL: FULL, routing.QUANTIZED: CODES, routing.EVICTED: EVICTED}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return random_tokens()


def random_tokens() -> Tensor:
    return torch.randint(3, VOCAB, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))


def run(model: PreTrainedModel, tokens: Tensor, held: Any, padding: Tensor | None = None, **options: Any) -> list[Any]:
    """The prompt in one forward, then the other tokens one by one; what the model returned each time."""
    results = []
    with torch.no_grad():
        for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + STEPS))]:
            inputs: dict[str, Any] = {}
            if padding is not None:
                positions = padding.cumsum(dim=1).sub(1).clamp(min=0)
                inputs = {"attention_mask": padding[:, :stop], "position_ids": positions[:, start:stop]}
            results.append(model(tokens[:, start:stop], **cache_argument(held), **inputs, **options))
    return results


def left_padding(pads: int) -> Tensor | None:
    """A mask whose first row begins with padding; None without."""
    mask = torch.ones(2, PROMPT + STEPS, dtype=torch.long)
    mask[0, :pads] = 0
    return mask if pads else None


@cache
def attention_matrices(pads: int) -> list[Tensor]:
    """`[batch, query_heads, all tokens, all tokens]` of each layer, from the model's own eager attention."""
    tokens = random_tokens()
    model = tiny_model("llama", attn_implementation="eager")
    results = run(model, tokens, DynamicCache(), left_padding(pads), output_attentions=True)
    length = tokens.shape[1]
    return [
        torch.cat([nn.functional.pad(r.attentions[i], (0, length - r.attentions[i].shape[-1])) for r in results], dim=2)
        for i in range(model.config.num_hidden_layers)
    ]


def live_scores(store: TierStore, lane: int) -> dict[int, float]:
    """State plus mass since the last event, of every window that is not evicted."""
    arena = store.arena
    scores = {}
    for table in (arena.full, arena.codes):
        for w, s, m in zip(
            table.window[lane].tolist(), table.state[lane].tolist(), table.mass[lane].tolist(), strict=True
        ):
            if w >= 0:
                scores[w] = s + m
    recent = store.recent_state[lane] + store.recent_mass[lane]
    return scores | {store.aged + i: score for i, score in enumerate(recent.tolist())}


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize(("prompt_queries", "pads"), [("all", 0), ("all", 6), (10, 0), (1, 6)])
def test_scores_are_column_sums_of_the_attention_matrix(
    model: PreTrainedModel, tokens: Tensor, granularity: Any, prompt_queries: Any, pads: int
) -> None:
    """Nothing is compressed, so the attention is the model's own; the last forward is still pending."""
    config = QEvictConfig(
        ranking="cumulative",
        budget=Budget(tokens=200),
        window_size=WINDOW,
        sink_tokens=SINKS,
        recent_tokens=7,
        granularity=granularity,
        prompt_queries=prompt_queries,
    )
    kept = QEvictCache(model, config)
    run(model, tokens, kept, left_padding(pads))
    assert kept.counts().quantized == kept.counts().evicted == 0
    kv_heads = model.config.num_key_value_heads
    matrices = attention_matrices(pads)
    for layer, matrix in zip(kept.layers, matrices, strict=True):
        for cohort in layer.cohorts:
            lanes = len(cohort.store.first_position) // len(cohort.rows)
            for lane in range(len(cohort.store.first_position)):
                row = int(cohort.rows[lane // lanes])
                heads = matrix[row].unflatten(0, (kv_heads, -1))
                chosen = heads if lanes == 1 else heads[lane % lanes : lane % lanes + 1]
                first = pads if row == 0 else 0
                counted = 0 if prompt_queries == "all" else PROMPT - prompt_queries
                queries = chosen.mean(dim=(0, 1))[max(counted, first) : -1]
                column = queries.sum(dim=0)[first:].tolist()
                scores = live_scores(cohort.store, lane)
                for window in range(-(-(len(column) - SINKS) // WINDOW)):
                    expected = sum(column[SINKS + window * WINDOW : SINKS + (window + 1) * WINDOW])
                    assert abs(scores.pop(window, 0.0) - expected) < 1e-5 * max(1.0, expected)
                assert all(score == 0 for score in scores.values())


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize("allocation", ["coverage", "split"])
def test_a_compressed_model_attends_and_scores_as_the_slow_lane(
    model: PreTrainedModel, tokens: Tensor, granularity: Any, allocation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queries, keys and values of every layer, replayed lane by lane."""
    calls: list[tuple[QEvictLayer, Tensor, Tensor, Tensor, float, Tensor]] = []
    original = QEvictLayer.attend

    def recorded(self: QEvictLayer, module: Any, query: Tensor, handle: Any, mask: Any, call: Any) -> Tensor:
        output = original(self, module, query, handle, mask, call)
        calls.append((self, query, handle.keys, handle.values, call.scaling, output))
        return output

    monkeypatch.setattr(QEvictLayer, "attend", recorded)
    config = QEvictConfig(
        budget=Budget(tokens=30),
        window_size=WINDOW,
        sink_tokens=SINKS,
        recent_tokens=7,
        quantized_fraction=0.6,
        codec="minmax",
        granularity=granularity,
        allocation=allocation,
        prompt_queries="all",
    )
    kept = QEvictCache(model, config)
    run(model, tokens, kept)
    assert kept.counts().quantized > 0
    assert kept.counts().evicted > 0
    for layer in kept.layers:
        replay(layer, [call[1:] for call in calls if call[0] is layer])


def replay(layer: QEvictLayer, calls: list[tuple[Tensor, Tensor, Tensor, float, Tensor]]) -> None:
    """Compare what a layer returned at every forward, and what it keeps, with a slow lane for each of its lanes."""
    (cohort,) = layer.cohorts
    store = cohort.store
    per_row = layer.session.lanes_per_row
    for lane in range(len(store.first_position)):
        row, part = divmod(lane, per_row)
        naive = NaiveLane(store.plan, store.config, layer.rope, 0, torch.float32)
        for step, (query, keys, values, scaling, output) in enumerate(calls):
            kv_heads = keys.shape[1]
            own = slice(None) if per_row == 1 else slice(part, part + 1)
            queries = query[row].unflatten(0, (kv_heads, -1))[own]
            expected, _ = naive.forward(queries, keys[row, own], values[row, own], scaling)
            if step == 0:
                naive.settle(0)  # a prompt is compressed at once
            got = output[row].transpose(0, 1).unflatten(0, (kv_heads, -1))[own]
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
        assert [NAMES[t] for t in store.assignment()[lane].tolist()] == [naive.tier[w] for w in range(store.aged)]
        for window, score in live_scores(store, lane).items():
            wanted = naive.state.get(window, 0.0) + naive.mass.get(window, 0.0)
            assert abs(score - wanted) < 1e-4 * max(1.0, wanted)


def test_a_scorer_of_ones_own_replaces_the_prompts_attention(model: PreTrainedModel, tokens: Tensor) -> None:
    """`[batch, kv_heads, tokens]`, summed over windows and averaged over the heads of a lane."""
    seen: list[tuple[int, ...]] = []

    def scorer(module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        seen.append(tuple(keys.shape[:3]))
        heads = torch.arange(1.0, keys.shape[1] + 1)[None, :, None]
        return heads * torch.arange(keys.shape[2]).float().expand(keys.shape[:3])

    for granularity, factors in (("layer", [1.5]), ("kv_head", [1.0, 2.0])):
        config = QEvictConfig(
            budget=Budget(tokens=200),
            window_size=WINDOW,
            sink_tokens=SINKS,
            recent_tokens=7,
            granularity=granularity,  # type: ignore[arg-type]
            prompt_scorer=scorer,
        )
        kept = QEvictCache(model, config)
        with torch.no_grad():
            model(tokens[:, :PROMPT], **cache_argument(kept))
        (cohort,) = kept.layers[0].cohorts
        for lane in range(len(cohort.store.first_position)):
            scores = live_scores(cohort.store, lane)
            for window in range((PROMPT - SINKS) // WINDOW):
                column = sum(range(SINKS + window * WINDOW, SINKS + (window + 1) * WINDOW))
                assert scores[window] == pytest.approx(factors[lane % len(factors)] * column)
    assert set(seen) == {(2, model.config.num_key_value_heads, PROMPT)}


def test_a_scorer_of_the_wrong_shape(model: PreTrainedModel, tokens: Tensor) -> None:
    config = QEvictConfig(
        budget=Budget(tokens=200), prompt_scorer=lambda module, q, k, v, scaling: k.norm(dim=-1)[:, :1]
    )
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"returned \(2, 1, 45\); it has to return \[batch, kv_heads, t"),
    ):
        model(tokens[:, :PROMPT], **cache_argument(QEvictCache(model, config)))
