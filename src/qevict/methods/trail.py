"""Which tokens of a row a store still reaches: a diagnostic, kept only where it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass
class Trail:
    """The tokens that each head reaches, by their number in the row, in the order in which the store holds them.

    Stores start one when they are made; the cache drops it at once unless `MethodCache.keep_trails` was called, so that
    it is never part of what a method holds.

    Attributes:
        tokens: ascending numbers for each KV head.
        seen: tokens of the row so far.
    """

    tokens: list[Int[Tensor, " _"]]
    seen: int

    def append(self, count: int) -> None:
        """So many new tokens, which every head reaches."""
        new = torch.arange(self.seen, self.seen + count, device=self.tokens[0].device)
        self.tokens = [torch.cat((own, new)) for own in self.tokens]
        self.seen += count

    def take(self, kept: Int[Tensor, "heads kept"]) -> None:
        """The given ones of each head's tokens stay."""
        self.tokens = [own[index] for own, index in zip(self.tokens, kept, strict=True)]

    def shorten(self, count: int) -> None:
        """The last `count` tokens were undone."""
        self.tokens = [own[: len(own) - count] for own in self.tokens]
        self.seen -= count
