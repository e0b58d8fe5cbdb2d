"""One layer's history storage: full slots from the front of a byte arena, code slots from its back.

The split between the two moves while the model generates, so both share the bytes; two preallocated pools would cost
twice. Neither region has gaps or an order: full slots fill theirs from the start of the arena, code slots from
its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from qevict.budget import SLOT_BYTES, TierPlan

EMPTY = -1
"""Window number of a slot that holds none."""


def dormant(window: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """How the code table marks a window whose codes are kept while it is in full precision. Its own inverse."""
    return -2 - window


@dataclass
class SlotTable:
    """What is known of each slot besides its bytes.

    Attributes:
        window: window number, EMPTY, or in the code table `dormant(window)`; int32.
        state: the ranking's state of the window; float32.
        mass: attention mass since the last routing event; float32.
    """

    window: Int[Tensor, "lanes slots"]
    state: Float[Tensor, "lanes slots"]
    mass: Float[Tensor, "lanes slots"]

    @classmethod
    def empty(cls, lanes: int, slots: int, device: torch.device) -> SlotTable:
        """A table without windows."""
        return cls(
            torch.full((lanes, slots), EMPTY, dtype=torch.int32, device=device),
            torch.zeros(lanes, slots, device=device),
            torch.zeros(lanes, slots, device=device),
        )

    def clear(self) -> None:
        """Empty every slot."""
        self.window.fill_(EMPTY)
        self.state.zero_()
        self.mass.zero_()

    def take(self, lanes: Int[Tensor, " chosen"]) -> SlotTable:
        """A table of the given lanes, sharing nothing with this one."""
        return SlotTable(self.window[lanes], self.state[lanes], self.mass[lanes])

    def tensors(self) -> tuple[Tensor, ...]:
        """The storages of this table."""
        return self.window, self.state, self.mass


class Arena:
    """The full and the low-bit tier of the lanes of one layer.

    Attributes:
        plan: capacities; the same for all lanes.
        data: `[lanes, arena_bytes]`; what both kinds of slot lie in.
        full, codes: slot tables.
        full_used, code_used: the most slots that any lane uses: full slots `[:full_used]`, code slots `[-code_used:]`.
    """

    def __init__(
        self, plan: TierPlan, lanes: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan, self.heads, self.head_dim, self.dtype = plan, heads, head_dim, dtype
        self.data = torch.zeros(lanes, plan.arena_bytes, dtype=torch.uint8, device=device)
        self.full = SlotTable.empty(lanes, plan.max_full, device)
        self.codes = SlotTable.empty(lanes, plan.max_codes, device)
        self.full_used = self.code_used = 0

    def full_slots(self) -> Float[Tensor, "lanes slots two heads tokens dim"]:
        """Keys (0) and values (1) of the full slots, as a view of the arena."""
        # A storage of no bytes cannot be viewed as another dtype.
        elements = self.data.view(self.dtype) if self.plan.arena_bytes else self.data.to(self.dtype)
        shape = (self.plan.max_full, 2, self.heads, self.plan.window, self.head_dim)
        used = elements[:, : self.plan.max_full * self.plan.full_bytes // self.dtype.itemsize]
        return used.unflatten(1, shape)

    def code_slots(self) -> UInt8[Tensor, "lanes slots bytes"]:
        """Packed windows of the code slots, as a view of the arena."""
        size = self.plan.max_codes * self.plan.code_bytes
        used = self.data[:, self.data.shape[1] - size :]
        return used.unflatten(1, (self.plan.max_codes, self.plan.code_bytes))

    def active_codes(self) -> Bool[Tensor, "lanes slots"]:
        """Code slots whose window is in the low-bit tier, neither empty nor dormant."""
        return self.codes.window >= 0

    def code_windows(self) -> Int[Tensor, "lanes slots"]:
        """Window numbers of the code slots, active or dormant; EMPTY where there is none."""
        window = self.codes.window
        return torch.where(window < EMPTY, dormant(window), window)

    def promoted(self) -> Bool[Tensor, "lanes slots"]:
        """Full slots whose window has dormant codes."""
        return (self.full.window[:, :, None] == dormant(self.codes.window)[:, None, :]).any(dim=-1) & (
            self.full.window >= 0
        )

    def take(self, lanes: Int[Tensor, " chosen"]) -> Arena:
        """An arena of the given lanes, sharing nothing with this one."""
        other = object.__new__(Arena)
        other.__dict__.update(self.__dict__)
        other.data, other.full, other.codes = self.data[lanes], self.full.take(lanes), self.codes.take(lanes)
        return other

    def refill(self, other: Arena) -> None:
        """Take over the windows of a smaller arena of the same lanes and window shape."""
        f, c = other.full_used, other.code_used
        for new, old in zip(self.full.tensors(), other.full.tensors(), strict=True):
            new[:, :f] = old[:, :f]
        for new, old in zip(self.codes.tensors(), other.codes.tensors(), strict=True):
            new[:, new.shape[1] - c :] = old[:, old.shape[1] - c :]
        self.full_used, self.code_used = other.full_used, other.code_used
        # Slot by slot: lanes use different numbers of slots, and an unused slot may overlap the other region.
        lane, slot = (other.full.window >= 0).nonzero(as_tuple=True)
        self.full_slots()[lane, slot] = other.full_slots()[lane, slot]
        if c == 0:
            return  # the codec may be another one, with slots of another size
        lane, slot = (other.codes.window != EMPTY).nonzero(as_tuple=True)
        shift = self.plan.max_codes - other.plan.max_codes
        self.code_slots()[lane, slot + shift] = other.code_slots()[lane, slot]

    def counts(self) -> tuple[int, int]:
        """Full slots and code slots in use, over all lanes; dormant codes count."""
        return int((self.full.window >= 0).sum()), int((self.codes.window != EMPTY).sum())

    def reserved_bytes(self) -> int:
        """Bytes of the storages, used or not."""
        tensors = (self.data, *self.full.tensors(), *self.codes.tensors())
        return sum(t.nbytes for t in tensors)

    def table_bytes(self) -> int:
        """Bytes of the metadata of the slots in use."""
        return sum(self.counts()) * SLOT_BYTES
