"""A process with a small budget is smaller than one with full KV: what a layer's prompt took is given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qevict import allocator

SCRIPT = """
import json, sys, torch
from tiny import tiny_model
from qevict.bench.efficiency import Candidate, peak_bytes

SIZES = {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "head_dim": 64}
torch.set_num_threads(1)
candidate = Candidate(sys.argv[1], 0.1)
load = lambda: (tiny_model("llama", num_key_value_heads=8, max_position_embeddings=4096, **SIZES), None)
print(json.dumps(peak_bytes(load, torch.randint(3, 60, (1, 2048)), candidate, 4, None)))
"""


def peak(method: str) -> int:
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent / "src")])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, method], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(allocator._trim() is None, reason="not a Linux with glibc")
def test_the_peak_of_a_small_budget_is_below_that_of_full_kv() -> None:
    full, saved = 16 * 2 * 2048 * 8 * 64 * 4, 0.9
    assert peak("qevict") < peak("full KV") - 0.6 * saved * full
