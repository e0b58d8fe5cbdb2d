"""Transformers' own `QuantizedCache`, as one of the methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, QuantizedCache

from qevict.architectures import text_config
from qevict.budget import MemoryReport
from qevict.config import Budget
from qevict.methods.base import Kind, MeasuredCache, OwnCache, Properties


@dataclass(frozen=True)
class HFQuantized(OwnCache):
    """Groups of a layer's keys and of its values in few bits, the newest tokens exact.

    Transformers quantises the dequantised cache anew whenever the exact tokens reach `residual`, so its error grows.

    Attributes:
        bits: of a code; quanto has 2 and 4.
        backend: "quanto" (pip install optimum-quanto) or "hqq" (pip install hqq).
        group: elements that share a scale.
        residual: newest tokens kept exactly, at most.
    """

    bits: int = 4
    backend: Literal["quanto", "hqq"] = "quanto"
    group: int = 64
    residual: int = 128

    name: ClassVar[str] = "hf-quantized"
    paper: ClassVar[str] = "Transformers' QuantizedCache (after KIVI)"
    source: ClassVar[str] = "transformers, cache_utils.QuantizedCache"
    kind: ClassVar[Kind] = "quantization"
    properties: ClassVar[Properties] = Properties(low_bit_retention=True)
    in_name: ClassVar[tuple[str, ...]] = ("bits",)

    @property
    def base_label(self) -> str:
        """`hf-quantized-4`."""
        return f"{self.name}-{self.bits}"

    def cache(
        self,
        model: PreTrainedModel,
        budget: Budget,
        *,
        max_new_tokens: int | None,
        store_dtype: torch.dtype | None,
        allow_untested: bool,
    ) -> MeasuredCache:
        """Transformers' cache, with its bytes counted.

        Raises:
            ValueError: if there is a limit, or the backend is missing or refuses the settings.
        """
        if not budget.unlimited:
            raise ValueError(f"{self.label} has an operating point of its own and takes no budget; got {budget}")
        try:
            return MeasuredQuantizedCache(model, self, store_dtype)
        except ImportError as error:
            package = "optimum-quanto" if self.backend == "quanto" else "hqq"
            raise ValueError(f"{self.label} needs a package that is not there: pip install {package}") from error


class MeasuredQuantizedCache(QuantizedCache):
    """Transformers' quantised cache; what it keeps exactly is in `store_dtype`, None for the model's."""

    def __init__(self, model: PreTrainedModel, settings: HFQuantized, store_dtype: torch.dtype | None) -> None:
        config = text_config(model)
        super().__init__(
            settings.backend,
            config,
            nbits=settings.bits,
            q_group_size=settings.group,
            residual_length=settings.residual,
        )
        self._store_dtype = store_dtype
        self._full_bytes: dict[int, int] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values, dequantised, in the dtype of the new ones."""
        dtype = self._store_dtype or key_states.dtype
        keys, values = super().update(key_states.to(dtype), value_states.to(dtype), layer_idx, *args, **kwargs)
        self._full_bytes[layer_idx] = keys.nbytes + values.nbytes
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def memory(self) -> MemoryReport:
        """Bytes of codes, of scales, and of the exact tokens."""
        exact = sum(tensor_bytes(t) for layer in self.layers for t in (layer.keys, layer.values))
        codes = scales = 0
        for layer in self.layers:
            for quantized in (getattr(layer, n, None) for n in ("_quantized_keys", "_quantized_values")):
                whole = tensor_bytes(quantized)
                packed = _packed_bytes(quantized)
                codes, scales = codes + packed, scales + whole - packed
        held = exact + codes + scales
        return MemoryReport(
            recent=exact, codes=codes, parameters=scales, reserved=held, full_kv=sum(self._full_bytes.values())
        )


def tensor_bytes(held: Any) -> int:
    """Bytes of the plain tensors inside of a tensor subclass, a tuple or a dictionary."""
    if hasattr(held, "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
    if isinstance(held, torch.Tensor):
        return held.nbytes
    if isinstance(held, dict):
        return sum(map(tensor_bytes, held.values()))
    return sum(map(tensor_bytes, held)) if isinstance(held, tuple | list) else 0


def _packed_bytes(quantized: Any) -> int:
    """Bytes of the codes alone: quanto keeps them in `_data`, hqq first of two."""
    return tensor_bytes(quantized[0] if isinstance(quantized, tuple) else getattr(quantized, "_data", None))
