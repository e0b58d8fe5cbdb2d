"""`qevict bench codecs`: bits and errors against what is known of a codec, on a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import save_model
from typer.testing import CliRunner

from qevict.bench.distortion import measure
from qevict.bench.study_commands import app
from qevict.codecs import WindowShape, get_codecs
from tiny import tiny_model


def test_bits_are_those_of_the_bytes_and_more_of_them_lose_less() -> None:
    model = tiny_model("llama")
    config = model.config
    ids = torch.randint(3, config.vocab_size, (120,)).tolist()
    names = ["minmax:2+2", "minmax:8+8", "allotted:2+2", "allotted:8+8"]
    found = {one.codec: one for one in measure(model, [ids, ids[::-1]], names, [8], last=16)}
    dim = config.hidden_size // config.num_attention_heads
    shape = WindowShape(config.num_key_value_heads, 8, dim)
    elements = shape.heads * 8 * dim
    assert found["minmax:2+2"].bits == pytest.approx(8 * next(get_codecs("minmax:2+2")).layout(shape).nbytes / elements)
    windows = (120 - 16 - 5) // 8
    allotted = next(get_codecs("allotted:2+2"))
    parameters = 8 * allotted.fitted_bytes(shape) / (elements * windows)
    assert found["allotted:2+2"].bits == pytest.approx(8 * allotted.layout(shape).nbytes / elements + parameters)
    for codec in ("minmax", "allotted"):
        few, many = found[f"{codec}:2+2"], found[f"{codec}:8+8"]
        assert many.output < 0.02 < few.output
        assert many.keys < few.keys
        assert many.values < few.values
        assert few.worst >= few.output


def test_a_text_without_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="20 tokens holds no window of 8 before its last 16"):
        measure(tiny_model("llama"), [list(range(3, 23))], ["minmax:2+2"], [8], last=16)


def test_the_command_writes_a_table_and_a_picture(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("One word after another makes a text that is long enough. " * 40)
    command = ["codecs", "--model", model, "--text", text, "--tokens", 200, "--windows", 8, "--out", tmp_path / "out"]
    runner = CliRunner()
    result = runner.invoke(app, [*map(str, command), "--codecs", "minmax:4+4,allotted:2.5+3"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    table = (tmp_path / "out" / "codecs.md").read_text()
    assert "| allotted:2.5+3 | 8 |" in table
    assert "| minmax:4+4 | 8 |" in table
    assert (tmp_path / "out" / "codecs.png").stat().st_size > 1000
    wrong = runner.invoke(app, [*map(str, command), "--codecs", "zip:2+2"])
    assert wrong.exit_code != 0
    assert "unknown codec" in wrong.output
