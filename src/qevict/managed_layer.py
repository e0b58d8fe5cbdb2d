"""ManagedLayer: the layer half of the Transformers contract, whatever a layer keeps and however it attends.

A subclass says what to do with a first forward (`_begin`), a later one (`_continue`), dropped columns and chosen rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from qevict.allocator import EVERY, WORTH, give_back
from qevict.attention import AttentionCall, KVHandle, LazyMask
from qevict.budget import MemoryReport
from qevict.forward import Forward
from qevict.rope import Rope
from qevict.session import Session

MAX_DRAFT = 64
"""A later forward of up to this many tokens may be a draft, so it stays pending and can be cropped; a longer one is
taken as text and settled at once, so that only one layer at a time holds it uncompressed."""


class RowState(NamedTuple):
    """How far a row has come: tokens seen, the position that follows them, and the announced S (None: unknown)."""

    row: int
    length: int
    position: int
    announced: int | None


class Prefill(NamedTuple):
    """A first forward of one layer, as the model computed it; rows may be padded on the left.

    Attributes:
        module: the attention module.
        query: `[batch, query_heads, queries, head_dim]`, rotated; those of the last `queries` columns.
        keys, values: `[batch, kv_heads, columns, head_dim]`; keys rotated.
        forward: which columns are tokens, and their positions.
        scaling: factor on the attention logits.
        hidden: `[batch, columns, hidden]` input of the attention module; only for methods that ask for it.
        scores: `[batch, kv_heads, columns]` see `reconstruction`; only for caches that ask for it.
    """

    module: nn.Module
    query: Tensor
    keys: Tensor
    values: Tensor
    forward: Forward
    scaling: float
    hidden: Tensor | None = None
    scores: Tensor | None = None


class ManagedLayer(CacheLayerMixin):
    """The cache of one managed layer.

    Args:
        session: shared with the other layers.
        index: the layer's index in the model.
        rope: the layer's rotary embedding.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    passed = (
        "for a prompt in chunks give the cache prompt_tokens=, for another turn call extend(tokens) first, or use an "
        "absolute budget"
    )
    """What to do where a text passes what was announced."""

    def __init__(self, session: Session, index: int, rope: Rope) -> None:
        super().__init__()
        self.session, self.index, self.rope = session, index, rope
        self.record_past = False
        self._forget()

    # -- what a subclass does --------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Forget everything seen; a subclass empties its storage, too."""
        self.seen = 0
        self.batch = 0
        self.last: Forward | None = None

    @abstractmethod
    def _begin(self, prefill: Prefill) -> None:
        """Take in a first forward, whose output the model's own attention has computed."""

    @abstractmethod
    def _continue(self, query: Tensor, handle: KVHandle, forward: Forward, scaling: float) -> Tensor:
        """Attend a later forward and take it in; `[batch, columns, query_heads, head_dim]`, zeros at padding."""

    @abstractmethod
    def _crop(self, dropped: tuple[int, ...]) -> None:
        """Undo the last tokens of the last forward, so many of each row."""

    @abstractmethod
    def _take(self, source: Tensor) -> None:
        """Row i becomes a copy of row `source[i]`."""

    @abstractmethod
    def _rows(self) -> Iterator[RowState]:
        """How far every row has come; nothing before the first forward."""

    @property
    @abstractmethod
    def is_croppable(self) -> bool:
        """Whether the last forward can still be undone."""

    @abstractmethod
    def extend(self, tokens: int) -> None:
        """Derive the budget from `tokens` more tokens than were seen so far."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """Bytes of this layer."""

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

    def activate_past_recording(self) -> None:
        """From now on every forward, also a long one, stays pending until the next, so that it can be cropped."""
        self.record_past = True

    def crop(self, count: int) -> None:
        """Undo the last |count| columns.

        Raises:
            ValueError: if they reach back before the last forward.
        """
        removed = abs(count)
        if removed == 0 or not self.seen:
            return
        assert self.last is not None
        if removed > self.last.columns:
            raise ValueError(
                f"cannot remove {removed} tokens: only the last forward's {self.last.columns} can be undone, older "
                "tokens have been scored and routed"
            )
        self._crop(self.last.last_tokens(removed))
        self.last = self.last.first(self.last.columns - removed)
        self.seen -= removed
        if self.seen == 0:  # the next forward is a first one again
            self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row `beam_idx[i]`."""
        self._reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one behind the other."""
        self._reorder(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the given order."""
        self._reorder(torch.arange(self.batch)[indices.cpu()] if indices.dtype == torch.bool else indices)

    def _reorder(self, source: Tensor) -> None:
        if not self.seen:
            return
        self._take(source)
        self.batch = len(source)
        if self.last is not None:
            self.last = self.last.take(source.to(self.last.positions.device))

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
        output: Tensor | None = None if self.seen else call.exact(query, handle.keys, handle.values, mask)[0]
        query, handle = query.detach(), KVHandle(self, handle.keys.detach(), handle.values.detach())
        with torch.inference_mode(False), torch.no_grad():
            forward = self._read(module, handle, mask, call)
            if output is None:
                output = self._continue(query, handle, forward, call.scaling)
                self._advance(forward)
            else:
                self.take_prefill(Prefill(module, query, handle.keys, handle.values, forward, call.scaling))
                if query.device.type == "cpu" and handle.keys.nbytes >= WORTH and self.index % EVERY == EVERY - 1:
                    give_back()
        return output

    def take_prefill(self, prefill: Prefill) -> None:
        """Take in a first forward whose attention has been computed already."""
        self.batch = prefill.keys.shape[0]
        self._begin(prefill)
        self._advance(prefill.forward)

    def _advance(self, forward: Forward) -> None:
        self.seen += forward.columns
        self.last = forward

    def _read(self, module: nn.Module, handle: KVHandle, mask: LazyMask | None, call: AttentionCall) -> Forward:
        session = self.session
        self.check_module(module)
        batch, columns = handle.keys.shape[0], handle.keys.shape[2]
        if self.index == session.first_layer or session.forward is None:
            positions = call.settings.get("position_ids")
            session.forward = Forward.read(mask, positions, batch, columns, self.seen, handle.keys.device)
            self.check(session.forward)
        if session.forward.start != self.seen:
            raise RuntimeError(
                f"layer {self.index} has seen {self.seen} tokens and the first managed layer {session.forward.start}: "
                "a forward was interrupted between them; reset() the cache, or make a new one"
            )
        return session.forward.to(handle.keys.device)

    def check_module(self, module: nn.Module) -> None:
        """Refuse a layer of another model than the cache was made for."""
        if module.config is not self.session.model_config():
            raise ValueError(
                f"this cache was made for another model than the {type(module).__name__} that uses it; make one cache "
                "for each model"
            )

    def check(self, forward: Forward) -> None:
        """Refuse a forward that the cache would get wrong; done by the first managed layer only."""
        if not self.seen:
            for row, count in enumerate(forward.counts):
                if count == 0:
                    raise ValueError(f"row {row} of the batch has no tokens: its attention mask is all zeros")
                self.session.check_length(count)
                _check_positions(forward, row, start=None)
        for state in self._rows():
            count = forward.counts[state.row]
            self._check_announced(state, count)
            self.session.check_length(state.length + count)
            _check_positions(forward, state.row, state.position)

    def _check_announced(self, state: RowState, count: int) -> None:
        limit = self.session.limit
        if limit.fraction is None or state.announced is None or count == 1:
            return
        if state.length + count > state.announced + MAX_DRAFT:
            raise ValueError(
                f"{count} tokens after {state.length} pass the {state.announced} that the budget of {limit} was "
                f"derived from; {self.passed}"
            )


def _check_positions(forward: Forward, row: int, start: int | None) -> None:
    """Refuse positions that do not count up from `start`, or from wherever a first forward begins (None)."""
    given = forward.positions[row] if forward.valid is None else forward.positions[row, forward.valid[row]]
    if start is not None and len(given) and int(given[0]) != start:
        raise ValueError(
            f"row {row} continues at positions {given.tolist()[:3]}..., but the cache ends before position "
            f"{start}; positions have to be consecutive"
        )
    if bool((given.diff() != 1).any()):
        raise ValueError(f"the positions of row {row} leave gaps or go back; positions have to be consecutive")
