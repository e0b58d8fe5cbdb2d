"""KIVI: keys per channel, values per token, the latest tokens exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qevict.budget import MemoryReport
from qevict.codecs import WindowShape
from qevict.codecs.kivi import KeyHalf, ValueHalf
from qevict.methods.base import Allowance, Kind, LayerPrefill, Method, Properties
from qevict.methods.code_store import Growing
from qevict.methods.decoded import Decoded
from qevict.methods.store import POSITION_BYTES, Block, RowStore


@dataclass(frozen=True)
class KIVI(Method):
    """Keys quantised per channel over groups of tokens, values per token over groups of channels.

    Both as the model attends to them, keys rotated; each group has a float16 scale and offset. Channels of keys have
    outliers and values do not, so that keys need many tokens for a group: they wait until `residual` exact ones have
    come together, which are then encoded at once (so between none and `residual` are exact). Of the values exactly the
    latest `residual` are exact: for each new one the oldest of them is encoded. Nothing is ever encoded twice.

    The authors' code rounds scale and offset to the nearest float16, fails on constant groups, and takes head sizes
    that are multiples of the group only; see `KiviCodec` for what happens here.

    Attributes:
        bits: of a code, 2 or 4 in the paper. The authors advise 4 for models with few KV heads.
        group: tokens of a key group and channels of a value group.
        residual: see above; a multiple of `group`.

    Raises:
        ValueError: if a setting is not allowed.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128

    name: ClassVar[str] = "kivi"
    paper: ClassVar[str] = "KIVI (Liu et al., 2024, arXiv 2402.02750)"
    source: ClassVar[str] = "jy-yuan/KIVI, docs/long_bench.md and models/llama_kivi.py"
    kind: ClassVar[Kind] = "quantization"
    properties: ClassVar[Properties] = Properties(low_bit_retention=True)
    in_name: ClassVar[tuple[str, ...]] = ("bits",)

    def __post_init__(self) -> None:
        KeyHalf(self.bits)  # which checks the width
        if self.group < 1 or self.residual < 1 or self.residual % self.group:
            raise ValueError(
                f"group is {self.group}, residual {self.residual}; residual has to be a multiple of group, both above 0"
            )

    @property
    def base_label(self) -> str:
        """`kivi-2`."""
        return f"{self.name}-{self.bits}"

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """All tokens, in codes but for the latest."""
        return [KIVIStore(p, self, allowance.new_tokens or 0, allowance.dtype) for p in prefills]

    def variants(self) -> Iterator[Method]:
        """4 and 2 bits, with fewer and fewer exact tokens."""
        for bits in (4, 2):
            for residual in (128, 64, 32):
                yield replace(self, bits=bits, group=32, residual=residual)


class Side:
    """The keys or the values of a row: windows in codes, then exact tokens.

    Args:
        codec: of the windows.
        window: tokens in one.
        tokens: the prompt's.
        total: tokens that storage is reserved for.
        batch: tokens that are encoded at a time, a multiple of `window`, while more than `keep` are exact.
        keep: see there.
        dtype: of the exact ones.
    """

    def __init__(
        self,
        codec: KeyHalf,
        window: int,
        tokens: Float[Tensor, "heads tokens dim"],
        total: int,
        batch: int,
        keep: int,
        dtype: torch.dtype,
    ) -> None:
        heads, count, dim = tokens.shape
        self.codec, self.batch, self.keep = codec, batch, keep
        self.shape = WindowShape(heads, window, dim)
        self.layout = codec.layout(self.shape)
        self.codes = Growing(self._due(total) // window, (self.layout.nbytes,), torch.uint8, tokens.device)
        self.room = min(total, keep + batch)  # a token is exact in the forward that brings it
        due = self._due(count)
        self._encode(tokens[:, :due])
        self.exact = Growing(self.room, (heads, dim), dtype, tokens.device)
        self.exact.append(tokens[:, due:].transpose(0, 1))
        self.decoded = Decoded(dtype, kept=False)

    def _due(self, exact: int) -> int:
        """How many of so many exact tokens are to be encoded."""
        return max(0, exact - self.keep) // self.batch * self.batch

    def _encode(self, tokens: Float[Tensor, "heads tokens dim"]) -> None:
        self.codes.append(self.codec.encode(tokens.unflatten(1, (-1, self.shape.tokens)).transpose(0, 1)))

    def settle(self) -> None:
        """Encode what is due."""
        due = self._due(self.exact.used)
        if due:
            self._encode(self.exact.rows[:due].transpose(0, 1))
            self.exact.drop_first(due)
        self.exact.resize(max(self.room, self.exact.used))

    def tokens(self) -> Float[Tensor, "heads tokens dim"]:
        """All of them, decoded."""
        coded, exact = self.codes.used * self.shape.tokens, self.exact.rows.transpose(0, 1)
        return self.decoded.tokens(coded, self._decode, (exact,))[0]

    def _decode(self, start: int) -> tuple[Float[Tensor, "heads tokens dim"]]:
        codes = self.codes.rows[start // self.shape.tokens :]
        return (self.codec.decode(codes, self.shape).transpose(0, 1).flatten(1, 2),)

    def memory(self) -> MemoryReport:
        """Bytes held. What a draft takes beyond the reserved room is workspace."""
        token = self.shape.heads * self.shape.head_dim * self.exact.rows.itemsize
        beyond = max(0, self.exact.capacity - self.room) * token
        return MemoryReport(
            full=min(self.exact.used, self.room) * token,
            codes=self.codes.used * self.layout.code_bytes,
            parameters=self.codes.used * self.layout.parameter_bytes,
            position=2 * POSITION_BYTES,  # windows in codes, exact tokens
            reserved=2 * POSITION_BYTES + self.codes.reserved_bytes + self.exact.reserved_bytes - beyond,
            workspace=beyond + self.decoded.nbytes,
        )


class KIVIStore(RowStore):
    """One row in one layer: keys and values, each with exact tokens of their own.

    Args:
        prefill: the prompt.
        method: the settings.
        growth: tokens to come that storage is reserved for.
        dtype: of the exact ones.
    """

    def __init__(self, prefill: LayerPrefill, method: KIVI, growth: int, dtype: torch.dtype) -> None:
        total, residual, bits = prefill.tokens + growth, method.residual, method.bits
        keys, values = KeyHalf(bits), ValueHalf(bits, method.group)
        self.keys = Side(keys, method.group, prefill.keys, total, batch=residual, keep=0, dtype=dtype)
        self.values = Side(values, 1, prefill.values, total, batch=1, keep=residual, dtype=dtype)

    def settle(self, coming: int) -> None:
        """Encode what is due."""
        self.fresh = 0
        self.keys.settle()
        self.values.settle()

    def append(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Take in the tokens of a forward."""
        self.keys.exact.append(keys.transpose(0, 1))
        self.values.exact.append(values.transpose(0, 1))

    def blocks(self) -> Iterator[Block]:
        """All heads."""
        yield Block(slice(0, self.keys.shape.heads), self.keys.tokens(), self.values.tokens())

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """From now on decode no code twice."""
        for side in (self.keys, self.values):
            side.decoded = Decoded(side.exact.rows.dtype, dtype)

    def undo(self, count: int) -> None:
        """Remove the last `count` tokens."""
        self.keys.exact.shorten(count)
        self.values.exact.shorten(count)
        self.fresh -= count

    def memory(self) -> MemoryReport:
        """Exact tokens count as full precision; their numbers are metadata."""
        return self.keys.memory() + self.values.memory()
