"""StreamingLLM: the first tokens and the most recent ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.budget import MemoryReport
from qevict.methods.base import Allowance, LayerPrefill
from qevict.methods.evicting import DecodeSelector, EvictingStore
from qevict.methods.store import POSITION_BYTES, ExactStore, Kept, RowStore


@dataclass(frozen=True)
class StreamingLLM(DecodeSelector):
    """`sinks` first tokens and as many of the last ones as the budget holds, sliding along while tokens are generated.

    Positions are counted inside the cache, as if the evicted tokens had never been. Only differences of positions
    matter to rotary attention, and those among the recent tokens and the new ones are right as they are; so the sinks
    move instead: a sink is rotated to its position plus the number of evicted tokens, from a copy of its key without
    rotation.

    Attributes:
        sinks: first tokens that always stay; the authors' examples take 4 (with 2000 recent ones).
        positions: "cache" as described; "original" leaves the sinks where they were, as kvpress does.
    """

    sinks: int = 4
    positions: Literal["cache", "original"] = "cache"

    name: ClassVar[str] = "streamingllm"
    paper: ClassVar[str] = "StreamingLLM (Xiao et al., 2023, arXiv 2309.17453)"
    source: ClassVar[str] = "mit-han-lab/streaming-llm, examples/run_streaming_llama.py"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it is at least 0 tokens")
        if self.positions not in ("cache", "original"):
            raise ValueError(f"positions is {self.positions!r}; it is 'cache' or 'original'")

    @property
    def least_tokens(self) -> int:
        """The sinks, or one token."""
        return max(1, self.sinks)

    @property
    def moves(self) -> bool:
        """Whether sinks are ever rotated anew."""
        return self.positions == "cache" and self.sinks > 0

    def score_rows(self, heads: int) -> int:
        """None."""
        return 0

    def extra_bytes(self, allowance: Allowance) -> int:
        """The sinks' keys without rotation, and the number of evicted tokens."""
        return (allowance.token_bytes // 2 * self.sinks + POSITION_BYTES) if self.moves else 0

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The sinks and the last tokens, the same for every head."""
        index = sinks_and_recent(prefill.tokens, self.sinks, tokens)
        return [index.to(prefill.keys.device)] * prefill.keys.shape[0]

    def store(self, prefill: LayerPrefill, capacity: int, allowance: Allowance) -> RowStore:
        """A window that slides."""
        kept = self.select([prefill], capacity)[0]
        return SlidingStore(prefill, kept, capacity, allowance, self)

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """As for every method that evicts generated tokens; where they all stay, the sinks move once."""
        stores = super().compress(prefills, allowance)
        if self.moves:
            for prefill, store in zip(prefills, stores, strict=True):
                if isinstance(store, ExactStore):
                    keys = store.buffers[0][1].keys
                    sinks = prefill.positions[: self.sinks]
                    evicted = prefill.tokens - keys.shape[1]
                    if evicted:
                        bare = prefill.rope.unrotate(prefill.keys[:, : self.sinks], sinks)
                        keys[:, : self.sinks] = prefill.rope.rotate(bare, sinks + evicted).to(keys.dtype)
        return stores


class SlidingStore(EvictingStore):
    """Sinks and recent tokens; the sinks move as the others do."""

    def __init__(
        self, prefill: LayerPrefill, kept: Kept, capacity: int, allowance: Allowance, method: StreamingLLM
    ) -> None:
        super().__init__(prefill, kept, capacity, allowance)
        self.method, self.rope, self.first_position = method, prefill.rope, prefill.first_position
        self.evicted = 0
        keys = self.buffer.keys
        self.bare: Float[Tensor, "heads sinks dim"] = keys.new_zeros(
            keys.shape[0], method.sinks if method.moves else 0, keys.shape[2]
        )
        self._move(prefill.tokens - self.buffer.used)

    def choose(self, tokens: int) -> Int[Tensor, "heads tokens"]:
        """The sinks and the last ones."""
        index = sinks_and_recent(self.buffer.used, self.method.sinks, tokens)
        return index.to(self.bare.device).expand(self.buffer.keys.shape[0], -1)

    def evict(self, kept: Int[Tensor, "heads kept"]) -> None:
        """Keep the given tokens, and bring the sinks up behind them."""
        evicted = self.buffer.used - kept.shape[1]
        super().evict(kept)
        self._move(evicted)

    def memory(self) -> MemoryReport:
        """Bytes of sinks and recent tokens apart."""
        report = super().memory()
        keys = self.buffer.keys
        sinks = min(self.method.sinks, keys.shape[1])
        sink = 2 * keys[:, :sinks].nbytes
        number = POSITION_BYTES if self.method.moves else 0
        return MemoryReport(
            sink=sink + self.bare.nbytes,
            recent=report.full - sink,
            position=report.position + number,
            reserved=report.reserved + self.bare.nbytes + number,
            workspace=report.workspace,
        )

    def copy(self) -> RowStore:
        """An independent copy; the rotary tables are shared."""
        return copy.deepcopy(self, {id(self.rope): self.rope})

    def _move(self, evicted: int) -> None:
        if not (evicted and self.method.moves):
            return
        sinks = self.buffer.keys[:, : self.method.sinks]
        places = self.first_position + torch.arange(self.method.sinks, device=sinks.device)
        if not self.evicted:
            self.bare = self.rope.unrotate(sinks, places).to(sinks.dtype)
        self.evicted += evicted
        sinks.copy_(self.rope.rotate(self.bare, places + self.evicted))


def sinks_and_recent(held: int, sinks: int, tokens: int) -> Int[Tensor, " tokens"]:
    """Indices of the first `sinks` and of the last ones of `held` tokens, `tokens` altogether."""
    return torch.cat((torch.arange(sinks), torch.arange(held - tokens + sinks, held)))
