"""QEvictLayer: one attention layer of the cache. Rows in, cohorts inside, attention out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from qevict.attention import AttentionCall, KVHandle, LazyMask
from qevict.budget import MemoryReport
from qevict.forward import Forward
from qevict.kernels import attend
from qevict.rope import Rope
from qevict.session import Session
from qevict.tiers import TierStore

MAX_DRAFT = 64
"""A later forward of up to this many tokens may be a draft, so it stays pending and can be cropped; a longer one is
taken as text and settled at once, so that only one layer at a time holds it uncompressed."""


@dataclass
class Cohort:
    """Rows that have seen equally many tokens, and their storage."""

    rows: Int[Tensor, " rows"]
    store: TierStore


class QEvictLayer(CacheLayerMixin):
    """The cache of one managed layer; made by `QEvictCache`.

    Args:
        session: shared with the other layers.
        index: the layer's index in the model.
        rope: the layer's rotary embedding.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, session: Session, index: int, rope: Rope) -> None:
        super().__init__()
        self.session, self.index, self.rope = session, index, rope
        self.record_past = False
        self._forget()

    def _forget(self) -> None:
        self.seen = 0
        self.batch = 0
        self.cohorts: list[Cohort] = []
        self.last: Forward | None = None

    # -- the Transformers contract ---------------------------------------------------------------------------------

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: storage is made when the first forward has been attended."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """A handle for keys and for values, which the registered attention function hands back to `attend`."""
        if self.seen and key_states.shape[0] != self.batch:
            raise ValueError(
                f"the cache holds a batch of {self.batch} rows and was given {key_states.shape[0]}; use reset(), "
                "batch_select_indices() or batch_repeat_interleave() first"
            )
        handle = KVHandle(self, key_states, value_states)
        return handle, handle

    def get_seq_length(self, *args: Any) -> int:
        """Tokens seen, padding included; not the tokens that are left."""
        return self.seen

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Length and offset of the mask; `query` is the query length, or (Transformers 5.2) its cache positions."""
        length = query if isinstance(query, int) else query.shape[0]
        if length == 0:  # said here, before the model trips over it
            raise ValueError("a forward needs at least one token; got an empty prompt")
        return self.seen + length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything seen."""
        self._forget()

    @property
    def is_croppable(self) -> bool:
        """Whether the last forward can still be undone."""
        return self.record_past or not self.cohorts or any(c.store.pending is not None for c in self.cohorts)

    def activate_past_recording(self) -> None:
        """From now on every forward, also a long one, stays pending until the next, so that it can be cropped."""
        self.record_past = True

    def crop(self, count: int) -> None:
        """Undo the last |count| columns.

        Raises:
            ValueError: if they reach back before the last forward.
        """
        removed = abs(count)
        if removed == 0 or not self.cohorts:
            return
        assert self.last is not None
        if removed > self.last.columns:
            raise ValueError(
                f"cannot remove {removed} tokens: only the last forward's {self.last.columns} can be undone, older "
                "tokens have been scored and routed"
            )
        dropped = self.last.last_tokens(removed)
        self._split(dropped)
        for cohort in self.cohorts:
            count = dropped[int(cohort.rows[0])]
            if count:
                cohort.store.crop(count)
        self.last = self.last.first(self.last.columns - removed)
        self.seen -= removed
        if self.seen == 0:  # the next forward is a first one again
            self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]`."""
        self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one behind the other."""
        self._take(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the given order."""
        self._take(torch.arange(self.batch)[indices.cpu()] if indices.dtype == torch.bool else indices)

    # -- attention -------------------------------------------------------------------------------------------------

    def attend(
        self, module: nn.Module, query: Tensor, handle: KVHandle, mask: LazyMask | None, call: AttentionCall
    ) -> Tensor:
        """Attention of the new tokens over everything kept; takes them in.

        A first forward is attended by the model's own attention, exactly, and compressed right after it.

        Returns:
            `[batch, tokens, query_heads, head_dim]`.
        """
        # What is exact may be differentiated; what is kept never is, and it has to be usable in inference mode and
        # outside of it, whichever it was made in.
        output: Tensor | None = None if self.cohorts else call.exact(query, handle.keys, handle.values, mask)[0]
        query, handle = query.detach(), KVHandle(self, handle.keys.detach(), handle.values.detach())
        with torch.inference_mode(False), torch.no_grad():
            forward = self._read(module, handle, mask, call)
            if output is None:
                output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
                if forward.valid is not None:
                    self._split(forward.counts)
                for cohort in self.cohorts:
                    self._continue(cohort, query, handle, forward, call.scaling, output)
            else:
                self._begin(module, query, handle, forward, call.scaling)
            self.seen += forward.columns
            self.last = forward
        return output

    def _read(self, module: nn.Module, handle: KVHandle, mask: LazyMask | None, call: AttentionCall) -> Forward:
        session = self.session
        if module.config is not session.model_config():
            raise ValueError(
                f"this QEvictCache was made for another model than the {type(module).__name__} that uses it; make one "
                "with QEvictCache(model, ...) for each model"
            )
        batch, columns = handle.keys.shape[0], handle.keys.shape[2]
        if self.index == session.first_layer or session.forward is None:
            positions = call.settings.get("position_ids")
            session.forward = Forward.read(mask, positions, batch, columns, self.seen, handle.keys.device)
            self._check(session.forward)
        if session.forward.start != self.seen:
            raise RuntimeError(
                f"layer {self.index} has seen {self.seen} tokens and the first managed layer {session.forward.start}: "
                "a forward was interrupted between them; reset() the cache, or make a new one"
            )
        return session.forward.to(handle.keys.device)

    def _check(self, forward: Forward) -> None:
        """Refuse a forward that the cache would get wrong; done by the first managed layer only."""
        if not self.cohorts:
            for row, count in enumerate(forward.counts):
                if count == 0:
                    raise ValueError(f"row {row} of the batch has no tokens: its attention mask is all zeros")
                self.session.check_length(count)
                self._check_positions(forward, row, start=None)
        for cohort in self.cohorts:
            store, lanes = cohort.store, self.session.lanes_per_row
            for row, lane in zip(cohort.rows.tolist(), range(0, len(store.first_position), lanes), strict=True):
                count = forward.counts[row]
                self._check_announced(store, count)
                self.session.check_length(store.length + count)
                start = int(store.first_position[lane]) + store.length
                self._check_positions(forward, row, start)

    def _check_positions(self, forward: Forward, row: int, start: int | None) -> None:
        """Refuse positions that do not count up from `start`, or from wherever a first forward begins (None)."""
        given = forward.positions[row] if forward.valid is None else forward.positions[row, forward.valid[row]]
        if start is not None and len(given) and int(given[0]) != start:
            raise ValueError(
                f"row {row} continues at positions {given.tolist()[:3]}..., but the cache ends before position "
                f"{start}; positions have to be consecutive"
            )
        if bool((given.diff() != 1).any()):
            raise ValueError(f"the positions of row {row} leave gaps or go back; positions have to be consecutive")

    def _check_announced(self, store: TierStore, count: int) -> None:
        tokens, limit = store.plan.tokens, self.session.config.limit
        if limit.fraction is None or tokens is None or count == 1:
            return
        if store.length + count > tokens + MAX_DRAFT:
            raise ValueError(
                f"{count} tokens after {store.length} pass the {tokens} that the budget of {limit} was derived from; "
                "for a prompt in chunks give QEvictCache(..., prompt_tokens=), for another turn call extend(tokens) "
                "first, or use an absolute budget"
            )

    def _begin(self, module: nn.Module, query: Tensor, handle: KVHandle, forward: Forward, scaling: float) -> None:
        session = self.session
        self.batch = query.shape[0]
        dtype = session.config.store_dtype or handle.keys.dtype
        for count in sorted(set(forward.counts)):
            rows = torch.tensor([i for i, c in enumerate(forward.counts) if c == count], device=query.device)
            columns = forward.tokens(rows, count)
            q, k, v = (_chosen(t, rows, columns, self.batch) for t in (query, handle.keys, handle.values))
            first = forward.positions[rows, 0] if columns is None else forward.positions[rows].gather(1, columns)[:, 0]
            pads = forward.columns - count
            store = TierStore(
                session.plan(self._announced(count, pads)),
                session.config,
                lanes=len(rows) * session.lanes_per_row,
                heads=k.shape[1] // session.lanes_per_row,
                head_dim=k.shape[3],
                rope=self.rope,
                first_position=first.repeat_interleave(session.lanes_per_row),
                dtype=dtype,
            )
            if session.config.prompt_scorer is None:
                prompt = self._query_lanes(q, k.shape[1])
            else:
                prompt = self._scored(session.config.prompt_scorer, module, q, k, v, scaling)
            store.begin(prompt, self._lanes(k), self._lanes(v), scaling)
            if not self.record_past:
                store.settle()
            self.cohorts.append(Cohort(rows, store))

    def _announced(self, count: int, pads: int) -> int | None:
        """S of a row whose first forward has `count` tokens beside `pads` columns of padding."""
        prompt, new = self.session.prompt_tokens, self.session.max_new_tokens
        if new is None:
            return None
        return new + (count if prompt is None else max(count, prompt - pads))

    def _continue(
        self, cohort: Cohort, query: Tensor, handle: KVHandle, forward: Forward, scaling: float, output: Tensor
    ) -> None:
        store, count = cohort.store, forward.counts[int(cohort.rows[0])]
        if count == 0:
            return
        columns = forward.tokens(cohort.rows, count)
        q, k, v = (_chosen(t, cohort.rows, columns, self.batch) for t in (query, handle.keys, handle.values))
        if store.outgrows(count) and self.session.config.limit.fraction is None:
            store.replan(self.session.plan(None))  # an absolute budget does not depend on what was announced
        store.settle(coming=count)
        text = count > MAX_DRAFT and not self.record_past
        counted = self.session.config.prompt_queries
        last = None if not text else count if counted == "all" else counted
        keys, values = self._lanes(k), self._lanes(v)
        attended = attend(self._query_lanes(q, k.shape[1]), store.view(keys, values), scaling, last)
        store.append(keys, values, attended.mass)
        if text:
            store.settle()
        heads_last = attended.output.reshape(len(cohort.rows), query.shape[1], count, query.shape[3]).transpose(1, 2)
        if columns is None:
            output[cohort.rows] = heads_last
        else:
            output[cohort.rows[:, None], columns] = heads_last

    # -- rows and lanes --------------------------------------------------------------------------------------------

    def _lanes(self, states: Float[Tensor, "rows heads tokens dim"]) -> Float[Tensor, "lanes lane_heads tokens dim"]:
        lanes = self.session.lanes_per_row
        return states.reshape(states.shape[0] * lanes, states.shape[1] // lanes, *states.shape[2:])

    def _query_lanes(self, query: Float[Tensor, "rows heads tokens dim"], kv_heads: int) -> Tensor:
        """`[lanes, lane_heads, group, tokens, dim]`: the query heads of a KV head become its group."""
        grouped = query.unflatten(1, (kv_heads, query.shape[1] // kv_heads))
        lanes = self.session.lanes_per_row
        return grouped.reshape(query.shape[0] * lanes, kv_heads // lanes, *grouped.shape[2:])

    def _scored(
        self,
        scorer: Callable[..., Tensor],
        module: nn.Module,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
    ) -> Float[Tensor, "lanes tokens"]:
        scores = scorer(module, query, keys, values, scaling)
        if scores.shape != keys.shape[:3]:
            raise ValueError(
                f"the prompt scorer returned {tuple(scores.shape)}; it has to return [batch, kv_heads, tokens], here "
                f"{tuple(keys.shape[:3])}"
            )
        lanes = self.session.lanes_per_row
        return scores.float().reshape(keys.shape[0] * lanes, -1, keys.shape[2]).mean(dim=1)

    def _lane_index(self, rows: Int[Tensor, " rows"]) -> Int[Tensor, " lanes"]:
        lanes = self.session.lanes_per_row
        return (rows[:, None] * lanes + torch.arange(lanes, device=rows.device)).flatten()

    def _split(self, counts: tuple[int, ...]) -> None:
        """Divide cohorts whose rows differ in `counts`."""
        cohorts = []
        for cohort in self.cohorts:
            own = torch.tensor([counts[row] for row in cohort.rows.tolist()], device=cohort.rows.device)
            if bool((own == own[0]).all()):
                cohorts.append(cohort)
                continue
            for count in own.unique():
                index = (own == count).nonzero()[:, 0]
                cohorts.append(Cohort(cohort.rows[index], cohort.store.take(self._lane_index(index))))
        self.cohorts = cohorts

    def _take(self, source: Tensor) -> None:
        """Row i becomes a copy of row `source[i]`."""
        if not self.cohorts:
            return
        device = self.cohorts[0].rows.device
        source = source.to(device)
        cohorts = []
        for cohort in self.cohorts:
            place = torch.full((self.batch,), -1, device=device)
            place[cohort.rows] = torch.arange(len(cohort.rows), device=device)
            rows = (place[source] >= 0).nonzero()[:, 0]
            if len(rows):
                cohorts.append(Cohort(rows, cohort.store.take(self._lane_index(place[source[rows]]))))
        self.cohorts, self.batch = cohorts, len(source)
        if self.last is not None:
            self.last = self.last.take(source)

    def extend(self, tokens: int) -> None:
        """Derive the budget from `tokens` more tokens than were seen so far."""
        for cohort in self.cohorts:
            store = cohort.store
            planned = store.plan.tokens
            if planned is not None and store.length + tokens > planned:
                store.replan(self.session.plan(store.length + tokens))

    def memory(self) -> MemoryReport:
        """Bytes of this layer."""
        report = MemoryReport()
        assert self.session.geometry is not None or not self.cohorts
        for cohort in self.cohorts:
            report += cohort.store.memory()
            assert self.session.geometry is not None
            tokens = max(cohort.store.length, cohort.store.plan.tokens or 0)
            report += MemoryReport(full_kv=len(cohort.rows) * tokens * self.session.geometry.token_bytes)
        return report


def _chosen(
    states: Float[Tensor, "batch heads columns dim"],
    rows: Int[Tensor, " rows"],
    columns: Int[Tensor, "rows tokens"] | None,
    batch: int,
) -> Float[Tensor, "rows heads tokens dim"]:
    """The tokens of some rows, without copying where that is all of them."""
    in_order = len(rows) == batch and torch.equal(rows, torch.arange(batch, device=rows.device))
    chosen = states if in_order else states[rows]
    if columns is None:
        return chosen
    index = columns[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return chosen.gather(2, index)
