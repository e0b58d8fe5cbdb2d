"""Slow, obvious quantised methods: loops over heads, tokens and channels, written from what the methods are defined to
do, sharing no code with qevict. Groups of min-max quantisation are those of `reference.codecs`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference.codecs import decode_row, pack_row, quantize_row


def padded(section: bytes) -> bytes:
    """A section of a window, filled up to a multiple of 4 bytes."""
    return section + bytes(-len(section) % 4)


# KIVI


def value_groups(token: Sequence[float], channels: int) -> list[list[float]]:
    """A token's channels in groups; the last may be smaller."""
    return [list(token[start : start + channels]) for start in range(0, len(token), channels)]


def kivi_window(keys: Tensor, values: Tensor, key_bits: int, value_bits: int, channels: int) -> bytes:
    """The bytes of one window, keys and values [heads, tokens, dim]."""
    heads, tokens, dim = keys.shape
    key_groups = [quantize_row(keys[h, :, d].tolist(), key_bits) for h in range(heads) for d in range(dim)]
    value_rows = [
        [quantize_row(group, value_bits) for group in value_groups(values[h, t].tolist(), channels)]
        for h in range(heads)
        for t in range(tokens)
    ]
    return b"".join(
        padded(section)
        for section in (
            b"".join(pack_row(codes, key_bits) for codes, _, _ in key_groups),
            b"".join(pack_row([code for codes, _, _ in row for code in codes], value_bits) for row in value_rows),
            b"".join(scale.tobytes() for _, scale, _ in key_groups),
            b"".join(offset.tobytes() for _, _, offset in key_groups),
            b"".join(scale.tobytes() for row in value_rows for _, scale, _ in row),
            b"".join(offset.tobytes() for row in value_rows for _, _, offset in row),
        )
    )


def decoded_keys(keys: Tensor, bits: int) -> Tensor:
    """What a group of tokens [heads, tokens, dim] is decoded as, quantised per channel."""
    decoded = torch.empty(keys.shape)
    for head in range(keys.shape[0]):
        for channel in range(keys.shape[2]):
            decoded[head, :, channel] = torch.tensor(decode_row(keys[head, :, channel].tolist(), bits))
    return decoded


def decoded_values(values: Tensor, bits: int, channels: int) -> Tensor:
    """What tokens [heads, tokens, dim] are decoded as, quantised per token in groups of channels."""
    decoded = torch.empty(values.shape)
    for head in range(values.shape[0]):
        for token in range(values.shape[1]):
            groups = value_groups(values[head, token].tolist(), channels)
            decoded[head, token] = torch.tensor([x for group in groups for x in decode_row(group, bits)])
    return decoded


class SlowKIVI:
    """KIVI as its authors' code runs: the prompt first, then one token after another.

    Args:
        keys, values: of the prompt, [heads, tokens, dim].
    """

    def __init__(self, keys: Tensor, values: Tensor, bits: int, group: int, residual: int) -> None:
        self.bits, self.group, self.residual = bits, group, residual
        whole = keys.shape[1] // residual * residual
        self.coded_keys = [self._group(keys[:, start : start + group]) for start in range(0, whole, group)]
        self.exact_keys = list(keys[:, whole:].unbind(1))
        self.coded_values: list[Tensor] = []
        self.exact_values = list(values.unbind(1))
        self._shift_values()

    def step(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a token [heads, dim] and return the keys and values that its query attends to."""
        self.exact_keys.append(key)
        self.exact_values.append(value)
        keys = torch.cat([*self.coded_keys, torch.stack(self.exact_keys, dim=1)], dim=1)
        values = torch.stack([*self.coded_values, *self.exact_values], dim=1)
        if len(self.exact_keys) == self.residual:
            whole = torch.stack(self.exact_keys, dim=1)
            self.coded_keys += [self._group(part) for part in whole.split(self.group, dim=1)]
            self.exact_keys = []
        self._shift_values()
        return keys, values

    def _group(self, keys: Tensor) -> Tensor:
        return decoded_keys(keys, self.bits)

    def _shift_values(self) -> None:
        while len(self.exact_values) > self.residual:
            oldest = self.exact_values.pop(0)
            self.coded_values.append(decoded_values(oldest[:, None], self.bits, self.group)[:, 0])


# TurboQuant


def sylvester(size: int) -> list[list[float]]:
    """The orthonormal Hadamard matrix: an entry's sign is the parity of the bits that row and column share."""
    return [[(-1) ** (row & column).bit_count() / math.sqrt(size) for column in range(size)] for row in range(size)]


def blocks(dim: int) -> list[tuple[int, int]]:
    """Start and size of each block of channels: the largest power of two that still fits, again and again."""
    found, start = [], 0
    while start < dim:
        size = 1
        while size * 2 <= dim - start:
            size *= 2
        found.append((start, size))
        start += size
    return found


def turboquant_block(
    x: Sequence[float], signs: Sequence[float], levels: Sequence[float], keep_norm: bool
) -> tuple[list[int], float, list[float]]:
    """Codes, scale and what is decoded, of one block; `levels` are for coordinates of mean square 1."""
    size, matrix = len(x), sylvester(len(x))
    turned = [sum(matrix[row][i] * signs[i] * x[i] for i in range(size)) for row in range(size)]
    norm = math.sqrt(sum(y * y for y in turned))
    codes = []
    for y in turned:
        unit = y / norm * math.sqrt(size) if norm > 0 else 0.0
        codes.append(min(range(len(levels)), key=lambda code: (abs(levels[code] - unit), code)))
    length = math.sqrt(sum(levels[code] ** 2 for code in codes)) if keep_norm else math.sqrt(size)
    scale = float(np.float16(norm / length))
    turned = [levels[code] * scale for code in codes]
    return codes, scale, [signs[row] * sum(matrix[row][i] * turned[i] for i in range(size)) for row in range(size)]


def turboquant_levels(size: int, bits: int, draws: int = 200_000) -> list[float]:
    """Levels by Lloyd's iteration on a sample of coordinates of random vectors of length sqrt(size)."""
    vectors = np.random.default_rng(0).standard_normal((draws, size))
    sample = np.sort(vectors[:, 0] / np.linalg.norm(vectors, axis=1) * math.sqrt(size))
    levels = np.quantile(sample, (np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(300):
        bounds = np.searchsorted(sample, (levels[1:] + levels[:-1]) / 2)
        levels = np.array([part.mean() for part in np.split(sample, bounds)])
    return [float(level) for level in levels]


# ZipCache


def zipcache_saliency(
    query: Tensor, keys: Tensor, scaling: float, probes: Sequence[int], among: str
) -> list[list[float]]:
    """Scores of each head's tokens; `query` is [heads, group, tokens, dim], `among` "probes" or "queries"."""
    heads, group, tokens, _ = query.shape
    scores = [[0.0] * tokens for _ in range(heads)]
    for head in range(heads):
        for member in range(group):
            for probe in probes:
                logits = [float(query[head, member, probe] @ keys[head, i]) * scaling for i in range(probe + 1)]
                total = sum(math.exp(x - max(logits)) for x in logits)
                for i, x in enumerate(logits):
                    scores[head][i] += math.exp(x - max(logits)) / total
        for i in range(tokens):
            seen_by = sum(probe >= i for probe in probes) if among == "probes" else tokens - i
            scores[head][i] /= seen_by
    return scores


def salient_tokens(scores: Sequence[float], share: float) -> list[bool]:
    """Whether each token is salient: not among the lowest-scored, equals being taken in the order of the text."""
    others = sorted(range(len(scores)), key=lambda i: (scores[i], i))[: int(round((1 - share) * len(scores), 6))]
    return [i not in others for i in range(len(scores))]


def zipped(
    keys: Tensor, values: Tensor, salient: list[list[bool]], bits: int, other_bits: int
) -> tuple[Tensor, Tensor]:
    """What tokens [heads, tokens, dim] are decoded as, keys per channel, values per j-th token of all heads."""
    heads, _, dim = keys.shape
    new_keys, new_values = keys.float().clone(), values.float().clone()
    scale = [[math.sqrt(float(values[h, :, d].abs().max())) or 1.0 for d in range(dim)] for h in range(heads)]
    scale = [[float(np.float16(x)) for x in row] for row in scale]
    for which, width in ((True, bits), (False, other_bits)):
        places = [[i for i, flag in enumerate(salient[h]) if flag == which] for h in range(heads)]
        for h in range(heads):
            for d in range(dim):
                decoded = decode_row([float(keys[h, i, d]) for i in places[h]], width) if places[h] else []
                for i, x in zip(places[h], decoded, strict=True):
                    new_keys[h, i, d] = x
        for j in range(len(places[0])):
            row = [
                float(np.float32(values[h, places[h][j], d]) / np.float32(scale[h][d]))
                for h in range(heads)
                for d in range(dim)
            ]
            decoded = decode_row(row, width)
            for h in range(heads):
                for d in range(dim):
                    new_values[h, places[h][j], d] = decoded[h * dim + d] * scale[h][d]
    return new_keys, new_values


# KVQuant


def key_thresholds(channel: Sequence[float], outliers: float) -> tuple[float, float]:
    """What is left of a channel's calibration tokens without half of the outliers at either end."""
    count = round(outliers / 2 * len(channel))
    ordered = sorted(channel)[count : len(channel) - count]
    return ordered[0], ordered[-1]


def token_outliers(token: Sequence[float], outliers: float) -> list[int]:
    """Channels of a token's lowest and highest elements, as many at either end."""
    count = min(max(1, round(outliers / 2 * len(token))), (len(token) - 1) // 2) if outliers else 0
    order = sorted(range(len(token)), key=lambda channel: (token[channel], channel))
    return order[:count] + order[len(token) - count :]


def unit(x: float, lower: float, upper: float) -> float:
    """x in a range, brought to -1...1."""
    return (x - (upper + lower) / 2) / ((upper - lower) / 2) if upper > lower else 0.0


def kmeans(sample: Sequence[float], count: int, iterations: int = 50) -> list[float]:
    """Lloyd's iteration on numbers, from quantiles."""
    ordered = sorted(sample)
    levels = [ordered[int((i + 0.5) / count * len(ordered))] for i in range(count)]
    for _ in range(iterations):
        members: list[list[float]] = [[] for _ in range(count)]
        for x in ordered:
            members[min(range(count), key=lambda i: (abs(levels[i] - x), i))].append(x)
        levels = sorted(math.fsum(m) / len(m) if m else level for m, level in zip(members, levels, strict=True))
    return levels


def same_moments(levels: Sequence[float], sample: Sequence[float]) -> list[float]:
    """Q-norm: levels stretched and moved so that the rounded sample has the sample's mean and deviation."""
    rounded = [min(levels, key=lambda level: abs(level - x)) for x in sample]
    stretch = float(np.std(sample)) / float(np.std(rounded))
    return [(level - float(np.mean(rounded))) * stretch + float(np.mean(sample)) for level in levels]


def nuq(x: float, lower: float, upper: float, levels: Sequence[float], decoded: Sequence[float]) -> float:
    """What an element that is no outlier comes back as."""
    code = min(range(len(levels)), key=lambda i: (abs(levels[i] - unit(x, lower, upper)), i))
    return decoded[code] * (upper - lower) / 2 + (upper + lower) / 2
