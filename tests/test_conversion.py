"""A GGUF file becomes a folder with the same weights, and nobody ever sees half of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qevict.conversion import build_once, convert_gguf
from tiny_gguf import tiny_llama, write_gguf

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    write_gguf(tiny_llama(), folder / "tiny.gguf")
    convert_gguf(folder / "tiny.gguf", folder / "model")
    return folder / "model"


@pytest.mark.contract
def test_the_converted_model_is_the_model_that_the_file_was_made_from(converted: Path) -> None:
    original, loaded = tiny_llama(), AutoModelForCausalLM.from_pretrained(converted)
    tokens = torch.arange(40).reshape(2, 20)
    torch.testing.assert_close(loaded(tokens).logits, original(tokens).logits, rtol=0, atol=1e-6)
    assert loaded.dtype == torch.float32
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert loaded.generation_config.eos_token_id == 2
    assert not hasattr(loaded.config, "quantization_config")


@pytest.mark.contract
def test_the_tokenizer_survives_the_way_through_the_folder(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = "Wörter,  und 1024 Ω\n\tin the end"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == tiny_llama().config.vocab_size
    assert ids[0] != tokenizer.bos_token_id


@pytest.mark.contract
def test_digits_stand_alone_and_leave_the_spaces_before_them_together(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.convert_ids_to_tokens(tokenizer("  42 the").input_ids) == ["ĠĠ", "4", "2", "Ġthe"]


@pytest.mark.contract
def test_the_chat_template_uses_the_special_tokens(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer(chat).input_ids.count(2) == 1


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", pre_tokenizer="llama-bpe")
    with pytest.raises(ValueError, match=r"llama-bpe.*only"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text("whole")

    for _ in range(2):
        target = build_once(tmp_path / "deep" / "model", build)
        assert (target / "weights").read_text() == "whole"
    assert len(calls) == 1


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    build_once(tmp_path / "model", lambda folder: None)
    assert list((tmp_path / "model").iterdir()) == []


BUILDER = """
import sys, time
from pathlib import Path
from qevict.conversion import build_once

def build(folder):
    (folder / "weights").write_text("half")
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "weights").write_text("whole")

print((build_once(Path(sys.argv[1]), build) / "weights").read_text(), flush=True)
"""


def start_builder(target: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(target), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def test_of_two_processes_one_builds_and_both_see_the_whole(tmp_path: Path) -> None:
    builders = [start_builder(tmp_path / "model", 0.5) for _ in range(2)]
    outputs = sorted(builder.communicate(timeout=60)[0].split() for builder in builders)
    assert outputs == [["building", "whole"], ["whole"]]


def test_a_build_that_was_killed_is_never_used(tmp_path: Path) -> None:
    killed = start_builder(tmp_path / "model", 60)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "building\n"
    killed.kill()
    killed.communicate(timeout=60)
    assert not (tmp_path / "model").exists()
    output, _ = start_builder(tmp_path / "model", 0).communicate(timeout=60)
    assert output.split() == ["building", "whole"]
