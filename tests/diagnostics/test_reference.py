"""The reference trace is the attention of the plain model, in files of a known size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_study import PREFILL, STEPS, article
from transformers import DynamicCache

from qevict.compat import cache_argument
from qevict.diagnostics.reference import record_reference, trace_header
from qevict.diagnostics.trace import Trace, TraceWriter
from tiny import tiny_model

pytestmark = pytest.mark.contract


def traced(folder: Path, family: str = "llama", chunk: int = 7, forced: bool = True) -> Trace:
    model, text = tiny_model(family), article()
    header = trace_header(model, text.tokens[:PREFILL], STEPS, title=text.title, chunk=chunk, forced=forced)
    continuation = text.tokens[PREFILL:] if forced else None
    return record_reference(model, header, folder, continuation=continuation, store_dtype=None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_trace_is_the_attention_that_the_model_itself_reports(family: str, tmp_path: Path) -> None:
    trace = traced(tmp_path, family)
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([trace.header.tokens]), output_attentions=True).attentions
    for layer in trace.header.layers:
        own = weights[layer][0]
        assert torch.allclose(trace.mass(layer), own[:, PREFILL:], atol=2e-3)
        assert torch.allclose(trace.prompt(layer)[:, :PREFILL], own[:, :PREFILL, :PREFILL].sum(dim=1), atol=1e-3)
        last = own[:, PREFILL - 32 : PREFILL, :PREFILL].sum(dim=1)
        assert torch.allclose(trace.prompt(layer, 32)[:, :PREFILL], last, atol=1e-3)


def test_chunks_change_nothing_but_the_files(tmp_path: Path) -> None:
    traces = [traced(tmp_path / str(chunk), chunk=chunk) for chunk in (1, 5, 100)]
    assert [len(list(trace.folder.glob("steps-*"))) for trace in traces] == [STEPS, 5, 1]
    for layer in traces[0].header.layers:
        assert all(torch.equal(trace.mass(layer), traces[0].mass(layer)) for trace in traces)


def test_the_size_is_known_beforehand(tmp_path: Path) -> None:
    trace = traced(tmp_path)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    headers = 4096 * len(list(tmp_path.glob("*.safetensors")))
    assert trace.header.nbytes <= on_disk <= trace.header.nbytes + headers


def test_an_8k_trace_of_the_default_model_holds_little_and_says_so() -> None:
    header = trace_header(tiny_model("llama"), [5] * 8192, 256)
    scaled = header.held_bytes * (30 * 9) // (len(header.layers) * header.query_heads)
    assert scaled < 0.3e9
    assert header.step_bytes == sum(2 * 4 * len(s) * (8192 + s.stop) * 2 for s in header.chunks)


def test_generated_tokens_are_the_models_own(tmp_path: Path) -> None:
    trace, model = traced(tmp_path, forced=False), tiny_model("llama")
    assert model.generation_config is not None
    prompt = torch.tensor([trace.header.tokens[:PREFILL]])
    suppressed = model.generation_config.eos_token_id
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=STEPS,
        suppress_tokens=[suppressed],
        **cache_argument(DynamicCache(config=model.config)),
    )
    assert tuple(generated[0].tolist()) == trace.header.tokens


def test_what_cannot_be_traced_or_read_is_said(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="a prompt and a continuation"):
        trace_header(model, [5] * 8, 0)
    with pytest.raises(ValueError, match="no finished reference trace"):
        Trace.open(tmp_path)
    header = trace_header(model, [5] * 8, 4)
    with pytest.raises(ValueError, match="4 steps, but the continuation has 3"):
        record_reference(model, header, tmp_path, continuation=[1, 2, 3])
    with pytest.raises(RuntimeError, match="4 steps got"):
        TraceWriter(tmp_path, header).close()
    with pytest.raises(ValueError, match="last \\(32,\\) prompt queries, not of 7"):
        traced(tmp_path).prompt(0, 7)
