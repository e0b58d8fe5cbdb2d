"""What codes decode to may be kept: the same tokens, nothing decoded twice, and the bytes are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from methods.quantised import allow, held, make_row
from qevict.methods import get_method
from qevict.methods.decoded import Decoded
from qevict.methods.store import RowStore

METHODS = {
    "kivi-2": {"group": 4, "residual": 8},
    "kvquant-3": {"outliers": 0.1, "sinks": 3},
    "zipcache": {"interval": 5},
    "turboquant-4": {},
    "turboquant-2": {"value_bits": 3, "residual": 4},
    "qprune:snapkv+minmax-4": {"residual": 3},
    "qprune:adakv+turboquant-3": {"residual": 3},
}


def stores(name: str, tokens: int, new: int) -> tuple[RowStore, RowStore, Any]:
    """Two stores of the same prompt, the second one keeping what it decodes; and the tokens to come."""
    row = make_row(tokens=tokens, dim=16, new=new, dtype=torch.float16)
    method: Any = get_method(name, **METHODS[name])
    size = int(0.4 * (tokens + new) * allow(row[0]).token_bytes) if method.takes_budget else None
    plain, keeping = (method.compress([row[0]], allow(row[0], size, new))[0] for _ in range(2))
    keeping.keep_decoded(torch.float32)
    return plain, keeping, row


@pytest.mark.parametrize("tokens", [2, 90])
@pytest.mark.parametrize("name", list(METHODS))
def test_what_is_kept_is_what_codes_decode_to(name: str, tokens: int) -> None:
    if name.startswith("qprune") and tokens < 40:
        pytest.skip("an observation window needs more tokens")
    plain, keeping, (_, keys, values) = stores(name, tokens, new=40)
    query = torch.randn(2, 2, 40, 16, generator=torch.Generator().manual_seed(1)).half()
    start = 0
    for count, undone in [(1, 0), (6, 2), (1, 0), (1, 0), (9, 0), (3, 3), *[(1, 0)] * 12]:
        new = slice(start, start + count)
        outputs = [each.attend(query[:, :, new], keys[:, new], values[:, new], 0.7) for each in (plain, keeping)]
        torch.testing.assert_close(*outputs, rtol=2e-3, atol=2e-3)
        for exact, kept in zip(held(plain), held(keeping), strict=True):
            for own, other in zip(exact, kept, strict=True):
                assert other.dtype == torch.float32
                torch.testing.assert_close(own.float(), other, rtol=1e-3, atol=1e-3)
        for each in (plain, keeping):
            if undone:
                each.undo(undone)
        start += count - undone
    one, other = plain.memory(), keeping.memory()
    assert (one.reserved, one.used) == (other.reserved, other.used)
    largest = sum(2 * head.numel() * 4 for head in held(plain)[0])
    assert other.workspace - one.workspace >= largest


def test_every_token_is_decoded_once() -> None:
    asked: list[tuple[int, int]] = []
    text = torch.randn(3, 200, 4)

    def tokens(decoded: Decoded, coded: int, total: int) -> None:
        def decode(start: int) -> list[torch.Tensor]:
            asked.append((start, coded))
            return [text[:, start:coded]]

        assert torch.equal(decoded.tokens(coded, decode, [text[:, coded:total]])[0], text[:, :total])

    decoded = Decoded(torch.float32)
    for coded, total in [(0, 0), (0, 5), (4, 5), (4, 9), (4, 7), (80, 130), (80, 131), (200, 200)]:
        tokens(decoded, coded, total)
    assert asked == [(0, 4), (4, 80), (80, 200)]
    decoded.forget()
    tokens(decoded, 200, 200)
    assert asked[-1] == (0, 200)


def test_decoded_tokens_are_rounded_as_stored_ones() -> None:
    text = torch.randn(1, 7, 4)
    decoded = Decoded(torch.bfloat16, torch.float32)
    held = decoded.tokens(5, lambda start: [text[:, start:5]], [text[:, 5:].bfloat16()])
    assert held.dtype == torch.float32
    assert torch.equal(held[0], text.bfloat16().float())
