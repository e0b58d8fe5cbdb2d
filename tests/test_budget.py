"""Plans to the unit, and the sums of memory reports."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.budget import MemoryReport, TierPlan, plan_tiers, row_bytes
from qevict.codecs import AllottedCodec, PromptCodec, WindowShape
from qevict.config import Budget, QEvictConfig
from qevict.geometry import KVGeometry

LLAMA_8B = KVGeometry(layers=32, kv_heads=8, query_heads=32, head_dim=128, element_bytes=2)
SMALL = KVGeometry(layers=2, kv_heads=2, query_heads=4, head_dim=16, element_bytes=2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"window_size": 8}, (7, 28)),  # R3
        ({"window_size": 32}, (1, 11)),  # R4
        ({"window_size": 8, "quantized_fraction": 0.0}, (14, 0)),  # R2
        ({"window_size": 1, "quantized_fraction": 0.0}, (116, 0)),  # R1
    ],
)
def test_capacities_of_the_papers_diagnostics(changes: dict[str, Any], expected: tuple[int, int]) -> None:
    plan = plan_tiers(QEvictConfig.paper("diagnostics", 0.2, **changes), LLAMA_8B, 512 + 256)
    assert (plan.full_capacity, plan.code_capacity) == expected


def test_uncompressed_bytes_by_hand() -> None:
    """Eq. 7: 2 (K and V) x layers x heads x head_dim x tokens x bytes of an element."""
    assert SMALL.token_bytes == 2 * 2 * 16 * 2
    assert SMALL.full_bytes(100) == 2 * 2 * 2 * 16 * 100 * 2
    assert LLAMA_8B.full_bytes(768) == 2 * 32 * 8 * 128 * 768 * 2


def test_split_by_hand() -> None:
    """Eq. 3 with a window of 4 tokens, one layer's share of half of 100 tokens."""
    settings = {"window_size": 4, "sink_tokens": 1, "recent_tokens": 5, "codec": "minmax", "bits": 2}
    config = QEvictConfig(budget=0.5, quantized_fraction=0.25, allocation="split", **settings)
    plan = plan_tiers(config, SMALL, 100)
    budget = 50 * 128
    charged = 1 + 5 + 3 + 4  # sinks, recent, growth of a window less one and of an interval
    history = (
        budget - charged * 128 - 3 * 8 - 8
    )  # 12 tokens behind the sink touch three windows, a score each; 8 for the lane
    codes = 2 * 16 * 1 + 2 * 4 * 4  # keys: 4 codes of 2 bits in each of 2 x 16 channels; values: 16 codes a token
    parameters = 4 * (2 * 16 + 2 * 4)  # a scale and an offset of 16 bits for each channel and each token
    assert plan.budget_bytes == budget
    assert plan.history_bytes == history
    assert (plan.full_bytes, plan.code_bytes) == (4 * 128, codes + parameters)
    assert plan.full_capacity == int(0.75 * history) // (512 + 12)
    assert plan.code_capacity == int(0.25 * history) // (codes + parameters + 12)
    assert (plan.max_full, plan.max_codes) == (plan.full_capacity, plan.code_capacity)


def test_coverage_by_hand() -> None:
    settings = {"window_size": 4, "sink_tokens": 1, "recent_tokens": 5, "codec": "minmax", "bits": 2}
    config = QEvictConfig(budget=Budget(bytes=2 * 6400), **settings)
    plan = plan_tiers(config, SMALL, None)
    history = 6400 - 13 * 128 - 3 * 8 - 8
    assert plan.full_capacity == 0  # q = 1: Eq. 3 knows no full tier
    assert plan.code_capacity == history // (224 + 12)
    assert plan.max_full == (history - 12 * (history // 524 + history // 236)) // 512
    assert plan.max_codes == (history - 12 * (history // 524 + history // 236)) // 224
    assert plan.arena_bytes <= history
    assert plan.arena_bytes >= plan.max_codes * 224


def test_kv_heads_share_the_budget_evenly() -> None:
    layer = plan_tiers(QEvictConfig(budget=0.2), LLAMA_8B, 4096)
    head = plan_tiers(QEvictConfig(budget=0.2, granularity="kv_head"), LLAMA_8B, 4096)
    assert head.budget_bytes == layer.budget_bytes // 8
    assert head.token_bytes == layer.token_bytes // 8
    assert head.protected_slots == layer.protected_slots
    assert 8 * head.reserved_bytes <= layer.budget_bytes


def test_absolute_budgets() -> None:
    assert row_bytes(Budget(bytes=12345), SMALL, None) == 12345
    assert row_bytes(Budget(tokens=30), SMALL, None) == SMALL.full_bytes(30)
    assert row_bytes(Budget(fraction=0.25), SMALL, 80) == SMALL.full_bytes(20)
    plan = plan_tiers(QEvictConfig(budget=Budget(tokens=300)), SMALL, None)
    assert plan.tokens is None
    assert plan.budget_bytes == 300 * SMALL.token_bytes


def test_a_fraction_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens= has to be given; or give an absolute budget"):
        plan_tiers(QEvictConfig(budget=0.2), SMALL, None)


def test_a_budget_too_small_says_the_three_numbers() -> None:
    with pytest.raises(ValueError, match="protected tokens") as caught:
        plan_tiers(QEvictConfig(budget=0.2, codec="minmax"), SMALL, 200)
    charged = 5 + 16 + 15 + 16
    cost = SMALL.full_bytes(charged) + 2 * (8 * 3 + 8)
    numbers = re.findall(r"[\d,]*\d", str(caught.value))
    assert numbers == [f"{SMALL.full_bytes(40):,}", str(charged), f"{cost:,}"]
    assert "raise the budget or lower sink_tokens, recent_tokens, window_size or routing_interval" in str(caught.value)


def test_a_budget_that_just_holds_the_protected_tokens() -> None:
    config = QEvictConfig(budget=Budget(bytes=2 * (52 * 128 + 3 * 8 + 8)), codec="minmax")
    plan = plan_tiers(config, SMALL, 200)
    assert (plan.history_bytes, plan.max_full, plan.max_codes, plan.arena_bytes) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="cannot hold the 52 protected tokens"):
        plan_tiers(config.replace(budget=Budget(bytes=2 * (52 * 128 + 3 * 8 + 8) - 2)), SMALL, 200)


@pytest.mark.parametrize("tokens", [1, 20, 21, 51, 52])
def test_a_sequence_shorter_than_the_protected_region_takes_what_it_needs(tokens: int) -> None:
    plan = plan_tiers(QEvictConfig(budget=Budget(tokens=100)), SMALL, tokens)
    assert plan.protected_slots == plan.charged_tokens == tokens
    assert plan.reserved_bytes <= plan.budget_bytes


def test_the_paper_charges_the_recent_tokens_alone() -> None:
    plan = plan_tiers(QEvictConfig.paper(), LLAMA_8B, 4096)
    assert plan.charged_tokens == 5 + 32
    assert plan.protected_slots == 5 + 32 + 7 + 8
    assert plan_tiers(QEvictConfig.paper(reserve_growth=True), LLAMA_8B, 4096).charged_tokens == 52


def test_the_recent_region_of_gsm8k_is_a_quarter_of_the_budget() -> None:
    plan = plan_tiers(QEvictConfig.paper("gsm8k", 0.2), LLAMA_8B, 2000)
    assert plan.recent_tokens == 100  # a quarter of 400 tokens
    assert plan_tiers(QEvictConfig(budget=0.5, recent_tokens=0.01), SMALL, 150).recent_tokens == 1


def test_a_routing_interval_of_its_own_is_charged() -> None:
    plan = plan_tiers(QEvictConfig(budget=0.5, routing_interval=50), SMALL, 1000)
    assert plan.protected_slots == 5 + 16 + 15 + 50


def test_codes_that_are_larger_than_the_window_get_no_slots() -> None:
    """A window of one token has more parameters than elements."""
    plan = plan_tiers(QEvictConfig(budget=0.5, window_size=1, codec="minmax"), SMALL, 1000)
    assert plan.code_bytes > plan.full_bytes
    assert plan.max_codes == 0
    assert plan.max_full > 0


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Settings, a geometry and a length."""
    allocation = draw(st.sampled_from(["coverage", "split"]))
    config = {
        "budget": draw(st.floats(0.01, 0.999)),
        "window_size": draw(st.sampled_from([1, 2, 3, 8, 16, 32])),
        "routing_interval": draw(st.none() | st.integers(1, 40)),
        "sink_tokens": draw(st.integers(0, 8)),
        "recent_tokens": draw(st.integers(1, 60) | st.floats(0.01, 0.6)),
        "quantized_fraction": draw(st.sampled_from([0.0, 1.0]) | st.floats(0, 1)),
        "allocation": allocation,
        "codec": draw(st.sampled_from(["minmax", "allotted"])),
        "bits": draw(st.sampled_from([None, 2, 3, 4, 8])),
        "granularity": draw(st.sampled_from(["layer", "kv_head"])),
        "dormant": draw(st.sampled_from(["slots", "extra"])) if allocation == "split" else "slots",
    }
    geometry = {
        "layers": draw(st.integers(1, 5)),
        "kv_heads": (kv_heads := draw(st.integers(1, 4))),
        "query_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": draw(st.integers(1, 80)),
        "element_bytes": draw(st.sampled_from([2, 4])),
    }
    return config, geometry, draw(st.integers(1, 3000))


def planned(settings_: dict[str, Any], geometry: dict[str, Any], tokens: int) -> TierPlan | None:
    try:
        return plan_tiers(QEvictConfig(**settings_), KVGeometry(**geometry), tokens)
    except ValueError:  # the budget cannot hold the protected tokens
        return None


@settings(max_examples=150)
@given(plans())
def test_what_is_reserved_never_exceeds_the_budget(drawn: tuple[dict[str, Any], dict[str, Any], int]) -> None:
    plan = planned(*drawn)
    if plan is None:
        return
    config, geometry = QEvictConfig(**drawn[0]), KVGeometry(**drawn[1])
    lanes = geometry.layers * (geometry.kv_heads if config.granularity == "kv_head" else 1)
    if config.dormant == "slots":
        assert plan.reserved_bytes <= plan.budget_bytes
    assert lanes * plan.budget_bytes <= config.limit.fraction * geometry.full_bytes(drawn[2])  # type: ignore[operator]
    assert plan.max_codes * plan.code_bytes <= plan.arena_bytes
    assert plan.max_full * plan.full_bytes <= plan.arena_bytes
    if config.quantized_fraction == 0:
        assert plan.max_codes == 0
    codes = plan.codec.layout(
        WindowShape(geometry.kv_heads * geometry.layers // lanes, config.window_size, geometry.head_dim)
    )
    assert plan.code_bytes == codes.nbytes
    unused = plan.history_bytes - plan.full_capacity * (plan.full_bytes + 12)
    # Bytes kept free for the parameters of a fitted codec are nobody's where then no code has room.
    undivided = plan.max_codes == 0 and config.quantized_fraction > 0 and isinstance(plan.codec, PromptCodec)
    if config.allocation == "split" and not undivided:  # the share of codes would hold no further window
        q = config.quantized_fraction
        assert plan.max_codes == 0 or unused >= plan.code_capacity * (plan.code_bytes + 12)
        assert (plan.full_capacity + 1) * (plan.full_bytes + 12) > (1 - q) * plan.history_bytes * (1 - 1e-9)
        assert (plan.code_capacity + 1) * (plan.code_bytes + 12) > q * plan.history_bytes * (1 - 1e-9)


@pytest.mark.parametrize(
    ("budget", "bits"),
    [
        (0.5, (4, 4)),
        (0.3, (4, 4)),
        (0.23, (3.5, 3)),
        (0.2, (3, 3)),
        (0.18, (2.5, 3)),
        (0.15, (2.5, 2)),
        (0.1, (2.5, 2)),
    ],
)
def test_codes_get_the_most_bits_that_leave_room_for_nearly_all_windows(budget: float, bits: tuple[float, int]) -> None:
    """At 10 % no codec of the ladder is small enough: then windows are evicted, and the last one is taken."""
    plan = plan_tiers(QEvictConfig(budget=budget), LLAMA_8B, 8192)
    assert plan.codec == AllottedCodec(*bits)
    covered = plan.code_capacity * 16 / (8192 - 5 - 16)
    assert covered >= 0.95 or budget == 0.1


def test_windows_that_are_in_codes_already_keep_their_codec() -> None:
    config = QEvictConfig(budget=0.2)
    assert plan_tiers(config, LLAMA_8B, 8192, codec=AllottedCodec(4, 4)).codec == AllottedCodec(4, 4)


def test_a_config_without_a_low_bit_tier_pays_for_no_codec() -> None:
    assert plan_tiers(QEvictConfig(budget=0.2, quantized_fraction=0.0), LLAMA_8B, 4096).fitted_bytes == 0


def test_reports_add_up() -> None:
    one = MemoryReport(
        sink=1, recent=2, full=4, codes=8, parameters=16, position=32, ledger=64, reserved=200, budget=150
    )
    assert one.used == 127
    assert one.overshoot == 50
    assert one.ratio == 0.0
    other = MemoryReport(sink=10, full=10, reserved=30, budget=100, full_kv=1000, unmanaged=7, workspace=9)
    both = one + other
    for f in fields(MemoryReport):
        assert getattr(both, f.name) == (getattr(one, f.name) or 0) + (getattr(other, f.name) or 0)
    assert both.ratio == 230 / 1000
    assert both.overshoot == 0
    assert (MemoryReport(reserved=5) + MemoryReport(reserved=6)).budget is None
    assert MemoryReport(reserved=5).overshoot == 0


@pytest.mark.parametrize("field", ["layers", "kv_heads", "query_heads", "head_dim", "element_bytes"])
def test_geometry_is_checked(field: str) -> None:
    sizes = {"layers": 2, "kv_heads": 2, "query_heads": 4, "head_dim": 16, "element_bytes": 2}
    with pytest.raises(ValueError, match=rf"^{field} is 0; it has to be a whole number of at least 1$"):
        KVGeometry(**{**sizes, field: 0})


def test_query_heads_share_kv_heads_evenly() -> None:
    with pytest.raises(ValueError, match="5 query heads cannot share 2 KV heads evenly"):
        KVGeometry(2, 2, 5, 16, 2)


def test_store_dtype_sets_the_bytes_of_the_geometry_not_the_fraction() -> None:
    """A fraction of 32-bit bytes is twice the bytes, and a window's codes take as many as beside 16-bit storage."""
    narrow = plan_tiers(QEvictConfig(budget=0.2, codec="minmax"), LLAMA_8B, 4096)
    wide = plan_tiers(
        QEvictConfig(budget=0.2, codec="minmax"), KVGeometry(32, 8, 32, 128, torch.float32.itemsize), 4096
    )
    assert wide.budget_bytes == 2 * narrow.budget_bytes
    assert wide.code_bytes == narrow.code_bytes


@pytest.mark.parametrize("allocation", ["split", "coverage"])
def test_a_budget_that_is_filled_to_the_last_byte(allocation: str) -> None:
    """Slots of 4 bytes and an odd number of them: rounding the arena up would exceed the budget."""
    settings = {"window_size": 1, "sink_tokens": 0, "recent_tokens": 1, "quantized_fraction": 0.0, "codec": "minmax"}
    config = QEvictConfig(**settings)
    config = config.replace(allocation=allocation, budget=Budget(bytes=8 + 2 * (4 + 8) + 3 * (4 + 12)))
    plan = plan_tiers(config, KVGeometry(1, 1, 1, 1, 2), None)
    assert plan.max_full == 3
    assert plan.reserved_bytes == plan.budget_bytes
