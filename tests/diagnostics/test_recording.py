"""What a policy trace says is what the cache holds, token by token, and what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import PREFILL, STEPS, article, tight

from qevict import QEvictCache
from qevict.bench.forks import fork_forward
from qevict.config import Budget
from qevict.diagnostics.conditions import Condition, method_condition, one_way
from qevict.diagnostics.policy import ABSENT, LOCAL, SINK, PolicyTrace
from qevict.diagnostics.recording import record_policies
from qevict.diagnostics.reference import record_reference, trace_header
from qevict.diagnostics.summary import summarise
from qevict.diagnostics.trace import Trace
from qevict.layer import QEvictLayer
from qevict.methods import MethodCache, make_cache
from qevict.methods.cache import MethodLayer
from qevict.routing import EVICTED, FULL, QUANTIZED
from qevict.trace import PrefillTrace
from tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def trace(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    text = article()
    header = trace_header(model, text.tokens[:PREFILL], STEPS, prompt_queries=(4, 32))
    folder = tmp_path_factory.mktemp("trace")
    return record_reference(model, header, folder, continuation=text.tokens[PREFILL:], store_dtype=torch.float32)


def recorded(model: Any, trace: Trace, *conditions: Condition, **settings: Any) -> dict[str, PolicyTrace]:
    policies, infeasible = record_policies(model, trace, conditions, store_dtype=torch.float32, **settings)
    assert not infeasible
    return policies


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_states_are_the_assignment_that_each_query_met(model: Any, trace: Trace, granularity: str) -> None:
    condition = tight(granularity=granularity)
    policy = recorded(model, trace, condition)["tight"]
    cache = make_cache(model, condition.method, condition.budget, max_new_tokens=STEPS, store_dtype=torch.float32)
    assert isinstance(cache, QEvictCache)
    PrefillTrace.capture(model, torch.tensor([trace.header.tokens[:PREFILL]])).fill(cache)
    seen: list[int] = []
    for step, token in enumerate(trace.header.tokens[PREFILL:]):
        fork_forward(model, [cache], torch.tensor([[token]]))
        stores = [layer.cohorts[0].store for layer in cache.layers if isinstance(layer, QEvictLayer)]
        if stores[0].events > len(seen):
            seen.append(PREFILL + step)
            states = policy.tiers[:, len(seen) - 1]
            for store, own in zip(stores, states, strict=True):
                history = 2 + 4 * store.aged
                assert torch.equal(own[:, 2:history].long(), store.assignment().repeat_interleave(4, dim=1))
                assert bool((own[:, :2] == SINK).all())
                assert bool((own[:, history : PREFILL + step] == LOCAL).all())
                assert bool((own[:, PREFILL + step :] == ABSENT).all())
    assert policy.lengths.tolist() == seen == list(range(PREFILL, PREFILL + STEPS, 4))
    assert all(bool((policy.tiers == state).any()) for state in (FULL, QUANTIZED, EVICTED)), "all tiers were in use"


def test_masses_are_the_references_where_nothing_is_compressed(model: Any, trace: Trace) -> None:
    policy = recorded(model, trace, tight("roomy", budget=400))["roomy"]
    assert policy.mass is not None
    assert not bool((policy.tiers == EVICTED).any())
    exact = tight("exact", budget=400, quantized_fraction=0.0)
    policy = recorded(model, trace, exact)["exact"]
    assert policy.mass is not None
    for place, layer in enumerate(trace.header.layers):
        reference = trace.mass(layer).mean(dim=0)[:, 2:]
        windows = torch.nn.functional.pad(reference, (0, -reference.shape[1] % 4)).unflatten(1, (-1, 4)).sum(dim=-1)
        assert torch.allclose(policy.mass[place, :, 0], windows, atol=1e-3)
    assert float(policy.kl.abs().max()) < 1e-4


def test_promotions_are_those_that_the_cache_counts(model: Any, trace: Trace) -> None:
    condition = tight(ranking="decayed", prompt_queries=4)
    both = recorded(model, trace, condition, one_way(condition))
    summaries = summarise(trace, both)
    assert summaries["tight"]["to_full"] == both["tight"].header.promoted > 0
    assert summaries["tight one-way"]["to_full"] == both["tight one-way"].header.promoted == 0
    assert summaries["tight one-way"]["lir"]["policy"]["1"]["rescued"] == 0


@pytest.mark.parametrize("name", ["h2o", "tova", "streamingllm", "keynorm", "adakv", "qprune:keynorm+kivi-4"])
def test_trails_name_the_tokens_that_the_store_holds(model: Any, trace: Trace, name: str) -> None:
    budget = Budget(fraction=0.6 if "adakv" not in name else 0.95)
    cache = make_cache(model, name, budget, max_new_tokens=STEPS, store_dtype=torch.float32)
    assert isinstance(cache, MethodCache)
    cache.keep_trails()
    ids = torch.tensor([trace.header.tokens])
    full = PrefillTrace.capture(model, ids)
    PrefillTrace.capture(model, ids[:, :PREFILL], hidden=True).fill(cache)
    for step in range(PREFILL, PREFILL + STEPS):
        fork_forward(model, [cache], ids[:, step : step + 1])
        layer = cache.managed[0]  # whose keys and values depend on nothing but its tokens
        assert isinstance(layer, MethodLayer)
        store = layer.rows[0].store
        assert store is not None
        assert store.trail is not None
        for block in store.blocks():
            for head in range(block.heads.start, block.heads.stop):
                own = store.trail.tokens[head]
                exact = store.coded()[head] if store.coded() else 0
                values = block.values[head - block.heads.start]
                assert len(own) == len(values)
                assert torch.allclose(values[exact:], full.prefills[0].values[0, head, own[exact:]], atol=1e-5)
                assert torch.allclose(values[:exact], full.prefills[0].values[0, head, own[:exact]], atol=0.5)


def test_a_cache_that_was_not_asked_keeps_no_trail(model: Any) -> None:
    cache = make_cache(model, "h2o", 0.6, max_new_tokens=8)
    assert isinstance(cache, MethodCache)
    PrefillTrace.capture(model, torch.tensor([article().tokens[:PREFILL]])).fill(cache)
    assert all(row.store.trail is None for layer in cache.managed for row in layer.rows if row.store is not None)


def test_any_method_is_a_condition_and_impossible_ones_say_why(model: Any, trace: Trace) -> None:
    names = ("h2o", "full", "kivi-2")
    conditions = [method_condition(name, Budget(fraction=0.5)) for name in names]
    policies, infeasible = record_policies(
        model, trace, [*conditions, method_condition("snapkv", Budget(fraction=0.5))]
    )
    assert list(infeasible) == ["snapkv"]
    assert "snapkv keeps" in infeasible["snapkv"]
    fmm = {name: summary["fmm"] for name, summary in summarise(trace, policies).items()}
    assert 0 < fmm["h2o"] < 1
    assert fmm["full"] == fmm["kivi-2"] == 0
    shares = {name: summary["shares"]["with prompt"] for name, summary in summarise(trace, policies).items()}
    assert shares["full"]["full"] == 1.0


def test_transformers_own_quantized_cache_keeps_all_in_codes(model: Any, trace: Trace) -> None:
    pytest.importorskip("optimum.quanto")
    policies = recorded(model, trace, method_condition("hf-quantized-4", Budget(fraction=0.5)))
    summary = summarise(trace, policies)["hf-quantized-4"]
    assert summary["fmm"] == 0
    assert summary["shares"]["with prompt"]["quantized"] == 1.0


def test_a_policy_trace_survives_its_file(model: Any, trace: Trace, tmp_path: Path) -> None:
    policy = recorded(model, trace, tight())["tight"]
    policy.save(tmp_path / "policy.safetensors")
    loaded = PolicyTrace.load(tmp_path / "policy.safetensors")
    assert loaded.header == policy.header
    assert policy.mass is not None
    assert loaded.mass is not None
    for before, after in ((policy.tiers, loaded.tiers), (policy.lengths, loaded.lengths), (policy.mass, loaded.mass)):
        assert torch.equal(before, after)


def test_the_full_precision_only_ablation_misses_what_the_codes_held(model: Any, trace: Trace) -> None:
    summary = summarise(trace, recorded(model, trace, tight()))["tight"]
    assert summary["fmm_full_only"] > summary["fmm"] > 0
    assert sum(summary["shares"]["decoding only"].values()) == pytest.approx(1.0, abs=1e-5)
    assert set(summary["lir"]) == {"policy", "oracle"}
