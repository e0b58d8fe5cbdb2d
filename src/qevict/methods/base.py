"""What a method is: frozen settings that turn the prefill of a row into what its layers keep.

A `Method` declares its paper, its kind and the four properties of the QEvict paper's table 1, and implements
`compress`. A `Selector` is the common case: it says which tokens of the prompt stay, head by head, and keeps them
exactly. What a row keeps in one layer is a `RowStore`; `MethodCache` makes and runs them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from qevict.budget import InfeasibleBudgetError, MemoryReport
from qevict.config import Budget
from qevict.geometry import KVGeometry
from qevict.methods.store import POSITION_BYTES, ExactStore, Kept, RowStore
from qevict.rope import Rope

Kind = Literal["full", "eviction", "quantization", "hybrid"]


@runtime_checkable
class MeasuredCache(Protocol):
    """A Transformers cache that knows its bytes."""

    def memory(self) -> MemoryReport:
        """Bytes really held."""
        ...

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen."""
        ...


class Properties(NamedTuple):
    """The columns of the QEvict paper's table 1."""

    selective_eviction: bool = False
    low_bit_retention: bool = False
    window_routing: bool = False
    dynamic_recovery: bool = False


@dataclass(frozen=True)
class LayerPrefill:
    """The prompt of one row in one layer, as the model computed it, padding left out.

    Attributes:
        index: the layer's index in the model.
        query: rotated queries of the last `queries` tokens, the query heads of a KV head side by side.
        keys, values: of all tokens; keys rotated.
        first_position: absolute position of the first token; the others follow without gaps.
        rope: the layer's rotary embedding.
        scaling: factor on the attention logits.
        module: the attention module, for methods that look at its weights.
        hidden: its input; only for methods that ask for it (`needs_hidden`).
    """

    index: int
    query: Float[Tensor, "heads group queries dim"]
    keys: Float[Tensor, "heads tokens dim"]
    values: Float[Tensor, "heads tokens dim"]
    first_position: int
    rope: Rope
    scaling: float
    module: nn.Module
    hidden: Float[Tensor, "tokens hidden"] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPrefill:
        """Itself: it is never written to, and its module is the model's."""
        return self

    @property
    def shared_parts(self) -> tuple[Any, ...]:
        """What tells it from others where work is shared; the rotary embedding is the module's."""
        return (self.query, self.keys, self.values, self.first_position, self.scaling, self.module, self.hidden)

    @property
    def tokens(self) -> int:
        """How many tokens the prompt has."""
        return self.keys.shape[1]

    @property
    def positions(self) -> Int[Tensor, " tokens"]:
        """Absolute positions of the tokens."""
        return torch.arange(self.first_position, self.first_position + self.tokens, device=self.keys.device)

    def first(self, tokens: int) -> LayerPrefill:
        """The first tokens alone."""
        dropped = self.tokens - tokens
        return dataclasses.replace(
            self,
            query=self.query[:, :, : self.query.shape[2] - dropped],
            keys=self.keys[:, :tokens],
            values=self.values[:, :tokens],
            hidden=None if self.hidden is None else self.hidden[:tokens],
        )

    def attention(self, last: int) -> Float[Tensor, "heads group last tokens"]:
        """Causal attention probabilities of the last queries over all tokens, in float32.

        Raises:
            ValueError: if fewer queries were kept.
        """
        return next(self.attention_blocks(last, block=max(1, last)))

    def attention_blocks(
        self, last: int | None = None, block: int = 128
    ) -> Iterator[Float[Tensor, "heads group some tokens"]]:
        """The same, a block of queries at a time, earliest first, so that no tokens x tokens matrix is ever held.

        Args:
            last: how many of the last queries (at most as many as there are tokens); None for all.
        """
        last = self.tokens if last is None else min(last, self.tokens)
        kept = self.query.shape[2]
        if last > kept:
            raise ValueError(f"queries of the last {kept} tokens were kept, but those of {last} are needed")
        keys, place = self.keys.float(), torch.arange(self.tokens, device=self.keys.device)
        for start in range(kept - last, kept, block):
            query = self.query[:, :, start : min(start + block, kept)].float()
            logits = torch.einsum("hgqd,htd->hgqt", query, keys) * self.scaling
            own = self.tokens - kept + start + torch.arange(query.shape[2], device=keys.device)
            yield logits.masked_fill_(place > own[:, None], -torch.inf).softmax(dim=-1)


@dataclass(frozen=True)
class Allowance:
    """What a row may keep in each layer.

    Attributes:
        bytes: of one layer, at most, at any step; None where there is no limit. Layers share a row's bytes evenly;
            a pooled method may give them out otherwise, as long as the sum stays.
        new_tokens: tokens announced after the first forward, which the bytes have to hold as well; None if unknown.
        exact_new: whether all of them have to stay exact (scope "prompt").
        dtype: of full-precision storage.
        geometry: of the managed layers.
    """

    bytes: int | None
    new_tokens: int | None
    exact_new: bool
    dtype: torch.dtype
    geometry: KVGeometry

    @property
    def token_bytes(self) -> int:
        """Bytes of an uncompressed token in one layer."""
        return self.geometry.token_bytes

    def growth(self, method: Method) -> int:
        """Announced new tokens, for a method that reserves them.

        Raises:
            ValueError: if they were not announced.
        """
        if self.new_tokens is None:
            raise ValueError(
                f"{method.label} never gives up generated tokens, so its budget has to pay for them beforehand: give "
                "max_new_tokens="
            )
        return self.new_tokens


@dataclass(frozen=True)
class Described:
    """What every method says of itself. Subclasses are frozen dataclasses; they hold settings and no state.

    Class attributes that a subclass declares:
        name: as users type it.
        paper: title or short reference.
        source: where the default settings are stated.
        kind: "eviction" and "hybrid" methods take a budget; "quantization" ones have an operating point of their own.
        properties: the columns of table 1.
        in_name: settings that `base_label` tells already.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    source: ClassVar[str] = ""
    kind: ClassVar[Kind]
    properties: ClassVar[Properties]
    in_name: ClassVar[tuple[str, ...]] = ()

    @property
    def base_label(self) -> str:
        """The name under which its defaults are known; of a method with several, one of them."""
        return self.name

    @property
    def label(self) -> str:
        """What results call it, and `get_method` understands: `snapkv`, `snapkv[window=64;kernel=5]`."""
        changed = [f"{name}={value}" for name, value in self.changes().items()]
        return self.base_label + (f"[{';'.join(changed)}]" if changed else "")

    def changes(self) -> dict[str, Any]:
        """Settings that are not the defaults of `base_label`, in the order of their declaration."""
        fields = (f for f in dataclasses.fields(self) if f.name not in self.in_name)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    @property
    def takes_budget(self) -> bool:
        """Whether a budget decides how much is kept; otherwise the settings alone do."""
        return self.kind in ("eviction", "hybrid")

    @property
    def observed_queries(self) -> int | None:
        """How many of the last prompt queries it looks at; None for all."""
        return 0

    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def with_settings(self, **changes: Any) -> Described:
        """A copy with some settings changed.

        Raises:
            ValueError: if there is no such setting, or a value is not allowed.
        """
        known = self.settings()
        for name in changes:
            if name not in known:
                raise ValueError(f"{self.name} has no setting {name!r}; it has {', '.join(known) or 'none'}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class OwnCache(Described, ABC):
    """A method that comes with a cache of its own, which has a `memory()`."""

    @abstractmethod
    def cache(
        self,
        model: PreTrainedModel,
        budget: Budget,
        *,
        max_new_tokens: int | None,
        store_dtype: torch.dtype | None,
        allow_untested: bool,
    ) -> MeasuredCache:
        """An empty cache for a model; arguments as for `MethodCache`."""


@dataclass(frozen=True)
class Method(Described, ABC):
    """A method that runs in a `MethodCache`.

    Class attributes beside those of `Described`:
        pooled: whether it has to see all layers of a prompt before it can compress any.
        needs_hidden: whether it looks at the input of the attention modules.
        one_row: whether its definition is for one sequence, so that a batch is refused.
    """

    pooled: ClassVar[bool] = False
    needs_hidden: ClassVar[bool] = False
    one_row: ClassVar[bool] = False

    @abstractmethod
    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """What a row keeps in each of the given layers: all managed ones for a pooled method, one at a time else.

        Raises:
            InfeasibleBudgetError: if the allowance cannot hold what the method must keep.
        """

    def variants(self) -> Iterator[Method]:
        """Settings to try, most bytes first, when a ratio is to be met; itself alone where a budget decides."""
        yield self

    def protected_bytes(self, allowance: Allowance) -> int | None:
        """Bytes of a layer for tokens that are kept whatever their score; None where it cannot be told."""
        return None


@dataclass(frozen=True)
class Selector(Method):
    """A method that keeps some of the prompt's tokens exactly, and all later ones; the budget reserves those."""

    kind: ClassVar[Kind] = "eviction"
    properties: ClassVar[Properties] = Properties(selective_eviction=True)

    @property
    def least_tokens(self) -> int:
        """The fewest prompt tokens of a head that the method can keep (its observation window, say)."""
        return 1

    def protected_bytes(self, allowance: Allowance) -> int:
        """The new tokens, and an observation window."""
        return ((allowance.new_tokens or 0) + self.unscored_tokens) * allowance.token_bytes

    @property
    def unscored_tokens(self) -> int:
        """Prompt tokens of a head that are kept whatever their score."""
        return self.least_tokens if self.least_tokens > 1 else 0

    @abstractmethod
    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """Which tokens stay: ascending indices for each KV head.

        Args:
            tokens: at least `least_tokens` and fewer than the prompt has. On average a head may keep so many; they
                need not be the same number for each.
        """

    def keep_pooled(self, prefills: Sequence[LayerPrefill], tokens: int) -> list[Kept]:
        """The same for all layers of a row; `tokens` is the average over layers as well."""
        return [self.keep(prefill, tokens) for prefill in prefills]

    def select(self, prefills: Sequence[LayerPrefill], tokens: int) -> list[Kept]:
        """`keep_pooled`, or everything where the budget holds it.

        Raises:
            InfeasibleBudgetError: if `tokens` are fewer than the method must keep.
        """
        if tokens >= prefills[0].tokens:
            return [everything(prefill) for prefill in prefills]
        if tokens < self.least_tokens:
            raise InfeasibleBudgetError(
                f"{self.label} keeps at least {self.least_tokens} prompt tokens, but the budget holds {max(0, tokens)} "
                "beside the new tokens; raise the budget or announce fewer new tokens"
            )
        return self.keep_pooled(prefills, tokens)

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """Exact storage of the kept tokens, with room for the announced new ones."""
        if allowance.bytes is None:
            growth = allowance.new_tokens or 0
            return [ExactStore(p.keys, p.values, everything(p), growth, allowance.dtype) for p in prefills]
        growth = allowance.growth(self)
        chosen = self.select(prefills, prompt_tokens(self, allowance, growth))
        return [
            ExactStore(p.keys, p.values, kept, growth, allowance.dtype)
            for p, kept in zip(prefills, chosen, strict=True)
        ]


def prompt_tokens(method: Method, allowance: Allowance, growth: int) -> int:
    """Exact prompt tokens that a layer's bytes hold beside `growth` new ones.

    Raises:
        InfeasibleBudgetError: if there is none.
    """
    assert allowance.bytes is not None
    room = allowance.bytes - POSITION_BYTES * (1 + allowance.geometry.kv_heads)
    tokens = room // allowance.token_bytes - growth
    if tokens < 1:
        raise InfeasibleBudgetError(
            f"a budget of {allowance.bytes:,} bytes a layer cannot hold the {growth} new tokens that {method.label} "
            f"keeps exactly ({growth * allowance.token_bytes:,} bytes) and any of the prompt; raise the budget or "
            "announce fewer new tokens"
        )
    return tokens


def everything(prefill: LayerPrefill) -> Kept:
    """All tokens of every head."""
    return [torch.arange(prefill.tokens, device=prefill.keys.device)] * prefill.keys.shape[0]


def best(scores: Float[Tensor, "heads tokens"], tokens: int) -> Kept:
    """The `tokens` highest-scored tokens of each head, ascending; ties go to the later token."""
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :tokens]
    chosen = scores.shape[-1] - 1 - order
    return list(chosen.sort(dim=-1).values)
