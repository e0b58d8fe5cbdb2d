"""KVQuant: keys before rotation per channel, values per token, levels where elements are dense, outliers apart."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from qevict.budget import MemoryReport
from qevict.codecs.packing import pack, packed_size, unpack
from qevict.methods.base import Allowance, Described, Kind, LayerPrefill, Method, Properties
from qevict.methods.code_store import Growing
from qevict.methods.decoded import Decoded
from qevict.methods.kvquant_calibration import (
    LIMIT,
    KVQuantCalibration,
    LayerElements,
    LayerStatistics,
    elements_of,
    normalise,
    side_by_side,
    split_values,
    value_outliers,
)
from qevict.methods.store import POSITION_BYTES, Block, RowStore, TokenBuffer
from qevict.shared import shared

MOST_CHANNELS = 1 << 15
"""Channels of all heads together, of which outliers are noted with 16 bits."""


@dataclass(frozen=True)
class KVQuant(Method):
    """All tokens but the first in codes of non-uniform levels, a share of outliers exactly.

    Keys are un-rotated, and each channel has a fixed range: where its calibration text's outliers begin, half of their
    share at either end. What lies outside, in the prompt or later, is an outlier. Values have a range for each token,
    over the channels of all heads, of what is left without exactly so many outliers at either end. Elements are brought
    to -1...1 in their range and rounded to the nearest of 2**bits levels, which k-means found on the calibration text,
    for each layer one set for keys and one for values. Outliers are stored as float16 with their channel.

    Without `calibration` the statistics are those of the prompt itself: nothing has to be prepared, and they suit the
    text better than the paper's. The label says so. They count as bytes of every row, shared or not.

    Differences from the authors' code: levels are not weighted by Fisher information unless a calibration was
    (`measure_layer`), which needs gradients; thresholds are elements, not interpolated percentiles, and equal elements
    never make more outliers than asked for; keys of generated tokens keep theirs, too.

    Attributes:
        bits: of a code, 2 to 4 in the paper.
        outliers: share of elements that are outliers.
        sinks: first tokens that stay exact.
        norm: Q-norm, whether levels are decoded with the mean and deviation of what they stand for; None at 2 bits.
        calibration: measured beforehand on some text; None for the prompt itself. `with_settings` takes the
            file it was saved to as well.

    Raises:
        ValueError: if a setting is not allowed, or the calibration is for others. At the first forward, if it is for
            another model.
    """

    bits: int = 2
    outliers: float = 0.01
    sinks: int = 1
    norm: bool | None = None
    calibration: KVQuantCalibration | None = None

    name: ClassVar[str] = "kvquant"
    paper: ClassVar[str] = "KVQuant (Hooper et al., 2024, arXiv 2401.18079)"
    source: ClassVar[str] = "SqueezeAILab/KVQuant, quant/README.md and quant/kvquant/simquant_module_quantizer.py"
    kind: ClassVar[Kind] = "quantization"
    properties: ClassVar[Properties] = Properties(low_bit_retention=True)
    in_name: ClassVar[tuple[str, ...]] = ("bits", "calibration")

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}; it is a whole number from 1 to 8")
        if not 0 <= self.outliers <= 0.5:
            raise ValueError(f"outliers is {self.outliers}; it is a share from 0 to 0.5")
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it has to be at least 0")
        given = self.calibration
        if given is not None and (given.bits, given.outliers) != (self.bits, self.outliers):
            raise ValueError(
                f"the calibration {given.name!r} is for {given.bits} bits and outliers={given.outliers}, not for "
                f"{self.bits} bits and outliers={self.outliers}"
            )

    def with_settings(self, **changes: Any) -> Described:
        """A copy with some settings changed; a calibration may be given as the path of its file."""
        if isinstance(changes.get("calibration"), str):
            changes["calibration"] = KVQuantCalibration.load(changes["calibration"])
        return super().with_settings(**changes)

    @property
    def base_label(self) -> str:
        """`kvquant-2`; `kvquant-2@` and its name with a calibration."""
        return f"{self.name}-{self.bits}" + ("" if self.calibration is None else f"@{self.calibration.name}")

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """All tokens, in codes but for the sinks."""
        return [KVQuantStore(p, self, self.statistics(p), allowance.new_tokens or 0, allowance.dtype) for p in prefills]

    def variants(self) -> Iterator[Method]:
        """4, 3 and 2 bits; of a calibrated method itself alone, since another width needs another calibration."""
        if self.calibration is not None:
            yield self
            return
        for bits in (4, 3, 2):
            yield replace(self, bits=bits)

    def statistics(self, prefill: LayerPrefill) -> LayerStatistics:
        """The calibration's, or the prompt's own.

        Raises:
            ValueError: if the calibration is for another model.
        """
        heads, tokens, dim = prefill.keys.shape
        if heads * dim > MOST_CHANNELS:
            raise ValueError(f"{heads} KV heads of {dim} channels are more than {MOST_CHANNELS} channels")
        if self.calibration is not None:
            known = self.calibration.layers.get(prefill.index)
            if known is None or len(known.lower) != heads * dim:
                raise ValueError(
                    f"the calibration {self.calibration.name!r} is for another model: layer {prefill.index} has "
                    f"{heads} KV heads of {dim} channels"
                )
            return known.to(prefill.keys.device)
        sinks = min(self.sinks, tokens - 1)  # a prompt of sinks alone has nothing else to measure
        return _elements(prefill, sinks, self.outliers).statistics(self.bits, self.norm)


@shared
def _elements(prefill: LayerPrefill, sinks: int, outliers: float) -> LayerElements:
    """What the prompt's own statistics are found from."""
    keys = prefill.rope.unrotate(prefill.keys, prefill.positions)[:, sinks:]
    return elements_of(keys, prefill.values[:, sinks:], outliers)


class KVQuantStore(RowStore):
    """One row in one layer: sinks, tokens in codes with their outliers, and the newest tokens.

    Args:
        prefill: the prompt.
        method: the settings.
        statistics: of the layer.
        growth: tokens to come that storage is reserved for. Outliers of their keys are reserved by their share.
        dtype: of exact tokens.
    """

    def __init__(
        self, prefill: LayerPrefill, method: KVQuant, statistics: LayerStatistics, growth: int, dtype: torch.dtype
    ) -> None:
        self.method, self.statistics, self.rope = method, statistics, prefill.rope
        self.heads, tokens, self.dim = prefill.keys.shape
        self.first_position, device = prefill.first_position, prefill.keys.device
        channels, sinks = self.heads * self.dim, min(method.sinks, tokens)
        total = tokens + growth
        self.sinks = TokenBuffer(
            prefill.keys[:, :sinks], prefill.values[:, :sinks], min(method.sinks, total) - sinks, dtype
        )
        coded, packed = max(0, total - method.sinks), packed_size(channels, method.bits)
        ends = 2 * value_outliers(channels, method.outliers)
        self.key_codes = Growing(coded, (packed,), torch.uint8, device)
        self.value_codes = Growing(coded, (packed,), torch.uint8, device)
        self.value_ranges = Growing(coded, (2,), torch.float16, device)
        self.value_outliers = Growing(coded, (ends,), torch.float16, device)
        self.value_channels = Growing(coded, (ends,), torch.int16, device)
        self.key_counts = Growing(coded, (), torch.int16, device)
        keys = prefill.rope.unrotate(prefill.keys[:, sinks:], prefill.positions[sinks:])
        expected = int((self._outside(side_by_side(keys))).sum()) + round(method.outliers * channels * growth)
        self.key_outliers = Growing(expected, (), torch.float16, device)
        self.key_channels = Growing(expected, (), torch.int16, device)
        self._encode(keys, prefill.values[:, sinks:])
        self.room = min(1, total)
        self.tail = TokenBuffer(prefill.keys[:, :0], prefill.values[:, :0], self.room, dtype)
        self.decoded = Decoded(dtype, kept=False)

    @property
    def _growing(self) -> tuple[Growing, ...]:
        return (
            self.key_codes,
            self.value_codes,
            self.value_ranges,
            self.value_outliers,
            self.value_channels,
            self.key_counts,
            self.key_outliers,
            self.key_channels,
        )

    def settle(self, coming: int) -> None:
        """All tokens go into codes, but for sinks that are missing yet."""
        self.fresh = 0
        missing = min(self.method.sinks - self.sinks.used, self.tail.used)
        if missing > 0:
            self.sinks.append(self.tail.keys[:, :missing], self.tail.values[:, :missing])
            self.tail.drop_first(missing)
        if self.tail.used:
            start = self.first_position + self.sinks.used + self.key_codes.used
            positions = torch.arange(start, start + self.tail.used, device=self.tail.keys.device)
            self._encode(self.rope.unrotate(self.tail.keys, positions), self.tail.values)
            self.tail.drop_first(self.tail.used)
        self.tail.resize(self.room)

    def append(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Take in the tokens of a forward."""
        self.tail.append(keys, values)

    def blocks(self) -> Iterator[Block]:
        """All heads."""
        settled = self.sinks.used + self.key_codes.used
        exact = self.tail.keys, self.tail.values
        yield Block(slice(0, self.heads), *self.decoded.tokens(settled, self._settled_tokens, exact))

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """From now on decode no code twice."""
        self.decoded = Decoded(self.tail.keys.dtype, dtype)

    def undo(self, count: int) -> None:
        """Remove the last `count` tokens."""
        self.tail.shorten(count)
        self.fresh -= count

    def memory(self) -> MemoryReport:
        """Ranges, levels and outliers with their channels are parameters. What a draft takes is workspace."""
        token = self.tail.reserved_bytes // max(1, self.tail.capacity)
        beyond = max(0, self.tail.capacity - self.room) * token
        codes = self.key_codes.used_bytes + self.value_codes.used_bytes
        numbers = 4 * POSITION_BYTES  # sinks, tokens in codes, outliers of keys, newest tokens
        reserved = self.sinks.reserved_bytes + self.tail.reserved_bytes - beyond
        reserved += sum(each.reserved_bytes for each in self._growing)
        return MemoryReport(
            sink=self.sinks.used_bytes,
            full=self.tail.used_bytes - max(0, self.tail.used - self.room) * token,
            codes=codes,
            parameters=sum(each.used_bytes for each in self._growing) - codes + self.statistics.nbytes,
            position=numbers,
            reserved=reserved + numbers + self.statistics.nbytes,
            workspace=beyond + self.decoded.nbytes,
        )

    def copy(self) -> KVQuantStore:
        """An independent copy; what is frozen is shared."""
        shared = (self.rope, self.statistics, self.method)
        return copy.deepcopy(self, {id(each): each for each in shared})

    def _outside(self, rows: Float[Tensor, "tokens channels"]) -> Tensor:
        return (rows < self.statistics.lower) | (rows > self.statistics.upper)

    def _heads(self, rows: Float[Tensor, "tokens channels"]) -> Float[Tensor, "heads tokens dim"]:
        return rows.unflatten(1, (self.heads, self.dim)).transpose(0, 1)

    def _encode(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Append tokens; keys un-rotated."""
        known, rows = self.statistics, side_by_side(keys)
        outside = self._outside(rows)
        self.key_codes.append(self._codes(normalise(rows, known.lower, known.upper), known.key_levels))
        self.key_counts.append(outside.sum(dim=1))
        self.key_outliers.append(rows[outside])
        self.key_channels.append(outside.nonzero()[:, 1])

        rows = side_by_side(values)
        split = split_values(values, self.method.outliers)
        ranges = torch.stack([split.lower, split.upper], dim=1).half()
        units = normalise(rows, ranges[:, :1].float(), ranges[:, 1:].float())
        self.value_codes.append(self._codes(units, known.value_levels))
        self.value_ranges.append(ranges)
        self.value_outliers.append(rows.gather(1, split.channels))
        self.value_channels.append(split.channels)

    def _codes(self, units: Float[Tensor, "new channels"], levels: Tensor) -> UInt8[Tensor, "new bytes"]:
        nearest = torch.bucketize(units, (levels[0, 1:] + levels[0, :-1]) / 2)
        return pack(nearest.to(torch.uint8), self.method.bits)

    def _units(self, packed: UInt8[Tensor, "tokens bytes"], levels: Tensor) -> Float[Tensor, "tokens channels"]:
        codes = unpack(packed, self.method.bits, self.heads * self.dim)
        return levels[1].index_select(0, codes.int().flatten()).view(codes.shape)

    def _settled_tokens(self, start: int) -> tuple[Float[Tensor, "heads more dim"], Float[Tensor, "heads more dim"]]:
        """Sinks and tokens in codes, from the given one on."""
        first = max(0, start - self.sinks.used)
        place = self.first_position + self.sinks.used
        positions = torch.arange(place + first, place + self.key_codes.used, device=self.tail.keys.device)
        keys = self.rope.rotate(self._heads(self._decode_keys(first)), positions)
        values = self._heads(self._decode_values(first))
        return (
            torch.cat([self.sinks.keys[:, start:].float(), keys], dim=1),
            torch.cat([self.sinks.values[:, start:].float(), values], dim=1),
        )

    def _decode_keys(self, first: int = 0) -> Float[Tensor, "tokens channels"]:
        lower, upper = self.statistics.lower, self.statistics.upper
        rows = self._units(self.key_codes.rows[first:], self.statistics.key_levels) * ((upper - lower) / 2)
        rows = (rows + (upper + lower) / 2).clamp(-LIMIT, LIMIT)
        token = torch.repeat_interleave(self.key_counts.rows[first:].long())
        own = slice(self.key_outliers.used - len(token), None)
        rows[token, self.key_channels.rows[own].long()] = self.key_outliers.rows[own].float()
        return rows

    def _decode_values(self, first: int = 0) -> Float[Tensor, "tokens channels"]:
        lower, upper = self.value_ranges.rows[first:].float().split(1, dim=1)
        rows = self._units(self.value_codes.rows[first:], self.statistics.value_levels) * ((upper - lower) / 2)
        rows = (rows + (upper + lower) / 2).clamp(-LIMIT, LIMIT)
        return rows.scatter(1, self.value_channels.rows[first:].long(), self.value_outliers.rows[first:].float())
