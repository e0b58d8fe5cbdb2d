"""QEvictConfig: what is refused and how, the paper's values, copies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch

from qevict.codecs import MinMaxCodec
from qevict.config import Budget, QEvictConfig, as_config
from qevict.ranking import CumulativeAttention, DecayedAttention, FunctionRanking

WHOLE_1 = "it has to be a whole number of at least 1"
WHOLE_OR_FRACTION = f"{WHOLE_1}, or a fraction of the budget between 0 and 1"


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As users run it: without the runtime type checks of the test run, which would refuse wrong types first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window_size", 0, f"window_size is 0; {WHOLE_1}"),
        ("window_size", 8.0, f"window_size is 8.0; {WHOLE_1}"),
        ("window_size", True, f"window_size is True; {WHOLE_1}"),
        ("routing_interval", 0, f"routing_interval is 0; {WHOLE_1}"),
        ("sink_tokens", -1, "sink_tokens is -1; it has to be a whole number of at least 0"),
        ("recent_tokens", 0, f"recent_tokens is 0; {WHOLE_1}"),
        (
            "recent_tokens",
            1.0,
            f"recent_tokens is 1.0; {WHOLE_OR_FRACTION}",
        ),
        (
            "recent_tokens",
            0.0,
            f"recent_tokens is 0.0; {WHOLE_OR_FRACTION}",
        ),
        ("quantized_fraction", 1.01, "quantized_fraction is 1.01; it has to be from 0 to 1"),
        ("quantized_fraction", -0.1, "quantized_fraction is -0.1; it has to be from 0 to 1"),
        ("quantized_fraction", float("nan"), "quantized_fraction is nan; it has to be from 0 to 1"),
        ("quantized_fraction", "half", "quantized_fraction is 'half'; it has to be from 0 to 1"),
        ("prompt_queries", 0, f"prompt_queries is 0; {WHOLE_1} or 'all'"),
        ("prompt_queries", "some", f"prompt_queries is 'some'; {WHOLE_1} or 'all'"),
        ("allocation", "literal", "allocation is 'literal'; it has to be 'coverage' or 'split'"),
        ("granularity", "head", "granularity is 'head'; it has to be 'layer' or 'kv_head'"),
        ("score_steps", "all", "score_steps is 'all'; it has to be 'every' or 'event'"),
        ("dormant", "free", "dormant is 'free'; it has to be 'slots' or 'extra'"),
        ("promotion", 1, "promotion is 1; it has to be True or False"),
        ("reserve_growth", "no", "reserve_growth is 'no'; it has to be True or False"),
        ("allow_untested", None, "allow_untested is None; it has to be True or False"),
        (
            "store_dtype",
            torch.float64,
            "store_dtype is torch.float64; it has to be None or one of bfloat16, float16, float32",
        ),
        ("prompt_scorer", 3, "prompt_scorer is 3; it has to be None, 'reconstruction' or a function"),
        ("budget", 0.0, "budget fraction is 0.0; it has to be above 0 and at most 1"),
        ("budget", 1.5, "budget fraction is 1.5; it has to be above 0 and at most 1"),
        ("budget", float("nan"), "budget fraction is nan; it has to be above 0 and at most 1"),
        ("codec", "zip", "unknown codec 'zip': the known ones are allotted, kivi, minmax, turboquant; or pass a Codec"),
        ("bits", 9, "key_bits of the allotted codec is from 0.5 to 8, not 9"),
        ("ranking", "h2o", "ranking is 'h2o'; known are cumulative, decayed, p-norm, key-norm, or give a function"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        QEvictConfig(**{field: value})


@pytest.mark.usefixtures("unchecked")
def test_a_budget_that_is_no_number() -> None:
    with pytest.raises(
        TypeError, match=r"budget is '20%'; give a fraction, Budget\(bytes=...\) or Budget\(tokens=...\)"
    ):
        QEvictConfig(budget="20%")  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "a Budget takes exactly one of fraction, bytes and tokens; got none"),
        (
            {"fraction": 0.5, "tokens": 5},
            "a Budget takes exactly one of fraction, bytes and tokens; got ['fraction', 'tokens']",
        ),
        ({"bytes": 0}, "budget bytes is 0; it has to be a whole number of at least 1"),
        ({"tokens": 1.5}, "budget tokens is 1.5; it has to be a whole number of at least 1"),
        ({"fraction": True}, "budget fraction is True; it has to be above 0 and at most 1"),
    ],
)
def test_a_wrong_budget(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Budget(**given)


def test_extra_dormant_codes_go_with_the_split_only() -> None:
    with pytest.raises(ValueError, match='dormant="extra" is a way of counting that goes with allocation="split" only'):
        QEvictConfig(dormant="extra")
    assert QEvictConfig(dormant="extra", allocation="split").dormant == "extra"


@pytest.mark.parametrize(
    ("task", "recent", "quantized"),
    [
        ("default", 32, 0.7),
        ("longbench", 128, 0.7),
        ("ruler", 64, 0.7),
        ("gsm8k", 0.25, 0.7),
        ("diagnostics", 32, 0.5),
    ],
)
def test_the_papers_settings(task: Any, recent: float, quantized: float) -> None:
    config = QEvictConfig.paper(task, 0.1)
    assert config.budget == Budget(fraction=0.1)
    assert (config.recent_tokens, config.quantized_fraction) == (recent, quantized)
    assert (config.window_size, config.interval, config.sink_tokens) == (8, 8, 5)
    assert (config.allocation, config.dormant, config.reserve_growth) == ("split", "extra", False)
    assert [*config.codecs()] == [MinMaxCodec(2, 2)]
    assert config.ranking_object() == CumulativeAttention()
    assert (config.granularity, config.prompt_queries, config.score_steps) == ("layer", "all", "every")
    assert config.promotion


def test_changes_to_the_papers_settings() -> None:
    config = QEvictConfig.paper("ruler", Budget(tokens=100), window_size=32, score_steps="event")
    assert (config.window_size, config.score_steps, config.recent_tokens) == (32, "event", 64)
    assert config.budget == Budget(tokens=100)
    assert QEvictConfig.paper().budget == Budget(fraction=0.2)


@pytest.mark.usefixtures("unchecked")
def test_a_task_the_paper_does_not_have() -> None:
    with pytest.raises(ValueError, match="task is 'mmlu'; the paper has settings for default, longbench, ruler, gsm8k"):
        QEvictConfig.paper("mmlu")  # type: ignore[arg-type]


def test_a_config_is_a_value() -> None:
    config = QEvictConfig(budget=0.3, window_size=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window_size = 8  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.limit.fraction = 0.5  # type: ignore[misc]
    assert config == QEvictConfig(budget=Budget(fraction=0.3), window_size=4)
    assert hash(config) == hash(QEvictConfig(budget=0.3, window_size=4))
    changed = config.replace(window_size=32, budget=Budget(bytes=1000))
    assert (changed.window_size, changed.limit, config.window_size) == (32, Budget(bytes=1000), 4)
    with pytest.raises(ValueError, match="window_size is 0"):
        config.replace(window_size=0)


def test_the_routing_interval_is_the_window_size_unless_given() -> None:
    assert QEvictConfig(window_size=4).interval == 4
    assert QEvictConfig(window_size=4, routing_interval=9).interval == 9


def test_objects_are_taken_as_they_are() -> None:
    codec, ranking = MinMaxCodec(4, 2), DecayedAttention(0.5)
    config = QEvictConfig(codec=codec, ranking=ranking)
    assert next(config.codecs()) is codec
    assert config.ranking_object() is ranking
    assert isinstance(QEvictConfig(ranking=lambda state, mass: state).ranking_object(), FunctionRanking)


def test_as_config() -> None:
    config = QEvictConfig(window_size=4)
    assert as_config(config) is config
    assert as_config(0.5) == QEvictConfig(budget=0.5)
    assert as_config(Budget(bytes=9)) == QEvictConfig(budget=Budget(bytes=9))


def test_budgets_in_words_and_the_one_without_limit() -> None:
    assert [str(b) for b in (Budget(fraction=0.2), Budget(bytes=10), Budget(tokens=7))] == [
        "0.2 of full KV",
        "10 bytes",
        "7 tokens' bytes",
    ]
    assert Budget(fraction=1.0).unlimited
    assert not Budget(fraction=0.99).unlimited
    assert not Budget(bytes=1).unlimited
