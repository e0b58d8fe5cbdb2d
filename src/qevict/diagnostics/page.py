"""One self-contained page for an article: tiers and attention over time, layer by layer, beside the text.

Written by hand on canvas and SVG: of the 5 MB that a page may have, Plotly's own bundle would take 4.5 MB, and it would
draw what is here (two grids and a line) no better. The page has no address in it and forbids itself the network.
"""

from __future__ import annotations

import base64
import html
import json
import math
import zlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qevict.diagnostics.agreement import event_sums
from qevict.diagnostics.mass import events_apart
from qevict.diagnostics.policy import ABSENT, LOCAL, SINK, PolicyTrace
from qevict.diagnostics.trace import Trace
from qevict.kernels.reference import window_sums
from qevict.routing import EVICTED

CELL = 8
"""Tokens of a cell, and at least between two columns, for policies that keep tokens one by one."""
MIXED = 10
"""A cell of which k eighths are kept has the state MIXED + k."""
_LOW, _HIGH = 1e-4, 1e3  # attention mass that the scale of scores reaches over


def page(trace: Trace, policies: Sequence[PolicyTrace], tokenizer: PreTrainedTokenizerBase, first: str = "R3") -> str:
    """The page's HTML.

    Args:
        policies: what can be chosen; those that keep tokens one by one are shown in cells of `CELL` tokens.
        first: the one that is shown first, if it is there.
    """
    header, names = trace.header, [policy.header.name for policy in policies]
    content = {
        "model": header.model,
        "prefill": header.prefill,
        "steps": header.steps,
        "layers": header.layers,
        "pieces": pieces(tokenizer, header.tokens),
        "first": names.index(first) if first in names else 0,
        "policies": [_policy(trace, policy) for policy in policies],
    }
    parts = {
        "__TITLE__": html.escape(f"Where the cache kept “{header.title}”"),
        "__STYLE__": _file("page.css"),
        # What closes a script element must not stand in the data.
        "__DATA__": json.dumps(content, ensure_ascii=False).replace("</", "<\\/"),
        "__SCRIPT__": _file("page.js"),
    }
    text = _file("page.html")
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; characters of several tokens belong to the last of them."""
    found, before = [], ""
    start = 0
    for index in range(len(tokens)):
        text = str(tokenizer.decode(list(tokens[start : index + 1])))
        whole = not text.endswith("\ufffd")
        found.append(text[len(before) :] if whole else "")
        if whole:
            before = text
        if whole and index - start >= CELL:  # decode in short stretches: only neighbours matter
            start, before = index, str(tokenizer.decode([tokens[index]]))
    return found


def _policy(trace: Trace, policy: PolicyTrace) -> dict[str, Any]:
    header = policy.header
    window = header.window if header.window > 1 else CELL
    events = events_apart(policy.lengths, CELL if header.window == 1 else 1)
    lengths = policy.lengths[events]
    states = torch.stack([cells(policy.tiers[place][events], header.sinks, window) for place in range(policy.layers)])
    windows = states.shape[-1]
    attention, reference, scores = [], [], []
    for place, layer in enumerate(trace.header.layers):
        mass = window_sums(trace.mass(layer).mean(dim=0)[:, header.sinks :], window)
        prompt = window_sums(trace.prompt(layer, header.prompt_queries).mean(dim=0)[header.sinks :], window)
        sums = event_sums(mass, lengths, trace.header.prefill, increments=True)
        steps = torch.cat([lengths[1:], torch.tensor([len(trace.header.tokens)])]) - lengths
        attention.append(sums / steps[:, None].clamp(min=1))
        reference.append(prompt + event_sums(mass, lengths, trace.header.prefill, increments=False))
        if policy.mass is not None and header.window > 1:
            own = policy.mass[place].transpose(0, 1)[..., :windows]
            so_far = [event_sums(lane, lengths, trace.header.prefill, increments=False) for lane in own]
            scores.append(prompt + torch.stack(so_far))
    budget = f"{100 * header.ratio:.1f} % of full KV's bytes at most"
    capacities = f", K_f = {header.full_capacity}, K_q = {header.code_capacity}" if header.full_capacity else ""
    return {
        "name": header.name,
        "about": f"{header.label}, windows of {header.window} tokens{capacities}, {budget}.",
        "window": window,
        "sinks": header.sinks,
        "lanes": states.shape[2],
        "scoreLanes": scores[0].shape[0] if scores else 1,
        "events": lengths.tolist(),
        "windows": windows,
        "scale": [_LOW, _HIGH],
        "states": _packed(states.transpose(1, 2)),
        "attention": _packed(_shade(torch.stack(attention))),
        "reference": _packed(log_steps(torch.stack(reference))),
        "scores": _packed(log_steps(torch.stack(scores))) if scores else None,
    }


def cells(tiers: UInt8[Tensor, "events lanes tokens"], sinks: int, window: int) -> UInt8[Tensor, "events lanes cells"]:
    """State of each window or cell of tokens; the last may be partly filled.

    Tokens that are not there yet do not count. Where some are evicted and some are not, it is MIXED + the eighths kept;
    where none is evicted, the state of most precision that a newer token does not override.
    """
    tokens = tiers[..., sinks:]
    count = -(-tokens.shape[-1] // window)
    padded = torch.nn.functional.pad(tokens, (0, count * window - tokens.shape[-1]), value=ABSENT)
    parts = padded.unflatten(-1, (count, window))
    there = parts != ABSENT
    kept = (there & (parts != EVICTED)).sum(dim=-1)
    present = there.sum(dim=-1)
    states = parts.masked_fill(~there, 0).amax(dim=-1)
    states = torch.where(states == SINK, LOCAL, states)
    eighths = (8 * kept / present.clamp(min=1)).round().clamp(1, 7).to(torch.uint8)
    mixed = (kept > 0) & (kept < present)
    return torch.where(present == 0, ABSENT, torch.where(mixed, MIXED + eighths, states)).to(torch.uint8)


def log_steps(mass: Float[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """Attention mass in 65534 logarithmic steps of 0.025 %; 0 is none worth telling."""
    place = 1 + 65534 * torch.log(mass.clamp(_LOW, _HIGH) / _LOW) / math.log(_HIGH / _LOW)
    return torch.where(mass < _LOW, 0, place.round()).int()


def _shade(mass: Float[Tensor, "layers events windows"]) -> UInt8[Tensor, "layers events windows"]:
    """Darkness of the attention map: a logarithm over three decades below each layer's most."""
    most = mass.amax(dim=(1, 2), keepdim=True).clamp(min=1e-9)
    return (255 * (1 + torch.log10((mass / most).clamp(1e-3, 1)) / 3)).round().to(torch.uint8)


def _packed(values: UInt8[Tensor, "*any"] | Int[Tensor, "*any"]) -> str:
    """Deflated: a byte each, or two (the low one first) where they are steps of a scale."""
    numbers = values.contiguous().numpy().astype("u1" if values.dtype == torch.uint8 else "<u2")
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode()


def _file(name: str) -> str:
    return (files("qevict.diagnostics") / name).read_text(encoding="utf-8")
