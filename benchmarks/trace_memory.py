"""How much memory recording a reference trace takes above the loaded model, and how large the trace is.

    python benchmarks/trace_memory.py --prefill 7936 --generate 256

Full KV runs once and every decode step's attention is written (`qevict.diagnostics.reference`). The peak is the
kernel's own high-water mark of resident memory, reset after the model was loaded and has run once, so Linux only. What
the trace takes on disk is stated before the run and compared with its files after it. The last line printed is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from method_bytes import text_ids
from rich.console import Console

from qevict.diagnostics.reference import record_reference, trace_header
from qevict.models import load

MB = 10**6


def resident(what: str) -> int:
    """Bytes of resident memory: `VmRSS` for now, `VmHWM` for the most since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def reset_peak() -> None:
    """Let `VmHWM` begin again at what is resident now (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prefill", type=int, default=7936, help="with --generate, as many as the model has positions")
    parser.add_argument("--generate", type=int, default=256)
    options = parser.parse_args()
    console = Console(stderr=True, highlight=False)

    model, tokenizer = load(options.model)
    ids = text_ids(tokenizer, options.prefill)
    with torch.no_grad():
        model(torch.tensor([ids[:32]]))  # weights that are mapped from a file become resident when they are used
    header = trace_header(model, ids, options.generate)
    console.print(
        f"the trace will take {header.nbytes / MB:.0f} MB, {header.held_bytes / MB:.0f} MB of it held at once"
    )

    reset_peak()
    before, start = resident("VmRSS"), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        record_reference(model, header, Path(folder))
        written = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    seconds, above = time.perf_counter() - start, resident("VmHWM") - before
    console.print(f"{above / MB:.0f} MB above the model's {before / MB:.0f} MB; {written / MB:.0f} MB written")
    result = {
        "benchmark": "trace_memory",
        "prefill": options.prefill,
        "generate": options.generate,
        "model_mb": round(before / MB),
        "peak_above_model_mb": round(above / MB),
        "held_at_once_mb": round(header.held_bytes / MB),
        "stated_mb": round(header.nbytes / MB),
        "written_mb": round(written / MB),
        "seconds": round(seconds),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
