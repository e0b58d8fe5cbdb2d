"""Attention of one decode step over the three tiers, beside torch's over the whole cache.

    python benchmarks/attention.py --context 8192 --budget 0.2 --threads 1

Every layer has a cache of its own and the layers take turns, as in a model, so that nothing is found in the processor's
cache that a model would not find there. Rounds alternate between the candidates. Torch is measured with each KV head's
query heads as if they were queries ("folded") and with `enable_gqa`, in float32 and bfloat16; the ratios are to the
best of each dtype. Beside it stands how fast a large block of memory is copied. The last line printed is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from qevict import QEvictConfig
from qevict.budget import plan_tiers
from qevict.geometry import KVGeometry
from qevict.kernels import attend, reference
from qevict.rope import Rope
from qevict.tiers import TierStore

Step = Callable[[int], object]


def make_stores(args: argparse.Namespace, config: QEvictConfig) -> list[TierStore]:
    """A layer's cache of random tokens for each layer."""
    store_dtype = getattr(torch, args.store)
    group = args.query_heads // args.kv_heads
    geometry = KVGeometry(args.layers, args.kv_heads, args.query_heads, args.head_dim, store_dtype.itemsize)
    plan = plan_tiers(config, geometry, args.context + 256)
    rope = Rope(10000.0 ** (-torch.arange(0, args.head_dim, 2) / args.head_dim))
    stores = []
    for _ in range(args.layers):
        first = torch.zeros(args.batch, dtype=torch.long)
        store = TierStore(plan, config, args.batch, args.kv_heads, args.head_dim, rope, first, store_dtype)
        keys, values = torch.randn(2, args.batch, args.kv_heads, args.context, args.head_dim)
        prompt = torch.randn(args.batch, args.kv_heads, group, args.context, args.head_dim)
        store.begin(prompt, keys, values, args.head_dim**-0.5)
        store.settle()
        stores.append(store)
    return stores


def kernel(stores: Sequence[TierStore], query: Tensor, new: Tensor, attention: Callable[..., object]) -> Step:
    """A step of the tiers: query `[batch, heads, group, 1, dim]`, one new token."""
    return lambda layer: attention(query, stores[layer].view(new, new), query.shape[-1] ** -0.5)


def torch_steps(args: argparse.Namespace, query: Tensor, dtype: torch.dtype) -> dict[str, Step]:
    """Torch's attention over whole caches, in two ways."""
    shape = (args.batch, args.kv_heads, args.context, args.head_dim)
    caches = [torch.randn(2, *shape).to(dtype) for _ in range(args.layers)]
    folded, apart = query[:, :, :, 0].to(dtype), query[:, :, :, 0].flatten(1, 2)[:, :, None].to(dtype)
    name = str(dtype).removeprefix("torch.")
    return {
        f"sdpa folded {name}": lambda layer: sdpa(folded, *caches[layer]),
        f"sdpa enable_gqa {name}": lambda layer: sdpa(apart, *caches[layer], enable_gqa=True),
    }


def measure(steps: dict[str, Step], layers: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a layer, one number a round."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for layer in range(layers):
                step(layer)
            spent[name].append((time.perf_counter() - start) / layers * 1e3)
    return {name: times[1:] for name, times in spent.items()}  # the first round warms up


def read_bytes(store: TierStore) -> int:
    """Bytes of keys and values that one step reads."""
    history = store.history
    shown = int(history.code_present.sum()) * history.packed.shape[2]
    exact = int(history.full_present.sum()) * 2 * history.full_keys[0, 0].nbytes if history.full_present.numel() else 0
    return shown + exact + 2 * store.keys[:, :, : store.stored].nbytes


def copy_speed(rounds: int = 7) -> float:
    """GB/s of reading a block of 256 MB and writing it elsewhere, both counted."""
    source, target, seconds = torch.zeros(1 << 26), torch.zeros(1 << 26), []
    for _ in range(rounds):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("context", 8192), ("layers", 30), ("query-heads", 9), ("kv-heads", 3), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("batch", 1), ("threads", 1), ("rounds", 21), ("window", 16), ("bits", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--codec", default="minmax", help="such as minmax, or allotted:3+3; --bits if it says none")
    parser.add_argument("--store", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--reference", action="store_true", help="measure the reference kernel, too (slow)")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)

    config = QEvictConfig(budget=args.budget, window_size=args.window, codec=args.codec, bits=args.bits)
    stores = make_stores(args, config)
    query = torch.randn(args.batch, args.kv_heads, args.query_heads // args.kv_heads, 1, args.head_dim)
    new = torch.randn(args.batch, args.kv_heads, 1, args.head_dim)
    view, scaling = stores[0].view(new, new), args.head_dim**-0.5
    expected, given = reference.attend(query, view, scaling), attend(query, view, scaling)
    error = float((given.output - expected.output).norm() / expected.output.norm())
    steps = {"qevict": kernel(stores, query, new, attend)}
    if args.reference:
        steps["reference"] = kernel(stores, query, new, reference.attend)
    for dtype in (torch.float32, torch.bfloat16):
        steps |= torch_steps(args, query, dtype)
    times = measure(steps, args.layers, args.rounds)
    medians = {name: statistics.median(spent) for name, spent in times.items()}

    table = Table(title=f"{args.context} tokens, budget {args.budget}, {args.threads} threads; milliseconds a layer")
    for heading in ("", "median", "least", "most"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, spent in times.items():
        table.add_row(name, *(f"{value:.3f}" for value in (medians[name], min(spent), max(spent))))
    Console(width=100).print(table)
    result = {"setting": vars(args), "windows": vars(stores[0].plan)["max_codes"], "error": error, "ms": medians}
    for dtype in ("float32", "bfloat16"):
        best = min((name for name in medians if name.endswith(dtype)), key=lambda name: medians[name])
        ratios = [a / b for a, b in zip(times["qevict"], times[best], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        result[f"ratio_{dtype}"] = {"to": best, "median": statistics.median(ratios), "quartiles": [low, high]}
        print(f"{statistics.median(ratios):.3f} of {best} (quartiles {low:.3f} to {high:.3f})")
    read, best = read_bytes(stores[0]), medians["qevict"]
    result |= {"read_bytes": read, "read_gb_s": read / best / 1e6, "copy_gb_s": copy_speed()}
    print(f"{read} bytes a layer read at {result['read_gb_s']:.2f} GB/s; a copy runs at {result['copy_gb_s']:.2f} GB/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
