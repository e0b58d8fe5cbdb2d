"""What a codec is fitted to; that caches use it is tested with the tiers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qevict import fitting
from qevict.fitting import query_energy
from qevict.rope import Rope

ROPE = Rope(10000.0 ** (-torch.arange(0, 8, 2) / 8))


def slow_energy(prompt: Tensor) -> Tensor:
    """The mean square of each channel, then of the two channels of a pair."""
    squares = (prompt**2).mean(dim=(2, 3))
    pairs = (squares[..., :4] + squares[..., 4:]) / 2
    return torch.cat([pairs, pairs], dim=-1)


@pytest.mark.parametrize(("tokens", "every"), [(1, 1), (7, 1), (8, 1), (9, 2), (25, 4)])
def test_energy_is_of_every_nth_query_of_long_prompts(tokens: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "ENOUGH", 8)
    prompt = torch.randn(2, 3, 2, tokens, 8)
    energy = query_energy(prompt, ROPE, torch.zeros(2, 3, tokens, 8))
    torch.testing.assert_close(energy, slow_energy(prompt[:, :, :, ::every]))


def test_without_queries_all_channels_count_alike() -> None:
    keys = torch.randn(2, 3, 5, 8)
    assert bool((query_energy(None, ROPE, keys) == 1).all())
