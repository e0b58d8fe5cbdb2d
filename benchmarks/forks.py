"""How much faster one sample is evaluated with all methods as forks of one prompt than with each by itself.

    python benchmarks/forks.py --length 1024 --new-tokens 32 --budgets 0.5,0.3,0.2

Together: one prefill, a cache for each method and budget, all decoded in one batch, as `qevict bench` does. Apart: for
each method and budget a prefill, its cache, and decoding it alone. All in one process, the forks both before and after
the separate runs, so that a busy machine slows both alike. The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from qevict.bench.cells import Cell, Failure, build, capture, cells_of
from qevict.bench.decode import Fork, decode
from qevict.demo import NEEDLE, document
from qevict.methods import get_method
from qevict.models import load

METHODS = "qevict,qevict-paper,snapkv,adakv,criticalkv,chunkkv,h2o,streamingllm"


@dataclass
class Spent:
    """Seconds of wall time: for the prefill, for compressing it into caches, for decoding."""

    prefill: float = 0.0
    fill: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        return self.prefill + self.fill + self.decode

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.prefill + other.prefill, self.fill + other.fill, self.decode + other.decode)


def evaluate(model: PreTrainedModel, ids: Sequence[int], cells: Sequence[Cell], new: int) -> tuple[Spent, list[Fork]]:
    """Run some cells together."""
    start = time.perf_counter()
    trace = capture(model, ids[:-1], [cell.method for cell in cells])
    traced = time.perf_counter()
    forks = []
    for cell in cells:
        cache = build(model, trace, cell, new, scope="total", store_dtype=torch.bfloat16)
        if isinstance(cache, Failure):
            raise SystemExit(f"{cell.method.label} at {cell.budget}: {cache.reason}")
        forks.append(Fork(cache, [ids[-1]], new))
    filled = time.perf_counter()
    for _ in decode(model, [forks], len(forks)):
        pass
    return Spent(traced - start, filled - traced, time.perf_counter() - filled), forks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--methods", default=METHODS, help="beside full KV")
    parser.add_argument("--budgets", default="0.5,0.3,0.2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(stderr=True, highlight=False)

    model, tokenizer = load(options.model)
    model.generation_config.eos_token_id = None  # every fork decodes all tokens
    names, budgets = options.methods.split(","), [float(budget) for budget in options.budgets.split(",")]
    cells = cells_of([get_method(name) for name in names], budgets)
    ids = tokenizer(document(tokenizer, options.length, NEEDLE)).input_ids[: options.length]
    evaluate(model, ids[:256], cells[:1], 2)  # the first run of anything is slower

    before, forks = evaluate(model, ids, cells, options.new_tokens)
    apart = {}
    for cell, fork in zip(cells, forks, strict=True):
        apart[cell], (alone,) = evaluate(model, ids, [cell], options.new_tokens)
        if alone.tokens != fork.tokens:
            console.print(f"{cell.method.label} at {cell.budget} decodes other tokens together than apart")
    after, _ = evaluate(model, ids, cells, options.new_tokens)
    both = before + after
    together = Spent(both.prefill / 2, both.fill / 2, both.decode / 2)
    separate = sum(apart.values(), start=Spent())

    table = Table("", "prefill s", "fill s", "decode s", "ms a token", "total s", box=None)
    rows = {f"{cell.method.label} {cell.budget or ''}": spent for cell, spent in apart.items()}
    for name, spent in {**rows, "all apart": separate, "all together": together}.items():
        token = 1000 * spent.decode / options.new_tokens
        values = (f"{spent.prefill:.2f}", f"{spent.fill:.2f}", f"{spent.decode:.2f}", f"{token:.0f}")
        table.add_row(name, *values, f"{spent.total:.2f}")
    console.print(table)
    result = {
        "benchmark": "forks",
        "forks": len(cells),
        "length": options.length,
        "new_tokens": options.new_tokens,
        "threads": options.threads,
        "seconds_apart": round(separate.total, 2),
        "seconds_together": round(together.total, 2),
        "gain": round(separate.total / together.total, 2),
        "gain_decoding": round(separate.decode / together.decode, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
