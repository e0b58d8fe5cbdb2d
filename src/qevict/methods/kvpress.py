"""Any press of NVIDIA's kvpress that shortens keys and values, as a method.

kvpress is an optional package with a narrow range of Transformers releases (0.5.5: below 5.3), so it may need an
environment of its own: `pip install qevict kvpress`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qevict.budget import InfeasibleBudgetError
from qevict.methods.base import Allowance, Kind, LayerPrefill, Method, Properties, everything, prompt_tokens
from qevict.methods.store import ExactStore, RowStore

PREFIX = "kvpress:"
_SPEC = re.compile(r"(\w+)(?:\((.*)\))?")


@dataclass(frozen=True)
class KVPress(Method):
    """A press by its class name; one that wraps another names it in brackets: `ChunkKVPress(SnapKVPress)`.

    The press decides how it rounds the number of tokens that it is asked to keep; those over budget are refused.
    Presses that only mask what they evict save no memory and are refused, as are those that need more than a prompt's
    hidden states, keys and values (a second pass, decoding, a download).

    Attributes:
        press: the name of the class.
    """

    press: str

    name: ClassVar[str] = "kvpress"
    paper: ClassVar[str] = "kvpress (NVIDIA)"
    source: ClassVar[str] = "the class's own defaults"
    kind: ClassVar[Kind] = "eviction"
    properties: ClassVar[Properties] = Properties(selective_eviction=True)
    needs_hidden: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _build(self.press)

    @property
    def label(self) -> str:
        """`kvpress:SnapKVPress`."""
        return PREFIX + self.press

    @property
    def observed_queries(self) -> int | None:
        """All of them where the press wants attention weights, else none: it makes its own."""
        return None if "ObservedAttention" in self.press else 0

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """What the press returns, with room for the announced new tokens."""
        if allowance.bytes is None:
            growth = allowance.new_tokens or 0
            return [ExactStore(p.keys, p.values, everything(p), growth, allowance.dtype) for p in prefills]
        growth = allowance.growth(self)
        return [self._pressed(p, prompt_tokens(self, allowance, growth), growth, allowance.dtype) for p in prefills]

    def protected_bytes(self, allowance: Allowance) -> int:
        """The new tokens; what else a press protects it does not say."""
        return allowance.growth(self) * allowance.token_bytes

    def _pressed(self, prefill: LayerPrefill, tokens: int, growth: int, dtype: torch.dtype) -> RowStore:
        if tokens >= prefill.tokens:
            return ExactStore(prefill.keys, prefill.values, everything(prefill), growth, dtype)
        # A press rounds as it likes (whole chunks, say), so it is asked for less until what it keeps fits.
        asked = kept = tokens
        while asked > 0:
            keys, values = self._ask(prefill, asked)
            kept = keys.shape[1]
            if kept <= tokens:
                whole = [torch.arange(kept, device=keys.device)] * len(keys)
                store = ExactStore(keys, values, whole, growth, dtype)
                store.trail = None  # a press does not say which tokens it has returned
                return store
            asked -= kept - tokens
        raise InfeasibleBudgetError(f"{self.label} keeps at least {kept} tokens, but the budget holds {tokens}")

    def _ask(self, prefill: LayerPrefill, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[heads, kept, dim]` of the press when it is asked for so many tokens."""
        press, module = _build(self.press), prefill.module
        # It keeps int(all * (1 - ratio)); half a token more survives the rounding of floats.
        press.compression_ratio = 1 - (tokens + 0.5) / prefill.tokens
        assert prefill.hidden is not None  # by needs_hidden
        attentions = None
        if self.observed_queries is None:
            attentions = prefill.attention(prefill.tokens).flatten(0, 1)[None]
        kwargs = {"position_embeddings": _cos_sin(prefill, prefill.positions), "cache_position": prefill.positions}
        with _rotary_on(prefill):
            keys, values = press.compress(
                module, prefill.hidden[None], prefill.keys[None], prefill.values[None], attentions, kwargs
            )
        if getattr(module, "masked_key_indices", None) is not None:
            module.masked_key_indices = None  # type: ignore[assignment]
            raise ValueError(f"{self.label} keeps all tokens and masks those that it evicts: it saves no memory")
        return keys[0], values[0]


@contextmanager
def _rotary_on(prefill: LayerPrefill) -> Iterator[None]:
    """Presses look for the model's rotary embedding on the attention module; it is there while they do."""
    module = prefill.module
    if hasattr(module, "rotary_emb"):
        yield
        return
    module.rotary_emb = lambda like, positions: _cos_sin(prefill, positions[0])  # type: ignore[assignment]
    try:
        yield
    finally:
        del module.rotary_emb


def _cos_sin(prefill: LayerPrefill, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin `[1, tokens, head_dim]`, as the models that kvpress supports lay them out."""
    cos, sin = prefill.rope.tables(int(positions[-1]) + 1, prefill.keys.device)
    cos, sin = (torch.cat([table[positions], table[positions]], dim=-1)[None] for table in (cos, sin))
    return cos.to(prefill.keys.dtype), sin.to(prefill.keys.dtype)


def _build(spec: str) -> Any:
    """A press from its name.

    Raises:
        ValueError: if kvpress is not installed, has no such press, or the press cannot serve as a method.
    """
    try:
        library = importlib.import_module("kvpress")
    except ImportError as error:
        raise ValueError(
            f"{PREFIX}{spec} needs kvpress, which needs Transformers below 5.3: pip install kvpress, in an environment "
            "of its own"
        ) from error
    match = _SPEC.fullmatch(spec)
    cls: Any = getattr(library, match[1], None) if match else None
    if match is None or library.BasePress not in getattr(cls, "__mro__", ()):
        raise ValueError(f"kvpress has no press {spec!r}; write SnapKVPress, or ChunkKVPress(SnapKVPress)")
    try:
        made = cls(_build(match[2])) if match[2] else cls()
    except TypeError as error:
        raise ValueError(f"{spec} needs another press in brackets, such as {match[1]}(SnapKVPress)") from error
    except AssertionError as error:
        raise ValueError(f"{spec}: {error}") from error
    base = library.BasePress
    own = [n for n in ("forward_hook", "__call__") if getattr(cls, n) is not getattr(base, n)]
    needs_model = match[2] is None and cls.post_init_from_model is not base.post_init_from_model
    if own or needs_model or cls.compress is base.compress:
        raise ValueError(f"{spec} does more than compress a layer's keys and values, so it cannot serve as a method")
    return made
