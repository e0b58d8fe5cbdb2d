"""ChunkKV: runs of neighbouring tokens stay or go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qevict.methods.base import LayerPrefill
from qevict.methods.snapkv import Pooling, SnapKV
from qevict.methods.store import Kept


@dataclass(frozen=True)
class ChunkKV(SnapKV):
    """The prompt in chunks, whole chunks kept; all heads of a layer keep the same.

    A chunk's score is the mean over its tokens of SnapKV's votes, summed over heads; tokens of the observation window
    count one more than the largest vote, so their chunks come first. The last chunk may be shorter and its mean is over
    what it has. Chunks are taken in falling order, each if it still fits into the budget.

    kvpress, whose definition this is, counts chunks instead of tokens: of ceil(T / chunk) it keeps
    int(ceil(T / chunk) * (1 - compression_ratio)), at least one, the shorter last one counted like the others. It may
    so keep more tokens than the ratio allows. `kvpress_tokens` is the number of tokens with which ours keeps the same
    chunks. kvpress also gives all rows of a batch the first row's chunks; here each row has its own.

    Attributes:
        chunk: tokens of a chunk.
        window, kernel, pooling: SnapKV's; the defaults are kvpress's.
    """

    window: int = 64
    kernel: int = 5
    pooling: Pooling = "avg"
    chunk: int = 20

    name: ClassVar[str] = "chunkkv"
    paper: ClassVar[str] = "ChunkKV (Liu et al., 2025, arXiv 2502.00299)"
    source: ClassVar[str] = "NVIDIA/kvpress, kvpress/presses/chunkkv_press.py and snapkv_press.py"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; it is at least 1 token")

    @property
    def least_tokens(self) -> int:
        """A chunk, and as many tokens as the observation window has."""
        return max(self.chunk, self.window)

    def kvpress_tokens(self, prompt: int, compression_ratio: float) -> int:
        """Tokens to allow so that the chunks are those that kvpress keeps of a prompt of so many tokens."""
        return self.chunk * max(1, int(-(-prompt // self.chunk) * (1 - compression_ratio)))

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The best chunks that fit, the same for every head."""
        left, kept = tokens, []
        for chunk in self.chunk_scores(prefill).argsort(descending=True, stable=True).tolist():
            start, stop = chunk * self.chunk, min((chunk + 1) * self.chunk, prefill.tokens)
            if stop - start <= left:
                left -= stop - start
                kept.append(torch.arange(start, stop))
            if left == 0:
                break
        index = torch.cat(kept).sort().values.to(prefill.keys.device)
        return [index] * prefill.keys.shape[0]

    def chunk_scores(self, prefill: LayerPrefill) -> Float[Tensor, " chunks"]:
        """Scores of the chunks, in the order of the prompt."""
        votes = self.votes(prefill)
        scores = torch.nn.functional.pad(votes, (0, self.window), value=float(votes.max()) + 1).sum(dim=0)
        return torch.stack([chunk.mean() for chunk in scores.split(self.chunk)])
