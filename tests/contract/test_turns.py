"""Several turns on one cache: nothing is fed twice, lengths count what was seen, and many turns equal one."""

from __future__ import annotations

import pytest
import torch
from driver import ROOMY, TIGHT, endless, forward, full_cache, generate, prompt, within_budget
from torch import Tensor

from qevict import Budget, QEvictCache, QEvictConfig

pytestmark = pytest.mark.contract

TURNS = (20, 1, 13, 2, 30)


@pytest.mark.parametrize("budget", [Budget(fraction=1.0), ROOMY], ids=["unlimited", "through-the-tiers"])
def test_many_turns_equal_one_forward_where_everything_fits(budget: Budget) -> None:
    model, ids = endless(), prompt(sum(TURNS), batch=2)
    cache = QEvictCache(model, QEvictConfig(budget, window_size=4, sink_tokens=2, recent_tokens=6))
    logits = torch.cat([forward(model, cache, turn) for turn in ids.split(list(TURNS), dim=1)], dim=1)
    expected = forward(model, full_cache(model), ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == sum(TURNS)


def fed(model: torch.nn.Module) -> tuple[list[int], torch.utils.hooks.RemovableHandle]:
    """Tokens of each forward from now on, until the handle is removed."""
    lengths: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        lengths.append(inputs[0].shape[1])

    return lengths, model.get_input_embeddings().register_forward_pre_hook(note)  # type: ignore[operator]


@pytest.mark.parametrize("budget", [1.0, ROOMY, TIGHT.budget], ids=["unlimited", "roomy", "tight"])
def test_a_turn_with_the_full_history_feeds_only_what_is_new(budget: float | Budget) -> None:
    model, history = endless(), prompt(60)
    cache = QEvictCache(model, TIGHT.replace(budget=budget))
    for turn in range(3):
        seen = cache.get_seq_length()
        lengths, handle = fed(model)
        answer = generate(model, cache, history, 6)
        handle.remove()
        assert lengths == [history.shape[1] - seen, 1, 1, 1, 1, 1]
        assert cache.get_seq_length() == history.shape[1] + 5  # the last new token was not fed
        history = torch.cat([history, answer, prompt(9, seed=turn)], dim=1)
    assert budget != TIGHT.budget or (cache.counts().quantized > 0 and within_budget(cache))


def test_the_length_counts_tokens_seen_not_tokens_kept() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :20] = 0
    forward(model, cache, prompt(60, batch=2), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert cache.counts().evicted > 0
    assert cache.get_seq_length() == 60
    assert [layer.get_seq_length() for layer in cache.layers] == [60, 60]


def test_extend_derives_the_budget_from_the_longer_sequence() -> None:
    model, ids = endless(), prompt(100)
    config = TIGHT.replace(budget=0.4)
    cache = QEvictCache(model, config, max_new_tokens=10)
    forward(model, cache, ids[:, :60])
    counts, token_bytes = cache.counts(), 2 * 2 * 2 * 16 * 4
    assert cache.memory().budget == pytest.approx(0.4 * 70 * token_bytes, abs=4 * token_bytes)
    cache.extend(130)
    assert cache.memory().budget == pytest.approx(0.4 * 190 * token_bytes, abs=4 * token_bytes)
    assert cache.counts() == counts  # evicted windows do not come back
    for turn in ids[:, 60:].split(20, dim=1):
        assert forward(model, cache, turn).isfinite().all()
        assert within_budget(cache)
    assert cache.counts().full > counts.full


def test_extend_does_not_change_what_is_held() -> None:
    """The tiers move into larger storages as they are: the very next logits are the same."""
    model, ids = endless(), prompt(80, batch=2)
    config = TIGHT.replace(budget=0.4)
    extended, plain = (QEvictCache(model, config, max_new_tokens=20) for _ in range(2))
    for cache in (extended, plain):
        forward(model, cache, ids)
    extended.extend(300)
    for step in range(3):
        token = prompt(1, batch=2, seed=step)
        assert torch.equal(forward(model, extended, token), forward(model, plain, token))


@pytest.mark.parametrize("budget", [ROOMY, TIGHT.budget], ids=["roomy", "tight"])
def test_absolute_budgets_do_not_depend_on_what_was_announced(budget: Budget) -> None:
    """Not even where the announced sequence is so short that all of it was to be protected."""
    model = endless()
    announced = QEvictCache(model, TIGHT.replace(budget=budget), max_new_tokens=2)
    plain = QEvictCache(model, TIGHT.replace(budget=budget))
    limit = None
    for turn in (5, 1, 1, 1, 1, 1, 1, 20, 3, 1, 30, 1):
        got, expected = (forward(model, cache, prompt(turn, seed=turn)) for cache in (announced, plain))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        limit = limit or announced.memory().budget
        assert announced.memory().budget == limit
        assert within_budget(announced)
    assert announced.get_seq_length() == 66


def test_a_padded_second_turn_equals_each_row_alone() -> None:
    model, first = endless(), prompt(60, batch=2)
    turns = [prompt(12, seed=1), prompt(5, seed=2)]
    batch = QEvictCache(model, TIGHT)
    forward(model, batch, first)
    ids = torch.cat([turns[0], torch.nn.functional.pad(turns[1], (7, 0))])
    mask = torch.ones(2, 72, dtype=torch.long)
    mask[1, 60:67] = 0
    positions = mask.cumsum(dim=1) - 1
    together = [forward(model, batch, ids, attention_mask=mask, position_ids=positions[:, 60:])[:, -1]]
    for step in range(6):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = mask.cumsum(dim=1)[:, -1:] - 1
        together.append(
            forward(model, batch, prompt(1, 2, seed=step), attention_mask=mask, position_ids=positions)[:, -1]
        )
    assert within_budget(batch)
    for row in range(2):
        alone = QEvictCache(model, TIGHT)
        forward(model, alone, first[row : row + 1])
        logits = [forward(model, alone, turns[row])[:, -1]]
        logits += [forward(model, alone, prompt(1, 2, seed=step)[row : row + 1])[:, -1] for step in range(6)]
        for got, expected in zip(together, logits, strict=True):
            torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-4, atol=1e-4)


def test_many_turns_under_compression_stay_within_the_budget() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    for turn, tokens in enumerate((40, 100, 1, 20, 70)):
        assert forward(model, cache, prompt(tokens, seed=turn)).isfinite().all()
        assert within_budget(cache)
    assert cache.get_seq_length() == 231
    assert cache.counts().quantized > 0
