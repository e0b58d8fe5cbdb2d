"""One lane of the cache, slow and obvious: lists and dictionaries, written from the documented rules.

Nothing is ever thrown away here: every token stays in `tokens` with its exact key and value, and a window's tier only
says how its tokens are read. Of qevict it uses the codec (bytes of one window), the rotary embedding (of one window)
and the numbers of the plan; scores, routing, attention and bookkeeping are its own.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from qevict.budget import TierPlan
from qevict.codecs import WindowShape
from qevict.config import QEvictConfig
from qevict.ranking import DecayedAttention
from qevict.rope import Rope

FULL, CODES, EVICTED = "full", "codes", "evicted"
SLOT, SCORE = 12, 8  # documented bytes of metadata: window number and score of a slot, score of a recent window


class NaiveLane:
    """One row of one layer, or one KV head of it.

    Attributes:
        tokens: (rotated key, value), `[heads, dim]` each, of every token so far.
        tier: state of every window that left the recent region.
        codes: the ledger: packed bytes of every window that was ever quantized and is not evicted.
        state, mass: the ranking's state of a window, and its attention mass since the last event.
        pending: tokens of the last forward; their masses are in `pending_mass`, a dictionary for each query.
        closest: the smallest relative gap between two scores that routing had to tell apart.
    """

    def __init__(self, plan: TierPlan, config: QEvictConfig, rope: Rope, position: int, dtype: torch.dtype) -> None:
        self.plan, self.config, self.rope, self.position, self.dtype = plan, config, rope, position, dtype
        self.window = config.window_size
        self.tokens: list[tuple[Tensor, Tensor]] = []
        self.tier: dict[int, str] = {}
        self.codes: dict[int, Tensor] = {}
        self.decoded: dict[int, tuple[Tensor, Tensor]] = {}
        self.state: dict[int, float] = {}
        self.mass: dict[int, float] = {}
        self.pending = 0
        self.pending_mass: list[dict[int, float]] = []
        self.event_after = False  # the pending forward makes an event whatever its length
        self.since_event = self.events = 0
        self.closest = math.inf

    # -- one forward ---------------------------------------------------------------------------------------------------

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, text: bool = False
    ) -> tuple[Tensor, list[dict[int, float]]]:
        """Attend `queries` `[heads, group, new, dim]` to all that is accessible and to the new tokens up to their own.

        `text` is a later forward that is no draft: only the last prompt_queries of it count, and it is settled at once.
        """
        new = keys.shape[1]
        self.settle(new)
        first = not self.tokens
        history = [entry for token in range(len(self.tokens)) if (entry := self.read(token)) is not None]
        start = len(self.tokens)
        self.tokens += [(keys[:, j], values[:, j]) for j in range(new)]
        fresh = [(self.window_of(start + j), *self.tokens[start + j]) for j in range(new)]
        windows, seen_keys, seen_values = zip(*history, *fresh, strict=True)
        all_keys = torch.stack([key.double() for key in seen_keys], dim=1)
        all_values = torch.stack([value.double() for value in seen_values], dim=1)
        outputs, masses = [], []
        for j in range(new):
            seen = len(history) + j + 1
            weights = (queries[:, :, j].double() @ all_keys[:, :seen].mT * scaling).softmax(dim=-1)
            outputs.append(weights @ all_values[:, :seen])
            mass: dict[int, float] = {}
            for window, share in zip(windows, weights.mean(dim=(0, 1)).tolist(), strict=False):
                if window is not None:
                    mass[window] = mass.get(window, 0.0) + share
            masses.append(mass)
        self.pending, self.pending_mass = new, masses
        self.event_after = first
        self.counted = self.config.prompt_queries if first or text else None
        if text:
            self.settle(0)
        return torch.stack(outputs, dim=2), masses

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens; they belong to the pending forward."""
        assert count <= self.pending
        if count:
            self.pending -= count
            del self.tokens[-count:], self.pending_mass[-count:]

    def settle(self, coming: int) -> None:
        """Let the pending forward count, and route if an event is due."""
        if not self.pending:
            return
        for token in range(len(self.tokens) - self.pending, len(self.tokens)):
            key, value = self.tokens[token]
            self.tokens[token] = key.to(self.dtype), value.to(self.dtype)
        self.since_event += self.pending
        no_room = self.local_tokens() > self.plan.protected_slots
        due = self.event_after or self.since_event >= self.config.interval or no_room
        masses = self.pending_mass if due or self.config.score_steps == "every" else []
        if self.counted is not None:
            masses = masses if self.counted == "all" else masses[-self.counted :]
        elif self.config.score_steps == "event":
            masses = masses[-1:]
        for mass in masses:
            for window, share in mass.items():
                self.mass[window] = self.mass.get(window, 0.0) + share
        self.pending, self.pending_mass = 0, []
        if due:
            self.event()

    # -- one token -----------------------------------------------------------------------------------------------------

    def window_of(self, token: int) -> int | None:
        """Number of the token's window; sinks have none."""
        return None if token < self.plan.sink_tokens else (token - self.plan.sink_tokens) // self.window

    def members(self, window: int) -> range:
        """The window's tokens."""
        start = self.plan.sink_tokens + window * self.window
        return range(start, start + self.window)

    def read(self, token: int) -> tuple[int | None, Tensor, Tensor] | None:
        """Window, key and value of a token as attention sees it; None if it is evicted."""
        window = self.window_of(token)
        tier = None if window is None else self.tier.get(window)
        if tier == EVICTED:
            return None
        if window is None or window not in self.codes:
            return (window, *self.tokens[token])
        keys, values = self.dequantized(window)
        index = token - self.members(window)[0]
        key, value = keys[:, index], values[:, index]
        return (window, key.to(self.dtype), value.to(self.dtype)) if tier == FULL else (window, key, value)

    def dequantized(self, window: int) -> tuple[Tensor, Tensor]:
        """Rotated keys and values `[heads, tokens, dim]` of a window's codes; the same every time, so decoded once."""
        if window not in self.decoded:
            heads, dim = self.tokens[0][0].shape
            keys, values = self.plan.codec.decode(self.codes[window], WindowShape(heads, self.window, dim))
            self.decoded[window] = self.rope.rotate(keys, self.positions(window)), values
        return self.decoded[window]

    def positions(self, window: int) -> Tensor:
        """Absolute positions `[1, tokens]` of a window's tokens."""
        return self.position + torch.tensor([list(self.members(window))])

    def local_tokens(self) -> int:
        """Sinks, and tokens of windows that did not leave the recent region."""
        return len(self.tokens) - len(self.tier) * self.window

    # -- one event -----------------------------------------------------------------------------------------------------

    def event(self) -> None:
        """Rescore every live window, let windows age, and give each aged one its tier."""
        self.since_event = 0
        self.events += 1
        ranking, _, number = str(self.config.ranking).partition(":")
        decay = float(number or 0.99)
        if isinstance(self.config.ranking, DecayedAttention):
            ranking, decay = "decayed", self.config.ranking.decay
        for window in range(self.complete_or_not()):
            if self.tier.get(window) == EVICTED:
                continue
            s, u = self.state.get(window, 0.0), self.mass.get(window, 0.0)
            if ranking == "cumulative":
                self.state[window] = s + u
            elif ranking == "decayed":
                self.state[window] = decay * s + u
            elif ranking == "p-norm":
                self.state[window] = s + u**3
        self.mass = {}
        fresh = [w for w in range(len(self.tier), self.complete_or_not()) if self.has_left(w)]
        if ranking == "key-norm":
            for window in fresh:
                norms = [self.tokens[token][0].float().norm(dim=-1).mean().item() for token in self.members(window)]
                self.state[window] = -sum(norms) / len(norms)
        pool = [w for w, tier in self.tier.items() if tier != EVICTED] + fresh
        pool.sort(key=lambda w: (self.state[w], w), reverse=True)
        self.watch_gaps(pool)
        full, codes = self.split(pool) if self.config.allocation == "split" else self.coverage(pool)
        for window in pool:
            if window in codes and window not in self.codes:
                self.codes[window] = self.encoded(window)
            self.tier[window] = FULL if window in full else CODES if window in codes else EVICTED
            if self.tier[window] == EVICTED:
                self.codes.pop(window, None)

    def complete_or_not(self) -> int:
        """Windows that have at least one token."""
        return max(0, -(-(len(self.tokens) - self.plan.sink_tokens) // self.window))

    def has_left(self, window: int) -> bool:
        """Whether all of its tokens left the recent region."""
        if self.plan.tokens is not None and self.plan.tokens <= self.plan.protected_slots:
            return False  # everything is protected
        return self.members(window)[-1] < len(self.tokens) - self.plan.recent_tokens

    def encoded(self, window: int) -> Tensor:
        """Bytes of a window's tokens as they are stored."""
        keys = torch.stack([self.tokens[token][0] for token in self.members(window)], dim=1)
        values = torch.stack([self.tokens[token][1] for token in self.members(window)], dim=1)
        return self.plan.codec.encode(self.rope.unrotate(keys, self.positions(window)), values)

    def split(self, pool: list[int]) -> tuple[set[int], set[int]]:
        """Algorithm 1: the best K_f in full precision, the next K_q in codes."""
        may_be_full = [w for w in pool if self.config.promotion or self.tier.get(w) != CODES]
        full = set(may_be_full[: self.plan.full_capacity])
        room = self.plan.code_capacity
        if self.config.dormant == "slots":
            room -= sum(w in self.codes for w in full)
        return full, set([w for w in pool if w not in full][: max(0, room)])

    def coverage(self, pool: list[int]) -> tuple[set[int], set[int]]:
        """Every way to keep n windows, f never quantized and p quantized ones of them in full: the best that fits."""
        return best_coverage(pool, set(self.codes), self.plan, self.config.promotion)

    def watch_gaps(self, pool: list[int]) -> None:
        scores = [self.state[w] for w in pool]
        for a, b in pairwise(scores):
            self.closest = min(self.closest, (a - b) / max(abs(a), abs(b), 1e-30))

    # -- what is held ------------------------------------------------------------------------------------------------

    def used_bytes(self, code_bytes: int) -> int:
        """Eq. 8 for this lane: protected tokens, windows, codes (dormant ones too), numbers, scores, first position."""
        local = self.local_tokens()
        sinks = min(local, self.plan.sink_tokens)
        full = sum(tier == FULL for tier in self.tier.values())
        return (
            8
            + local * self.plan.token_bytes
            + -(-(local - sinks) // self.window) * SCORE
            + full * (self.window * self.plan.token_bytes + SLOT)
            + len(self.codes) * (code_bytes + SLOT)
        )


def best_coverage(pool: list[int], coded: set[int], plan: TierPlan, promotion: bool) -> tuple[set[int], set[int]]:
    """Windows in full precision and in codes, by trying all counts.

    `pool` is ordered from the best. Kept are the n best; of them the f best that were never quantized and the p best
    that were are in full precision, the latter on top of their codes. More kept, then more f, then more p is better.
    """
    best, choice = (-1, -1, -1), (set[int](), set[int]())
    for n in range(len(pool) + 1):
        fresh = [w for w in pool[:n] if w not in coded]
        old = [w for w in pool[:n] if w in coded]
        for f in range(len(fresh) + 1):
            for p in range(len(old) + 1 if promotion else 1):
                code_slots = n - f
                fits = (f + p) * plan.full_bytes + code_slots * plan.code_bytes <= plan.arena_bytes
                if fits and f + p <= plan.max_full and code_slots <= plan.max_codes and (n, f, p) > best:
                    full = set(fresh[:f] + old[:p])
                    best, choice = (n, f, p), (full, set(pool[:n]) - full)
    return choice
