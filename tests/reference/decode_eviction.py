"""Eviction while tokens are generated, one token and one head at a time, with sets of token numbers.

A token's number is its place in the text. Nothing is ever forgotten: what was evicted is merely not in `kept`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from qevict.rope import Rope
from reference.prompt_eviction import heavy_and_recent, mean, top

Scores = dict[int, float]


@dataclass
class Text:
    """A text of one layer before rotation: queries `[heads, group, tokens, dim]`, keys and values."""

    query: Tensor
    keys: Tensor
    values: Tensor
    first: int
    rope: Rope
    scaling: float

    def turned(self, vector: Tensor, position: int) -> Tensor:
        return self.rope.rotate(vector[None], torch.tensor([position]))[0]


class Rule(Protocol):
    """What a method does with attention."""

    def merge(self, scores: Scores, weights: list[Scores]) -> Scores:
        """Scores after the attention of some queries, each averaged over the query heads that matter."""
        ...

    def choose(self, kept: list[int], scores: Scores, count: int) -> list[int]:
        """Which of the kept tokens stay."""
        ...


@dataclass
class H2ORule:
    heavy: int

    def merge(self, scores: Scores, weights: list[Scores]) -> Scores:
        tokens = set(scores).union(*weights)
        return {t: scores.get(t, 0.0) + sum(seen.get(t, 0.0) for seen in weights) for t in tokens}

    def choose(self, kept: list[int], scores: Scores, count: int) -> list[int]:
        chosen = heavy_and_recent([scores[t] for t in kept], count, min(self.heavy, count))
        return [kept[i] for i in chosen]


@dataclass
class TOVARule:
    keep_last: bool

    def merge(self, scores: Scores, weights: list[Scores]) -> Scores:
        return weights[-1]

    def choose(self, kept: list[int], scores: Scores, count: int) -> list[int]:
        row = [scores[t] for t in kept]
        if self.keep_last:
            row[-1] = math.inf
        return [kept[i] for i in top(row, count)]


@dataclass
class StreamingRule:
    sinks: int

    def merge(self, scores: Scores, weights: list[Scores]) -> Scores:
        return {}

    def choose(self, kept: list[int], scores: Scores, count: int) -> list[int]:
        return kept[: self.sinks] + kept[len(kept) - (count - self.sinks) :]


@dataclass
class SlowRow:
    """One row of one layer.

    Attributes:
        kept: token numbers of each head.
        scores: of each head.
        shared: whether all heads have the same scores.
        inside: whether positions are counted inside the cache.
    """

    text: Text
    rule: Rule
    capacity: int
    kept: list[list[int]]
    scores: list[Scores]
    shared: bool = False
    inside: bool = False
    fresh: int = 0
    pending: list[list[Scores]] = field(default_factory=list)

    @property
    def heads(self) -> range:
        return range(len(self.kept))

    def forward(self, count: int, start: int) -> Tensor:
        """Attention output `[heads, group, count, dim]` of the tokens numbered from `start`."""
        self.settle(1)
        self.fresh, self.pending = count, []
        outputs = []
        for token in range(start, start + count):
            for head in self.heads:
                self.kept[head].append(token)
            outputs.append(self.attend(token))
        return torch.stack(outputs, dim=2)

    def attend(self, token: int) -> Tensor:
        text, seen, outputs = self.text, [], []
        for head in self.heads:
            tokens = self.kept[head]
            places = list(range(len(tokens))) if self.inside else [text.first + t for t in tokens]
            keys = torch.stack([text.turned(text.keys[head, t], p) for t, p in zip(tokens, places, strict=True)])
            rows = []
            for query in text.query[head, :, token]:
                logits = keys.double() @ text.turned(query, places[-1]).double() * text.scaling
                rows.append(logits.softmax(dim=0))
            outputs.append(torch.stack([row @ text.values[head, tokens].double() for row in rows]))
            seen.append([dict(zip(tokens, row.tolist(), strict=True)) for row in rows])
        self.pending.append(self.averaged(seen))
        return torch.stack(outputs).float()

    def averaged(self, seen: list[list[Scores]]) -> list[Scores]:
        """One average for each head, or one of all heads for each."""
        if self.shared:
            seen = [[row for members in seen for row in members]] * len(seen)
        return [{t: mean([row[t] for row in members]) for t in members[0]} for members in seen]

    def undo(self, count: int) -> None:
        self.kept = [tokens[: len(tokens) - count] for tokens in self.kept]
        self.fresh -= count
        self.pending = self.pending[: self.fresh]

    def settle(self, coming: int) -> None:
        for head in self.heads:
            if self.pending:
                self.scores[head] = self.rule.merge(self.scores[head], [seen[head] for seen in self.pending])
            if len(self.kept[head]) > self.capacity - coming:
                self.kept[head] = self.rule.choose(self.kept[head], self.scores[head], self.capacity - coming)
                self.scores[head] = {t: s for t, s in self.scores[head].items() if t in self.kept[head]}
        self.fresh, self.pending = 0, []


MakeRow = Callable[[Text, int, int], SlowRow]
