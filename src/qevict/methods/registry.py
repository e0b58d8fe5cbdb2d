"""Methods by name, and the cache of any of them.

Others add theirs as entry points of the group `qevict.methods`: a name, and a `Method` (or a class with defaults).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from transformers import PreTrainedModel

from qevict.config import Budget
from qevict.methods.adakv import AdaKV
from qevict.methods.base import Described, MeasuredCache, Method, OwnCache, Selector
from qevict.methods.cache import MethodCache
from qevict.methods.chunkkv import ChunkKV
from qevict.methods.criticalkv import CriticalAdaKV, CriticalKV
from qevict.methods.defensivekv import DefensiveKV, LayerDefensiveKV
from qevict.methods.expected_attention import ExpectedAttention
from qevict.methods.full import FullKV
from qevict.methods.h2o import H2O, ObservedAttention
from qevict.methods.hf_quantized import HFQuantized
from qevict.methods.keynorm import KeyNorm
from qevict.methods.kivi import KIVI
from qevict.methods.kvpress import PREFIX as KVPRESS
from qevict.methods.kvpress import KVPress
from qevict.methods.kvquant import KVQuant
from qevict.methods.qevict import QEvict
from qevict.methods.qprune import QPrune
from qevict.methods.qprune import parse as parse_qprune
from qevict.methods.snapkv import SnapKV
from qevict.methods.streaming import StreamingLLM
from qevict.methods.tova import TOVA
from qevict.methods.turboquant import TurboQuant
from qevict.methods.zipcache import ZipCache

ENTRY_POINTS = "qevict.methods"
QPRUNE = "qprune:"

_PRESETS: dict[str, Callable[[], Described]] = {
    "full": FullKV,
    "qevict": QEvict,
    "qevict-paper": QEvict.at_matched_bytes,
    "streamingllm": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "adakv": AdaKV,
    "criticalkv": CriticalKV,
    "criticaladakv": CriticalAdaKV,
    "defensivekv": DefensiveKV,
    "layerdefensivekv": LayerDefensiveKV,
    "chunkkv": ChunkKV,
    "tova": TOVA,
    "keynorm": KeyNorm,
    "expectedattention": ExpectedAttention,
    "observedattention": ObservedAttention,
    "kivi-2": KIVI,
    "kivi-4": lambda: KIVI(bits=4),
    "kvquant-2": KVQuant,
    "kvquant-3": lambda: KVQuant(3),
    "kvquant-4": lambda: KVQuant(4),
    "zipcache": ZipCache,
    "turboquant-2": lambda: TurboQuant(2),
    "turboquant-3": lambda: TurboQuant(3),
    "turboquant-4": lambda: TurboQuant(4),
    "qprune:snapkv+kivi-4": lambda: QPrune(SnapKV(), "kivi-4"),
    "qprune:adakv+turboquant-3": lambda: QPrune(AdaKV(), "turboquant-3"),
    "qprune:chunkkv+turboquant-4": lambda: QPrune(ChunkKV(), "turboquant-4"),
    "qprune:snapkv+minmax-4": lambda: QPrune(SnapKV(), "minmax-4"),
    "hf-quantized-2": lambda: HFQuantized(bits=2),
    "hf-quantized-4": HFQuantized,
}


@cache
def _installed() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def method_names() -> list[str]:
    """Names that `get_method` knows; beside them `qprune:SELECTOR+CODEC` and `kvpress:PRESS`."""
    return [*_PRESETS, *(name for name in _installed() if name not in _PRESETS)]


def get_method(spec: str, **settings: Any) -> Described:
    """A method by name, some of its settings changed: `get_method("snapkv", window=64)`, or as people type it,
    `get_method("snapkv[window=64;kernel=5]")`, which is what its label says.

    Raises:
        ValueError: if there is no such method or setting, or what it needs is not installed.
    """
    name, bracket, inside = spec.partition("[")
    if bracket and not inside.endswith("]"):
        raise ValueError(f"method is {spec!r}; settings are written NAME[setting=value;setting=value]")
    changes = parse_settings(inside.removesuffix("]").split(";")) if bracket else {}
    changes |= settings
    method = _named(name)
    return method.with_settings(**changes) if changes else method


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Settings from `name=value`, values as Python writes them or plain words.

    Raises:
        ValueError: if one of them has no `=`.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"a setting is written NAME=VALUE; got {text!r}")
        try:
            settings[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[name.strip()] = value.strip()
    return settings


def selectors() -> dict[str, Selector]:
    """Methods that `qprune` can evict with; somebody else's that cannot be loaded is left out."""
    found = {}
    for name in method_names():
        with suppress(ValueError, ImportError):
            method = _named(name) if not name.startswith(QPRUNE) else None
            if isinstance(method, Selector):
                found[name] = method
    return found


def make_cache(
    model: PreTrainedModel,
    method: str | Described,
    budget: float | Budget = 1.0,
    *,
    max_new_tokens: int | None = None,
    store_dtype: torch.dtype | None = None,
    allow_untested: bool = False,
) -> MeasuredCache:
    """An empty cache of a method for a model; arguments as for `MethodCache`.

    Raises:
        ValueError: if method, model or budget cannot be supported, in one sentence that says why.
    """
    made = get_method(method) if isinstance(method, str) else method
    limit = budget if isinstance(budget, Budget) else Budget(fraction=float(budget))
    given: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "store_dtype": store_dtype,
        "allow_untested": allow_untested,
    }
    if isinstance(made, OwnCache):
        return made.cache(model, limit, **given)
    if isinstance(made, Method):
        return MethodCache(model, made, limit, **given)
    raise TypeError(f"a method is a Method or an OwnCache, not {type(made).__name__}")


def _named(name: str) -> Described:
    if name in _PRESETS:
        return _PRESETS[name]()
    if name.startswith(QPRUNE):
        return parse_qprune(name, selectors())
    if name.startswith(KVPRESS):
        return KVPress(name.removeprefix(KVPRESS))
    if name in _installed():
        loaded = _installed()[name].load()
        made = loaded() if isinstance(loaded, type) else loaded
        if not isinstance(made, Described):
            raise ValueError(f"the entry point {name!r} of {ENTRY_POINTS} is {made!r}, which is no method")
        return made
    raise ValueError(
        f"there is no method {name!r}; there are {', '.join(method_names())}, qprune:SELECTOR+CODEC and kvpress:PRESS"
    )
