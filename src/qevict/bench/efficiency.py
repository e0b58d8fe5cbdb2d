"""Time and memory of decoding (the paper's table 4 and appendix H): every candidate beside full KV, in one run.

Machines are noisy, so candidates take turns: every round reads the prompt once with each, and in decoding each takes
one step after the other. What is quoted are ratios of what was measured side by side. Memory is that of a process of
its own for each candidate.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from qevict.allocator import give_back
from qevict.bench.best_full import BestFullCache
from qevict.bench.study_tables import Sheet, row_label
from qevict.compat import cache_argument
from qevict.config import Budget
from qevict.methods import make_cache
from qevict.stopwatch import listening
from qevict.trace import PrefillTrace, read_prompt, reads_twice

FULL, BEST = "full KV", "full KV, in place"
_WARM_TOKENS = 2048  # few, but as many as small budgets need for what they always keep
WARM_STEPS = 3
"""Steps before the clock runs; the first one may compile."""


@dataclass(frozen=True)
class Candidate:
    """What is measured: `FULL` (`DynamicCache`), `BEST` (`BestFullCache`), or a method at a share of full KV."""

    method: str
    budget: float | None = None

    @property
    def label(self) -> str:
        """As tables name it."""
        return row_label(self.method, self.budget)

    def cache(self, model: PreTrainedModel, prompt: int, new: int, store_dtype: torch.dtype | None) -> Any:
        """An empty cache for a prompt and new tokens of these numbers."""
        if self.method == FULL:
            return DynamicCache(config=model.config)
        if self.method == BEST:
            return BestFullCache(model, prompt + new)
        budget = Budget(fraction=1.0 if self.budget is None else self.budget)
        return make_cache(model, self.method, budget, max_new_tokens=new, store_dtype=store_dtype)


class Speed(NamedTuple):
    """Seconds of one candidate.

    Attributes:
        first: time to first token (TTFT) of each round, compression included.
        steps: of every decode step.
        routing: seconds a token of each part of routing events (scores, ranking, migration); empty for other methods.
    """

    first: list[float]
    steps: list[float]
    routing: dict[str, float]

    @property
    def ttft(self) -> float:
        """Median."""
        return statistics.median(self.first)

    @property
    def tpot(self) -> float:
        """Eq. 10: seconds an output token behind the first."""
        return statistics.mean(self.steps)

    def throughput(self, batch: int) -> float:
        """Eq. 10: output tokens a second, from the start on."""
        return batch * (len(self.steps) + 1) / (self.ttft + sum(self.steps))


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    ids: Int[Tensor, "batch tokens"],
    candidates: Sequence[Candidate],
    new_tokens: int,
    rounds: int,
    store_dtype: torch.dtype | None = None,
    watch: Callable[[str], None] = lambda _: None,
) -> dict[str, Speed]:
    """Every candidate's times on one prompt, by label.

    Args:
        rounds: how often the prompt is read with each, at least once.
        watch: told what is being done.
    """
    first: dict[str, list[float]] = {one.label: [] for one in candidates}
    for number in range(rounds):
        for one in candidates:
            watch(f"{one.label}: reading {ids.shape[1]} tokens, round {number + 1}")
            first[one.label].append(_time_to_first_token(model, ids, one, new_tokens, store_dtype))
    watch(f"decoding after {ids.shape[1]} tokens")
    count = WARM_STEPS + new_tokens - 1
    caches = {one.label: one.cache(model, ids.shape[1], count + 1, store_dtype) for one in candidates}
    trace = PrefillTrace.capture(model, ids, scores=any(map(reads_twice, caches.values())))
    for cache in caches.values():
        trace.fill(cache)
    del trace
    steps: dict[str, list[float]] = {label: [] for label in caches}
    routing: dict[str, Counter[str]] = {label: Counter() for label in caches}
    token, labels = ids[:, -1:], list(caches)
    for number in range(count):
        for label in labels[number % len(labels) :] + labels[: number % len(labels)]:
            with listening() as parts:
                steps[label].append(_timed(partial(_step, model, token, caches[label])))
            routing[label].update({name: seconds / count for name, seconds in parts.items()})
    return {label: Speed(first[label], steps[label][WARM_STEPS:], dict(routing[label])) for label in caches}


def _time_to_first_token(
    model: PreTrainedModel, ids: Tensor, candidate: Candidate, new_tokens: int, store_dtype: torch.dtype | None
) -> float:
    cache = candidate.cache(model, ids.shape[1], new_tokens, store_dtype)

    return _timed(lambda: _read(model, ids, cache))


def _read(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """The token `[batch, 1]` that follows some, the prompt at first."""
    if reads_twice(cache) and not cache.get_seq_length():
        read_prompt(model, cache, ids[:, :-1])
        ids = ids[:, -1:]
    logits = model(ids, use_cache=True, logits_to_keep=1, **cache_argument(cache)).logits
    return cast(Tensor, logits[:, -1:].argmax(dim=-1))


def _step(model: PreTrainedModel, token: Tensor, cache: Any) -> None:
    model(token, use_cache=True, **cache_argument(cache)).logits[:, -1].argmax(dim=-1)


def _timed(action: Callable[[], object]) -> float:
    _wait()
    start = time.perf_counter()
    action()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- memory ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def peak_bytes(
    load: Callable[[], tuple[PreTrainedModel, Any]],
    ids: Int[Tensor, "batch tokens"],
    candidate: Candidate,
    new_tokens: int,
    store_dtype: torch.dtype | None,
) -> int:
    """Most bytes above the loaded and warmed model, while it reads the prompt and generates.

    On a CPU, call it in a process of its own: memory that other work freed may be taken again unseen.
    """
    model = load()[0]
    short = ids[:, :_WARM_TOKENS]  # for libraries, kernels and buffers of the model itself
    for cache in (DynamicCache(config=model.config), candidate.cache(model, short.shape[1], 8, store_dtype)):
        _generate(model, short, cache, 8)
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        give_back()  # or what the warm-up freed would be used again unseen
        before = _reset_peak()
    _generate(model, ids, candidate.cache(model, ids.shape[1], new_tokens, store_dtype), new_tokens)
    return (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")) - before


def _generate(model: PreTrainedModel, ids: Tensor, cache: Any, new_tokens: int) -> None:
    token = ids
    for _ in range(new_tokens):
        token = _read(model, token, cache)


def _reset_peak() -> int:
    """Let the kernel forget the largest resident set so far; returns the present one.

    Raises:
        ValueError: where there is no such switch.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise ValueError(f"peak memory on a CPU needs Linux: {error}") from None
    return _status("VmRSS")


def _status(name: str) -> int:
    """A figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"this machine does not tell {name}")


# -- what is read, and what is shown -----------------------------------------------------------------------------------


def rows(tokenizer: PreTrainedTokenizerBase, text: Path | None, batch: int, length: int) -> Int[Tensor, "batch tokens"]:
    """The beginning of a text, cut into rows.

    Args:
        text: None takes the Python reference.

    Raises:
        ValueError: if the text is too short.
    """
    read = text.read_text(encoding="utf8") if text is not None else "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(read, add_special_tokens=False, verbose=False)["input_ids"][: batch * length]
    if len(ids) < batch * length:
        raise ValueError(f"the text has {len(ids)} tokens, {batch} rows of {length} need more; give a longer --text")
    return torch.tensor(ids).view(batch, length)


def sheet(title: str, speeds: dict[str, Speed], peaks: dict[str, int], batch: int) -> Sheet:
    """A line for each candidate; ratios are to `FULL`."""
    full = speeds[FULL]
    lines = []
    for label, speed in speeds.items():
        low, middle, high = step_ratio(speed, full)
        routing = " + ".join(f"{1e3 * seconds:.2f}" for seconds in speed.routing.values())
        lines.append(
            (
                label,
                f"{speed.ttft:.2f} s ({speed.ttft / full.ttft:.2f})",
                f"{1e3 * speed.tpot:.1f} ms ({speed.tpot / full.tpot:.2f})",
                f"{middle:.2f} [{low:.2f}, {high:.2f}]",
                f"{speed.throughput(batch):.1f}",
                routing or "–",
                f"{peaks[label] / 1e6:.0f} MB" if label in peaks else "–",
            )
        )
    heads = ("", "TTFT", "TPOT", "step, of full KV's", "tokens/s", "scores + ranking + migration", "peak")
    notes = (
        "Eq. 10; in brackets the ratio to full KV (Transformers' DynamicCache). Steps are compared with those of full "
        "KV beside them: median and quartiles of the ratios.",
        "Routing: milliseconds a token. Peak: most memory above the loaded model, in a process of its own.",
    )
    return Sheet(title, heads, tuple(lines), notes)


def step_ratio(speed: Speed, full: Speed) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the ratios of steps that were taken in turn."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(speed.steps, full.steps, strict=True)], n=4)
    return low, middle, high


def as_json(results: Sequence[tuple[int, dict[str, Speed], dict[str, int]]], batch: int) -> list[dict[str, Any]]:
    """One object for each context and candidate, everything in seconds and bytes."""
    return [
        {
            "context": length,
            "batch": batch,
            "method": label,
            "ttft": speed.ttft,
            "tpot": speed.tpot,
            "throughput": speed.throughput(batch),
            "step_ratio": step_ratio(speed, speeds[FULL]),
            "routing": speed.routing,
            "peak": peaks.get(label),
        }
        for length, speeds, peaks in results
        for label, speed in speeds.items()
    ]
