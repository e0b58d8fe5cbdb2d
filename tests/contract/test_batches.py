"""Rows are independent: a row in a batch equals that row alone, whatever is beside it and however rows are moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driver import TIGHT, endless, forward, generate, left_padded, prompt, within_budget
from torch import Tensor
from transformers import PreTrainedModel

from qevict import Budget, MemoryReport, QEvictCache, QEvictConfig

pytestmark = pytest.mark.contract

LENGTHS = (60, 41, 7, 53)  # the third is shorter than the protected region
BUDGETS = pytest.mark.parametrize("budget", [Budget(tokens=24), 0.85], ids=["absolute", "fraction"])
BOTH_GRANULARITIES = pytest.mark.parametrize("granularity", ["layer", "kv_head"])


def rows() -> list[Tensor]:
    return [prompt(length, seed=length) for length in LENGTHS]


def tiers(cache: QEvictCache, row: int) -> list[list[list[int]]]:
    """State of every aged window of a row: one list a lane, one list of lanes a layer."""
    found = []
    for layer in cache.layers:
        for cohort in layer.cohorts:
            if row in cohort.rows.tolist():
                lanes = cohort.store.assignment().unflatten(0, (len(cohort.rows), -1))
                found.append(lanes[cohort.rows.tolist().index(row)].tolist())
    return found


class Batch:
    """Rows decoded side by side with one compressed cache, each fed its own tokens."""

    def __init__(self, model: PreTrainedModel, prompts: list[Tensor], config: QEvictConfig = TIGHT) -> None:
        self.model, self.cache = model, QEvictCache(model, config)
        inputs = left_padded(prompts)
        self.mask = inputs["attention_mask"]
        self.logits = self._forward(inputs["input_ids"])[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, vocabulary]` after `tokens [batch, new]`."""
        self.mask = torch.nn.functional.pad(self.mask, (0, tokens.shape[1]), value=1)
        self.logits = self._forward(tokens)[:, -1]
        return self.logits

    def _forward(self, ids: Tensor) -> Tensor:
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return forward(self.model, self.cache, ids, attention_mask=self.mask, position_ids=positions)


@BOTH_GRANULARITIES
@BUDGETS
def test_padded_rows_equal_the_rows_alone(budget: Budget | float, granularity: str) -> None:
    """Tokens, tiers, and bytes: padding is neither scored nor kept nor charged."""
    model, config = endless(), TIGHT.replace(budget=budget, granularity=granularity)
    together = QEvictCache(model, config, max_new_tokens=12)
    tokens = generate(model, together, left_padded(rows()), 12)
    memory = MemoryReport()
    for row, ids in enumerate(rows()):
        alone = QEvictCache(model, config, max_new_tokens=12)
        assert torch.equal(tokens[row : row + 1], generate(model, alone, ids, 12))
        assert tiers(together, row) == tiers(alone, 0)
        memory += alone.memory()
    assert together.counts().quantized > 0
    assert within_budget(together)
    # The workspace is rotary tables, which rows share.
    assert replace(together.memory(), workspace=0) == replace(memory, workspace=0)


def test_padding_on_the_left_of_every_row_changes_nothing() -> None:
    model, ids = endless(), prompt(60)
    alone, padded = QEvictCache(model, TIGHT), QEvictCache(model, TIGHT)
    inputs = left_padded([ids, prompt(73)])
    inputs = {name: tensor[:1] for name, tensor in inputs.items()}  # 13 columns of padding and nothing else
    assert torch.equal(generate(model, padded, inputs, 12), generate(model, alone, ids, 12))
    assert padded.memory() == alone.memory()


def test_a_permuted_batch_permutes_its_outputs() -> None:
    model, order = endless(), [2, 0, 3, 1]
    first, second = QEvictCache(model, TIGHT), QEvictCache(model, TIGHT)
    tokens = generate(model, first, left_padded(rows()), 8)
    permuted = generate(model, second, left_padded([rows()[i] for i in order]), 8)
    assert torch.equal(permuted, tokens[order])
    assert [tiers(second, i) for i in range(4)] == [tiers(first, i) for i in order]


@BOTH_GRANULARITIES
@pytest.mark.parametrize("how", ["reorder", "select", "select by flags", "repeat"])
def test_moved_rows_go_on_as_the_rows_they_were(how: str, granularity: str) -> None:
    model, config = endless(), TIGHT.replace(granularity=granularity)
    batch = Batch(model, rows(), config)
    before, after = prompt(3, batch=4, seed=8), prompt(6, batch=4, seed=9)
    for token in before.split(1, dim=1):
        batch.step(token)
    if how == "reorder":
        source = [2, 2, 0, 1]
        batch.cache.reorder_cache(torch.tensor(source))
    elif how == "select":
        source = [3, 1]
        batch.cache.batch_select_indices(torch.tensor(source))
    elif how == "select by flags":
        source = [1, 2, 3]
        batch.cache.batch_select_indices(torch.tensor([False, True, True, True]))
    else:
        source = [0, 0, 1, 1, 2, 2, 3, 3]
        batch.cache.batch_repeat_interleave(2)  # both copies of a row are fed alike here
    batch.mask = batch.mask[source]
    for token in after[source].split(1, dim=1):
        batch.step(token)

    assert batch.cache.counts().quantized > 0
    assert within_budget(batch.cache)
    for origin in set(source):
        alone = Batch(model, [rows()[origin]], config)
        for token in torch.cat([before, after], dim=1)[origin : origin + 1].split(1, dim=1):
            alone.step(token)
        for row in (row for row, other in enumerate(source) if other == origin):
            torch.testing.assert_close(batch.logits[row], alone.logits[0], rtol=1e-4, atol=1e-4)
            assert tiers(batch.cache, row) == tiers(alone.cache, 0)


def test_copies_of_a_row_part_ways() -> None:
    """Two beams from one row share nothing: what one is fed never shows in the other."""
    model = endless()
    batch = Batch(model, [prompt(60)])
    batch.cache.batch_repeat_interleave(2)
    batch.mask = batch.mask.repeat(2, 1)
    for token in prompt(12, batch=2, seed=4).split(1, dim=1):
        batch.step(token)
    alone = Batch(model, [prompt(60)])
    for token in prompt(12, batch=2, seed=4)[1:].split(1, dim=1):
        alone.step(token)
    torch.testing.assert_close(batch.logits[1], alone.logits[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(batch.logits[0], batch.logits[1], atol=1e-2)


def test_beams_with_rows_of_different_lengths_stay_within_the_budget() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    assert generate(model, cache, left_padded(rows()), 10, num_beams=2).shape == (4, 10)
    assert within_budget(cache)
