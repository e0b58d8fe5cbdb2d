"""How the time of a decode step grows with the context, at a fixed number of bytes and with full KV.

    python benchmarks/growth.py --contexts 1024,2048,4096,8000 --tokens 820

Every context has a cache of each kind, and the caches take turns step by step, in one run: the default policy with the
bytes of `--tokens` tokens, and Transformers' `DynamicCache`. TPOT includes routing events. The last line printed is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from qevict import Budget, QEvictCache, QEvictConfig, attach
from qevict.bench.efficiency import rows
from qevict.compat import cache_argument
from qevict.models import load

WARM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", default="1024,2048,4096,8000", help="tokens of the prompts, the shortest first")
    parser.add_argument("--tokens", type=int, default=820, help="the budget, in tokens' bytes")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model)
    attach(model)
    contexts = [int(length) for length in args.contexts.split(",")]
    config = QEvictConfig(budget=Budget(tokens=args.tokens), store_dtype=torch.bfloat16)

    caches = {}
    with torch.no_grad():
        for length in contexts:
            ids = rows(tokenizer, None, 1, length)
            for kind in ("qevict", "full KV"):
                cache = QEvictCache(model, config) if kind == "qevict" else DynamicCache(config=model.config)
                model(ids, use_cache=True, logits_to_keep=1, **cache_argument(cache))
                caches[kind, length] = cache
        times: dict[tuple[str, int], list[float]] = {key: [] for key in caches}
        for _ in range(WARM_STEPS + args.steps):
            for key, cache in caches.items():
                start = time.perf_counter()
                model(ids[:, -1:], use_cache=True, **cache_argument(cache))
                times[key].append(time.perf_counter() - start)
    times = {key: spent[WARM_STEPS:] for key, spent in times.items()}

    table = Table(title=f"{args.model}, {args.steps} steps, {args.threads} threads; the shortest context is 1")
    for heading in ("", "context", "TPOT, ms", "growth of TPOT", "growth of the median step"):
        table.add_column(heading, justify="right" if heading else "left")
    results = []
    for (kind, length), spent in times.items():
        first = times[kind, contexts[0]]
        growth = statistics.mean(spent) / statistics.mean(first), statistics.median(spent) / statistics.median(first)
        tpot = 1e3 * statistics.mean(spent)
        table.add_row(kind, str(length), f"{tpot:.1f}", *(f"{ratio:.2f}" for ratio in growth))
        results.append({"cache": kind, "context": length, "tpot_ms": tpot, "growth": growth[0], "median": growth[1]})
    Console(width=100).print(table)
    print(json.dumps({"setting": vars(args), "results": results}))


if __name__ == "__main__":
    main()
