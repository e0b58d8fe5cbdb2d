"""Rankings against the equations, summed event by event."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qevict.ranking import (
    AttentionPNorm,
    CumulativeAttention,
    DecayedAttention,
    FunctionRanking,
    KeyNorm,
    Ranking,
    get_ranking,
)

EVENTS, LANES, WINDOWS = 6, 2, 5


@pytest.fixture
def masses() -> Tensor:
    """Attention mass of every event, u of Eq. 20."""
    return torch.rand(EVENTS, LANES, WINDOWS, generator=torch.Generator().manual_seed(0))


def scores(ranking: Ranking, masses: Tensor) -> Tensor:
    state = torch.zeros(LANES, WINDOWS)
    for mass in masses:
        state = ranking.update(state, mass)
    return state


def test_cumulative_is_the_sum_over_events(masses: Tensor) -> None:
    """Eq. 21."""
    torch.testing.assert_close(scores(CumulativeAttention(), masses), masses.sum(dim=0))


@pytest.mark.parametrize("decay", [0.5, 0.99, 1.0])
def test_decayed_weights_an_event_by_its_age(decay: float, masses: Tensor) -> None:
    """Eq. 22."""
    expected = sum(decay**age * mass for age, mass in enumerate(reversed(masses)))
    torch.testing.assert_close(scores(DecayedAttention(decay), masses), expected)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_p_norm_ranks_as_the_norm_over_events(p: float, masses: Tensor) -> None:
    """Eq. 23; the root is left out, which leaves the order as it is."""
    state = scores(AttentionPNorm(p), masses)
    norm = masses.norm(p=p, dim=0)
    torch.testing.assert_close(state ** (1 / p), norm)
    assert torch.equal(state.argsort(dim=-1), norm.argsort(dim=-1))


def test_key_norm_prefers_small_keys_and_forgets_attention(masses: Tensor) -> None:
    """Eq. 24."""
    keys = torch.randn(LANES, WINDOWS, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    state = KeyNorm().from_keys(keys)
    for lane in range(LANES):
        for window in range(WINDOWS):
            norms = [keys[lane, window, head, token].norm() for head in range(3) for token in range(4)]
            torch.testing.assert_close(state[lane, window], -sum(norms) / len(norms))
    assert torch.equal(KeyNorm().update(state, masses[0]), state)
    assert bool((KeyNorm().from_keys(keys * 2) < state).all())


def test_attention_rankings_have_no_use_for_keys() -> None:
    for ranking in (CumulativeAttention(), DecayedAttention(), AttentionPNorm(), get_ranking(lambda s, m: s)):
        assert not ranking.uses_keys
        with pytest.raises(NotImplementedError, match="no use for keys"):
            ranking.from_keys(torch.zeros(1, 1, 1, 1, 1))
    assert KeyNorm().uses_keys


def test_names() -> None:
    assert get_ranking("cumulative") == CumulativeAttention()
    assert get_ranking("decayed") == DecayedAttention(0.99)
    assert get_ranking("p-norm") == AttentionPNorm(3.0)
    assert get_ranking("key-norm") == KeyNorm()
    assert get_ranking("decayed:0.5") == DecayedAttention(0.5)
    assert get_ranking("p-norm:2") == AttentionPNorm(2.0)
    own = DecayedAttention(0.5)
    assert get_ranking(own) is own
    with pytest.raises(ValueError, match=r"ranking is 'h2o'; known are cumulative, decayed, p-norm, key-norm"):
        get_ranking("h2o")
    for wrong in ("decayed:", "decayed:half", "cumulative:0.5", "key-norm:1"):
        with pytest.raises(ValueError, match=r"decayed:0\.5"):
            get_ranking(wrong)
    with pytest.raises(ValueError, match="decay is 2"):
        get_ranking("decayed:2")


def test_a_function_ranks(masses: Tensor) -> None:
    ranking = get_ranking(lambda state, mass: torch.maximum(state, mass))
    torch.testing.assert_close(scores(ranking, masses), masses.amax(dim=0))
    assert get_ranking(lambda state, mass: mass.double()).update(masses[0], masses[1]).dtype == torch.float32


@pytest.mark.parametrize("function", [lambda state, mass: mass, lambda state, mass: mass[:1].expand_as(mass)])
def test_what_a_function_returns_is_not_overwritten_later(function: object, masses: Tensor) -> None:
    """The caller zeroes the masses in place after an update; a function may well return them."""
    ranking = get_ranking(function)  # type: ignore[arg-type]
    mass = masses[0].clone()
    state = ranking.update(torch.zeros(LANES, WINDOWS), mass)
    expected = state.clone()
    mass.zero_()
    assert torch.equal(state, expected)
    state[0, 0] = 7.0  # every element has a place of its own
    assert int((state == 7.0).sum()) == 1


@pytest.mark.parametrize(
    ("returned", "shown"), [(torch.zeros(LANES), r"\(2,\)"), (torch.zeros(LANES, 1), r"\(2, 1\)"), (1.0, "float")]
)
def test_a_function_that_returns_something_else(returned: object, shown: str, masses: Tensor) -> None:
    ranking = FunctionRanking(lambda state, mass: returned)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=rf"the ranking function returned {shown}; .* a tensor of \(2, 5\)"):
        ranking.update(masses[0], masses[1])


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"decay is 0\.0; it has to be above 0 and at most 1"):
        DecayedAttention(0.0)
    with pytest.raises(ValueError, match=r"p is 0\.5; it has to be at least 1"):
        AttentionPNorm(0.5)
