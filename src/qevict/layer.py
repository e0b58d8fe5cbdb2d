"""QEvictLayer: one attention layer of the three-tier cache. Rows in, cohorts inside, attention out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.attention import KVHandle
from qevict.budget import MemoryReport
from qevict.forward import Forward
from qevict.kernels import attend
from qevict.managed_layer import MAX_DRAFT, ManagedLayer, Prefill, RowState
from qevict.rope import Rope
from qevict.session import TierSession
from qevict.tiers import TierStore


@dataclass
class Cohort:
    """Rows that have seen equally many tokens, in ascending order, and their storage."""

    rows: Int[Tensor, " rows"]
    store: TierStore


class QEvictLayer(ManagedLayer):
    """The three tiers of one managed layer; made by `QEvictCache`."""

    session: TierSession

    def __init__(self, session: TierSession, index: int, rope: Rope) -> None:
        super().__init__(session, index, rope)

    def _forget(self) -> None:
        super()._forget()
        self.cohorts: list[Cohort] = []

    @property
    def is_croppable(self) -> bool:
        """Whether the last forward can still be undone."""
        return self.record_past or not self.cohorts or any(c.store.pending is not None for c in self.cohorts)

    def _crop(self, dropped: tuple[int, ...]) -> None:
        self._split(dropped)
        for cohort in self.cohorts:
            count = dropped[int(cohort.rows[0])]
            if count:
                cohort.store.crop(count)

    def _rows(self) -> Iterator[RowState]:
        lanes = self.session.lanes_per_row
        for cohort in self.cohorts:
            store = cohort.store
            first = store.first_position[::lanes].tolist()
            for row, position in zip(cohort.rows.tolist(), first, strict=True):
                yield RowState(row, store.length, position + store.length, store.plan.tokens)

    # -- attention -------------------------------------------------------------------------------------------------

    def _begin(self, prefill: Prefill) -> None:
        session, forward = self.session, prefill.forward
        dtype = session.store_dtype or prefill.keys.dtype
        for rows, columns, count in forward.equal_rows(range(self.batch)):
            # Queries may be those of the last columns only, which padding on the left leaves alone.
            last = min(count, prefill.query.shape[2])
            recent = None if columns is None else columns[:, -last:] - (forward.columns - prefill.query.shape[2])
            q = _chosen(prefill.query, rows, recent)[:, :, -last:]
            k, v = (_chosen(t, rows, columns) for t in (prefill.keys, prefill.values))
            first = forward.positions[rows, 0] if columns is None else forward.positions[rows].gather(1, columns)[:, 0]
            pads = forward.columns - count
            store = TierStore(
                session.plan(session.announced(count, pads), session.prompt(count, pads)),
                session.config,
                lanes=len(rows) * session.lanes_per_row,
                heads=k.shape[1] // session.lanes_per_row,
                head_dim=k.shape[3],
                rope=self.rope,
                first_position=first.repeat_interleave(session.lanes_per_row),
                dtype=dtype,
            )
            scores = self._prompt_scores(prefill, rows, columns, (q, k, v))
            store.begin(self._query_lanes(q, k.shape[1]), self._lanes(k), self._lanes(v), prefill.scaling, scores)
            if not self.record_past:
                store.settle()
            self.cohorts.append(Cohort(rows, store))

    def _continue(self, query: Tensor, handle: KVHandle, forward: Forward, scaling: float) -> Tensor:
        if forward.valid is not None:
            self._split(forward.counts)
        elif len(self.cohorts) == 1:  # the usual case, which needs no copies
            return self._attended(self.cohorts[0].store, query, handle.keys, handle.values, scaling)
        batch, heads, columns, dim = query.shape
        output = query.new_zeros(batch, columns, heads, dim)
        for cohort in self.cohorts:
            self._continue_cohort(cohort, query, handle, forward, scaling, output)
        return output

    def _continue_cohort(
        self, cohort: Cohort, query: Tensor, handle: KVHandle, forward: Forward, scaling: float, output: Tensor
    ) -> None:
        count = forward.counts[int(cohort.rows[0])]
        if count == 0:
            return
        columns = forward.tokens(cohort.rows, count)
        q, k, v = (_chosen(t, cohort.rows, columns) for t in (query, handle.keys, handle.values))
        heads_last = self._attended(cohort.store, q, k, v, scaling)
        if columns is None:
            output[cohort.rows] = heads_last
        else:
            output[cohort.rows[:, None], columns] = heads_last

    def _attended(
        self,
        store: TierStore,
        query: Float[Tensor, "rows heads tokens dim"],
        keys: Tensor,
        values: Tensor,
        scaling: float,
    ) -> Float[Tensor, "rows tokens heads dim"]:
        """Attention of the new tokens of a cohort's rows, which its store takes in."""
        count = query.shape[2]
        if store.outgrows(count) and self.session.limit.fraction is None:
            # An absolute budget does not depend on what was announced.
            store.replan(self.session.plan(None, codec=store.used_codec))
        store.settle(coming=count)
        text = count > MAX_DRAFT and not self.record_past
        counted = self.session.config.prompt_queries
        last = None if not text else count if counted == "all" else counted
        heads, keys, values = keys.shape[1], self._lanes(keys), self._lanes(values)
        attended = attend(self._query_lanes(query, heads), store.view(keys, values), scaling, last)
        store.append(keys, values, attended.mass)
        if text:
            store.settle()
        return attended.output.reshape(query.shape).transpose(1, 2)

    # -- rows and lanes --------------------------------------------------------------------------------------------

    def _lanes(self, states: Float[Tensor, "rows heads tokens dim"]) -> Float[Tensor, "lanes lane_heads tokens dim"]:
        lanes = self.session.lanes_per_row
        return states.reshape(states.shape[0] * lanes, states.shape[1] // lanes, *states.shape[2:])

    def _query_lanes(self, query: Float[Tensor, "rows heads tokens dim"], kv_heads: int) -> Tensor:
        """`[lanes, lane_heads, group, tokens, dim]`: the query heads of a KV head become its group."""
        grouped = query.unflatten(1, (kv_heads, query.shape[1] // kv_heads))
        lanes = self.session.lanes_per_row
        return grouped.reshape(query.shape[0] * lanes, kv_heads // lanes, *grouped.shape[2:])

    def _prompt_scores(
        self,
        prefill: Prefill,
        rows: Int[Tensor, " rows"],
        columns: Int[Tensor, "rows tokens"] | None,
        states: tuple[Tensor, Tensor, Tensor],
    ) -> Float[Tensor, "lanes tokens"] | None:
        """What the prompt scorer says of the tokens of some rows; None without one."""
        scorer = self.session.config.prompt_scorer
        if scorer is None:
            return None
        if callable(scorer):
            return self._token_scores(scorer(prefill.module, *states, prefill.scaling), states[1])
        if prefill.scores is None:
            raise ValueError(
                f"prompt_scorer={scorer!r} reads the prompt twice, which a forward cannot: give the cache its prompt "
                "with qevict.read_prompt(model, cache, input_ids), then generate"
            )
        return self._token_scores(_chosen(prefill.scores[..., None], rows, columns)[..., 0], states[1])

    def _token_scores(self, scores: Tensor, keys: Tensor) -> Float[Tensor, "lanes tokens"]:
        """A prompt scorer's scores as the lanes take them."""
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
        device = self.cohorts[0].rows.device
        source = source.to(device)
        cohorts = []
        for cohort in self.cohorts:
            place = torch.full((self.batch,), -1, device=device)
            place[cohort.rows] = torch.arange(len(cohort.rows), device=device)
            rows = (place[source] >= 0).nonzero()[:, 0]
            if len(rows):
                cohorts.append(Cohort(rows, cohort.store.take(self._lane_index(place[source[rows]]))))
        self.cohorts = cohorts

    def extend(self, tokens: int) -> None:
        """Derive the budget from `tokens` more tokens than were seen so far."""
        for cohort in self.cohorts:
            store = cohort.store
            planned = store.plan.tokens
            if planned is not None and store.length + tokens > planned:
                prompt = store.plan.prompt or 0
                store.replan(self.session.plan(store.length + tokens, prompt, store.used_codec))

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
) -> Float[Tensor, "rows heads tokens dim"]:
    """The tokens of some rows, without copying where that is all of them."""
    chosen = states if len(rows) == len(states) else states[rows]
    if columns is None:
        return chosen
    index = columns[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return chosen.gather(2, index)
