"""The paper's conditions R1-R4 (appendix I.1), and any method by name, as things to force on a reference trace.

The paper states capacities; budgets follow. `budget_for` inverts Eq. 3: it finds the bytes and the share q from which
Eq. 3 gives K_f and K_q again, so that the conditions are exactly the paper's on a model of any shape. R2 has R3's bytes
to the last one. R1 has them, too: the paper calls R1, R3 and R4 complete operating points at one budget and leaves open
which of them it was matched to. R0 is the reference itself; R3's full-precision-only ablation is R3 read without its
low-bit tier, so neither is a condition to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from qevict.architectures import describe, managed_layers
from qevict.budget import SLOT_BYTES, TierPlan, plan_tiers, protected_bytes
from qevict.codecs import WindowShape
from qevict.config import Budget, QEvictConfig
from qevict.geometry import KVGeometry
from qevict.methods.base import Described, OwnCache
from qevict.methods.qevict import QEvict
from qevict.methods.registry import get_method

PAPER_CAPACITIES = {"R3": (8, 7, 28), "R4": (32, 1, 11)}
"""Omega, K_f and K_q (appendix I.1)."""
PAPER_CONDITIONS = ("R1", "R2", "R3", "R4")
ONE_WAY = " one-way"
"""What the name of a condition without promotion ends with."""


@dataclass(frozen=True)
class Condition:
    """A method at a budget, under a name.

    Attributes:
        name: as tables and pictures call it.
        method: what compresses the cache.
        budget: of the row.
    """

    name: str
    method: Described
    budget: Budget


def geometry_of(model: PreTrainedModel, tokens: int, element_bytes: int = 2) -> KVGeometry:
    """Shape of the layers that a cache of so many tokens manages; 16-bit storage unless said otherwise."""
    architecture = describe(model)
    return KVGeometry(
        layers=sum(managed_layers(architecture, tokens)),
        kv_heads=architecture.kv_heads,
        query_heads=architecture.query_heads,
        head_dim=architecture.head_dim,
        element_bytes=element_bytes,
    )


def budget_for(config: QEvictConfig, geometry: KVGeometry, full: int, codes: int) -> QEvictConfig:
    """The configuration with the budget and the q from which Eq. 3 gives K_f = `full` and K_q = `codes`.

    Raises:
        ValueError: if the configuration divides its bytes in another way than Eq. 3, or there is no window to hold.
    """
    if config.allocation != "split" or config.reserve_growth or config.granularity != "layer":
        raise ValueError("capacities can be asked for where Eq. 3 is to the letter: start from QEvictConfig.paper()")
    if full < 0 or codes < 0 or full + codes == 0:
        raise ValueError(f"K_f is {full} and K_q {codes}; both are at least 0, and not both are 0")
    token, window = geometry.token_bytes, config.window_size
    recent = config.recent_tokens
    if isinstance(recent, float):
        raise ValueError("capacities can be asked for with a recent region of so many tokens, not of a share")
    *_, codec = config.codecs()
    layout = codec.layout(WindowShape(geometry.kv_heads, window, geometry.head_dim))
    # A byte more than the windows take in each share, so that no rounding of q loses one.
    full_share = full * (window * token + SLOT_BYTES) + 1
    code_share = codes * (layout.nbytes + SLOT_BYTES) + 1
    protected = protected_bytes(config.sink_tokens + recent, config.sink_tokens, token, window)
    lane = protected + full_share + code_share
    made = config.replace(
        budget=Budget(bytes=lane * geometry.layers), quantized_fraction=code_share / (full_share + code_share)
    )
    plan = plan_tiers(made, geometry, None)
    assert (plan.full_capacity, plan.code_capacity) == (full, codes)
    return made


def paper_conditions(
    model: PreTrainedModel,
    tokens: int,
    names: Sequence[str] = PAPER_CONDITIONS,
    *,
    capacities: Mapping[str, tuple[int, int, int]] | None = None,
) -> list[Condition]:
    """R1 to R4 for traces of so many tokens.

    Args:
        capacities: Omega, K_f and K_q of further three-tier conditions, or of R3 and R4 where they are not the paper's.

    Raises:
        ValueError: for a condition that the paper does not have.
    """
    geometry, base = geometry_of(model, tokens), QEvictConfig.paper("diagnostics")
    sizes = PAPER_CAPACITIES | dict(capacities or {})
    configs = {
        name: budget_for(base.replace(window_size=window), geometry, full, codes)
        for name, (window, full, codes) in sizes.items()
    }
    r3 = configs["R3"].replace(quantized_fraction=0.0)
    configs = {"R1": r3.replace(window_size=1), "R2": r3, **configs}
    if unknown := [name for name in names if name not in configs]:
        raise ValueError(
            f"the paper has no condition {', '.join(unknown)}; it has R0 (the reference), {', '.join(configs)}"
        )
    return [Condition(name, QEvict(configs[name], preset=name), configs[name].limit) for name in names]


def method_condition(name: str, budget: Budget) -> Condition:
    """A method by name; those with an operating point of their own take no budget.

    Methods that keep all generated tokens exactly need a budget that holds those, or one of scope "prompt", which pays
    for the prompt alone and is part of the condition's name.
    """
    method = get_method(name)
    if not method.takes_budget:
        return Condition(name, method, Budget(fraction=1.0))
    return Condition(f"{name} (prompt)" if budget.scope == "prompt" else name, method, budget)


def one_way(condition: Condition) -> Condition:
    """The same without promotion (appendix K)."""
    return replace(condition, name=condition.name + ONE_WAY, method=condition.method.with_settings(promotion=False))


def promotion_conditions(model: PreTrainedModel, tokens: int) -> list[Condition]:
    """Appendix K: R3 with and without promotion, at the paper's capacities (those of its 512 + 256 tokens) and at the
    (13, 53) that Eq. 3 gives for its 256 + 1024 tokens with 20 % and q = 0.5 on Llama-3.1-8B."""
    larger = "R3 (13, 53)"
    both = paper_conditions(model, tokens, ("R3", larger), capacities={larger: (8, 13, 53)})
    return [condition for one in both for condition in (one, one_way(one))]


def plan_of(condition: Condition, geometry: KVGeometry, tokens: int, prompt: int) -> TierPlan | None:
    """The capacities of a QEvict condition; None for any other method."""
    if not isinstance(condition.method, QEvict) or condition.budget.unlimited:
        return None
    return plan_tiers(condition.method.config.replace(budget=condition.budget), geometry, tokens, prompt)


def keeps_codes(method: Described) -> bool:
    """Whether a method with a cache of its own keeps tokens in low-bit form."""
    return isinstance(method, OwnCache) and method.properties.low_bit_retention
