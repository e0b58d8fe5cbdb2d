"""Attention over the tiers in plain torch: slow, obvious, and the definition that other kernels are tested against.

Besides the output, attention yields the window masses of Eq. 1: for every query, the probability that falls on each
window, averaged over the query heads of the lane. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from qevict.codecs import Codec, WindowShape
from qevict.rope import Rope
from qevict.shared import shared

_BLOCK_ELEMENTS = 1 << 24
"""Most attention probabilities held at once (64 MiB of float32)."""
_CPU_BLOCK_ELEMENTS = 1 << 20
"""The same where they are summed at once on a CPU, which is four times as fast while they stay in its cache."""


@dataclass(frozen=True, eq=False)
class History:
    """The windows of one layer's cohort, as its arena holds them; another object after every change of the arena.

    Attributes:
        full_keys, full_values: full-precision windows, keys rotated; strided views of the arena.
        full_present: which full slots hold a window.
        packed: code slots; keys not rotated.
        code_present: which code slots take part in attention (neither empty nor dormant).
        code_positions: position of the first token of the window in each code slot.
        codec, rope: how to read `packed`, and how to rotate its keys. No codec where there can be no codes.
    """

    full_keys: Float[Tensor, "lanes full heads tokens dim"]
    full_values: Float[Tensor, "lanes full heads tokens dim"]
    full_present: Bool[Tensor, "lanes full"]
    packed: UInt8[Tensor, "lanes codes bytes"]
    code_present: Bool[Tensor, "lanes codes"]
    code_positions: Int[Tensor, "lanes codes"]
    codec: Codec | None
    rope: Rope


class TierView(NamedTuple):
    """What the tokens of a forward attend to, as it lies in memory: nothing is copied or converted for it.

    Attributes:
        stored_keys, stored_values: sinks and recent tokens, in the storage's dtype; keys rotated.
        new_keys, new_values: the tokens of the forward, in the model's dtype; keys rotated.
        history: the windows.
        sinks: tokens at the start of the local ones (stored, then new) that belong to no window.
    """

    stored_keys: Float[Tensor, "lanes heads stored dim"]
    stored_values: Float[Tensor, "lanes heads stored dim"]
    new_keys: Float[Tensor, "lanes heads new dim"]
    new_values: Float[Tensor, "lanes heads new dim"]
    history: History
    sinks: int


class Attended(NamedTuple):
    """Attention output, and the masses of full windows, code windows and local windows, in this order.

    `mass` has one row for each query, or a single row with their sum.
    """

    output: Float[Tensor, "lanes heads group queries dim"]
    mass: Float[Tensor, "lanes steps columns"]


def attend(
    query: Float[Tensor, "lanes heads group queries dim"], view: TierView, scaling: float, count_last: int | None = None
) -> Attended:
    """Exact attention of the new tokens over everything that the view holds.

    Query j sees the stored tokens and the new ones up to its own.

    Args:
        query: rotated queries; `group` query heads share one KV head.
        scaling: factor on the logits.
        count_last: None gives the masses of every query apart; n gives the sum over the last n queries.

    Returns:
        The output in the query's dtype, the masses in float32. Local windows start behind the sinks; the last may be
        partly filled.
    """
    lanes, heads, _, queries, dim = query.shape
    window = view.history.full_keys.shape[3]
    full_keys, full_values = _flat(view.history.full_keys), _flat(view.history.full_values)
    code_keys, code_values = _decoded(view.history, WindowShape(heads, window, dim))
    # In float32, as bfloat16 storage can hold what rounds to infinity in float16.
    keys = torch.cat([full_keys, code_keys, view.stored_keys.float(), view.new_keys.float()], dim=2)
    values = torch.cat([full_values, code_values, view.stored_values.float(), view.new_values.float()], dim=2)
    history = full_keys.shape[2] + code_keys.shape[2]
    present = torch.cat([view.history.full_present, view.history.code_present], dim=1)
    present = present.repeat_interleave(window, dim=1)
    if not bool(present.all()):
        # Empty slots hold arbitrary bytes: their values must not meet a weight of zero as infinities.
        values[:, :, :history].masked_fill_(~present[:, None, :, None], 0.0)
    mask = torch.zeros(lanes, 1, 1, 1, keys.shape[2], dtype=torch.bool, device=query.device)
    mask[:, 0, 0, 0, :history] = ~present
    local_index = torch.arange(keys.shape[2] - history, device=query.device)

    outputs, masses = [], []
    block = max(1, _BLOCK_ELEMENTS // (query[:, :, :, 0, 0].numel() * keys.shape[2]))
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        logits = torch.einsum("nhgqd,nhtd->nhgqt", query[:, :, :, start:stop].float(), keys) * scaling
        last_seen = len(local_index) - queries + torch.arange(start, stop, device=query.device)
        future = torch.cat([mask.new_zeros(stop - start, history), local_index > last_seen[:, None]], dim=1)
        weights = logits.masked_fill_(mask | future, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("nhgqt,nhtd->nhgqd", weights, values).to(query.dtype))
        if count_last is not None:
            weights = weights[:, :, :, max(0, queries - count_last - start) :]
        mass = _window_mass(weights.mean(dim=(1, 2)), history, window, view.sinks)
        masses.append(mass if count_last is None else mass.sum(dim=1, keepdim=True))
    joined = torch.cat(masses, dim=1)
    return Attended(torch.cat(outputs, dim=3), joined if count_last is None else joined.sum(dim=1, keepdim=True))


@shared
def prompt_mass(
    query: Float[Tensor, "lanes heads group queries dim"],
    keys: Float[Tensor, "lanes heads tokens dim"],
    scaling: float,
    count_last: int | None,
) -> Float[Tensor, "lanes tokens"]:
    """Causal attention mass that each token receives from the last `count_last` queries (None: from all).

    The column sums of the attention matrix, averaged over the lane's query heads, computed blockwise. `query` may be
    those of the last tokens only, as long as no others count.
    """
    tokens, absent = keys.shape[2], keys.shape[2] - query.shape[3]
    total = torch.zeros(query.shape[0], tokens, device=query.device)
    first = 0 if count_last is None else max(0, tokens - count_last)
    if first < absent:
        raise ValueError(f"queries of the last {tokens - absent} tokens were kept, but those of {tokens - first} count")
    for weights in causal_weights(query, keys, scaling, tokens - first):
        total[:, : weights.shape[-1]] += weights.flatten(1, 3).sum(dim=1)
    return total / query[0, :, :, 0, 0].numel()


def causal_weights(
    query: Float[Tensor, "lanes heads group queries dim"],
    keys: Float[Tensor, "lanes heads tokens dim"],
    scaling: float,
    last: int,
) -> Iterator[Float[Tensor, "lanes heads group some seen"]]:
    """Attention probabilities of the last tokens, some queries at a time over the tokens up to the last of them.

    Args:
        query: those of the last tokens, `last` at least.
    """
    absent, tokens = keys.shape[2] - query.shape[3], keys.shape[2]
    group, seen = query.shape[2], keys.float().mT
    most = _CPU_BLOCK_ELEMENTS if query.device.type == "cpu" else _BLOCK_ELEMENTS
    block = max(1, most // (query[:, :, :, 0, 0].numel() * tokens))
    for start in range(tokens - last, tokens, block):
        stop = min(start + block, tokens)
        some = query[:, :, :, start - absent : stop - absent].float().mul(scaling).flatten(2, 3)
        logits = (some @ seen[..., :stop]).unflatten(2, (group, stop - start))
        future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).triu_(diagonal=1)
        logits[..., start:].masked_fill_(future, -torch.inf)
        yield logits.softmax(dim=-1)


def window_sums(tokens: Float[Tensor, "*rows tokens"], window: int) -> Float[Tensor, "*rows windows"]:
    """Sums over consecutive windows; the last window may be partly filled."""
    windows = -(-tokens.shape[-1] // window)
    padding = windows * window - tokens.shape[-1]
    return torch.nn.functional.pad(tokens, (0, padding)).unflatten(-1, (windows, window)).sum(dim=-1)


def _flat(windows: Float[Tensor, "lanes windows heads tokens dim"]) -> Float[Tensor, "lanes heads all dim"]:
    return windows.float().transpose(1, 2).flatten(2, 3)


def _decoded(
    history: History, shape: WindowShape
) -> tuple[Float[Tensor, "lanes heads all dim"], Float[Tensor, "lanes heads all dim"]]:
    if history.codec is None:
        nothing = torch.zeros(history.packed.shape[0], shape.heads, 0, shape.head_dim, device=history.packed.device)
        return nothing, nothing
    keys, values = history.codec.decode(history.packed, shape)
    positions = history.code_positions[:, :, None] + torch.arange(shape.tokens, device=keys.device)
    # Empty slots have no position of their own; any valid one will do.
    return _flat(history.rope.rotate(keys, positions.clamp(min=0)[:, :, None])), _flat(values)


def _window_mass(
    weights: Float[Tensor, "lanes queries tokens"], history: int, window: int, sinks: int
) -> Float[Tensor, "lanes queries columns"]:
    past, local = weights[..., :history], weights[..., history + sinks :]
    return torch.cat([window_sums(past, window), window_sums(local, window)], dim=-1)
