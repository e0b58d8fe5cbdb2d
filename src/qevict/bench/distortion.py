"""What a codec's bits lose: on a real text's keys and values, in attention. No budget, no eviction, nothing generated.

The windows of a text's beginning are encoded and decoded, and its last tokens attend to them, as a cache of which
nothing was evicted would let them. Codecs that are fitted see the beginning only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import PreTrainedModel

from qevict.bench.study_tables import Sheet
from qevict.codecs import Codec, PromptCodec, WindowShape, get_codecs
from qevict.fitting import query_energy
from qevict.managed_layer import Prefill
from qevict.report.pictures import Picture, draw
from qevict.rope import Rope, rope_for_layers
from qevict.trace import PrefillTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SINKS = 5
"""First tokens, which are left exact, as in the cache."""
USUAL = (
    "minmax:2+2,minmax:3+3,minmax:4+4,kivi:2+2,kivi:4+4,turboquant:2+2,turboquant:3+3,turboquant:4+4,"
    "allotted:2+2,allotted:2.5+2,allotted:2.5+3,allotted:3+3,allotted:3.5+3,allotted:4+4"
)
"""Codecs that are measured where none are named."""


class Distortion(NamedTuple):
    """Bits and errors of a codec, means over layers and texts.

    Attributes:
        bits: of a key element and a value element together, parameters included; full precision has 32.
        keys, values, output: |x - x'| / |x| of the keys before rotary embedding, of the values, and of the attention
            output of the last tokens.
        worst: the largest error of the output in any layer.
    """

    codec: str
    window: int
    bits: float
    keys: float
    values: float
    output: float
    worst: float


class _Loss(NamedTuple):
    bits: float
    keys: float
    values: float
    output: float


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    texts: Iterable[Sequence[int]],
    codecs: Sequence[str],
    windows: Sequence[int],
    last: int = 64,
) -> list[Distortion]:
    """Every codec with every window size, in the order given.

    Args:
        texts: token ids; each longer than `last` and a window.
        codecs: names as `QEvictConfig.codec` takes them; the first of several pairs of bits is measured.
        last: tokens at the end of a text that attend; they are left exact.

    Raises:
        ValueError: if there is no such codec, or a text is too short.
    """
    made = {name: next(get_codecs(name)) for name in codecs}
    losses: dict[tuple[str, int], list[_Loss]] = {(name, window): [] for name in made for window in windows}
    ropes = rope_for_layers(model)
    for ids in texts:
        if len(ids) < SINKS + max(windows) + last:
            raise ValueError(f"a text of {len(ids)} tokens holds no window of {max(windows)} before its last {last}")
        trace = PrefillTrace.capture(model, torch.tensor([list(ids)]))
        for prefill, rope in zip(trace.prefills, ropes, strict=True):
            for (name, window), own in losses.items():
                own.append(_loss(prefill, rope, made[name], window, last))
    return [_mean(name, window, own) for (name, window), own in losses.items()]


def _mean(codec: str, window: int, losses: Sequence[_Loss]) -> Distortion:
    bits, keys, values, output = (statistics.mean(column) for column in zip(*losses, strict=True))
    return Distortion(codec, window, bits, keys, values, output, max(loss.output for loss in losses))


def _loss(prefill: Prefill, rope: Rope, codec: Codec | PromptCodec, window: int, last: int) -> _Loss:
    """Of one layer of one text."""
    keys, values = prefill.keys.float(), prefill.values.float()
    count = (keys.shape[2] - last - SINKS) // window
    history = slice(SINKS, SINKS + count * window)
    shape = WindowShape(keys.shape[1], window, keys.shape[3])
    positions = torch.arange(history.start, history.stop)
    unrotated = rope.unrotate(keys[:, :, history], positions)
    elements = shape.heads * shape.tokens * shape.head_dim
    bits = 8 * codec.layout(shape).nbytes / elements
    if isinstance(codec, PromptCodec):
        grouped = prefill.query[:, :, : history.stop].unflatten(1, (shape.heads, -1))
        bits += 8 * codec.fitted_bytes(shape) / (elements * count)
        codec = codec.fit(unrotated, query_energy(grouped, rope, unrotated))
    windows = [t.unflatten(2, (count, window)).transpose(1, 2) for t in (unrotated, values[:, :, history])]
    decoded = codec.decode(codec.encode(*windows), shape)
    new_keys, new_values = (t.transpose(1, 2).flatten(2, 3) for t in decoded)
    seen = torch.ones(last, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - last)
    rebuilt = keys.clone(), values.clone()
    rebuilt[0][:, :, history], rebuilt[1][:, :, history] = rope.rotate(new_keys, positions), new_values
    exact, lossy = (
        sdpa(prefill.query[:, :, -last:].float(), *kv, attn_mask=seen, scale=prefill.scaling, enable_gqa=True)
        for kv in ((keys, values), rebuilt)
    )
    return _Loss(bits, _error(unrotated, new_keys), _error(values[:, :, history], new_values), _error(exact, lossy))


def _error(exact: Float[Tensor, "*any"], other: Float[Tensor, "*any"]) -> float:
    return float((exact - other).norm() / exact.norm())


def sheet(found: Sequence[Distortion], title: str) -> Sheet:
    """A line for each codec and window, by bits."""
    lines = [
        (one.codec, str(one.window), f"{one.bits:.2f}", *(f"{x:.4f}" for x in one[3:]))
        for one in sorted(found, key=lambda one: one.bits)
    ]
    heads = ("codec", "window", "bits a pair", "keys", "values", "output", "worst layer")
    return Sheet(title, heads, tuple(lines), ("Relative errors; bits of a key element and a value element together.",))


def picture(found: Sequence[Distortion], title: str) -> Picture:
    """Error of the attention output against bits, a curve for each codec and window."""
    curves: dict[tuple[str, int], list[Distortion]] = {}
    for one in sorted(found, key=lambda one: one.bits):
        curves.setdefault((one.codec.partition(":")[0], one.window), []).append(one)

    def onto(figure: Figure) -> None:
        axes = figure.subplots()
        for number, ((codec, window), points) in enumerate(curves.items()):
            label, marker = f"{codec}, windows of {window}", "osD^vP"[number % 6]
            axes.plot([p.bits for p in points], [p.output for p in points], marker=marker, label=label)
        axes.set_yscale("log")
        axes.set_xlabel("bits of a key and a value element together (full precision: 32)")
        axes.set_ylabel("relative error of the attention output")
        axes.set_title(title)
        axes.legend()

    return draw("codecs", "Error of the attention output against the bits of a codec", (7.0, 4.5), onto)


def save(found: Sequence[Distortion], title: str, folder: Path, pictured: bool = True) -> None:
    """`codecs.md`, and `codecs.png` and `codecs.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "codecs.md").write_text(sheet(found, title).markdown(), encoding="utf8")
    if pictured:
        picture(found, title).save(folder)
