"""MethodCache: any `Method` as a Transformers cache, on the same attention function as QEvictCache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from qevict.architectures import attention_modules
from qevict.attention import KVHandle
from qevict.budget import MemoryReport, row_bytes
from qevict.config import Budget
from qevict.forward import Forward
from qevict.hidden import AttentionInputs
from qevict.managed_cache import ManagedCache
from qevict.managed_layer import MAX_DRAFT, ManagedLayer, Prefill, RowState
from qevict.methods.base import Allowance, LayerPrefill, Method
from qevict.methods.store import POSITION_BYTES, RowStore
from qevict.rope import Rope
from qevict.session import Session


@dataclass
class MethodSession(Session):
    """The session of a `MethodCache`.

    Attributes:
        waiting: layers whose prompts are not compressed yet.
        inputs: collects the attention modules' inputs until the prompt was read; for methods that look at them.
        trails: whether stores keep note of which tokens they reach.
        decoded: dtype in which stores hold what their codes decode to; None where they do not.
    """

    method: Method
    waiting: list[MethodLayer] = field(default_factory=list, kw_only=True)
    inputs: AttentionInputs | None = field(default=None, kw_only=True)
    trails: bool = field(default=False, kw_only=True)
    decoded: torch.dtype | None = field(default=None, kw_only=True)

    def compress(self) -> None:
        """Compress the prompts that wait, row by row."""
        layers, self.waiting = self.waiting, []
        for row in range(len(layers[0].rows) if layers else 0):
            states = [layer.rows[row] for layer in layers]
            stores = self.method.compress([state.waiting_prefill for state in states], states[0].allowance)
            for state, store in zip(states, stores, strict=True):
                if not self.trails:
                    store.trail = None
                if self.decoded is not None:
                    store.keep_decoded(self.decoded)
                    list(store.blocks())  # at once, so that copies need not decode anything either
                state.store, state.prefill = store, None


@dataclass
class Row:
    """One row of the batch in one layer.

    Attributes:
        length: tokens seen.
        first_position: of its first token.
        announced: S; None if unknown.
        prefill: its prompt while it waits to be compressed; `store` is None until then.
    """

    length: int
    first_position: int
    announced: int | None
    allowance: Allowance
    prefill: LayerPrefill | None = None
    store: RowStore | None = None

    @property
    def waiting_prefill(self) -> LayerPrefill:
        """The prompt, which has to be waiting."""
        assert self.prefill is not None
        return self.prefill

    def copy(self) -> Row:
        """An independent copy."""
        store = None if self.store is None else self.store.copy()
        return Row(self.length, self.first_position, self.announced, self.allowance, self.prefill, store)


class MethodLayer(ManagedLayer):
    """One managed layer of a `MethodCache`. Every row has a store of its own."""

    session: MethodSession
    passed = "announce all tokens with max_new_tokens=, give the prompt in one forward, or use an absolute budget"

    def __init__(self, session: MethodSession, index: int, rope: Rope) -> None:
        super().__init__(session, index, rope)

    def _forget(self) -> None:
        super()._forget()
        self.rows: list[Row] = []
        self.session.waiting = []

    @property
    def is_croppable(self) -> bool:
        """Whether the last forward can still be undone."""
        return self.record_past or not self.rows or any(row.store is None or row.store.fresh for row in self.rows)

    def _begin(self, prefill: Prefill) -> None:
        session = self.session
        if session.method.one_row and self.batch > 1:
            raise ValueError(
                f"{session.method.label} is defined for one sequence; got a batch of {self.batch} rows, run them apart"
            )
        if session.method.needs_hidden and prefill.hidden is None:
            prefill = prefill._replace(hidden=self._hidden())
        self.rows = [self._row(prefill, row) for row in range(self.batch)]
        session.waiting.append(self)
        whole = not session.method.pooled or self.index == session.last_layer
        if whole and not self.record_past:
            session.compress()

    def _hidden(self) -> Tensor:
        session = self.session
        if session.inputs is None:
            raise ValueError(
                f"{session.method.label} looks at hidden states, which are collected for the first prompt only; make a "
                "new cache, or trace the prompt with hidden=True"
            )
        hidden = session.inputs.by_layer.pop(self.index)
        if self.index == session.last_layer:
            session.inputs.close()
            session.inputs = None
        return hidden

    def _row(self, prefill: Prefill, row: int) -> Row:
        session, forward = self.session, prefill.forward
        assert session.geometry is not None
        count, pads = forward.counts[row], forward.columns - forward.counts[row]
        own = slice(None) if forward.valid is None else forward.valid[row]
        asking = slice(None) if forward.valid is None else forward.valid[row, -prefill.query.shape[2] :]
        total, prompt = session.announced(count, pads), session.prompt(count, pads)
        unlimited = session.limit.unlimited or not session.method.takes_budget
        held = None if unlimited else row_bytes(session.limit, session.geometry, total, prompt)
        allowance = Allowance(
            bytes=None if held is None else held // session.geometry.layers,
            new_tokens=None if total is None else total - count,
            exact_new=session.limit.scope == "prompt",
            dtype=session.store_dtype or prefill.keys.dtype,
            geometry=session.geometry,
        )
        first = int(forward.positions[row][own][0])
        heads = prefill.keys.shape[1]
        layer_prefill = LayerPrefill(
            index=self.index,
            query=prefill.query[row].unflatten(0, (heads, -1))[:, :, asking],
            keys=prefill.keys[row][:, own],
            values=prefill.values[row][:, own],
            first_position=first,
            rope=self.rope,
            scaling=prefill.scaling,
            module=prefill.module,
            hidden=None if prefill.hidden is None else prefill.hidden[row][own],
        )
        return Row(count, first, total, allowance, layer_prefill)

    def _continue(self, query: Tensor, handle: KVHandle, forward: Forward, scaling: float) -> Tensor:
        if self.session.waiting:
            self.session.compress()
        if forward.valid is None:
            rows = zip(self.rows, query, handle.keys, handle.values, strict=True)
            return torch.stack([self._attend(row, asking, keys, values, scaling) for row, asking, keys, values in rows])
        output = query.new_zeros(query.shape[0], forward.columns, query.shape[1], query.shape[3])
        for index, row in enumerate(self.rows):
            if not forward.counts[index]:
                continue
            own = forward.valid[index]
            asking, keys, values = (x[index][:, own] for x in (query, handle.keys, handle.values))
            output[index, own] = self._attend(row, asking, keys, values, scaling)
        return output

    def _attend(
        self, row: Row, query: Float[Tensor, "query_heads new dim"], keys: Tensor, values: Tensor, scaling: float
    ) -> Float[Tensor, "new query_heads dim"]:
        assert row.store is not None
        attended = row.store.attend(query.unflatten(0, (keys.shape[0], -1)), keys, values, scaling)
        row.length += keys.shape[1]
        if keys.shape[1] > MAX_DRAFT and not self.record_past:
            row.store.settle(coming=0)
        return attended.flatten(0, 1).transpose(0, 1)

    def _crop(self, dropped: tuple[int, ...]) -> None:
        for row, count in zip(self.rows, dropped, strict=True):
            if row.store is not None:
                if count > row.store.fresh:
                    raise ValueError(
                        f"cannot remove {count} tokens: only the last forward's {row.store.fresh} can be undone; "
                        "activate_past_recording() on the cache beforehand keeps a prompt undoable"
                    )
                row.store.undo(count)
                if row.store.trail is not None:
                    row.store.trail.shorten(count)
            else:
                row.prefill = row.waiting_prefill.first(row.length - count)
                new = row.allowance.new_tokens
                row.allowance = replace(row.allowance, new_tokens=None if new is None else new + count)
            row.length -= count

    def _take(self, source: Tensor) -> None:
        self.rows = [self.rows[index].copy() for index in source.tolist()]

    def _rows(self) -> Iterator[RowState]:
        for index, row in enumerate(self.rows):
            yield RowState(index, row.length, row.first_position + row.length, row.announced)

    def extend(self, tokens: int) -> None:
        """Refused where the budget depends on what was announced.

        Raises:
            ValueError: if the budget is a fraction.
        """
        if self.session.limit.fraction is not None and not self.session.limit.unlimited:
            raise ValueError(
                f"{self.session.method.label} divides its budget when it compresses the prompt; for several turns "
                "announce all tokens with max_new_tokens=, or give an absolute budget"
            )

    def memory(self) -> MemoryReport:
        """Bytes of this layer."""
        report = MemoryReport()
        for row in self.rows:
            allowance = row.allowance
            report += MemoryReport(
                position=POSITION_BYTES,
                reserved=POSITION_BYTES,
                budget=allowance.bytes,
                full_kv=max(row.length, row.announced or 0) * allowance.token_bytes,
            )
            if row.store is not None:
                report += row.store.memory()
            else:
                prompt = row.waiting_prefill
                report += MemoryReport(workspace=prompt.query.nbytes + prompt.keys.nbytes + prompt.values.nbytes)
        return report


class MethodCache(ManagedCache):
    """A drop-in key-value cache that keeps what a method keeps. The prompt has to come in one forward.

    Args:
        model: a decoder-only model.
        method: from `qevict.methods.get_method`, or an instance of your own.
        budget: a fraction of full KV, or a `Budget`; for each row of a batch. Methods that quantise all tokens have an
            operating point of their own and take 1.0 only.
        max_new_tokens: tokens that will be generated. Methods that never give up generated tokens reserve them.
        store_dtype: of full-precision storage; None is the model's.
        allow_untested: accept model types that no test of this project covers.

    Raises:
        ValueError: if the model or the budget cannot be supported.
        InfeasibleBudgetError: at the first forward, if the budget cannot hold what the method must keep.
    """

    _session: MethodSession

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        budget: float | Budget = 1.0,
        *,
        max_new_tokens: int | None = None,
        store_dtype: torch.dtype | None = None,
        allow_untested: bool = False,
    ) -> None:
        self.method = method
        limit = budget if isinstance(budget, Budget) else Budget(fraction=float(budget))
        if not method.takes_budget and not limit.unlimited:
            raise ValueError(
                f"{method.label} has an operating point of its own and takes no budget; `qevict methods --match` shows "
                "which of its settings meets a ratio"
            )
        super().__init__(
            model,
            limit,
            store_dtype=store_dtype,
            allow_untested=allow_untested,
            max_new_tokens=max_new_tokens,
            prompt_tokens=None,
        )
        if method.needs_hidden:
            self._session.inputs = AttentionInputs(attention_modules(model))

    def keep_trails(self) -> None:
        """From the next prompt on, rows keep note of which tokens they reach (`RowStore.trail`), beside what they hold.

        A diagnostic: it takes memory that no report counts.
        """
        self._session.trails = True

    def keep_decoded(self) -> None:
        """From the next prompt on, rows hold what their codes decode to, in the model's dtype, and decode none twice.

        Memory for time, where answers count and not what a cache is for: reports name these bytes as workspace. Same
        results, up to how a product of matrices rounds that decodes fewer tokens at a time.
        """
        self._session.decoded = self._model_dtype

    def __repr__(self) -> str:
        return f"MethodCache({self.method.label}, {len(self.managed)} of {len(self.layers)} layers managed)"

    def _new_session(self, **announced: object) -> Session:
        return MethodSession(**announced, method=self.method)  # type: ignore[arg-type]

    def _layer(self, index: int, rope: Rope) -> MethodLayer:
        return MethodLayer(self._session, index, rope)
