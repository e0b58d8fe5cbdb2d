"""TierStore: everything that one layer keeps of the rows of one cohort. Nobody else touches tier storage.

A *cohort* is the rows of a batch that have seen equally many tokens: they share a plan, age windows and route in
lockstep, so their storage is rectangular. Each row is one lane, or one lane for each KV head.

Tokens of a lane are numbered from 0, padding left out. The first `sink_tokens` are sinks; the others form windows of
`window_size` tokens. Windows whose tokens have all left the recent region are *aged*: they are in the arena or evicted.

The last forward stays *pending* until the next one (or until it is cropped): its attention masses do not count yet.
Settling it adds them to the scores and, when a routing event is due, routes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.arena import Arena
from qevict.budget import SCORE_BYTES, SLOT_BYTES, MemoryReport, TierPlan
from qevict.codecs import Codec, FittedCodec, PromptCodec, WindowShape
from qevict.config import QEvictConfig
from qevict.fitting import known_keys, query_energy
from qevict.kernels.reference import History, TierView
from qevict.migration import Aged, Moves, candidates, carry_out
from qevict.pending import Pending
from qevict.planning import assign
from qevict.rope import Rope
from qevict.routing import EVICTED, FULL, QUANTIZED
from qevict.stopwatch import part


class TierStore:
    """Storage and bookkeeping of one cohort in one layer.

    Args:
        plan: capacities of a lane.
        config: the cache's settings.
        lanes: rows, times KV heads with granularity "kv_head".
        heads: KV heads of a lane.
        rope: the layer's rotary embedding.
        first_position: `[lanes]` position of each lane's first token.
        dtype: of full-precision storage.
    """

    def __init__(
        self,
        plan: TierPlan,
        config: QEvictConfig,
        lanes: int,
        heads: int,
        head_dim: int,
        rope: Rope,
        first_position: Int[Tensor, " lanes"],
        dtype: torch.dtype,
    ) -> None:
        device = first_position.device
        self.plan, self.config, self.rope, self.first_position = plan, config, rope, first_position
        self.ranking = config.ranking_object()
        self.codec = _unfitted(plan)
        self.shape = WindowShape(heads, plan.window, head_dim)
        self.arena = Arena(plan, lanes, heads, head_dim, dtype, device)
        protected = (lanes, heads, plan.protected_slots, head_dim)
        self.keys = torch.zeros(protected, dtype=dtype, device=device)
        self.values = torch.zeros(protected, dtype=dtype, device=device)
        self.recent_state = torch.zeros(lanes, plan.recent_windows, device=device)
        self.recent_mass = torch.zeros(lanes, plan.recent_windows, device=device)
        self.length = 0  # settled and pending tokens of a lane
        self.aged = 0  # windows that left the recent region
        self.since_event = 0  # settled tokens since the last routing event
        self.events = 0
        self.moves = [Moves()] * lanes  # of each lane; a diagnostic, like `events`
        self.pending: Pending | None = None
        self._history: History | None = None

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def stored(self) -> int:
        """Tokens in the protected storage; those of a draft that has no room there are not among them."""
        spilled = self.pending.count if self.pending is not None and self.pending.keys is not None else 0
        return self.length - spilled - self.aged * self.plan.window

    def view(self, new_keys: Float[Tensor, "lanes heads new dim"], new_values: Tensor) -> TierView:
        """What the new tokens attend to, themselves included. Call `settle` first."""
        used = self.stored
        return TierView(
            stored_keys=self.keys[:, :, :used],
            stored_values=self.values[:, :, :used],
            new_keys=new_keys,
            new_values=new_values,
            history=self.history,
            sinks=min(self.plan.sink_tokens, used + new_keys.shape[2]),
        )

    @property
    def history(self) -> History:
        """The windows in the arena; the same object from one routing event to the next."""
        if self._history is None:
            arena = self.arena
            codes = slice(self.plan.max_codes - arena.code_used, None)
            full = arena.full_slots()[:, : arena.full_used]
            window = arena.codes.window[:, codes].long()
            self._history = History(
                full_keys=full[:, :, 0],
                full_values=full[:, :, 1],
                full_present=arena.full.window[:, : arena.full_used] >= 0,
                packed=arena.code_slots()[:, codes],
                code_present=window >= 0,
                code_positions=self._window_zero()[:, None] + window * self.plan.window,
                codec=self.codec,
                rope=self.rope,
            )
        return self._history

    # -- one forward -----------------------------------------------------------------------------------------------

    def begin(
        self,
        prompt: Float[Tensor, "lanes heads group queries dim"],
        keys: Float[Tensor, "lanes heads new dim"],
        values: Tensor,
        scaling: float,
        scores: Float[Tensor, "lanes new"] | None = None,
    ) -> None:
        """Take in a first forward; see `Pending`. It stays pending until `settle`."""
        self.length += keys.shape[2]
        self.pending = Pending(keys.shape[2], prompt=prompt, scores=scores, scaling=scaling, keys=keys, values=values)

    def append(
        self,
        keys: Float[Tensor, "lanes heads new dim"],
        values: Float[Tensor, "lanes heads new dim"],
        mass: Float[Tensor, "lanes steps columns"],
    ) -> None:
        """Take in a forward that was attended through `view`. It stays pending until `settle`.

        Tokens for which the protected storage has no room are held beside it until then.
        """
        count, used = keys.shape[2], self.stored
        self.length += count
        if used + count <= self.plan.protected_slots:
            self.keys[:, :, used : used + count] = keys
            self.values[:, :, used : used + count] = values
            self.pending = Pending(count, mass)
        else:
            self.pending = Pending(count, mass, keys=keys, values=values)

    def outgrows(self, coming: int) -> bool:
        """Whether the plan is for a sequence so short that all of it is protected, and `coming` tokens pass that."""
        return self._all_protected and self.length + coming > self.plan.protected_slots

    def settle(self, coming: int = 0) -> None:
        """Make the last forward count, before `coming` new tokens are attended; route if an event is due.

        An event is due every `interval` tokens, after a first forward, and where the protected storage has no room for
        the tokens that stayed.

        Raises:
            RuntimeError: if the plan was made for a sequence so short that all of it is protected, and it gets longer.
        """
        if self.outgrows(coming):
            raise RuntimeError(
                f"the sequence passes the {self.plan.tokens} tokens that its budget was planned for; announce more "
                "with max_new_tokens=, or call extend(tokens) on the cache first"
            )
        pending, used = self.pending, self.stored
        if pending is None:
            return
        self.pending = None
        self.since_event += pending.count
        local = self.length - self.aged * self.plan.window
        crowded = local > self.plan.protected_slots
        due = pending.prompt is not None or self.since_event >= self.config.interval or crowded
        # Windows that only cropped tokens had begun are no windows.
        columns = self.arena.full_used + self.arena.code_used + self._windows(local)
        mass = pending.masses(self.config, self.plan, due)[:, :columns]
        keys, values = self.keys[:, :, :used], self.values[:, :, :used]
        if pending.keys is not None and pending.values is not None:
            keys, values = _joined(keys, pending.keys), _joined(values, pending.values)
        if due:
            self._fit(keys, pending.prompt)
            self._route(keys, values, mass)
            return
        self._add_mass(mass)
        if pending.keys is not None:
            self.keys[:, :, :local], self.values[:, :, :local] = keys, values

    def crop(self, count: int) -> None:
        """Undo the last `count` tokens of the pending forward, exactly: they never score or age.

        Raises:
            ValueError: if the last forward had fewer tokens, or is settled already.
        """
        available = 0 if self.pending is None else self.pending.count
        if self.pending is None or count > available:
            raise ValueError(
                f"cannot remove {count} tokens: only the last forward's {available} can be undone, older tokens have "
                "been scored and routed; activate_past_recording() on the cache beforehand keeps a prompt undoable"
            )
        self.length -= count
        self.pending = self.pending.first(available - count) if count < available else None

    # -- rows and plans --------------------------------------------------------------------------------------------

    def take(self, lanes: Int[Tensor, " chosen"]) -> TierStore:
        """A store of the given lanes, sharing no storage with this one."""
        other = object.__new__(TierStore)
        other.__dict__.update(self.__dict__)
        for name in ("keys", "values", "recent_state", "recent_mass", "first_position"):
            setattr(other, name, getattr(self, name)[lanes])
        other.arena, other._history = self.arena.take(lanes), None
        if isinstance(self.codec, FittedCodec):
            other.codec = self.codec.take(lanes)
        other.moves = [self.moves[lane] for lane in lanes.tolist()]
        other.pending = None if self.pending is None else self.pending.take(lanes)
        return other

    @property
    def used_codec(self) -> Codec | PromptCodec | None:
        """What windows are quantized with now; None if there are none."""
        return self.plan.codec if self.arena.code_used else None

    def replan(self, plan: TierPlan) -> None:
        """Move into the larger storages of another plan, made for `used_codec`; the windows stay where they are.

        A recent region that is a fraction of the budget may grow by more than the budget did, which would leave history
        less room than it takes. The old capacities are kept then: they are within the larger budget.
        """
        sizes = ("protected_slots", "max_full", "max_codes", "arena_bytes")
        if self.aged and any(getattr(plan, name) < getattr(self.plan, name) for name in sizes):
            plan = replace(self.plan, tokens=plan.tokens, budget_bytes=plan.budget_bytes)
        if plan.codec != self.plan.codec:
            self.codec = _unfitted(plan)  # nothing is in codes yet, or the plan would have been made for them
        old, lanes = self.arena, len(self.first_position)
        self.arena = Arena(plan, lanes, self.shape.heads, self.shape.head_dim, old.dtype, self.keys.device)
        self.arena.refill(old)
        self._history = None
        for name in ("keys", "values"):
            before = getattr(self, name)
            after = before.new_zeros(*before.shape[:2], plan.protected_slots, before.shape[3])
            after[:, :, : before.shape[2]] = before
            setattr(self, name, after)
        for name in ("recent_state", "recent_mass"):
            before = getattr(self, name)
            setattr(self, name, _columns(before, plan.recent_windows))
        self.plan = plan

    def assignment(self) -> Int[Tensor, "lanes windows"]:
        """State of every aged window, by window number: FULL, QUANTIZED or EVICTED."""
        lanes = len(self.first_position)
        tier = torch.full((lanes, self.aged), EVICTED, device=self.first_position.device)
        for table, state in ((self.arena.full, FULL), (self.arena.codes, QUANTIZED)):
            lane, slot = (table.window >= 0).nonzero(as_tuple=True)
            tier[lane, table.window[lane, slot].long()] = state
        return tier

    def counts(self) -> tuple[int, int, int]:
        """Windows in full precision, in codes, and evicted, over all lanes."""
        tier = self.assignment()
        return int((tier == FULL).sum()), int((tier == QUANTIZED).sum()), int((tier == EVICTED).sum())

    def memory(self) -> MemoryReport:
        """Bytes of this store, term by term (Eq. 8)."""
        full, codes = self.arena.counts()
        layout = self.plan.codec.layout(self.shape)
        fitted = self.codec.nbytes if isinstance(self.codec, FittedCodec) else 0
        lanes = len(self.first_position)
        sinks = min(self.plan.sink_tokens, self.stored)
        recent = self.stored - sinks
        storages = (self.keys, self.values, self.recent_state, self.recent_mass, self.first_position)
        return MemoryReport(
            sink=lanes * sinks * self.plan.token_bytes,
            recent=lanes * recent * self.plan.token_bytes,
            full=full * self.plan.full_bytes,
            codes=codes * layout.code_bytes,
            parameters=codes * layout.parameter_bytes + fitted,
            position=(full + codes) * (SLOT_BYTES - SCORE_BYTES) + self.first_position.nbytes,
            ledger=(full + codes + lanes * self._windows(self.stored)) * SCORE_BYTES,
            reserved=self.arena.reserved_bytes() + sum(t.nbytes for t in storages) + fitted,
            budget=lanes * self.plan.budget_bytes,
            workspace=0 if self.pending is None else self.pending.nbytes,
        )

    # -- routing ---------------------------------------------------------------------------------------------------

    @property
    def _all_protected(self) -> bool:
        """Whether all S tokens fit into the protected storage, so that nothing ever ages."""
        return self.plan.tokens is not None and self.plan.tokens <= self.plan.protected_slots

    @property
    def _ageable(self) -> int:
        """Tokens that may leave the protected storage: all, or the prompt's while there is room for the others."""
        prompt, local = self.plan.prompt, self.length - self.aged * self.plan.window
        return self.length if prompt is None or local > self.plan.protected_slots else min(self.length, prompt)

    def _windows(self, local: int) -> int:
        """Windows that so many local tokens touch, the sinks among them left out."""
        return -(-max(0, local - self.plan.sink_tokens) // self.plan.window)

    def _window_zero(self) -> Int[Tensor, " lanes"]:
        """Position of the first token of window 0 in each lane."""
        return self.first_position + self.plan.sink_tokens

    def _add_mass(self, mass: Float[Tensor, "lanes columns"]) -> Float[Tensor, "lanes local"]:
        """Add masses to those since the last event; those of all local windows, also unstored ones, are returned."""
        f, c = self.arena.full_used, self.arena.code_used
        self.arena.full.mass[:, :f] += mass[:, :f]
        self.arena.codes.mass[:, self.plan.max_codes - c :] += mass[:, f : f + c]
        local = mass[:, f + c :]
        stored = min(local.shape[1], self.recent_mass.shape[1])
        self.recent_mass[:, :stored] += local[:, :stored]
        return torch.cat([self.recent_mass[:, :stored], local[:, stored:]], dim=1)

    def _fit(self, keys: Float[Tensor, "lanes heads local dim"], prompt: Tensor | None) -> None:
        """Fit the codec, if it is one to be fitted, as long as no window is in codes but some may come to be."""
        codec = self.plan.codec
        quantizes = self.plan.max_codes and not self._all_protected
        if not isinstance(codec, PromptCodec) or self.arena.code_used or not quantizes:
            return
        if prompt is not None and prompt.shape[3] < self.length:
            raise ValueError(
                f"queries of the last {prompt.shape[3]} tokens were kept, but the codec is fitted to those of all "
                f"{self.length}"
            )
        index = torch.arange(keys.shape[2], device=keys.device)
        index += (index >= self.plan.sink_tokens) * self.aged * self.plan.window
        local = self.rope.unrotate(keys, (self.first_position[:, None] + index)[:, None])
        first = min(self.plan.sink_tokens, keys.shape[2] - 1)  # sinks are unlike the others
        seen = known_keys(self.arena, self.rope, self._window_zero(), local[:, :, first:])
        self.codec, self._history = codec.fit(seen, query_energy(prompt, self.rope, seen)), None

    def _route(
        self, keys: Float[Tensor, "lanes heads local dim"], values: Tensor, mass: Float[Tensor, "lanes columns"]
    ) -> None:
        """A routing event over the arena and the local tokens: rescore, age, reassign (section 4.3)."""
        with part("scores"):
            local_mass = self._add_mass(mass)
            for table in (self.arena.full, self.arena.codes):
                table.state = self.ranking.update(table.state, table.mass)
                table.mass = torch.zeros_like(table.mass)  # not in place: a ranking may return the masses themselves
            state = self.ranking.update(_columns(self.recent_state, local_mass.shape[1]), local_mass)

        sinks, window = self.plan.sink_tokens, self.plan.window
        complete = 0 if self._all_protected else (self._ageable - self.plan.recent_tokens - sinks) // window
        count = max(0, complete - self.aged)
        stop = sinks + count * window
        aged = self._aged(count, keys[:, :, sinks:stop], values[:, :, sinks:stop], state)
        self._history = None
        with part("ranking"):
            pool = candidates(self.arena, aged)
            tier = assign(self.config, self.plan, pool)
        with part("migration"):
            moved = carry_out(self.arena, pool, tier, aged, self.codec, self.rope, self._window_zero())
        self.moves = [before + now for before, now in zip(self.moves, moved, strict=True)]
        for storage, local in ((self.keys, keys), (self.values, values)):
            kept = torch.cat([local[:, :, :sinks], local[:, :, stop:]], dim=2)
            storage[:, :, : kept.shape[2]] = kept
        self.recent_state = _columns(state[:, count:], self.plan.recent_windows)
        self.recent_mass.zero_()
        self.aged += count
        self.since_event = 0
        self.events += 1

    def _aged(self, count: int, keys: Tensor, values: Tensor, state: Float[Tensor, "lanes local"]) -> Aged:
        """The `count` windows that leave the recent region."""
        number = torch.arange(self.aged, self.aged + count, device=keys.device)
        windows = [t.unflatten(2, (count, self.plan.window)).transpose(1, 2) for t in (keys, values)]
        scores = self.ranking.from_keys(windows[0]) if self.ranking.uses_keys else state[:, :count]
        return Aged(number, windows[0], windows[1], scores)


def _unfitted(plan: TierPlan) -> Codec | None:
    """The plan's codec; None if it is still to be fitted."""
    return None if isinstance(plan.codec, PromptCodec) else plan.codec


def _joined(stored: Float[Tensor, "lanes heads stored dim"], new: Float[Tensor, "lanes heads new dim"]) -> Tensor:
    return torch.cat([stored.to(new.dtype), new], dim=2) if stored.shape[2] else new


def _columns(values: Float[Tensor, "lanes columns"], count: int) -> Float[Tensor, "lanes count"]:
    """The first `count` columns, filled up with zeros."""
    return torch.nn.functional.pad(values, (0, count - values.shape[1]))
