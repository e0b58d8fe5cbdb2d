"""Shared work is done once, for the very same views of the very same tensors, and never mixed up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qevict.shared import SharedWork, shared

calls: list[int] = []


@shared
def doubled(tensor: Tensor, times: int) -> Tensor:
    calls.append(times)
    return tensor * times


def count(*arguments: tuple[Tensor, int]) -> int:
    """How often the function runs for these arguments, whose results have to be right."""
    calls.clear()
    for tensor, times in arguments:
        assert torch.equal(doubled(tensor, times), tensor * times)
    return len(calls)


def test_the_same_view_is_computed_once() -> None:
    base = torch.arange(24.0).view(4, 6)
    views = [base, base[:, :3], base[:, 3:], base.T, base.view(6, 4)]
    assert count((base, 2), (base, 2)) == 2
    with SharedWork([base]).active():
        assert count(*[(view, 2) for view in views * 3]) == len(views)
        assert count((base, 2), (base, 3)) == 1
        other = base.clone()
        assert count((other, 2), (other, 2)) == 2
    assert count((base, 2)) == 1
    work = SharedWork([base])
    for expected in (1, 0):
        with work.active():
            assert count((base, 2)) == expected


def test_results_are_everybodys_own() -> None:
    base = torch.ones(3)
    with SharedWork([base]).active():
        doubled(base, 2).zero_()
        assert doubled(base, 2).tolist() == [2, 2, 2]


def test_keywords_are_never_remembered() -> None:
    base = torch.ones(3)
    calls.clear()
    with SharedWork([base]).active():
        for _ in range(2):
            doubled(base, times=2)
    assert len(calls) == 2


class Ends(NamedTuple):
    least: Tensor
    most: Tensor


@dataclass(frozen=True, eq=False)
class Named:
    """A tensor with a name, of which notes are beside the point."""

    name: str
    tensor: Tensor
    notes: object

    @property
    def shared_parts(self) -> tuple[str, Tensor]:
        return self.name, self.tensor


@shared
def ends(named: Named) -> Ends:
    calls.append(1)
    return Ends(named.tensor.min(), named.tensor.max())


def test_objects_are_told_apart_by_their_parts_and_tuples_are_everybodys_own() -> None:
    base, other = torch.arange(6.0), torch.arange(6.0)
    calls.clear()
    with SharedWork([base]).active():
        first = ends(Named("a", base, object()))
        first.most.zero_()
        assert ends(Named("a", base, object())) == (0, 5)
        assert len(calls) == 1
        ends(Named("b", base, None))
        ends(Named("a", base[1:], None))
        assert len(calls) == 3
        ends(Named("a", other, None))
        ends(Named("a", other, None))
        assert len(calls) == 5
