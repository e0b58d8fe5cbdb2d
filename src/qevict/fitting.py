"""What a codec is fitted to: the keys that one layer's cohort holds in full precision, and its prompt's queries."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.arena import Arena
from qevict.rope import Rope

ENOUGH = 2048
"""Tokens whose queries tell the energy of channels: of longer prompts every second, every third, ... counts."""


def known_keys(
    arena: Arena, rope: Rope, window_zero: Int[Tensor, " lanes"], local: Float[Tensor, "lanes heads local dim"]
) -> Float[Tensor, "lanes heads tokens dim"]:
    """Keys before rotary embedding: the local ones, then those of the full slots in use.

    A lane that uses fewer slots than others has its last local key in their place.

    Args:
        window_zero: position of the first token of window 0 in each lane.
        local: at least one token, before rotary embedding.
    """
    if not arena.full_used:
        return local
    window, tokens = arena.full.window[:, : arena.full_used], arena.plan.window
    start = window_zero[:, None] + window.clamp(min=0) * tokens
    positions = start[:, :, None] + torch.arange(tokens, device=local.device)
    keys = rope.unrotate(arena.full_slots()[:, : arena.full_used, 0], positions[:, :, None])
    keys = torch.where((window < 0)[:, :, None, None, None], local[:, None, :, -1:], keys)
    return torch.cat([local, keys.transpose(1, 2).flatten(2, 3)], dim=2)


def query_energy(
    prompt: Float[Tensor, "lanes heads group queries dim"] | None,
    rope: Rope,
    keys: Float[Tensor, "lanes heads tokens dim"],
) -> Float[Tensor, "lanes heads dim"]:
    """Mean squared query of each channel, the same for the two of a rotary pair; ones where no queries are held.

    Args:
        prompt: queries of the prompt.
    """
    if prompt is None:
        return torch.ones_like(keys[:, :, 0])
    some = prompt[:, :, :, :: -(-prompt.shape[3] // ENOUGH)].float()
    squares = torch.linalg.vector_norm(some, dim=(2, 3)).square()  # many times faster than a mean of squares
    return rope.paired_mean(squares / some[0, 0, :, :, 0].numel())
