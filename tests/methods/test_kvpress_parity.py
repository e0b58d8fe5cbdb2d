"""The tokens that NVIDIA's kvpress keeps are those that ours keep, under kvpress's settings.

`tests/fixtures/make_kvpress_fixtures.py` says how the fixture was made. kvpress's number of tokens is
int(tokens * (1 - ratio)); only ChunkKV counts otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from qevict.methods.adakv import AdaKV
from qevict.methods.base import LayerPrefill, Selector
from qevict.methods.chunkkv import ChunkKV
from qevict.methods.criticalkv import CriticalAdaKV, CriticalKV
from qevict.methods.expected_attention import ExpectedAttention
from qevict.methods.h2o import ObservedAttention
from qevict.methods.keynorm import KeyNorm
from qevict.methods.snapkv import SnapKV
from qevict.methods.streaming import StreamingLLM
from qevict.methods.tova import TOVA
from qevict.rope import Rope

FIXTURE = Path(__file__).parents[1] / "fixtures" / "kvpress.safetensors"
LAYERS = 2

with safe_open(FIXTURE, "pt") as file:
    TENSORS = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    SETTINGS = {name: json.loads(value) for name, value in file.metadata().items()}

RATIOS = SETTINGS["ratios"]
WINDOW, KERNEL, CHUNK = SETTINGS["window"], SETTINGS["kernel"], SETTINGS["chunk"]

METHODS: dict[str, Selector] = {
    "snapkv": SnapKV(WINDOW, KERNEL, "avg"),
    "streamingllm": StreamingLLM(),
    "observedattention": ObservedAttention(),
    "adakv": AdaKV(WINDOW, KERNEL, "avg", safeguard="floor"),
    "criticalkv": CriticalKV(WINDOW, KERNEL, "avg"),
    "criticaladakv": CriticalAdaKV(WINDOW, KERNEL, "avg"),
    "tova": TOVA(keep_last=True),
    "keynorm": KeyNorm(),
    "expectedattention": ExpectedAttention(),
}


def layer(index: int) -> LayerPrefill:
    keys, weight = TENSORS[f"{index}.keys"], TENSORS[f"{index}.output"]
    module = nn.Module()
    module.o_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.o_proj.weight.data = weight
    return LayerPrefill(
        index=index,
        query=TENSORS[f"{index}.query"].unflatten(0, (len(keys), -1)),
        keys=keys,
        values=TENSORS[f"{index}.values"],
        first_position=0,
        rope=Rope(TENSORS["inv_freq"]),
        scaling=keys.shape[2] ** -0.5,
        module=module,
    )


def theirs(name: str, ratio: float, index: int) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in TENSORS[f"{name}/{ratio}/{index}"]]


def as_lists(kept: list[Tensor]) -> list[list[int]]:
    return [index.tolist() for index in kept]


@pytest.mark.parametrize("index", range(LAYERS))
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", METHODS)
def test_the_same_tokens_stay(name: str, ratio: float, index: int) -> None:
    prefill = layer(index)
    kept = METHODS[name].keep(prefill, int(prefill.tokens * (1 - ratio)))
    assert as_lists(kept) == theirs(name, ratio, index)


@pytest.mark.parametrize("index", range(LAYERS))
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_same_chunks_stay_with_as_many_tokens_as_their_chunks_have(ratio: float, index: int) -> None:
    """kvpress counts the shorter last chunk as a whole one and may pass int(tokens * (1 - ratio))."""
    prefill, method = layer(index), ChunkKV(WINDOW, KERNEL, chunk=CHUNK)
    kept = method.keep(prefill, method.kvpress_tokens(prefill.tokens, ratio))
    assert as_lists(kept) == theirs("chunkkv", ratio, index)


def test_the_presses_differ() -> None:
    """Otherwise equal sets would prove little."""
    kept = [TENSORS[f"{name}/0.5/1"] for name in (*METHODS, "chunkkv")]
    assert all(not torch.equal(a, b) for i, a in enumerate(kept) for b in kept[:i])


def test_criticalkv_differs_where_the_first_stage_is_smaller_than_the_window() -> None:
    """There kvpress lets the norms of values push tokens out of the observation window; ours always keeps it."""
    prefill = layer(0)
    tokens = WINDOW + 3
    kept = CriticalKV(WINDOW, KERNEL, "avg").keep(prefill, tokens)
    window = set(range(prefill.tokens - WINDOW, prefill.tokens))
    assert all(window <= set(index.tolist()) for index in kept)
