"""Which settings of a method meet a byte ratio, found by measuring a cache of one layer.

Layers are alike, so one of them, with random weights, shows what all take; nothing here repeats a method's arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qevict.architectures import decoder, text_config
from qevict.budget import InfeasibleBudgetError
from qevict.compat import cache_argument
from qevict.config import Budget
from qevict.methods.base import Described, MeasuredCache, Method
from qevict.methods.registry import make_cache
from qevict.trace import PrefillTrace

_VOCABULARY = 64


@dataclass(frozen=True)
class Match:
    """What meets a ratio.

    Attributes:
        method: with the settings that do, or come nearest.
        ratio: measured, the maximum over all steps; None if it could not be run.
        reason: why the ratio cannot be met; empty if it is.
    """

    method: Described
    ratio: float | None
    reason: str = ""


class Matcher:
    """Measures methods on one layer of a model's shape.

    Args:
        config: of the model; no weights are needed.
        context, new: tokens of the prompt and after it.
    """

    def __init__(self, config: PretrainedConfig, context: int, new: int, store_dtype: torch.dtype) -> None:
        self._model = _one_layer(config)
        self._new, self._store_dtype = new, store_dtype
        ids = torch.randint(3, _VOCABULARY, (1, context), generator=torch.Generator().manual_seed(0))
        self._trace = PrefillTrace.capture(self._model, ids, hidden=True)

    def match(self, method: Described, ratio: float) -> Match:
        """The settings of a method with the most bytes that are at most `ratio` of full KV's."""
        if method.kind == "full":
            return Match(method, 1.0, "" if ratio >= 1 else "is not compressed")
        nearest = Match(method, None, "has no settings")
        for variant in _variants(method):
            budget = Budget(fraction=ratio if method.takes_budget else 1.0)
            try:
                measured = self.measure(variant, budget)
            except InfeasibleBudgetError as error:
                return Match(variant, None, f"infeasible: {error}")
            except ValueError as error:
                return Match(variant, None, f"refused: {error}")
            if measured <= ratio or method.takes_budget:
                over = "" if measured <= ratio else "passes its budget"
                return Match(variant, measured, over)
            nearest = Match(variant, measured, f"cannot: {variant.label} takes the least, and that is more")
        return nearest

    @torch.no_grad()
    def measure(self, method: Described, budget: Budget) -> float:
        """Reserved bytes as a share of full KV's, the maximum over the prefill and every new token.

        Raises:
            ValueError: if the method cannot be run so.
        """
        cache = make_cache(
            self._model,
            method,
            budget,
            max_new_tokens=self._new,
            store_dtype=self._store_dtype,
            allow_untested=True,
        )
        self._trace.fill(cache)
        full = self._full_bytes(cache)
        highest = cache.memory().reserved / full
        for token in range(self._new):
            decoder(self._model)(torch.tensor([[3 + token % (_VOCABULARY - 3)]]), **cache_argument(cache))
            highest = max(highest, cache.memory().reserved / full)
        return highest

    def _full_bytes(self, cache: MeasuredCache) -> int:
        keys = self._trace.prefills[0].keys
        tokens = keys.shape[2] + self._new
        return 2 * keys.shape[1] * keys.shape[3] * tokens * self._store_dtype.itemsize


def _variants(method: Described) -> Iterator[Described]:
    if isinstance(method, Method):
        yield from method.variants()
    else:
        yield method


def _one_layer(config: PretrainedConfig) -> PreTrainedModel:
    """A random model of a config's shape with a single full-attention layer and a small vocabulary."""
    small = copy.deepcopy(text_config(config))
    small.num_hidden_layers = 1
    small.vocab_size = _VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    if getattr(small, "layer_types", None):
        small.layer_types = ["full_attention"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    return model.eval()
