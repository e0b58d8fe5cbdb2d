"""What kernels are tested with: random tiers of all kinds, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from views import SCALING, make_view, random_query

from qevict.codecs import AllottedCodec, KiviCodec, MinMaxCodec, TurboQuantCodec
from qevict.kernels import reference
from qevict.kernels.reference import Attended, TierView
from qevict.rope import Rope

Kernel = Callable[[Tensor, TierView, float, int | None], Attended | None]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROPES = {
    "half": lambda dim: Rope(0.7 ** torch.arange(dim // 2)),
    "interleaved": lambda dim: Rope(0.7 ** torch.arange(dim // 2), layout="interleaved"),
    "partial": lambda dim: Rope(0.7 ** torch.arange(dim // 4 + 1), scaling=1.3, dtype=torch.bfloat16),
    "partial interleaved": lambda dim: Rope(0.7 ** torch.arange(dim // 4 + 1), layout="interleaved"),
    "none": lambda _: Rope.identity(),
}
CODECS = st.builds(MinMaxCodec, *[st.sampled_from([2, 3, 4, 8])] * 2) | st.builds(
    KiviCodec, *[st.sampled_from([2, 3, 4, 8])] * 2, st.sampled_from([8, 32, 64])
)
SIZES = {
    "lanes": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "dim": st.sampled_from([8, 64, 80, 96, 128, 256]),
    "window": st.sampled_from([1, 4, 7, 8, 16, 24, 32, 40, 48, 61, 64, 100]),
    "full": st.integers(0, 4),
    "codes": st.integers(0, 4) | st.sampled_from([9, 40]),
    "stored": st.integers(0, 40),
    "holes": st.booleans(),
    "dtype": st.sampled_from(DTYPES),
    "store": st.sampled_from(DTYPES),
    "codec": CODECS,
    "seed": st.integers(0, 2**31),
}


ASKED = st.fixed_dictionaries(
    {
        "rope": st.sampled_from(sorted(ROPES)),
        "group": st.integers(1, 4),
        "sinks": st.integers(0, 5),
        "count_last": st.sampled_from([None, None, 1, 3, 99]),
    }
)
"""What else a comparison on random tiers draws, but for the number of queries; see `check_random`."""


def by_kernel(kernel: Kernel, query: Tensor, view: TierView, count_last: int | None = None) -> Attended:
    attended = kernel(query, view, SCALING, count_last)
    assert attended is not None, "the kernel left it to the reference"
    return attended


def distance(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def check(kernel: Kernel, query: Tensor, view: TierView, count_last: int | None = None) -> None:
    given, expected = by_kernel(kernel, query, view, count_last), reference.attend(query, view, SCALING, count_last)
    assert given.output.dtype == query.dtype
    assert given.output.shape == query.shape
    assert distance(given.output, expected.output) < (1e-4 if query.dtype == torch.float32 else 2e-2)
    torch.testing.assert_close(given.mass, expected.mass, rtol=1e-3, atol=1e-5)


def swapped(query: Tensor, view: TierView) -> tuple[Tensor, TierView]:
    """The same as models hand it over: heads and tokens swapped, storages with room behind, full of NaN."""

    def cut(x: Tensor) -> Tensor:
        room = x.transpose(1, 2).repeat(1, 2, 1, 2)
        return room.transpose(1, 2)[:, :, : x.shape[2], : x.shape[3]]

    padded = [torch.cat([t, torch.full_like(t, torch.nan)], dim=2) for t in (view.stored_keys, view.stored_values)]
    stored = [t[:, :, : view.stored_keys.shape[2]] for t in padded]
    other = view._replace(
        new_keys=cut(view.new_keys), new_values=cut(view.new_values), stored_keys=stored[0], stored_values=stored[1]
    )
    return query.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4), other


def unknown(what: str, most_queries: int) -> tuple[Tensor, TierView]:
    """A query and a view that a kernel has to leave alone."""
    sizes: dict[str, Any] = {
        "codec": {"codec": TurboQuantCodec()},
        "many levels": {"codec": AllottedCodec(3, 5), "window": 8},
        "value groups": {"codec": KiviCodec(channels=12), "dim": 24},
        "head size": {"dim": 20},
        "odd head size": {"dim": 15},
        "large heads": {"dim": 258},
        "dtype": {"dtype": torch.float64},
        "storage": {"store": torch.float64},
        "text": {"new": most_queries + 1},
    }
    view = make_view(**sizes.get(what, {}))
    query = random_query(view, 2, view.new_keys.shape[2])
    if what == "strides":
        query = query.mT.contiguous().mT
    return query.requires_grad_(what == "gradient"), view


def check_random(
    kernel: Kernel,
    sizes: dict[str, Any],
    rope: str,
    group: int,
    queries: int,
    sinks: int,
    count_last: int | None,
) -> None:
    sinks = min(sinks, sizes["stored"] + queries)
    view = make_view(**sizes, new=queries, sinks=sinks, rope=ROPES[rope](sizes["dim"]))
    check(kernel, random_query(view, group, queries), view, count_last)
