"""The model `qevict` of lm-evaluation-harness: what it generates and scores comes from the compressed cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from bench.tiny_run import save_model
from qevict.bench.cells import Cell, build, capture
from qevict.bench.decode import Fork, decode, forced_nll
from qevict.lm_eval import QEvictLM
from qevict.methods import get_method

CONTEXT = "a fox ran by the old mill and then it saw a red hen in the yard of the farm that lay by"
SHORTER = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
SETTINGS = {"window": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def made(folder: Path, **arguments: Any) -> Any:
    given = {"pretrained": str(folder), "method": "snapkv[window=8]", "budget": "50%", "device": "cpu", **arguments}
    return get_model("qevict").create_from_arg_obj(given)


def requests(*pairs: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=pair, task_name="made") for pair in pairs]


def ids(model: Any, text: str) -> list[int]:
    tokens: list[int] = model.tok_encode(text)
    return tokens


def fork(model: Any, text: str, new: int) -> Fork:
    """As our own benchmarks evaluate it."""
    tokens, cell = ids(model, text), Cell(get_method("snapkv", **SETTINGS), 0.5)
    trace = capture(model.model, tokens[:-1], [cell.method])
    cache: Any = build(model.model, trace, cell, 1 + new, scope="total", store_dtype=None)
    return Fork(cache, tokens[-1:], new)


def test_it_is_found_by_its_name() -> None:
    assert get_model("qevict") is QEvictLM


@pytest.mark.parametrize("batch_size", [1, 2])
def test_generation_is_that_of_our_own_benchmarks(folder: Path, batch_size: int) -> None:
    model = made(folder, batch_size=batch_size)
    arguments = {"until": ["\n\n"], "max_gen_toks": 9}
    said = model.generate_until(requests((CONTEXT, arguments), (SHORTER, arguments)), disable_tqdm=True)
    for text, answer in zip((CONTEXT, SHORTER), said, strict=True):
        ours = fork(model, text, 9)
        next(iter(decode(model.model, [[ours]])))
        assert answer == model.tok_decode(ours.tokens)
    full = HFLM(pretrained=str(folder), device="cpu")
    assert said != full.generate_until(requests((CONTEXT, arguments), (SHORTER, arguments)), disable_tqdm=True)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_continuations_are_scored_by_the_compressed_cache(folder: Path, batch_size: int) -> None:
    model = made(folder, batch_size=batch_size)
    endings = [" the mill", " a", " the old farm that lay by the mill and the yard"]
    pairs = [(CONTEXT, ending) for ending in endings] + [(SHORTER, " sixteen")]
    scores = model.loglikelihood(requests(*pairs), disable_tqdm=True)
    for (text, ending), (score, _) in zip(pairs, scores, strict=True):
        tokens = ids(model, ending)
        ours = fork(model, text, len(tokens) - 1)
        (nll,) = forced_nll(model.model, [ours.cache], ours.pending, tokens)
        assert score == pytest.approx(-nll * len(tokens), rel=1e-5)
    full = HFLM(pretrained=str(folder), device="cpu").loglikelihood(requests(*pairs), disable_tqdm=True)
    assert all(score != pytest.approx(other, rel=1e-4) for (score, _), (other, _) in zip(scores, full, strict=True))


def test_without_a_limit_scores_are_those_of_hf(folder: Path) -> None:
    model, full = made(folder, budget=1.0), HFLM(pretrained=str(folder), device="cpu")
    likely = full.generate_until(requests((CONTEXT, {"until": [], "max_gen_toks": 3})), disable_tqdm=True)[0]
    pairs = requests((CONTEXT, " the mill"), (CONTEXT, likely), (SHORTER, " sixteen"))
    scores, expected = (m.loglikelihood(pairs, disable_tqdm=True) for m in (model, full))
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert any(greedy for _, greedy in scores)
    torch.testing.assert_close(*(torch.tensor([s for s, _ in found]) for found in (scores, expected)))


def test_quantisers_take_no_budget(folder: Path) -> None:
    model = made(folder, method="kivi-2", budget=None)
    assert model.loglikelihood(requests((CONTEXT, " the mill")), disable_tqdm=True)[0][0] < 0


def test_what_reads_no_cache_is_refused(folder: Path) -> None:
    model = made(folder)
    with pytest.raises(ValueError, match="nothing to compress"):
        model.loglikelihood(requests(("", "a hen")), disable_tqdm=True)
    with pytest.raises(NotImplementedError, match="fidelity"):
        model.loglikelihood_rolling(requests((CONTEXT,)))


def test_wrong_settings_are_refused_at_once(folder: Path) -> None:
    for wrong, message in [
        ({"method": "snapkeyvalue"}, "there is no method"),
        ({"budget": "lots"}, "budget is 'lots'"),
        ({"method": "kivi-2", "budget": 0.2}, "takes no budget"),
        ({"pretrained": "/nowhere/at/all"}, "nowhere"),
    ]:
        with pytest.raises(ValueError, match=message):
            made(folder, **wrong)
