"""Methods by name, others' methods, and what the conformance kit finds."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from qevict import Budget
from qevict.budget import InfeasibleBudgetError
from qevict.compat import cache_argument
from qevict.methods import (
    ExactStore,
    Kept,
    LayerPrefill,
    Selector,
    best,
    get_method,
    make_cache,
    method_names,
    registry,
)
from qevict.testing import check_method, tiny_llama

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_names_are_labels_so_that_results_can_be_reproduced() -> None:
    for name in method_names():
        assert get_method(name).label == name


def test_a_label_with_settings_is_read_back() -> None:
    for method in (
        get_method("snapkv", window=64, pooling="avg"),
        get_method("qevict", bits=2, window_size=8, score_steps="event"),
        get_method("qevict-paper", quantized_fraction=0.5),
        get_method("hf-quantized-2", residual=64),
        get_method("kivi-4", residual=64),
    ):
        assert "[" in method.label
        assert get_method(method.label) == method
    assert get_method("snapkv[window=64;pooling=avg]").label == "snapkv[window=64;pooling=avg]"
    with pytest.raises(ValueError, match="a setting is written NAME=VALUE; got 'window'"):
        get_method("snapkv[window]")
    with pytest.raises(ValueError, match="settings are written NAME"):
        get_method("snapkv[window=64")


def test_settings_are_changed_by_name_and_checked() -> None:
    assert get_method("snapkv", window=16).settings()["window"] == 16
    assert get_method("qevict", bits=2).settings()["bits"] == 2
    for name in ("snapkv", "qevict", "full"):
        with pytest.raises(ValueError, match="has no setting 'colour'"):
            get_method(name, colour=1)
    with pytest.raises(ValueError, match="kernel odd"):
        get_method("snapkv", kernel=4)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("snapkw", "there is no method 'snapkw'; there are full, qevict"),
        ("qprune:snapkv", "write qprune:<selector>+<codec>"),
        ("qprune:kivi-2+kivi-4", "names no known selector"),
        ("qprune:snapkv+kivi-5", "kivi-5"),
    ],
)
def test_unknown_names_say_what_there_is(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("+", r"\+")):
        get_method(name)


def test_kvpress_says_what_it_needs_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(ValueError, match="pip install kvpress"):
        get_method("kvpress:SnapKVPress")


def test_a_budget_for_what_takes_none_is_refused() -> None:
    model = tiny_llama()
    for name in ("full", "kivi-2", "hf-quantized-4"):
        with pytest.raises(ValueError, match=r"has no budget|takes no budget"):
            make_cache(model, name, 0.2, max_new_tokens=4)


def test_a_budget_that_cannot_hold_the_new_tokens_is_infeasible() -> None:
    model = tiny_llama()
    with pytest.raises(InfeasibleBudgetError, match=r"cannot hold the 90 new tokens that snapkv keeps exactly"):
        model.generate(
            input_ids=torch.ones(1, 100, dtype=torch.long) * 5,
            **cache_argument(make_cache(model, "snapkv", 0.4, max_new_tokens=90)),
            max_new_tokens=90,
        )


def test_absolute_budgets_need_the_new_tokens_announced_where_they_are_reserved() -> None:
    model = tiny_llama()
    cache = make_cache(model, "snapkv", Budget(tokens=60))
    with pytest.raises(ValueError, match="give max_new_tokens="):
        model(torch.ones(1, 100, dtype=torch.long) * 5, **cache_argument(cache))


def test_the_example_conforms() -> None:
    check_method(runpy.run_path(str(EXAMPLES / "own_method.py"))["LongValues"]())


class _EntryPoint:
    def __init__(self, name: str, loaded: Any) -> None:
        self.name, self._loaded = name, loaded

    def load(self) -> Any:
        return self._loaded


def test_others_add_methods_as_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(EXAMPLES / "own_method.py"))["LongValues"]
    points = [_EntryPoint("longvalues", example), _EntryPoint("short", example(recent=2)), _EntryPoint("odd", 3)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "qevict.methods" else [])
    registry._installed.cache_clear()
    try:
        assert "longvalues" in method_names()
        assert get_method("longvalues", recent=4).settings() == {"recent": 4}
        assert get_method("short").settings() == {"recent": 2}
        assert get_method("qprune:longvalues+kivi-4").label == "qprune:longvalues+kivi-4"
        with pytest.raises(ValueError, match="which is no method"):
            get_method("odd")
    finally:
        monkeypatch.undo()
        registry._installed.cache_clear()


# -- methods with a fault, which the kit has to find -------------------------------------------------------------------


@dataclass(frozen=True)
class Greedy(Selector):
    """Keeps a token more than it may."""

    name: ClassVar[str] = "greedy"
    paper: ClassVar[str] = "a fault"

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        return best(prefill.keys.norm(dim=-1), tokens + 1)


@dataclass(frozen=True)
class Hoarder(Selector):
    """Keeps the whole prompt beside what it says it keeps, as implementations that only mask do."""

    name: ClassVar[str] = "hoarder"
    paper: ClassVar[str] = "a fault"

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        return best(prefill.keys.norm(dim=-1), tokens)

    def compress(self, prefills: Any, allowance: Any) -> Any:
        stores = super().compress(prefills, allowance)
        for store, prefill in zip(stores, prefills, strict=True):
            assert isinstance(store, ExactStore)
            store.hoard = prefill.keys.clone()  # type: ignore[attr-defined]
        return stores


@dataclass(frozen=True)
class Forgetful(Selector):
    """Leaves a mark on the model."""

    name: ClassVar[str] = "forgetful"
    paper: ClassVar[str] = "a fault"

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        prefill.module.last_kept = tokens  # type: ignore[assignment]
        return best(prefill.keys.norm(dim=-1), tokens)


@pytest.mark.parametrize(
    ("method", "fault"),
    [(Greedy(), "holds .* bytes with a budget"), (Hoarder(), "holds tensors of"), (Forgetful(), "behind on the model")],
    ids=["greedy", "hoarder", "forgetful"],
)
def test_the_kit_finds_faults(method: Selector, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        check_method(method)
