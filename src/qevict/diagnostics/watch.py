"""Watchers: read from outside, after every forward, what a cache reaches and what attention it measured.

Nothing is hooked. A `QEvictCache` shows its assignment and the masses of the forward that is not settled yet; the
stores of a `MethodCache` keep note of their tokens (`keep_trails`); any other cache keeps every token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from qevict.cache import QEvictCache
from qevict.diagnostics.policy import ABSENT, LOCAL, SINK
from qevict.layer import QEvictLayer
from qevict.methods.cache import MethodCache, MethodLayer
from qevict.routing import EVICTED, FULL, QUANTIZED
from qevict.tiers import TierStore


class Watcher(ABC):
    """Collects the events of one cache of batch 1.

    Attributes:
        lengths: tokens seen at each event.
        tiers: of each event, `[layers, lanes, tokens]`.
    """

    def __init__(self, prefill: int, steps: int) -> None:
        self.prefill, self.steps = prefill, steps
        self.lengths: list[int] = []
        self.tiers: list[UInt8[Tensor, "layers lanes tokens"]] = []

    @abstractmethod
    def see(self, step: int) -> None:
        """Read the cache after the forward of a decode step."""

    @property
    def mass(self) -> Tensor | None:
        """`[layers, steps, lanes, windows]`, where the cache measures any."""
        return None

    def _event(self, step: int, layers: list[UInt8[Tensor, "lanes tokens"]]) -> None:
        self.lengths.append(self.prefill + step)
        self.tiers.append(torch.stack(layers))

    def _absent(self, lanes: int) -> UInt8[Tensor, "lanes tokens"]:
        return torch.full((lanes, self.prefill + self.steps), ABSENT, dtype=torch.uint8)


class TierWatcher(Watcher):
    """A `QEvictCache`: an event is one of its own routing events."""

    def __init__(self, cache: QEvictCache, prefill: int, steps: int) -> None:
        super().__init__(prefill, steps)
        self.layers = [layer for layer in cache.layers if isinstance(layer, QEvictLayer)]
        self.events = 0
        config, store = cache.config, self._store(0)
        self.lanes, self.sinks = len(store.first_position), config.sink_tokens
        windows = -(-(prefill + steps - self.sinks) // config.window_size)
        self._mass = torch.zeros(len(self.layers), steps, self.lanes, windows)
        self._column: list[Int[Tensor, "lanes columns"]] = []

    @property
    def mass(self) -> Tensor | None:
        """What the cache adds to its scores, step by step."""
        return self._mass

    def see(self, step: int) -> None:
        """States if the cache has routed before this step's attention, and the step's masses."""
        stores = [self._store(index) for index in range(len(self.layers))]
        if stores[0].events > self.events:
            self.events = stores[0].events
            self._event(step, [self._states(store, self.prefill + step) for store in stores])
            self._column = [_slot_windows(store) for store in stores]
        for index, store in enumerate(stores):
            assert store.pending is not None
            assert store.pending.mass is not None
            self._add(index, step, store, store.pending.mass.sum(dim=1).cpu())

    def _add(self, index: int, step: int, store: TierStore, mass: Tensor) -> None:
        """Masses of slots by their window, then those of the recent region's windows."""
        slots = self._column[index]
        held = mass[:, : slots.shape[1]].masked_fill(slots < 0, 0)
        self._mass[index, step].scatter_add_(1, slots.clamp(min=0), held)
        local = mass[:, slots.shape[1] :]
        self._mass[index, step, :, store.aged : store.aged + local.shape[1]] += local

    def _states(self, store: TierStore, length: int) -> UInt8[Tensor, "lanes tokens"]:
        states, window = self._absent(self.lanes), store.plan.window
        history = self.sinks + store.aged * window
        states[:, : min(self.sinks, length)] = SINK
        states[:, self.sinks : history] = store.assignment().repeat_interleave(window, dim=1).cpu().to(torch.uint8)
        states[:, history:length] = LOCAL
        return states

    def _store(self, index: int) -> TierStore:
        return self.layers[index].cohorts[0].store


class StoreWatcher(Watcher):
    """A `MethodCache`: it is looked at every `interval` tokens, whether or not it has evicted in between."""

    def __init__(self, cache: MethodCache, prefill: int, steps: int, interval: int, sinks: int, recent: int) -> None:
        super().__init__(prefill, steps)
        self.layers = [layer for layer in cache.managed if isinstance(layer, MethodLayer)]
        self.label, self.interval, self.sinks, self.recent = cache.method.label, interval, sinks, recent

    def see(self, step: int) -> None:
        """What every head reaches besides the step's own token."""
        if step % self.interval == 0:
            self._event(step, [self._states(layer, self.prefill + step) for layer in self.layers])

    def _states(self, layer: MethodLayer, length: int) -> UInt8[Tensor, "heads tokens"]:
        store = layer.rows[0].store
        assert store is not None
        heads: list[Any] = [None] * layer.rows[0].allowance.geometry.kv_heads
        if store.trail is not None:
            heads = list(store.trail.tokens)
        elif any(block.keys.shape[1] != length + 1 for block in store.blocks()):
            raise ValueError(f"{self.label} does not say which tokens it keeps, so it cannot be diagnosed")
        coded = store.coded() or [0] * len(heads)
        states = self._absent(len(heads))
        states[:, :length] = EVICTED
        for head, tokens in enumerate(heads):
            own = torch.arange(length) if tokens is None else tokens[tokens < length].cpu()
            states[head, own] = FULL
            states[head, own[: coded[head]]] = QUANTIZED
        _label_protected(states, length, self.sinks, self.recent)
        return states


class WholeWatcher(Watcher):
    """A cache that keeps every token, in codes if `quantized`."""

    def __init__(self, layers: int, prefill: int, steps: int, interval: int, quantized: bool) -> None:
        super().__init__(prefill, steps)
        self.layers, self.interval, self.state = layers, interval, QUANTIZED if quantized else FULL

    def see(self, step: int) -> None:
        """All tokens so far."""
        if step % self.interval == 0:
            states = self._absent(1)
            states[:, : self.prefill + step] = self.state
            self._event(step, [states] * self.layers)


def _label_protected(states: Tensor, length: int, sinks: int, recent: int) -> None:
    """Call kept exact tokens sinks and local ones where QEvict's protected regions would be."""
    for name, part in ((SINK, slice(0, sinks)), (LOCAL, slice(max(sinks, length - recent), length))):
        states[:, part] = torch.where(states[:, part] == FULL, name, states[:, part])


def _slot_windows(store: TierStore) -> Int[Tensor, "lanes columns"]:
    """Window of each used full slot and code slot, in the order of the masses; -1 where there is none."""
    arena, most = store.arena, store.plan.max_codes
    full, codes = arena.full.window[:, : arena.full_used], arena.codes.window[:, most - arena.code_used :]
    return torch.cat([full, codes.clamp(min=-1)], dim=1).long().cpu()
