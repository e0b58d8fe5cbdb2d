"""ZipCache: its probes and saliency, its codes, and recompression, against slow definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.quantised import allow, held, make_row
from qevict.methods.zipcache import ZipCache, Zipped, ZipStore
from reference.quantisers import salient_tokens, zipcache_saliency, zipped


@settings(max_examples=15)
@given(
    heads=st.integers(1, 2),
    group=st.integers(1, 2),
    tokens=st.integers(1, 30),
    share=st.sampled_from([0.0, 0.5, 0.6, 0.7, 1.0]),
    visible=st.sampled_from(["probes", "queries"]),
    seed=st.integers(0, 99),
)
def test_the_prompt_is_what_the_slow_definition_makes_of_it(
    heads: int, group: int, tokens: int, share: float, visible: str, seed: int
) -> None:
    prefill, _, _ = make_row(heads=heads, group=group, tokens=tokens, dim=4, seed=seed)
    method = ZipCache(share=share, recent=0.2, drawn=0.2, visible=visible, seed=seed)
    probes = method.probes(prefill).tolist()
    expected = zipcache_saliency(prefill.query, prefill.keys, prefill.scaling, probes, visible)
    scores = method.saliency(prefill)
    assert torch.allclose(scores, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    salient = method.salient(scores)
    assert salient.tolist() == [salient_tokens(row, share) for row in scores.tolist()]
    [store] = method.compress([prefill], allow(prefill))
    for mine, theirs in zip(held(store), zipped(prefill.keys, prefill.values, salient.tolist(), 4, 2), strict=True):
        assert torch.allclose(torch.stack(mine), theirs, rtol=1e-5, atol=1e-6)


def test_probes_are_the_last_and_as_many_others() -> None:
    prefill, _, _ = make_row(tokens=200)
    probes = ZipCache().probes(prefill)
    assert len(probes) == 20
    assert probes[10:].tolist() == list(range(190, 200))
    assert (probes.diff() > 0).all()
    assert torch.equal(probes, ZipCache().probes(prefill))
    assert not torch.equal(probes, ZipCache(seed=1).probes(prefill))
    one, _, _ = make_row(tokens=1)
    assert ZipCache().probes(one).tolist() == [0]


@pytest.mark.parametrize("forwards", [[1] * 13, [3, 1, 2, 9, 1, 4], [16, 1]])
def test_every_interval_everything_is_compressed_again(forwards: list[int]) -> None:
    new = sum(forwards)
    prefill, keys, values = make_row(tokens=9, dim=4, new=new)
    method = ZipCache(share=0.5, interval=5)
    [store] = method.compress([prefill], allow(prefill, new=new))
    assert isinstance(store, ZipStore)
    salient = store.zipped.salient.tolist()
    coded = zipped(prefill.keys, prefill.values, salient, 4, 2)
    exact = (keys[:, :0], values[:, :0])
    generator, start, last = torch.Generator().manual_seed(0), 0, torch.empty(0)
    for count in forwards:
        while exact[0].shape[1] >= 5:  # with the attention of the last forward's newest query
            place = slice(coded[0].shape[1], coded[0].shape[1] + 5)
            salient = [mine + salient_tokens(last[h, place].tolist(), 0.5) for h, mine in enumerate(salient)]
            together = [torch.cat([old, tail[:, :5]], dim=1) for old, tail in zip(coded, exact, strict=True)]
            coded = zipped(*together, salient, 4, 2)
            exact = (exact[0][:, 5:], exact[1][:, 5:])
        stop = start + count
        query = torch.randn(2, 2, count, 4, generator=generator)
        store.attend(query, keys[:, start:stop], values[:, start:stop], 0.7)
        exact = (torch.cat([exact[0], keys[:, start:stop]], 1), torch.cat([exact[1], values[:, start:stop]], 1))
        start = stop
        everything = torch.cat([coded[0], exact[0]], dim=1)
        last = (torch.einsum("hgd,htd->hgt", query[:, :, -1], everything) * 0.7).softmax(-1).sum(1)
        for mine, theirs in zip(held(store), (everything, torch.cat([coded[1], exact[1]], dim=1)), strict=True):
            # a float16 parameter of what was decoded before may round the other way
            assert torch.allclose(torch.stack(mine), theirs, rtol=3e-3, atol=1e-3)
        assert store.memory().used <= store.memory().reserved


def test_a_draft_that_was_undone_does_not_vote() -> None:
    prefill, keys, values = make_row(tokens=9, dim=4, new=12)
    [store] = ZipCache(share=0.5, interval=5).compress([prefill], allow(prefill, new=12))
    other = store.copy()
    query = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    store.attend(query, keys[:, :8], values[:, :8], 0.7)
    store.undo(2)
    other.attend(query[:, :, :6], keys[:, :6], values[:, :6], 0.7)
    for each in (store, other):
        each.attend(query[:, :, 6:7], keys[:, 6:7], values[:, 6:7], 0.7)
    for mine, theirs in zip(held(store), held(other), strict=True):
        assert torch.allclose(torch.stack(mine), torch.stack(theirs), rtol=1e-4, atol=1e-5)


def test_bytes_are_counted_by_hand() -> None:
    prefill, _, _ = make_row(heads=2, tokens=100, dim=8)
    [store] = ZipCache(share=0.7).compress([prefill], allow(prefill))
    channels, salient, others = 2 * 8, 70, 30
    codes = channels * (35 + 8) + salient * channels // 2 + others * channels // 4  # 30 codes of 2 bits: 8 bytes
    parameters = 2 * (2 * channels + salient + others) * 2  # scale and offset: of channels twice, of rows
    extra = channels * 2 + 2 * 13  # what channels are divided by; a bit a token
    memory = store.memory()
    assert memory.codes == codes
    assert memory.parameters == parameters + extra
    assert memory.reserved == codes + parameters + extra + 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("constant", [0.0, 1e-6, 6e4])
@pytest.mark.parametrize("dim", [80, 96])
def test_extremes_stay_finite(constant: float, dtype: torch.dtype, dim: int) -> None:
    x = torch.full((2, 7, dim), constant, dtype=dtype)
    x[0, 0, 0] = -constant
    salient = torch.tensor([[True] * 3 + [False] * 4] * 2)
    for decoded in Zipped(x, x, salient, ZipCache().codecs).decode():
        assert decoded.half().isfinite().all()
        assert torch.allclose(decoded, x.float(), rtol=1e-2, atol=1e-6)


def test_names_and_settings() -> None:
    assert ZipCache().label == "zipcache"
    assert ZipCache(other_bits=3, share=0.6).label == "zipcache[other_bits=3;share=0.6]"
    assert [method.share for method in ZipCache().variants()][:2] == [1.0, 0.9]
    for wrong, said in (
        ({"bits": 5}, "bits"),
        ({"share": 1.1}, "share is 1.1"),
        ({"recent": 0.6, "drawn": 0.5}, "together"),
        ({"interval": 0}, "interval is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            ZipCache(**wrong)
