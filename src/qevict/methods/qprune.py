"""Evict, then quantise: the tokens that any selector keeps, in any codec's codes, under one byte budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from qevict.methods.base import Allowance, Kind, LayerPrefill, Method, Properties, Selector, everything
from qevict.methods.code_store import CodeFormat, CodePlan, CodeStore, get_format
from qevict.methods.store import POSITION_BYTES, ExactStore, Kept, RowStore


@dataclass(frozen=True)
class QPrune(Method):
    """Prompt tokens that a selector keeps, in codes: as many as the budget holds.

    The codes, their parameters, the exact tokens behind them and (for codecs that work on un-rotated keys) positions
    all count. Where the budget holds everything exactly, everything stays exact. Otherwise the kept tokens go into
    codes a group at a time, in the order of the text; the latest `residual` ones and those of an incomplete group stay
    exact. Generated tokens follow them in the same way, as they leave the residual; under a budget of scope "prompt"
    they all stay exact.

    Where heads keep different numbers of tokens, each has groups and exact tokens of its own, which take a little more
    than the same tokens spread evenly: the number asked of the selector is lowered until its choice fits.

    Attributes:
        selector: chooses the tokens.
        codec: name of a format (`code_store.FORMATS`: kivi-2/4, turboquant-2/3/4, minmax-2/3/4/8), or a `CodeFormat`.
        residual: latest tokens of a head that stay exact.

    Raises:
        ValueError: if no format has that name, or `residual` is negative.
    """

    selector: Selector
    codec: str | CodeFormat = "kivi-4"
    residual: int = 16

    name: ClassVar[str] = "qprune"
    paper: ClassVar[str] = "eviction, then quantisation: the control for any method that mixes the two"
    kind: ClassVar[Kind] = "hybrid"
    properties: ClassVar[Properties] = Properties(selective_eviction=True, low_bit_retention=True)
    in_name: ClassVar[tuple[str, ...]] = ("selector", "codec")

    def __post_init__(self) -> None:
        self._plan(0, exact_new=False)  # which checks the settings

    @property
    def format(self) -> CodeFormat:
        """How the codec is used."""
        return get_format(self.codec) if isinstance(self.codec, str) else self.codec

    @property
    def base_label(self) -> str:
        """`qprune:snapkv+kivi-4`."""
        return f"{self.name}:{self.selector.label}+{self.format.name}"

    @property
    def observed_queries(self) -> int | None:
        """The selector's."""
        return self.selector.observed_queries

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        """The selector's."""
        return self.selector.pooled

    @property
    def needs_hidden(self) -> bool:  # type: ignore[override]
        """The selector's."""
        return self.selector.needs_hidden

    @property
    def one_row(self) -> bool:  # type: ignore[override]
        """The selector's."""
        return self.selector.one_row

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """The selector's choice in codes; the layers' bytes are given out together."""
        if self._holds_all(prefills[0].tokens, allowance):
            growth = allowance.new_tokens or 0
            return [ExactStore(p.keys, p.values, everything(p), growth, allowance.dtype) for p in prefills]
        plan = self._plan(allowance.growth(self), allowance.exact_new)
        chosen = self._choose(prefills, plan, allowance)
        return [
            CodeStore(p.keys, p.values, kept, plan, p.first_position, p.rope, allowance.dtype)
            for p, kept in zip(prefills, chosen, strict=True)
        ]

    def protected_bytes(self, allowance: Allowance) -> int:
        """The new tokens, the residual ones and the selector's, in codes or exact as they come to be."""
        plan, geometry = self._plan(allowance.growth(self), allowance.exact_new), allowance.geometry
        return plan.bytes(geometry.kv_heads, geometry.head_dim, allowance.dtype, self.selector.unscored_tokens)

    def _plan(self, growth: int, exact_new: bool) -> CodePlan:
        return CodePlan(self.format, self.residual, growth, exact_new)

    def _holds_all(self, prompt: int, allowance: Allowance) -> bool:
        """Whether the allowance holds everything exactly."""
        if allowance.bytes is None:
            return True
        tokens = prompt + allowance.growth(self)
        return tokens * allowance.token_bytes + 2 * POSITION_BYTES <= allowance.bytes

    def _choose(self, prefills: Sequence[LayerPrefill], plan: CodePlan, allowance: Allowance) -> list[Kept]:
        """What the selector keeps of as many tokens as fit."""
        assert allowance.bytes is not None
        room = allowance.bytes - POSITION_BYTES  # the row's first position
        heads, dim, dtype = prefills[0].keys.shape[0], allowance.geometry.head_dim, allowance.dtype
        # n tokens fewer save at most a group of codes and n exact tokens.
        group, exact = plan.group_bytes(heads, dim), plan.exact_bytes(heads, dim, dtype)
        tokens = prefills[0].tokens
        while tokens and (excess := plan.bytes(heads, dim, dtype, tokens) - room) > 0:
            tokens = max(0, tokens - max(1, (excess - group) // exact))
        while True:
            chosen = self.selector.select(prefills, tokens)
            excess = sum(plan.kept_bytes(kept, dim, dtype) - room for kept in chosen)
            if excess <= 0:
                return chosen
            tokens -= max(1, excess // (len(prefills) * exact))


def parse(spec: str, selectors: Mapping[str, Selector]) -> QPrune:
    """The method of a specification as users type it: `qprune:snapkv+kivi-4`, or without `qprune:`.

    Args:
        selectors: by name.

    Raises:
        ValueError: if the specification is not of that form, or names an unknown selector or codec.
    """
    selector, plus, codec = spec.removeprefix(f"{QPrune.name}:").rpartition("+")
    if not plus:
        raise ValueError(f"{spec!r} names no selector and codec; write qprune:<selector>+<codec>")
    if selector not in selectors:
        raise ValueError(f"{spec!r} names no known selector; the known ones are {', '.join(sorted(selectors))}")
    return QPrune(selectors[selector], codec)
