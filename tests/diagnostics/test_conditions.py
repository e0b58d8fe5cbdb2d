"""The paper's conditions have the paper's capacities on a model of any shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict import QEvictConfig
from qevict.budget import plan_tiers
from qevict.config import Budget
from qevict.diagnostics.conditions import (
    budget_for,
    geometry_of,
    method_condition,
    paper_conditions,
    plan_of,
    promotion_conditions,
)
from qevict.geometry import KVGeometry
from tiny import tiny_model

PAPER = QEvictConfig.paper("diagnostics")


@given(
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([16, 64, 128]),
    st.sampled_from([1, 4, 8, 32]),
    st.integers(0, 20),
    st.integers(0, 60),
    st.integers(1, 40),
)
def test_equation_3_gives_back_the_capacities_asked_for(
    heads: int, dim: int, window: int, full: int, codes: int, layers: int
) -> None:
    geometry = KVGeometry(layers, heads, heads, dim, 2)
    if full + codes == 0:
        with pytest.raises(ValueError, match="not both are 0"):
            budget_for(PAPER, geometry, full, codes)
        return
    made = budget_for(PAPER.replace(window_size=window), geometry, full, codes)
    plan = plan_tiers(made, geometry, 768)
    assert (plan.full_capacity, plan.code_capacity) == (full, codes)


def test_the_papers_conditions() -> None:
    model = tiny_model("llama")
    geometry = geometry_of(model, 768)
    made = {one.name: one for one in paper_conditions(model, 768)}
    plans = {name: plan_of(one, geometry, 768, 512) for name, one in made.items()}
    sizes = {name: (p.window, p.full_capacity, p.code_capacity) for name, p in plans.items() if p is not None}
    assert sizes["R3"] == (8, 7, 28)
    assert sizes["R4"] == (32, 1, 11)
    assert sizes["R2"][0] == 8
    assert sizes["R2"][2] == sizes["R1"][2] == 0
    assert sizes["R1"][0] == 1
    assert made["R1"].budget == made["R2"].budget == made["R3"].budget


def test_r2_and_r1_follow_from_r3s_bytes_as_on_llama() -> None:
    """On Llama-3.1-8B's shapes R3's bytes hold the paper's 14 windows without a low-bit tier."""
    geometry = KVGeometry(32, 8, 32, 128, 2)
    r3 = budget_for(PAPER, geometry, 7, 28)
    r2 = plan_tiers(r3.replace(quantized_fraction=0.0), geometry, 768)
    assert (r2.full_capacity, r2.code_capacity) == (14, 0)
    assert 0.18 < (r3.limit.bytes or 0) / geometry.full_bytes(768) <= 0.2


def test_promotion_is_compared_at_two_capacities() -> None:
    names = [one.name for one in promotion_conditions(tiny_model("llama"), 1280)]
    assert names == ["R3", "R3 one-way", "R3 (13, 53)", "R3 (13, 53) one-way"]


def test_what_is_no_condition_is_said() -> None:
    with pytest.raises(ValueError, match="no condition R7"):
        paper_conditions(tiny_model("llama"), 768, ["R7"])
    with pytest.raises(ValueError, match=r"Eq\. 3 is to the letter"):
        budget_for(QEvictConfig(), KVGeometry(1, 1, 1, 16, 2), 1, 1)
    assert method_condition("kivi-2", Budget(fraction=0.2)).budget.unlimited
    assert method_condition("snapkv", Budget(fraction=0.2, scope="prompt")).name == "snapkv (prompt)"
