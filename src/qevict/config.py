"""QEvictConfig: every choice that a user can make, validated, frozen; and the paper's settings as presets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from qevict.codecs import Codec, PromptCodec, get_codecs
from qevict.ranking import Ranking, get_ranking

PaperTask = Literal["default", "longbench", "ruler", "gsm8k", "diagnostics"]
"""What `QEvictConfig.paper` has settings for; "default" is the paper's section 5."""

_PAPER_RECENT: dict[str, int | float] = {
    "default": 32,  # section 5
    "longbench": 128,  # appendix C.1
    "ruler": 64,  # appendix E.1
    "gsm8k": 0.25,  # appendix F.1: a quarter of the budget
    "diagnostics": 32,  # appendix I.1 names none; section 5's
}
_BYTE_UNITS = {"byte": 1, "bytes": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
RECONSTRUCTION = "reconstruction"
"""The prompt scorer that has to read the prompt twice; see `qevict.reconstruction`."""
_STORE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Budget:
    """How many bytes the cache of one sequence (one batch row) may hold; give exactly one of the first three.

    Attributes:
        fraction: share of the bytes that an uncompressed cache would take (Eq. 7), above 0 and at most 1. 1.0 means no
            limit: nothing is ever quantized or evicted.
        bytes: bytes of the managed layers together.
        tokens: as many bytes as this many uncompressed tokens take.
        scope: what a fraction is a share of. "total": prompt + new tokens, all of which have to fit. "prompt": the
            prompt alone; everything after it is kept exactly and comes on top.
    """

    fraction: float | None = None
    bytes: int | None = None
    tokens: int | None = None
    scope: Literal["total", "prompt"] = "total"

    def __post_init__(self) -> None:
        given = [name for name in ("fraction", "bytes", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a Budget takes exactly one of fraction, bytes and tokens; got {given or 'none'}")
        if self.fraction is not None and not (_is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ValueError(f"budget fraction is {self.fraction!r}; it has to be above 0 and at most 1")
        for name in ("bytes", "tokens"):
            value = getattr(self, name)
            if value is not None and (not _is_whole(value) or value < 1):
                raise ValueError(f"budget {name} is {value!r}; it has to be a whole number of at least 1")
        if self.scope not in ("total", "prompt"):
            raise ValueError(f"budget scope is {self.scope!r}; it has to be 'total' or 'prompt'")
        if self.scope == "prompt" and self.fraction is None:
            raise ValueError("budget scope 'prompt' goes with a fraction only")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget as people write it: `0.2`, `20%`, `512tokens`, `24MB` (a million bytes each), `1000000bytes`.

        Raises:
            ValueError: if the text is none of these.
        """
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z%]*)\s*", text)
        number, unit = (float(match[1]), match[2].lower()) if match else (0.0, "?")
        if unit in ("", "%"):
            return cls(fraction=number / (100 if unit else 1))
        if unit in ("token", "tokens"):
            return cls(tokens=int(number))
        if unit in _BYTE_UNITS:
            return cls(bytes=int(number * _BYTE_UNITS[unit]))
        raise ValueError(f"budget is {text!r}; write 0.2, 20%, 512tokens, 24MB or 1000000bytes")

    @property
    def unlimited(self) -> bool:
        """Whether this is the budget 1.0, which means no limit."""
        return self.fraction == 1.0

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{self.fraction:.4g} of full KV" + (" of the prompt" if self.scope == "prompt" else "")
        return f"{self.bytes} bytes" if self.bytes is not None else f"{self.tokens} tokens' bytes"


@dataclass(frozen=True)
class QEvictConfig:
    """Settings of the cache. Symbols are the paper's.

    Attributes:
        budget: a fraction of full KV, or a `Budget` in bytes or tokens.
        window_size: tokens of a window (Omega). 1 is token eviction.
        routing_interval: new tokens between two routing events (R); None is `window_size`, as in the paper.
        sink_tokens: first tokens of a sequence, always kept in full precision.
        recent_tokens: last tokens, always kept in full precision; a whole number, or a fraction of the budget.
        quantized_fraction: share of the history bytes that codes may take (q of Eq. 3). 0 is two-tier eviction.
        allocation: how the history bytes are divided. "coverage" keeps as many windows as possible, in full precision
            while bytes are left, codes taking at most the share q; "split" is Eq. 3 to the letter.
        codec: name of a codec (see `get_codecs`), with its bits if they differ ("allotted:2.5+3"), a `Codec` or a
            `PromptCodec`. Where a name says several pairs of bits, the first with which nearly all windows have a place
            is taken, the last where none is enough; `plan_tiers` decides once the length is known.
        bits: bits of a code; only for a codec given by a name that does not say them. None: the codec's usual ones.
        ranking: name of a ranking, with a number if it is to have another (`decayed:0.5`); a `Ranking`; or a function
            `(state, mass) -> state`.
        granularity: "layer" ranks a window once a layer (the paper), "kv_head" once for each KV head.
        prompt_queries: which prompt queries initialise the scores: "all" (the paper) or the last n.
        prompt_scorer: replaces the prompt's attention mass: by "reconstruction", for questions that are not known yet
            (`read_prompt` then reads the prompt twice), or by a function
            `(module, queries, keys, values, scaling) -> [batch, kv_heads, tokens]`; summed over each window.
        score_steps: "every" decode step adds to the scores (Eq. 1), or only the "event" step's query, which is all
            that the paper's implementation sees.
        promotion: whether windows may return from codes to full precision.
        dormant: codes of a promoted window take one of the "slots" for codes, or come as an "extra" to the budget (the
            paper's looser count; only with allocation="split").
        reserve_growth: whether the budget also pays for the tokens by which the recent region grows between routing
            events, so that every update obeys it. The paper charges `recent_tokens` alone.
        store_dtype: dtype of full-precision storage; None is the model's.
        allow_untested: accept model types that no test of this project covers.
    """

    budget: float | Budget = 0.2
    window_size: int = 16
    routing_interval: int | None = None
    sink_tokens: int = 5
    recent_tokens: int | float = 16
    quantized_fraction: float = 1.0
    allocation: Literal["coverage", "split"] = "coverage"
    codec: str | Codec | PromptCodec = "allotted"
    bits: int | None = None
    ranking: str | Ranking | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "decayed:0.5"
    granularity: Literal["layer", "kv_head"] = "layer"
    prompt_queries: int | Literal["all"] = 32
    prompt_scorer: Callable[..., torch.Tensor] | Literal["reconstruction"] | None = None
    score_steps: Literal["every", "event"] = "every"
    promotion: bool = True
    dormant: Literal["slots", "extra"] = "slots"
    reserve_growth: bool = True
    store_dtype: torch.dtype | None = None
    allow_untested: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            if not _is_number(self.budget):
                raise TypeError(f"budget is {self.budget!r}; give a fraction, Budget(bytes=...) or Budget(tokens=...)")
            object.__setattr__(self, "budget", Budget(fraction=float(self.budget)))
        self._check_whole("window_size", 1)
        if self.routing_interval is not None:
            self._check_whole("routing_interval", 1)
        self._check_whole("sink_tokens", 0)
        if isinstance(self.recent_tokens, float):
            allowed = "a whole number of at least 1, or a fraction of the budget between 0 and 1"
            self._check(0 < self.recent_tokens < 1, "recent_tokens", allowed)
        else:
            self._check_whole("recent_tokens", 1)
        self._check(
            _is_number(self.quantized_fraction) and 0 <= self.quantized_fraction <= 1,
            "quantized_fraction",
            "from 0 to 1",
        )
        if self.prompt_queries != "all":
            self._check_whole("prompt_queries", 1, also="'all'")
        self._check_choice("allocation", "coverage", "split")
        self._check_choice("granularity", "layer", "kv_head")
        self._check_choice("score_steps", "every", "event")
        self._check_choice("dormant", "slots", "extra")
        for name in ("promotion", "reserve_growth", "allow_untested"):
            self._check(isinstance(getattr(self, name), bool), name, "True or False")
        self._check(
            self.store_dtype in (None, *_STORE_DTYPES), "store_dtype", "None or one of bfloat16, float16, float32"
        )
        scores = self.prompt_scorer is None or self.prompt_scorer == RECONSTRUCTION or callable(self.prompt_scorer)
        self._check(scores, "prompt_scorer", f"None, {RECONSTRUCTION!r} or a function")
        if self.dormant == "extra" and self.allocation != "split":
            raise ValueError('dormant="extra" is a way of counting that goes with allocation="split" only')
        list(self.codecs())
        self.ranking_object()

    @classmethod
    def paper(cls, task: PaperTask = "default", budget: float | Budget = 0.2, **changes: Any) -> QEvictConfig:
        """The paper to the letter: appendix B.5, with the recent region of each benchmark.

        Recent tokens: 32 (section 5), LongBench 128 (C.1), RULER 64 (E.1), GSM8K a quarter of the budget (F.1).
        q = 0.7, but 0.5 for the diagnostics, whose K_f and K_q imply it. Eq. 3's split is literal, dormant codes and
        the recent region's growth are left uncharged, and all prompt queries count, as the paper does. Scores follow
        Eq. 1 (every decode step); `score_steps="event"` is what the paper's implementation sees.

        Args:
            changes: fields to set otherwise, as for the constructor.

        Raises:
            ValueError: if the paper has no settings for `task`.
        """
        if task not in _PAPER_RECENT:
            raise ValueError(f"task is {task!r}; the paper has settings for {', '.join(_PAPER_RECENT)}")
        settings: dict[str, Any] = {
            "budget": budget,
            "window_size": 8,
            "sink_tokens": 5,
            "recent_tokens": _PAPER_RECENT[task],
            "quantized_fraction": 0.5 if task == "diagnostics" else 0.7,
            "allocation": "split",
            "codec": "minmax",
            "bits": 2,
            "ranking": "cumulative",
            "prompt_queries": "all",
            "dormant": "extra",
            "reserve_growth": False,
        }
        return cls(**(settings | changes))

    @property
    def limit(self) -> Budget:
        """The budget as a `Budget`."""
        assert isinstance(self.budget, Budget)  # by __post_init__
        return self.budget

    @property
    def interval(self) -> int:
        """The routing interval in tokens (R)."""
        return self.window_size if self.routing_interval is None else self.routing_interval

    def codecs(self) -> Iterator[Codec | PromptCodec]:
        """The codecs that windows may be quantized with; a plan takes one of them."""
        return get_codecs(self.codec, self.bits) if isinstance(self.codec, str) else iter([self.codec])

    def ranking_object(self) -> Ranking:
        """The ranking that windows are scored with."""
        return get_ranking(self.ranking)

    def replace(self, **changes: Any) -> QEvictConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def _check(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it has to be {allowed}")

    def _check_whole(self, name: str, least: int, also: str = "") -> None:
        value = getattr(self, name)
        allowed = f"a whole number of at least {least}" + (f" or {also}" if also else "")
        self._check(_is_whole(value) and value >= least, name, allowed)

    def _check_choice(self, name: str, *choices: str) -> None:
        self._check(getattr(self, name) in choices, name, " or ".join(map(repr, choices)))


def as_config(spec: QEvictConfig | Budget | float) -> QEvictConfig:
    """A configuration from itself, or the default one with the given budget."""
    return spec if isinstance(spec, QEvictConfig) else QEvictConfig(budget=spec)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
