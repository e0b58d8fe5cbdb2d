"""Window scores: how the attention that a window receives becomes the number it is ranked by (Eqs. 1 and 20-24).

A ranking keeps one float for each window, its *state*. At a routing event it is shown the attention mass that every
window received since the last event (u, Eq. 20) and returns the new states; a higher state is kept in preference.
The prompt's attention is the first event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

States = Float[Tensor, "lanes windows"]


@runtime_checkable
class Ranking(Protocol):
    """One float a window, updated at every routing event. Implementations hold settings only, never state."""

    uses_keys: bool

    def update(self, state: States, mass: States) -> States:
        """States after an event at which the windows had received `mass` since the one before (float32)."""
        ...

    def from_keys(self, keys: Float[Tensor, "lanes windows heads tokens dim"]) -> States:
        """States of windows that leave the recent region, from their keys; called only where `uses_keys`."""
        ...


class _AttentionRanking:
    """Base of the rankings that look at attention alone."""

    uses_keys = False

    def from_keys(self, keys: Float[Tensor, "lanes windows heads tokens dim"]) -> States:
        raise NotImplementedError(f"{type(self).__name__} ranks by attention and has no use for keys")


@dataclass(frozen=True)
class CumulativeAttention(_AttentionRanking):
    """S <- S + u (Eqs. 1 and 21), the paper's choice."""

    def update(self, state: States, mass: States) -> States:
        return state + mass


@dataclass(frozen=True)
class DecayedAttention(_AttentionRanking):
    """S <- decay * S + u (Eq. 22); the decay is applied once an event, however many tokens have passed.

    The paper's is 0.99, with which it found no difference to the sum. A much smaller one follows the attention of a
    long generation: at 0.5, qevict's default, an event counts half of the next one.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay!r}; it has to be above 0 and at most 1")

    def update(self, state: States, mass: States) -> States:
        return self.decay * state + mass


@dataclass(frozen=True)
class AttentionPNorm(_AttentionRanking):
    """S = (sum over events of u^p)^(1/p) (Eq. 23).

    The state is the sum itself: the root is monotone, so the order is the same and nothing is lost to taking a root
    and a power at every event.
    """

    p: float = 3.0

    def __post_init__(self) -> None:
        if not self.p >= 1:
            raise ValueError(f"p is {self.p!r}; it has to be at least 1")

    def update(self, state: States, mass: States) -> States:
        return state + mass**self.p


@dataclass(frozen=True)
class KeyNorm:
    """S = -mean ||k|| over a window's tokens (Eq. 24): low norms are kept. Rotation leaves the norm as it is.

    The paper writes k for a layer's key without saying how heads join; here the norms are averaged over the heads.
    """

    uses_keys = True

    def update(self, state: States, mass: States) -> States:
        return state

    def from_keys(self, keys: Float[Tensor, "lanes windows heads tokens dim"]) -> States:
        return -keys.float().norm(dim=-1).mean(dim=(-2, -1))


@dataclass(frozen=True)
class FunctionRanking(_AttentionRanking):
    """A user's function `(state, mass) -> state`, both `[lanes, windows]` float32."""

    function: Callable[[Tensor, Tensor], Tensor]

    def update(self, state: States, mass: States) -> States:
        new = self.function(state, mass)
        if not isinstance(new, torch.Tensor) or new.shape != state.shape:
            got = tuple(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
            raise ValueError(f"the ranking function returned {got}; it has to return a tensor of {tuple(state.shape)}")
        # A copy: the function may return what it was given, or an expanded tensor, and both are written to later.
        return new.to(state.dtype, copy=True)


RANKINGS: dict[str, Callable[..., Ranking]] = {
    "cumulative": CumulativeAttention,
    "decayed": DecayedAttention,
    "p-norm": AttentionPNorm,
    "key-norm": KeyNorm,
}
_WITH_NUMBER = ("decayed", "p-norm")


def get_ranking(spec: str | Ranking | Callable[[Tensor, Tensor], Tensor]) -> Ranking:
    """A ranking from its name, from a `Ranking`, or from a function `(state, mass) -> state`.

    A name may say the ranking's number: `decayed:0.5`, `p-norm:2`.

    Raises:
        ValueError: if the name or its number is unknown, or the object is none of these.
    """
    if isinstance(spec, str):
        return _named(spec)
    if isinstance(spec, Ranking) and not isinstance(spec, type):
        return spec
    if callable(spec) and not isinstance(spec, type):
        return FunctionRanking(spec)
    raise ValueError(f"ranking is {spec!r}; give a name ({', '.join(RANKINGS)}), a Ranking or a function")


def _named(spec: str) -> Ranking:
    name, colon, number = spec.partition(":")
    if name not in RANKINGS:
        raise ValueError(f"ranking is {spec!r}; known are {', '.join(RANKINGS)}, or give a function")
    if not colon:
        return RANKINGS[name]()
    try:
        given = float(number)
    except ValueError:
        given = None
    if given is None or name not in _WITH_NUMBER:
        raise ValueError(f"ranking is {spec!r}; a number goes with {' and '.join(_WITH_NUMBER)}, as in decayed:0.5")
    return RANKINGS[name](given)
