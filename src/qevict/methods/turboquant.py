"""TurboQuant: every token's vectors rotated and rounded, each by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from qevict.codecs import TurboQuantCodec
from qevict.methods.base import Allowance, Kind, LayerPrefill, Method, Properties, everything
from qevict.methods.code_store import CodeFormat, CodePlan, CodeStore
from qevict.methods.store import RowStore


@dataclass(frozen=True)
class TurboQuant(Method):
    """All tokens in the codes of `TurboQuantCodec`, whose docstring has the method and where engines differ.

    Keys are encoded as the model rotated them, as serving engines do. A token is exact in the forward that brings it
    (engines encode it before that forward attends).

    Attributes:
        bits: of a key's coordinate, and of a value's where `value_bits` is not given.
        value_bits: of a value's coordinate; None for `bits`.
        residual: latest tokens that stay exact. 0 as in engines.
        keep_norm: whether decoded vectors have the length of the encoded ones (vLLM's presets that end in "_nc").
        seed: of the rotation's random signs.

    Raises:
        ValueError: if a width is not from 1 to 8, or `residual` negative. At the first forward, for a head size that is
            no multiple of 4.
    """

    bits: int = 4
    value_bits: int | None = None
    residual: int = 0
    keep_norm: bool = True
    seed: int = 0

    name: ClassVar[str] = "turboquant"
    paper: ClassVar[str] = "TurboQuant (Zandieh et al., 2025, arXiv 2504.19874)"
    source: ClassVar[str] = "vllm-project/vllm pull request 38479"
    kind: ClassVar[Kind] = "quantization"
    properties: ClassVar[Properties] = Properties(low_bit_retention=True)
    in_name: ClassVar[tuple[str, ...]] = ("bits",)

    def __post_init__(self) -> None:
        self._plan(0)  # which checks the settings

    @property
    def base_label(self) -> str:
        """`turboquant-4`."""
        return f"{self.name}-{self.bits}"

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """All tokens in codes, but for the residual."""
        plan = self._plan(allowance.new_tokens or 0)
        return [
            CodeStore(p.keys, p.values, everything(p), plan, p.first_position, p.rope, allowance.dtype)
            for p in prefills
        ]

    def variants(self) -> Iterator[Method]:
        """4, 3 and 2 bits."""
        for bits in (4, 3, 2):
            yield replace(self, bits=bits, value_bits=None)

    def _plan(self, growth: int) -> CodePlan:
        codec = TurboQuantCodec(self.bits, self.value_bits or self.bits, self.keep_norm, self.seed)
        return CodePlan(CodeFormat(self.name, codec, group=1), self.residual, growth, exact_new=False)
