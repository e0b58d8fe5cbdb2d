"""What KVQuant measures beforehand: ranges of key channels, and levels that suit the normalised elements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from qevict.rope import rope_for_layers
from qevict.shared import shared
from qevict.trace import PrefillTrace

LIMIT = 65504.0
"""Elements beyond it, the largest finite float16, are clamped."""
_ITERATIONS = 50
_SAMPLE = 1 << 17  # elements that levels are found from; more are thinned out evenly


class LayerStatistics(NamedTuple):
    """What is known of one layer; frozen, and shared by all tokens.

    Attributes:
        lower, upper: of each key channel, all heads side by side; what lies outside is an outlier.
        key_levels, value_levels: the levels that normalised elements are rounded to (row 0), ascending, and what they
            are decoded as (row 1; the same without Q-norm).
    """

    lower: Float32[Tensor, " channels"]
    upper: Float32[Tensor, " channels"]
    key_levels: Float32[Tensor, "two levels"]
    value_levels: Float32[Tensor, "two levels"]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self)

    def to(self, device: torch.device) -> LayerStatistics:
        """The same on a device."""
        return LayerStatistics(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True, eq=False)
class KVQuantCalibration:
    """Statistics of the layers of one model, for one width and share of outliers.

    Attributes:
        name: what it was measured on; shown in labels.
        bits, outliers: that it is for.
        layers: by index in the model.
    """

    name: str
    bits: int
    outliers: float
    layers: Mapping[int, LayerStatistics]

    def __repr__(self) -> str:
        return (
            f"KVQuantCalibration({self.name!r}, bits={self.bits}, outliers={self.outliers}, {len(self.layers)} layers)"
        )

    @classmethod
    def measure(
        cls,
        model: PreTrainedModel,
        texts: Sequence[Int[Tensor, "1 _"]],
        *,
        name: str,
        bits: int,
        outliers: float = 0.01,
        sinks: int = 1,
        norm: bool | None = None,
    ) -> KVQuantCalibration:
        """From what a model makes of some texts (the authors: 16 of 2048 tokens of WikiText-2's training set).

        Args:
            texts: token ids, one row each.
            name: what they are.
            sinks, norm: as for `KVQuant`.

        Raises:
            ValueError: if there are no texts.
        """
        if not texts:
            raise ValueError("a calibration needs at least one text; got none")
        ropes = rope_for_layers(model)
        keys: dict[int, list[Tensor]] = {}
        values: dict[int, list[Tensor]] = {}
        for ids in texts:
            for index, prefill in enumerate(PrefillTrace.capture(model, ids, queries=1).prefills):
                positions = prefill.forward.positions[0]
                keys.setdefault(index, []).append(ropes[index].unrotate(prefill.keys[0], positions)[:, sinks:])
                values.setdefault(index, []).append(prefill.values[0][:, sinks:].float())
        return cls(
            name,
            bits,
            outliers,
            {
                index: measure_layer(torch.cat(keys[index], 1), torch.cat(values[index], 1), bits, outliers, norm)
                for index in keys
            },
        )

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file."""
        tensors = {
            f"{index}.{field}": tensor.contiguous().cpu()
            for index, layer in self.layers.items()
            for field, tensor in layer._asdict().items()
        }
        about = {"name": self.name, "bits": self.bits, "outliers": self.outliers}
        save_file(tensors, str(path), metadata={"kvquant": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> KVQuantCalibration:
        """Read what `save` wrote.

        Raises:
            ValueError: if the file holds something else.
        """
        with safe_open(str(path), framework="pt") as file:
            about = (file.metadata() or {}).get("kvquant")
            if about is None:
                raise ValueError(f"{path} holds no KVQuant calibration")
            indices = {int(name.split(".")[0]) for name in list(file.keys())}
            layers = {
                index: LayerStatistics(*(file.get_tensor(f"{index}.{field}") for field in LayerStatistics._fields))
                for index in sorted(indices)
            }
        return cls(**json.loads(about), layers=layers)


def measure_layer(
    keys: Float[Tensor, "heads tokens dim"],
    values: Float[Tensor, "heads tokens dim"],
    bits: int,
    outliers: float,
    norm: bool | None = None,
    key_weights: Float[Tensor, "heads tokens dim"] | None = None,
    value_weights: Float[Tensor, "heads tokens dim"] | None = None,
) -> LayerStatistics:
    """Statistics of a layer from un-rotated keys, and values.

    Of each key channel's tokens, half of `outliers` at either end are left out of its range. Elements inside, brought
    to -1...1, are clustered around 2**bits levels (k-means); those of values are brought there token by token.

    Args:
        norm: whether levels are decoded with the mean and deviation of what they stand for (Q-norm); None at 2 bits.
        key_weights, value_weights: how much each element's error matters; the authors weight by Fisher information.
    """
    return elements_of(keys, values, outliers, key_weights, value_weights).statistics(bits, norm)


class LayerElements(NamedTuple):
    """What the statistics of a layer are found from, whatever their number of levels.

    Attributes:
        lower, upper: as in `LayerStatistics`.
        keys, values: see `thinned`.
        key_weights, value_weights: theirs.
    """

    lower: Float32[Tensor, " channels"]
    upper: Float32[Tensor, " channels"]
    keys: Float32[Tensor, " key_elements"]
    key_weights: Float32[Tensor, " key_elements"]
    values: Float32[Tensor, " value_elements"]
    value_weights: Float32[Tensor, " value_elements"]

    def statistics(self, bits: int, norm: bool | None) -> LayerStatistics:
        """2**bits levels each; `norm` as for `measure_layer`."""
        norm = bits == 2 if norm is None else norm
        key_levels = _levels(self.keys, self.key_weights, bits, norm)
        return LayerStatistics(self.lower, self.upper, key_levels, _levels(self.values, self.value_weights, bits, norm))


def elements_of(
    keys: Float[Tensor, "heads tokens dim"],
    values: Float[Tensor, "heads tokens dim"],
    outliers: float,
    key_weights: Float[Tensor, "heads tokens dim"] | None = None,
    value_weights: Float[Tensor, "heads tokens dim"] | None = None,
) -> LayerElements:
    """Arguments as for `measure_layer`."""
    rows = side_by_side(keys)
    count = round(outliers / 2 * len(rows))
    lower, upper = rows.kthvalue(count + 1, dim=0).values, rows.kthvalue(len(rows) - count, dim=0).values
    inside = (rows >= lower) & (rows <= upper)
    weights = None if key_weights is None else side_by_side(key_weights)[inside]
    key_elements = thinned(normalise(rows, lower, upper)[inside], weights)

    rows = side_by_side(values)
    split = split_values(values, outliers)
    inside = torch.ones_like(rows, dtype=torch.bool).scatter(1, split.channels, False)
    weights = None if value_weights is None else side_by_side(value_weights)[inside]
    units = normalise(rows, split.lower[:, None], split.upper[:, None])
    return LayerElements(lower, upper, *key_elements, *thinned(units[inside], weights))


class ValueSplit(NamedTuple):
    """Outliers of value tokens (which channels, exactly as many in each token), and the range of the others."""

    channels: Int[Tensor, "tokens outliers"]
    lower: Float32[Tensor, " tokens"]
    upper: Float32[Tensor, " tokens"]


def value_outliers(channels: int, outliers: float) -> int:
    """Outliers of a token at either end of its range: the nearest whole number to half the share, but at least one."""
    return min(max(1, round(outliers / 2 * channels)), (channels - 1) // 2) if outliers else 0


@shared
def split_values(values: Float[Tensor, "heads tokens dim"], outliers: float) -> ValueSplit:
    """The lowest and the highest elements of each token, and the range of what is between; the earlier among equals."""
    rows = side_by_side(values)
    channels = rows.shape[1]
    count = value_outliers(channels, outliers)
    order = rows.argsort(dim=1, stable=True)
    outside = torch.cat([order[:, :count], order[:, channels - count :]], dim=1)
    ends = rows.gather(1, order[:, [count, channels - 1 - count]])
    return ValueSplit(outside, ends[:, 0], ends[:, 1])


def side_by_side(x: Float[Tensor, "heads tokens dim"]) -> Float32[Tensor, "tokens channels"]:
    """The channels of all heads in one row for each token."""
    return x.float().clamp(-LIMIT, LIMIT).transpose(0, 1).flatten(1)


def normalise(
    rows: Float32[Tensor, "tokens channels"], lower: Tensor, upper: Tensor
) -> Float32[Tensor, "tokens channels"]:
    """Elements between `lower` and `upper` to -1...1; 0 where these are equal."""
    half = (upper - lower) / 2
    return torch.where(half > 0, (rows - (upper + lower) / 2) / torch.where(half > 0, half, 1), 0)


def thinned(
    sample: Float32[Tensor, " elements"], weights: Float32[Tensor, " elements"] | None
) -> tuple[Float32[Tensor, " kept"], Float32[Tensor, " kept"]]:
    """Elements chosen evenly, so few that levels are found fast; ascending, with their weights (1 without any)."""
    step = -(-len(sample) // _SAMPLE)
    kept, order = sample[::step].sort()
    return kept, torch.ones_like(kept) if weights is None else weights[::step][order]


def find_levels(
    sample: Float32[Tensor, " elements"], weights: Float32[Tensor, " elements"] | None, bits: int, norm: bool
) -> Float32[Tensor, "two levels"]:
    """Levels of least (weighted) squared error by Lloyd's iteration from quantiles, and what they are decoded as."""
    return _levels(*thinned(sample, weights), bits, norm)


def _levels(
    sample: Float32[Tensor, " ascending"], weights: Float32[Tensor, " ascending"], bits: int, norm: bool
) -> Float32[Tensor, "two levels"]:
    sample, weight = sample.double(), weights.double()
    zero = weight.new_zeros(1)
    mass, moment = torch.cat([zero, weight.cumsum(0)]), torch.cat([zero, (weight * sample).cumsum(0)])
    shares = (torch.arange(1 << bits, device=sample.device) + 0.5) / (1 << bits)
    levels = sample[torch.searchsorted(mass[1:].contiguous(), shares * mass[-1], right=True)]
    for _ in range(_ITERATIONS):
        within, total = _sums(levels, sample, mass), _sums(levels, sample, moment)
        moved = torch.where(within > 0, total / torch.where(within > 0, within, 1), levels).sort().values
        if torch.equal(moved, levels):
            break
        levels = moved
    decoded = _same_moments(levels, sample) if norm else levels
    return torch.stack([levels, decoded]).float()


def _sums(levels: Tensor, sample: Tensor, cumulative: Tensor) -> Tensor:
    """Sum over the elements that are nearest to each level."""
    bounds = torch.searchsorted(sample, (levels[1:] + levels[:-1]) / 2, right=True)
    ends = torch.cat([bounds.new_zeros(1), bounds, bounds.new_full((1,), len(sample))])
    return cumulative[ends[1:]] - cumulative[ends[:-1]]


def _same_moments(levels: Tensor, sample: Tensor) -> Tensor:
    """Levels stretched and moved so that the rounded sample has the mean and deviation that it had (Q-norm)."""
    rounded = levels[torch.bucketize(sample, (levels[1:] + levels[:-1]) / 2)]
    deviation = rounded.std(unbiased=False)
    if deviation == 0:
        return levels
    return (levels - rounded.mean()) * (sample.std(unbiased=False) / deviation) + sample.mean()
