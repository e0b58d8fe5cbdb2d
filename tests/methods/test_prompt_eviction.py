"""What the eviction methods keep of a prompt, against their definitions in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefills import allow, as_lists, make_prefill, shapes

import reference.prompt_eviction as slow
from qevict.budget import InfeasibleBudgetError
from qevict.geometry import KVGeometry
from qevict.methods import get_method
from qevict.methods.adakv import AdaKV
from qevict.methods.base import Allowance, Selector
from qevict.methods.chunkkv import ChunkKV
from qevict.methods.criticalkv import CriticalAdaKV, CriticalKV
from qevict.methods.defensivekv import DefensiveKV, LayerDefensiveKV
from qevict.methods.expected_attention import ExpectedAttention
from qevict.methods.h2o import H2O, ObservedAttention
from qevict.methods.keynorm import KeyNorm
from qevict.methods.snapkv import SnapKV
from qevict.methods.streaming import StreamingLLM
from qevict.methods.tova import TOVA

few = settings(max_examples=25)
WINDOWS = st.sampled_from([1, 2, 5])
POOLING = st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from(["max", "avg"]))
# tokens of the prompt behind the window, and how many of them may stay; the window and one more token at the least
LENGTHS = st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))


@few
@given(shapes, WINDOWS, POOLING, LENGTHS)
def test_snapkv(shape: dict[str, int], window: int, pooling: tuple[int, Any], lengths: tuple[int, int]) -> None:
    prefill, tokens = make_prefill(tokens=window + lengths[0], **shape), window + lengths[1]
    kept = SnapKV(window, *pooling).keep(prefill, tokens)
    assert as_lists(kept) == slow.snapkv(prefill, tokens, window, *pooling)


@few
@given(shapes, WINDOWS, POOLING, LENGTHS, st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_adakv(
    shape: dict[str, int], window: int, pooling: tuple[int, Any], lengths: tuple[int, int], alpha: float
) -> None:
    prefill, tokens = make_prefill(tokens=window + lengths[0], **shape), window + lengths[1]
    scores = slow.snapkv_scores(prefill, window, *pooling)

    kept = as_lists(AdaKV(window, *pooling, alpha, "floor").keep(prefill, tokens))
    budgets = slow.floor_budgets(scores, tokens, alpha)
    assert kept == [slow.top(row, budget) for row, budget in zip(scores, budgets, strict=True)]

    kept = as_lists(AdaKV(window, *pooling, alpha, "blend").keep(prefill, tokens))
    exact, total = slow.blend_budgets(scores, tokens, alpha, window)
    assert kept == [slow.top(row, len(chosen)) for row, chosen in zip(scores, kept, strict=True)]
    assert sum(map(len, kept)) == total
    assert all(abs(len(chosen) - budget) < 1 for chosen, budget in zip(kept, exact, strict=True))


@few
@given(shapes, WINDOWS, LENGTHS, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1e-4, 0.1]))
def test_criticalkv(shape: dict[str, int], window: int, lengths: tuple[int, int], first: float, eps: float) -> None:
    prefill, tokens = make_prefill(tokens=window + lengths[0], **shape), window + lengths[1]
    scores, norms = slow.snapkv_scores(prefill, window, 3, "max"), slow.output_norms(prefill)
    kept = CriticalKV(window, 3, "max", eps, first).keep(prefill, tokens)
    assert as_lists(kept) == [
        slow.two_stages(row, norm, eps, int(first * tokens), tokens) for row, norm in zip(scores, norms, strict=True)
    ]

    kept = CriticalAdaKV(window, 3, "max", 0.6, epsilon=eps, first_stage=first).keep(prefill, tokens)
    safe = max(1, int(0.6 * tokens))
    expected = []
    for row, norm, budget in zip(scores, norms, slow.floor_budgets(scores, tokens, 0.6), strict=True):
        expected.append(slow.two_stages(row, norm, eps, max(safe, int(first * budget)), budget))
    assert as_lists(kept) == expected


def test_criticaladakv_secures_the_safeguards_tokens_whatever_their_values() -> None:
    prefill, tokens = make_prefill(tokens=40), 16
    secured = [set(slow.top(row, 8)) for row in slow.snapkv_scores(prefill, 2, 1, "avg")]

    def keeps_all(safeguard: Any) -> list[bool]:
        method = CriticalAdaKV(2, 1, "avg", 0.5, safeguard, epsilon=10.0, first_stage=0.0)
        return [few <= set(index.tolist()) for few, index in zip(secured, method.keep(prefill, tokens), strict=True)]

    assert all(keeps_all("floor"))
    assert not any(keeps_all("blend"))


@few
@given(
    shapes,
    WINDOWS,
    st.sampled_from([1, 3, 5]),
    LENGTHS,
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from(["author", "corrected"]),
)
def test_defensivekv(
    shape: dict[str, int], window: int, kernel: int, lengths: tuple[int, int], coverage: float, bias: Any
) -> None:
    prefill, tokens = make_prefill(tokens=window + lengths[0], **shape), window + lengths[1]
    kept = DefensiveKV(window, kernel, coverage, bias).keep(prefill, tokens)
    scores = slow.defensive_scores(prefill, tokens, window, kernel, coverage, bias == "corrected")
    assert as_lists(kept) == slow.best_of_all([scores], tokens)[0]


@few
@given(shapes, WINDOWS, LENGTHS, st.integers(1, 3))
def test_layer_defensivekv(shape: dict[str, int], window: int, lengths: tuple[int, int], layers: int) -> None:
    shape = shape | {"tokens": window + lengths[0]}
    prefills = [make_prefill(**shape | {"seed": shape["seed"] + index}, index=index) for index in range(layers)]
    tokens = window + lengths[1]
    kept = LayerDefensiveKV(window, 3).keep_pooled(prefills, tokens)
    scores = [slow.defensive_scores(prefill, tokens, window, 3, 0.9, False) for prefill in prefills]
    assert [as_lists(layer) for layer in kept] == slow.best_of_all(scores, tokens)


def test_defensivekv_stays_finite_where_attention_underflows() -> None:
    """All attention goes to the last token, so that the tokens before the window receive exactly nothing."""
    prefill = make_prefill(tokens=12)
    prefill.keys[:, -1] = 1e3 * prefill.query[:, 0, -1]
    prefill.query[:, :, -1] = prefill.query[:, :1, -1]
    assert DefensiveKV(window=1).scores(prefill, 6).isfinite().all()
    assert sum(map(len, DefensiveKV(window=1).keep(prefill, 6))) == 12


@few
@given(shapes, st.sampled_from([1, 4, 7]), st.integers(1, 30), st.integers(0, 100))
def test_chunkkv(shape: dict[str, int], chunk: int, length: int, percent: int) -> None:
    window = 3
    prefill = make_prefill(tokens=window + length, **shape)
    tokens = max(chunk, window) + percent * length // 100
    if tokens >= prefill.tokens:
        return
    kept = ChunkKV(window, 3, "avg", chunk).keep(prefill, tokens)
    expected = slow.chunkkv(prefill, tokens, window, 3, "avg", chunk)
    assert as_lists(kept) == [expected] * shape["heads"]
    assert len(expected) <= tokens


@few
@given(shapes, LENGTHS, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_h2o_and_observed_attention(shape: dict[str, int], lengths: tuple[int, int], heavy: float) -> None:
    prefill, tokens = make_prefill(tokens=1 + lengths[0], **shape), 1 + lengths[1]
    received = slow.received(prefill)
    kept = H2O(heavy).keep(prefill, tokens)
    assert as_lists(kept) == [slow.heavy_and_recent(row, tokens, int(heavy * tokens)) for row in received]
    kept = ObservedAttention().keep(prefill, tokens)
    average = [[x / (prefill.tokens - t) for t, x in enumerate(row)] for row in received]
    assert as_lists(kept) == [slow.top(row, tokens) for row in average]


@few
@given(shapes, LENGTHS)
def test_tova_streaming_and_key_norm(shape: dict[str, int], lengths: tuple[int, int]) -> None:
    prefill, tokens = make_prefill(tokens=1 + lengths[0], **shape), 1 + lengths[1]
    scores = slow.last_attention(prefill)
    assert as_lists(TOVA().keep(prefill, tokens)) == [slow.top(scores, tokens)] * shape["heads"]
    last_kept = slow.top([*scores[:-1], 2.0], tokens)
    assert as_lists(TOVA(keep_last=True).keep(prefill, tokens)) == [last_kept] * shape["heads"]

    sinks = min(2, tokens)
    expected = [t for t in range(prefill.tokens) if t < sinks or t >= prefill.tokens - (tokens - sinks)]
    assert as_lists(StreamingLLM(sinks).keep(prefill, tokens)) == [expected] * shape["heads"]

    assert as_lists(KeyNorm().keep(prefill, tokens)) == [slow.top(row, tokens) for row in slow.key_norms(prefill)]


@settings(max_examples=10)
@given(shapes, st.integers(0, 3), LENGTHS, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_expected_attention(
    shape: dict[str, int], sinks: int, lengths: tuple[int, int], covariance: bool, norm: bool, epsilon: float
) -> None:
    prefill, tokens = make_prefill(tokens=sinks + 1 + lengths[0], **shape), max(1, sinks) + lengths[1]
    method = ExpectedAttention(5, sinks, covariance, norm, epsilon)
    expected = slow.expected_attention_scores(prefill, 5, sinks, covariance, norm, epsilon)
    torch.testing.assert_close(method.scores(prefill), torch.tensor(expected), rtol=1e-3, atol=1e-6)
    assert as_lists(method.keep(prefill, tokens)) == [slow.top(row, tokens) for row in method.scores(prefill).tolist()]


EVERY: list[Selector] = [
    SnapKV(3),
    AdaKV(3),
    AdaKV(3, safeguard="floor"),
    CriticalKV(3),
    CriticalAdaKV(3),
    DefensiveKV(3),
    LayerDefensiveKV(3),
    ChunkKV(3, chunk=3),
    H2O(),
    ObservedAttention(),
    TOVA(),
    StreamingLLM(3),
    KeyNorm(),
    ExpectedAttention(sinks=3),
]
every = pytest.mark.parametrize("method", EVERY, ids=lambda method: method.name)


@every
@pytest.mark.parametrize("tokens", [3, 4])
def test_where_everything_ties_the_budget_is_used_and_obeyed(method: Selector, tokens: int) -> None:
    prefill = make_prefill(heads=2, tokens=9)
    for tensor in (prefill.query, prefill.keys, prefill.values):
        tensor.zero_()
    kept = method.select([prefill], tokens)[0]
    assert sum(map(len, kept)) == 2 * (3 if isinstance(method, ChunkKV) else tokens)
    assert all(index.diff().gt(0).all() for index in kept)


@every
def test_prompts_of_the_window_and_one_more_token(method: Selector) -> None:
    """The least that is kept; a prompt that is no longer than that is kept whole."""
    for length in (1, 2, 3):
        prefill = make_prefill(tokens=length)
        assert [len(index) for index in method.select([prefill], 3)[0]] == [length] * 2
    kept = method.select([make_prefill(tokens=4)], 3)[0]
    assert sum(map(len, kept)) == (2 if method.name == "chunkkv" else 6)  # its last chunk, which holds one token


@every
def test_too_small_a_budget_is_refused(method: Selector) -> None:
    prefill = make_prefill(tokens=9)
    with pytest.raises(InfeasibleBudgetError, match=r"bytes|tokens"):
        method.compress([prefill], allow(prefill, 0))
    if method.least_tokens > 1:
        with pytest.raises(InfeasibleBudgetError, match="keeps at least 3"):
            method.compress([prefill], allow(prefill, 2))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(method: Selector, dtype: torch.dtype) -> None:
    """Scores are float32 whatever the model's dtype, so rounding the inputs beforehand changes nothing."""
    prefill = make_prefill(tokens=15, dtype=dtype)
    exact = make_prefill(tokens=15)
    for name in ("query", "keys", "values"):
        getattr(exact, name).copy_(getattr(prefill, name))
    assert as_lists(method.select([prefill], 7)[0]) == as_lists(method.select([exact], 7)[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: SnapKV(window=0),
        lambda: SnapKV(kernel=4),
        lambda: AdaKV(alpha=1.5),
        lambda: CriticalKV(epsilon=-1.0),
        lambda: CriticalAdaKV(first_stage=2.0),
        lambda: DefensiveKV(window=0),
        lambda: DefensiveKV(coverage=90.0),
        lambda: ChunkKV(chunk=0),
        lambda: H2O(heavy=-0.1),
        lambda: StreamingLLM(sinks=-1),
        lambda: ExpectedAttention(future=0),
    ],
)
def test_settings_are_checked(make: Callable[[], Selector]) -> None:
    with pytest.raises(ValueError, match=" is "):
        make()


@pytest.mark.parametrize(
    ("method", "setting"),
    [(SnapKV(), "pooling"), (AdaKV(), "safeguard"), (DefensiveKV(), "window_bias"), (StreamingLLM(), "positions")],
)
def test_words_are_checked(method: Selector, setting: str) -> None:
    object.__setattr__(method, setting, "other")  # __init__ is checked by the test run itself
    with pytest.raises(ValueError, match=f"{setting} is 'other'; it is '"):
        method.__post_init__()  # type: ignore[attr-defined]


def test_what_is_protected_is_what_no_score_decides() -> None:
    """New tokens where a method reserves them, observation windows, sinks; in codes where those come to be in codes."""
    geometry = KVGeometry(layers=2, kv_heads=2, query_heads=4, head_dim=64, element_bytes=2)
    allowance = Allowance(10**6, 100, False, torch.bfloat16, geometry)
    token = geometry.token_bytes

    def tokens(name: str, given: Allowance = allowance) -> float:
        held = get_method(name).protected_bytes(given)
        assert held is not None
        return held / token

    assert tokens("snapkv") == 100 + 32
    assert tokens("keynorm") == 100
    assert tokens("h2o") == 0
    assert tokens("streamingllm") == 4
    assert tokens("streamingllm", replace(allowance, exact_new=True)) == 100 + 4
    assert 16 < tokens("qprune:snapkv+kivi-4") < 100
    assert tokens("qprune:snapkv+kivi-4", replace(allowance, exact_new=True)) > 100
    assert get_method("kivi-2").protected_bytes(allowance) is None
