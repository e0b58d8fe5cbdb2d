"""Decoded: what the codes of a row decode to, kept from forward to forward: memory traded for time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_ROOM = 64  # tokens that storage grows by


class Decoded:
    """Tokens in codes, decoded once each, and exact ones behind them, side by side in one tensor.

    Args:
        stored: dtype of exact tokens, to which decoded ones are rounded, too.
        dtype: to hold all of them in; None for `stored`.
        kept: False decodes all of them at every forward and holds nothing in between.
    """

    def __init__(self, stored: torch.dtype, dtype: torch.dtype | None = None, *, kept: bool = True) -> None:
        self._stored, self._dtype, self._kept = stored, dtype or stored, kept
        self._held: Float[Tensor, "sides heads room dim"] | None = None
        self._coded = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._held is None else self._held.nbytes

    def forget(self) -> None:
        """Codes have changed: decode all of them again."""
        self._coded = 0

    def tokens(
        self,
        coded: int,
        decode: Callable[[int], Sequence[Float[Tensor, "heads more dim"]]],
        exact: Sequence[Float[Tensor, "heads exact dim"]],
    ) -> Float[Tensor, "sides heads tokens dim"]:
        """All tokens, as they are until the next call.

        Args:
            coded: tokens in codes, at least as many as before.
            decode: gives those from a token on, for each side (keys and values, say).
            exact: the others of each side.
        """
        total = coded + exact[0].shape[1]
        held = self._with_room(total, len(exact), exact[0])
        if coded > self._coded:
            for side, decoded in zip(held, decode(self._coded), strict=True):
                side[:, self._coded : coded] = decoded.to(self._stored)
            self._coded = coded
        for side, tokens in zip(held, exact, strict=True):
            side[:, coded:total] = tokens
        if not self._kept:
            self._held, self._coded = None, 0
        return held[:, :, :total]

    def _with_room(self, total: int, sides: int, like: Float[Tensor, "heads exact dim"]) -> Tensor:
        if self._held is None or self._held.shape[2] < total:
            room = -(-total // _ROOM) * _ROOM
            held = like.new_empty(sides, like.shape[0], room, like.shape[2], dtype=self._dtype)
            if self._held is not None:
                held[:, :, : self._coded] = self._held[:, :, : self._coded]
            self._held = held
        return self._held
