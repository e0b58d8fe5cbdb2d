"""Random tiers as kernels see them, and the obvious attention over them."""

from __future__ import annotations

import torch
from torch import Tensor

from qevict.codecs import Codec, MinMaxCodec, PromptCodec, WindowShape
from qevict.kernels.reference import History, TierView
from qevict.rope import Rope

SCALING = 0.3


def make_view(
    *,
    lanes: int = 2,
    heads: int = 2,
    dim: int = 16,
    window: int = 4,
    full: int = 3,
    codes: int = 3,
    stored: int = 5,
    new: int = 4,
    sinks: int = 2,
    holes: bool = True,
    dtype: torch.dtype = torch.float32,
    store: torch.dtype | None = None,
    codec: Codec | PromptCodec | None = None,
    rope: Rope | None = None,
    seed: int = 0,
) -> TierView:
    """Random tiers, stored in `store` (None: in the model's `dtype`); a `PromptCodec` is fitted to random keys.

    With holes some slots hold no window, and bytes that decode to NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    store, codec = store or dtype, codec or MinMaxCodec(4, 3)
    rope = rope or Rope(torch.rand(dim // 2 - 1, generator=generator))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def presence(slots: int) -> Tensor:
        return torch.rand(lanes, slots, generator=generator) < (0.6 if holes else 2.0)

    if isinstance(codec, PromptCodec):
        spread = normal(lanes, heads, 1, dim).exp()  # so that channels get different bits
        codec = codec.fit(spread * normal(lanes, heads, 32, dim), torch.ones(lanes, heads, dim))
    slots = normal(lanes, full, 2, heads, window, dim).to(store)  # keys and values side by side, as in the arena
    full_present, code_present = presence(full), presence(codes)
    slots[~full_present] = torch.nan
    packed = codec.encode(normal(lanes, codes, heads, window, dim), normal(lanes, codes, heads, window, dim))
    packed[~code_present] = 255  # a scale of NaN
    history = History(
        full_keys=slots[:, :, 0],
        full_values=slots[:, :, 1],
        full_present=full_present,
        packed=packed,
        code_present=code_present,
        code_positions=torch.randint(0, 500, (lanes, codes), generator=generator).masked_fill(~code_present, -7),
        codec=codec,
        rope=rope,
    )
    return TierView(
        stored_keys=normal(lanes, heads, stored, dim).to(store),
        stored_values=normal(lanes, heads, stored, dim).to(store),
        new_keys=normal(lanes, heads, new, dim).to(dtype),
        new_values=normal(lanes, heads, new, dim).to(dtype),
        history=history,
        sinks=sinks,
    )


def dense(query: Tensor, view: TierView, lane: int) -> tuple[Tensor, Tensor]:
    """Output `[heads, group, queries, dim]` and masses `[queries, columns]` of one lane, token by token in float64."""
    heads, group, queries, dim = query.shape[1:]
    keys, values, column = [], [], []  # of every token that may be seen, in no particular order
    past = view.history
    window = past.full_keys.shape[3]
    slots, packed_slots = past.full_keys.shape[1], past.packed.shape[1]
    stored, local = view.stored_keys.shape[2], view.stored_keys.shape[2] + view.new_keys.shape[2]
    for slot in range(slots):
        if past.full_present[lane, slot]:
            keys += past.full_keys[lane, slot].unbind(dim=1)
            values += past.full_values[lane, slot].unbind(dim=1)
            column += [slot] * window
    for slot in range(packed_slots):
        if past.code_present[lane, slot]:
            unrotated, decoded = past.codec.decode(past.packed[lane, slot], WindowShape(heads, window, dim))
            positions = past.code_positions[lane, slot] + torch.arange(window)
            keys += past.rope.rotate(unrotated, positions).unbind(dim=1)
            values += decoded.unbind(dim=1)
            column += [slots + slot] * window
    history = len(keys)
    keys += [*view.stored_keys[lane].unbind(dim=1), *view.new_keys[lane].unbind(dim=1)]
    values += [*view.stored_values[lane].unbind(dim=1), *view.new_values[lane].unbind(dim=1)]
    column += [-1 if t < view.sinks else slots + packed_slots + (t - view.sinks) // window for t in range(local)]

    k, v = (torch.stack([row.double() for row in rows], dim=1) for rows in (keys, values))
    output = torch.zeros(heads, group, queries, dim, dtype=torch.float64)
    columns = slots + packed_slots + -(-max(0, local - view.sinks) // window)
    mass = torch.zeros(queries, columns, dtype=torch.float64)
    for j in range(queries):
        seen = history + stored + j + 1
        weights = (query[lane, :, :, j].double() @ k[:, :seen].mT * SCALING).softmax(dim=-1)
        output[:, :, j] = weights @ v[:, :seen]
        for token, share in enumerate(weights.mean(dim=(0, 1)).tolist()):
            if column[token] >= 0:
                mass[j, column[token]] += share
    return output, mass


def random_query(view: TierView, group: int, queries: int, seed: int = 1) -> Tensor:
    lanes, heads, _, dim = view.new_keys.shape
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(lanes, heads, group, queries, dim, generator=generator)).to(view.new_keys.dtype)
