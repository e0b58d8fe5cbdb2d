"""What all layers of one forward share: which new columns are tokens, and their positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qevict.attention import LazyMask


@dataclass(frozen=True)
class Forward:
    """The new columns of a batch.

    Attributes:
        start: columns before these.
        columns: how many there are, padding included.
        valid: true where there is a token; None where there is no padding among them.
        positions: absolute positions, arbitrary at padding.
        counts: tokens of each row.
    """

    start: int
    columns: int
    valid: Bool[Tensor, "batch columns"] | None
    positions: Int[Tensor, "batch columns"]
    counts: tuple[int, ...]

    @classmethod
    def read(
        cls,
        mask: LazyMask | None,
        position_ids: Tensor | None,
        batch: int,
        columns: int,
        seen: int,
        device: torch.device,
    ) -> Forward:
        """Read from what the attention function is given.

        Args:
            seen: columns before these.

        Raises:
            ValueError: if the padding mask does not cover exactly the columns seen and the new ones, or if positions
                are missing where padding makes them necessary.
        """
        padding = None if mask is None else mask.padding
        if padding is not None and padding.shape[1] != seen + columns:
            raise ValueError(
                f"the attention mask covers {padding.shape[1]} tokens, but the cache has seen {seen} and gets "
                f"{columns} more; pass the mask of the whole sequence, or reset() the cache to begin another one"
            )
        valid = None if padding is None else padding[:, seen:].bool()
        if valid is not None and bool(valid.all()):
            valid = None
        if position_ids is None:
            if padding is not None and not bool(padding.all()):
                raise ValueError("the model passes no positions to its attention function, so padding cannot be used")
            position_ids = torch.arange(seen, seen + columns, device=device)[None]
        if position_ids.ndim != 2:
            raise ValueError(f"positions of shape {tuple(position_ids.shape)} are not supported; [batch, tokens] are")
        counts = (columns,) * batch if valid is None else tuple(valid.sum(dim=1).tolist())
        return cls(seen, columns, valid, position_ids.to(device).expand(batch, -1), counts)

    def to(self, device: torch.device) -> Forward:
        """The same on another device; the layers of a model may lie on several."""
        if self.positions.device == device:
            return self
        valid = None if self.valid is None else self.valid.to(device)
        return replace(self, valid=valid, positions=self.positions.to(device))

    def first(self, columns: int) -> Forward:
        """The first columns alone."""
        valid = None if self.valid is None else self.valid[:, :columns]
        counts = (columns,) * len(self.counts) if valid is None else tuple(valid.sum(dim=1).tolist())
        return replace(self, columns=columns, valid=valid, positions=self.positions[:, :columns], counts=counts)

    def take(self, rows: Int[Tensor, " rows"]) -> Forward:
        """The given rows."""
        valid = None if self.valid is None else self.valid[rows]
        counts = tuple(self.counts[row] for row in rows.tolist())
        return replace(self, valid=valid, positions=self.positions[rows], counts=counts)

    def equal_rows(self, rows: Iterable[int]) -> Iterator[tuple[Tensor, Tensor | None, int]]:
        """Rows with equally many tokens together: rows, columns of their tokens (see `tokens`), how many."""
        of_count: dict[int, list[int]] = {}
        for row in rows:
            of_count.setdefault(self.counts[row], []).append(row)
        for count in sorted(of_count):
            index = torch.tensor(of_count[count], device=self.positions.device)
            yield index, self.tokens(index, count), count

    def last_tokens(self, columns: int) -> tuple[int, ...]:
        """How many tokens each row has in the last `columns` columns."""
        if self.valid is None:
            return (columns,) * len(self.counts)
        return tuple(self.valid[:, self.columns - columns :].sum(dim=1).tolist())

    def tokens(self, rows: Int[Tensor, " rows"], count: int) -> Int[Tensor, "rows count"] | None:
        """Columns of the rows' tokens, which have `count` each; None where that is every column."""
        if self.valid is None:
            return None
        return self.valid[rows].nonzero()[:, 1].view(len(rows), count)
