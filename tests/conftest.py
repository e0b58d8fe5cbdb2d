"""What every test shares: shapes checked at run time, poisoned fresh memory, one small real model."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from jaxtyping import install_import_hook

# Before anything imports qevict: every annotated shape and type of the package is checked in the whole run.
install_import_hook("qevict", "beartype.beartype")

# Before anything imports Triton: no test has a GPU, so the GPU kernel runs in Triton's interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for each other are slow on a busy machine

# torch.empty comes filled with NaN, so that output that nobody wrote shows.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, eval mode, and its tokenizer; treat both as read-only."""
    from qevict import models

    try:
        return models.load("smollm2-135m", dtype=torch.float32)
    except models.ModelNotFoundError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be reached."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's local cache, empty."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache
