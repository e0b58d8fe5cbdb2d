"""Undoing the last forward leaves no trace of it; copies share nothing; a reset cache is a new one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driver import TIGHT, endless, forward, full_cache, generate, prompt, within_budget
from torch import Tensor
from transformers.cache_utils import Cache

from qevict import QEvictCache

pytestmark = pytest.mark.contract


def tensors(thing: object, path: str = "cache", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an object holds, at any depth."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield path, thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from tensors(value, f"{path}.{key}", seen)
    elif isinstance(thing, list | tuple):
        for index, value in enumerate(thing):
            yield from tensors(value, f"{path}[{index}]", seen)
    elif hasattr(thing, "__dict__"):
        yield from tensors(vars(thing), path, seen)


def state(cache: QEvictCache) -> list[tuple[str, Any]]:
    """Everything that decides what the cache does next."""
    stores = [cohort.store for layer in cache.layers for cohort in layer.cohorts]
    found: list[tuple[str, Any]] = [("seen", cache.get_seq_length()), ("counts", cache.counts())]
    for store in stores:
        found += [(n, getattr(store, n)) for n in ("length", "aged", "since_event", "events", "moves", "stored")]
        used = store.stored
        found += [("keys", store.keys[:, :, :used].clone()), ("values", store.values[:, :, :used].clone())]
        found.append(("pending mass", None if store.pending is None else store.pending.mass.clone()))
        found += [("recent", store.recent_state.clone()), ("recent mass", store.recent_mass.clone())]
        arena = store.arena
        found += [(f"table {i}", t.clone()) for i, t in enumerate((*arena.full.tensors(), *arena.codes.tensors()))]
        codes = arena.codes.window != -1
        found.append(("codes", arena.code_slots()[codes].clone()))
    return found


def assert_same_state(one: list[tuple[str, Any]], other: list[tuple[str, Any]]) -> None:
    assert [name for name, _ in one] == [name for name, _ in other]
    for (name, a), (_, b) in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, name


def croppable(cache: Cache) -> bool:
    """5.2 has no such property on the cache itself."""
    return all(layer.is_croppable for layer in cache.layers)


def crop(cache: Cache, removed: int, spelling: str) -> None:
    cache.crop(-removed if spelling == "negative" else cache.get_seq_length() - removed)


SPELLINGS = pytest.mark.parametrize("spelling", ["negative", "length to keep"])


@SPELLINGS
@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_a_rejected_draft_leaves_no_trace(spelling: str, granularity: Any) -> None:
    model, ids = endless(), prompt(60)
    with_draft, without = (QEvictCache(model, TIGHT.replace(granularity=granularity)) for _ in range(2))
    for cache in (with_draft, without):
        forward(model, cache, ids)
    for step in range(10):  # over several routing events
        token = prompt(1, seed=step)
        forward(model, with_draft, prompt(3, seed=100 + step))
        crop(with_draft, 3, spelling)
        assert torch.equal(forward(model, with_draft, token), forward(model, without, token))
        assert_same_state(state(with_draft), state(without))
    assert with_draft.counts().quantized > 0


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_the_accepted_part_of_a_draft_counts_as_if_it_came_alone(accepted: int) -> None:
    model, ids, draft = endless(), prompt(60), prompt(5, seed=1)
    cropped, alone = QEvictCache(model, TIGHT), QEvictCache(model, TIGHT)
    for cache in (cropped, alone):
        forward(model, cache, ids)
    forward(model, cropped, draft)
    cropped.crop(accepted - 5)
    forward(model, alone, draft[:, :accepted])
    assert cropped.get_seq_length() == alone.get_seq_length() == 60 + accepted
    for step in range(10):
        token = prompt(1, seed=10 + step)
        torch.testing.assert_close(forward(model, cropped, token), forward(model, alone, token), rtol=1e-4, atol=1e-4)
    assert cropped.counts() == alone.counts()
    assert cropped.moves() == alone.moves()
    assert cropped.memory() == alone.memory()


def test_rejected_drafts_longer_than_the_protected_storage() -> None:
    model, ids = endless(), prompt(60)
    cache = QEvictCache(model, TIGHT)
    forward(model, cache, ids)
    for step in range(6):
        forward(model, cache, prompt(20, seed=step))
        assert within_budget(cache)
        cache.crop(-19)
        assert forward(model, cache, prompt(1, seed=step)).isfinite().all()
        assert within_budget(cache)
    assert cache.get_seq_length() == 60 + 6 * 2


def test_a_rejected_draft_in_a_batch_with_different_lengths() -> None:
    model = endless()
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :19] = 0
    caches = [QEvictCache(model, TIGHT) for _ in range(2)]
    logits = []
    for cache, drafts in zip(caches, (True, False), strict=True):
        seen = mask
        positions = (seen.cumsum(dim=1) - 1).clamp(min=0)
        forward(model, cache, prompt(60, batch=2), attention_mask=seen, position_ids=positions)
        for step in range(3):
            for tokens in [prompt(3, batch=2, seed=50), prompt(1, batch=2, seed=step)][0 if drafts else 1 :]:
                longer = torch.nn.functional.pad(seen, (0, tokens.shape[1]), value=1)
                positions = (longer.cumsum(dim=1) - 1)[:, -tokens.shape[1] :]
                out = forward(model, cache, tokens, attention_mask=longer, position_ids=positions)
                if tokens.shape[1] == 3:
                    cache.crop(-3)
                else:
                    seen = longer
        logits.append(out)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def test_only_the_last_forward_can_be_undone_and_the_cache_says_so() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    forward(model, cache, prompt(60))
    assert not croppable(cache)  # the prompt is compressed already
    with pytest.raises(ValueError, match="cannot remove 1 tokens: only the last forward's"):
        cache.crop(-1)
    forward(model, cache, prompt(3))
    assert croppable(cache)
    with pytest.raises(ValueError, match="cannot remove 4 tokens: only the last forward's 3 can be undone"):
        cache.crop(-4)
    with pytest.raises(ValueError, match="cannot remove 10 tokens"):
        cache.crop(53)
    assert cache.get_seq_length() == 63  # a refused crop changes nothing
    cache.crop(-3)
    assert not croppable(cache)
    cache.crop(0)
    cache.crop(1000)  # nothing is as long
    assert cache.get_seq_length() == 60


def test_a_long_turn_is_taken_as_text_and_cannot_be_undone() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    forward(model, cache, prompt(30))
    forward(model, cache, prompt(80))
    assert not croppable(cache)
    with pytest.raises(ValueError, match="cannot remove 2 tokens"):
        cache.crop(-2)


def test_recording_keeps_the_prompt_croppable() -> None:
    model = endless()
    recorded, plain = QEvictCache(model, TIGHT), QEvictCache(model, TIGHT)
    recorded.activate_past_recording()
    forward(model, recorded, prompt(60))
    assert croppable(recorded)
    recorded.crop(-10)
    forward(model, plain, prompt(60)[:, :50])
    got, expected = forward(model, recorded, prompt(1)), forward(model, plain, prompt(1))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert recorded.counts() == plain.counts()


@SPELLINGS
def test_an_unlimited_cache_crops_anywhere(spelling: str) -> None:
    model, ids = endless(), prompt(60)
    cache, other = QEvictCache(model, 1.0), full_cache(model)
    forward(model, cache, ids)
    crop(cache, 25, spelling)
    forward(model, other, ids[:, :35])
    torch.testing.assert_close(forward(model, cache, prompt(2)), forward(model, other, prompt(2)))


def test_forks_go_their_own_ways_and_share_nothing() -> None:
    model, ids = endless(), prompt(60)
    cache, undisturbed = QEvictCache(model, TIGHT), QEvictCache(model, TIGHT)
    for each in (cache, undisturbed):
        forward(model, each, ids)
        forward(model, each, prompt(1))
    fork = copy.deepcopy(cache)
    places = [{t.untyped_storage().data_ptr() for _, t in tensors(each) if t.numel()} for each in (cache, fork)]
    assert len(places[0]) == len(places[1]) > 20
    assert not places[0] & places[1]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not weights & (places[0] | places[1])
    size = sum(t.untyped_storage().nbytes() for _, t in tensors(fork))
    assert size == sum(t.untyped_storage().nbytes() for _, t in tensors(cache))  # and no weights came along

    for step in range(10):
        token = prompt(1, seed=20 + step)
        got, expected = forward(model, cache, token), forward(model, undisturbed, token)
        assert torch.equal(got, expected)
        assert not torch.equal(forward(model, fork, prompt(1, seed=40 + step)), expected)
    assert within_budget(fork)


def test_a_fork_goes_on_as_the_original_would_have() -> None:
    model, ids = endless(), prompt(60)
    cache = QEvictCache(model, TIGHT)
    forward(model, cache, ids)
    fork = copy.deepcopy(cache)
    for step in range(10):
        token = prompt(1, seed=step)
        assert torch.equal(forward(model, cache, token), forward(model, fork, token))
    assert_same_state(state(cache), state(fork))


@pytest.mark.parametrize("budget", [TIGHT.budget, 0.5, 1.0], ids=str)
def test_a_reset_cache_gives_a_fresh_ones_tokens(budget: Any) -> None:
    model = endless()
    config = TIGHT.replace(budget=budget)
    used, fresh = QEvictCache(model, config, max_new_tokens=12), QEvictCache(model, config, max_new_tokens=12)
    generate(model, used, prompt(80, batch=2, seed=5), 12)
    used.reset()
    assert used.get_seq_length() == 0
    assert torch.equal(generate(model, used, prompt(60), 12), generate(model, fresh, prompt(60), 12))
    assert used.counts() == fresh.counts()
    assert used.moves() == fresh.moves()
    assert used.memory().reserved == fresh.memory().reserved
