"""How much faster caches of many methods decode together, as forks of one prompt, than each by itself.

    python benchmarks/forks.py --length 1024 --methods snapkv,qevict,... --budgets 0.5,0.2,0.1

All in one process on the same caches, together and apart by turns, so that a busy machine slows both alike. Everything
that a benchmark run does at a step is timed: the forward, the choice of the token, reading the memory. The last line
printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from qevict.bench.cells import Cell, Failure, build, capture, cells_of
from qevict.bench.decode import Fork, decode
from qevict.bench.forks import copies
from qevict.demo import NEEDLE, document
from qevict.methods import get_method
from qevict.models import load


def seconds(work: Callable[[], object]) -> float:
    """Wall time."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--methods", default="qevict,qevict-paper,snapkv,adakv,h2o,tova,streamingllm,chunkkv")
    parser.add_argument("--budgets", default="0.5,0.3,0.2")
    parser.add_argument("--steps", type=int, default=8, help="tokens decoded in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)

    model, tokenizer = load(options.model)
    model.generation_config.eos_token_id = None  # every fork decodes all steps
    cells = cells_of(
        [get_method(name) for name in options.methods.split(",")], [float(b) for b in options.budgets.split(",")]
    )
    ids = tokenizer(document(tokenizer, options.length, NEEDLE)).input_ids[: options.length]
    trace = capture(model, ids[:-1], [cell.method for cell in cells])
    caches = {}
    for cell in cells:
        made = build(model, trace, cell, options.steps + 1, scope="total", store_dtype=torch.bfloat16)
        if isinstance(made, Failure):
            console.print(f"{cell.key} left out: {made.reason}", highlight=False)
        else:
            caches[cell] = made

    def forks(chosen: list[Cell]) -> list[Fork]:
        held = copies([caches[cell] for cell in chosen])
        return [Fork(cache, [ids[-1]], options.steps) for cache in held]

    together: list[float] = []
    apart: dict[Cell, list[float]] = {cell: [] for cell in caches}
    for _ in range(options.turns):
        group = forks(list(caches))
        together.append(seconds(lambda group=group: list(decode(model, [group], len(group)))))
        tokens = {cell: fork.tokens for cell, fork in zip(caches, group, strict=True)}
        for cell, times in apart.items():
            alone = forks([cell])
            times.append(seconds(lambda alone=alone: list(decode(model, [alone], 1))))
            if alone[0].tokens != tokens[cell]:
                console.print(f"{cell.key} decodes other tokens together than apart", highlight=False)

    one = statistics.median(together) / options.steps
    each = {cell: statistics.median(times) / options.steps for cell, times in apart.items()}
    table = Table("method", "budget", "ms a token, apart", box=None)
    for cell, spent in each.items():
        table.add_row(cell.method.label, "" if cell.budget is None else f"{cell.budget:.0%}", f"{1000 * spent:.0f}")
    console.print(table)
    gain = sum(each.values()) / one
    console.print(
        f"{len(caches)} forks: {1000 * one:.0f} ms a step together, {1000 * sum(each.values()):.0f} ms apart: "
        f"{gain:.1f} times as fast",
        highlight=False,
    )
    result = {
        "benchmark": "forks",
        "forks": len(caches),
        "length": options.length,
        "threads": options.threads,
        "steps": options.steps,
        "seconds_together": one,
        "seconds_apart": sum(each.values()),
        "gain": gain,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
