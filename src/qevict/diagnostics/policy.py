"""PolicyTrace: where a real cache kept every token at every routing event, while it was fed a reference's tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qevict.routing import EVICTED, FULL, QUANTIZED

LOCAL, SINK, ABSENT = 3, 4, 5
"""States beside routing's three: in the recent region, among the sinks, and not there yet."""
STATES = {EVICTED: "evicted", QUANTIZED: "quantized", FULL: "full", LOCAL: "local", SINK: "sink", ABSENT: "absent"}


@dataclass(frozen=True)
class PolicyHeader:
    """What was run.

    Attributes:
        name: of the condition.
        label: of the method.
        window: tokens of a window; 1 where the method keeps tokens one by one.
        sinks, recent: tokens that are called sinks and recent ones. A method without either gets the reference
            conditions' numbers as labels, so that its shares can be compared.
        full_capacity, code_capacity: K_f and K_q; 0 where the method has none.
        prompt_queries: prompt queries that initialise the scores; None for all.
        ratio: most bytes reserved at any step, as a share of full KV's.
        bytes: the same in bytes.
        promoted: windows that returned from codes to full precision, over all layers and lanes, as the cache counts.
        settings: of the method, for the record.
    """

    name: str
    label: str
    window: int
    sinks: int
    recent: int
    full_capacity: int = 0
    code_capacity: int = 0
    prompt_queries: int | None = None
    ratio: float = 0.0
    bytes: int = 0
    promoted: int = 0
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyTrace:
    """Policy sets and quantised scores of one run, batch of one.

    A *lane* is what is kept alike: all heads of a layer, or one KV head. Event r happens when `lengths[r]` tokens have
    been seen, right before the next one is attended: its states are those that the next query meets.

    Attributes:
        header: what was run.
        lengths: tokens seen at each event, ascending; the first is the prompt.
        tiers: state of every token at every event, one of `STATES`.
        mass: attention that each window received in each decode step, as the cache measured it under its own execution:
            the mean over the lane's query heads. None for caches that measure none.
        kl: KL(full || cache) of the next-token distributions after each decode step, in nats.
    """

    header: PolicyHeader
    lengths: Int[Tensor, " events"]
    tiers: UInt8[Tensor, "layers events lanes tokens"]
    kl: Float[Tensor, " steps"]
    mass: Float[Tensor, "layers steps lanes windows"] | None = None

    def save(self, path: Path) -> None:
        """One safetensors file, the header in its metadata."""
        tensors = {"lengths": self.lengths, "tiers": self.tiers, "kl": self.kl}
        if self.mass is not None:
            tensors["mass"] = self.mass
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"header": json.dumps(asdict(self.header))})
        partial.rename(path)

    @classmethod
    def load(cls, path: Path) -> PolicyTrace:
        """What `save` wrote."""
        with safe_open(path, "pt") as file:
            header = PolicyHeader(**json.loads(file.metadata()["header"]))
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(header, **tensors)

    @property
    def layers(self) -> int:
        """Traced layers."""
        return self.tiers.shape[0]

    def accessible(self, layer: int, *, quantized: bool = True) -> Bool[Tensor, "events lanes tokens"]:
        """Which tokens attention can reach; without the low-bit tier for the full-precision-only ablation."""
        tiers = self.tiers[layer]
        reached = (tiers == FULL) | (tiers == LOCAL) | (tiers == SINK)
        return reached | (tiers == QUANTIZED) if quantized else reached

    def retained(self, layer: int) -> Bool[Tensor, "events lanes tokens"]:
        """The historical set: tokens in either tier, sinks and recent ones left out."""
        tiers = self.tiers[layer]
        return (tiers == FULL) | (tiers == QUANTIZED)

    def windows(self, layer: int) -> UInt8[Tensor, "events lanes windows"]:
        """State of every whole window; LOCAL or ABSENT where that is the state of any of its tokens.

        A window is in a tier as a whole, so its first token speaks for it, but for the recent region, in which it may
        be partly there.
        """
        tokens = self.tiers[layer][..., self.header.sinks :]
        whole = tokens.shape[-1] // self.header.window
        return tokens[..., : whole * self.header.window].unflatten(-1, (whole, self.header.window)).amax(dim=-1)


def window_starts(tokens: int, sinks: int, window: int) -> Int[Tensor, " windows"]:
    """First token of every whole window."""
    return sinks + window * torch.arange(max(0, tokens - sinks) // window)
