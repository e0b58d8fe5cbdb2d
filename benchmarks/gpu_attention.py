"""Attention of one decode step over the three tiers on a CUDA device, beside torch's over the whole cache.

    python benchmarks/gpu_attention.py --contexts 4096 32768 131072 --batches 1 32 --budget 0.2

One layer of Llama-3.1-8B's shape in bfloat16, random tokens. First the output and the window masses of a row are
compared with those of the reference; a kernel that is wrong is not measured. Then qevict, torch's attention as it
chooses and its FlashAttention backend take turns. Before each call a gibibyte is overwritten: that empties the L2
cache, and takes so long that the call is waiting when the device comes to it. So times are the device's, by its own
clock; what the CPU takes to ask for a step stands beside them. The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from qevict import QEvictConfig
from qevict.budget import plan_tiers
from qevict.geometry import KVGeometry
from qevict.kernels import attend, gpu, reference
from qevict.rope import Rope
from qevict.tiers import TierStore

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP, SCALING, DTYPE = QUERY_HEADS // KV_HEADS, DIM**-0.5, torch.bfloat16
TOLERANCE = {
    torch.float32: 1e-3,
    DTYPE: 0.02,
}  # of queries of that dtype; the first shows mistakes, the second rounding

Step = Callable[[], object]


def make_store(config: QEvictConfig, keys: Tensor, values: Tensor) -> TierStore:
    """A layer's cache of one row with the given keys and values `[1, heads, tokens, dim]`."""
    device, tokens = keys.device, keys.shape[2]
    plan = plan_tiers(config, KVGeometry(1, KV_HEADS, QUERY_HEADS, DIM, DTYPE.itemsize), tokens + 256)
    rope = Rope(500000.0 ** (-torch.arange(0, DIM, 2, device=device) / DIM), dtype=DTYPE)
    first = torch.zeros(1, dtype=torch.long, device=device)
    store = TierStore(plan, config, 1, KV_HEADS, DIM, rope, first, DTYPE)
    prompt = torch.randn(1, KV_HEADS, GROUP, tokens, DIM, device=device, dtype=DTYPE)
    store.begin(prompt, keys, values, SCALING)
    store.settle()
    return store


def errors(store: TierStore, query: Tensor, new: Tensor) -> list[float]:
    """Relative errors of the output and of the masses of the store's row."""
    view = store.view(new, new)
    given, expected = gpu.attend(query, view, SCALING), reference.attend(query, view, SCALING)
    if given is None:
        raise SystemExit("the GPU kernel left these tiers to the reference: is Triton installed?")
    pairs = zip(given, expected, strict=True)
    return [float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs]


def torch_steps(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Step]:
    """Torch's attention over the whole cache, in the ways that this device has."""
    asked = query[:, :, :, 0].flatten(1, 2)[:, :, None]

    def chosen() -> Tensor:
        return sdpa(asked, keys, values, enable_gqa=True)

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return chosen()

    steps: dict[str, Step] = {"sdpa": chosen, "flash": flash}
    try:
        flash()
    except RuntimeError:
        del steps["flash"]
    return steps


def measure(steps: dict[str, Step], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of the device, one number a round, and the median of those of the CPU."""
    evict = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    spent: dict[str, list[float]] = {name: [] for name in steps}
    asked: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):  # kernels are compiled, and memory is found
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            torch.cuda.synchronize()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            evict.zero_()
            start.record()
            before = time.perf_counter()
            step()
            asked[name].append((time.perf_counter() - before) * 1e3)
            stop.record()
            stop.synchronize()
            spent[name].append(start.elapsed_time(stop))
    return spent, {name: statistics.median(times) for name, times in asked.items()}


def run(args: argparse.Namespace, context: int, batch: int, device: str) -> dict[str, object]:
    """One setting: compared, then measured."""
    config = QEvictConfig(budget=args.budget, window_size=args.window, codec=args.codec, bits=args.bits)
    keys, values = torch.randn(2, 1, KV_HEADS, context, DIM, device=device, dtype=DTYPE)
    row = make_store(config, keys, values)
    query = torch.randn(1, KV_HEADS, GROUP, 1, DIM, device=device, dtype=DTYPE)
    new = torch.randn(1, KV_HEADS, 1, DIM, device=device, dtype=DTYPE)
    found = {dtype: errors(row, query.to(dtype), new.to(dtype)) for dtype in TOLERANCE}
    result: dict[str, object] = {"context": context, "batch": batch}
    result["errors"] = {str(dtype): each for dtype, each in found.items()}
    if not all(error < TOLERANCE[dtype] for dtype, each in found.items() for error in each):
        return result | {"wrong": True}
    store = row.take(torch.zeros(batch, dtype=torch.long, device=device))  # the same tokens, in memory of their own
    query, new = query.repeat(batch, 1, 1, 1, 1), new.repeat(batch, 1, 1, 1)
    steps: dict[str, Step] = {"qevict": lambda: attend(query, store.view(new, new), SCALING)}
    steps |= torch_steps(query, keys.repeat(batch, 1, 1, 1), values.repeat(batch, 1, 1, 1))
    times, asked = measure(steps, args.rounds)
    result |= {"ms": {name: statistics.median(spent) for name, spent in times.items()}, "cpu_ms": asked}
    for name in times.keys() - {"qevict"}:
        ratios = [a / b for a, b in zip(times["qevict"], times[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[f"ratio_{name}"] = {"median": middle, "quartiles": [low, high]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    for name, default in (("rounds", 31), ("window", 16), ("bits", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument(
        "--codec", default="allotted:3+3", help="such as allotted:3+3, or minmax; --bits if it says none"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA device, and torch finds none here\n")
    torch.manual_seed(0)
    results = []
    for context in args.contexts:
        for batch in args.batches:
            torch.cuda.empty_cache()
            try:
                result = run(args, context, batch, "cuda")
            except torch.cuda.OutOfMemoryError:
                result = {"context": context, "batch": batch, "out_of_memory": True}
            print(json.dumps(result), flush=True)
            results.append(result)
    print(json.dumps({"setting": vars(args), "device": torch.cuda.get_device_name(), "results": results}))


if __name__ == "__main__":
    main()
