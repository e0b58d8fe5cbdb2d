"""Single needle in a haystack of filler: accuracy of the full cache, of the paper's tiers, and of eviction alone.

    python benchmarks/needle.py --samples 30 --length 1024 --out needle.jsonl

All caches store 16 bits. The prompt but for its last token is prefilled and compressed, then the last token is fed, so
that every answer token comes from the compressed cache. A run that was stopped goes on where it was. The last line
printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qevict import QEvictCache, QEvictConfig
from qevict.architectures import decoder
from qevict.compat import cache_argument
from qevict.models import load
from qevict.needle import FILLER, INTRODUCTION, Needle, hide

ANSWER_TOKENS = 12


def conditions() -> dict[str, QEvictConfig]:
    """What is compared, by name."""
    named: dict[str, QEvictConfig] = {"full KV": QEvictConfig(budget=1.0)}
    for budget in (0.2, 0.1):
        named[f"paper() {budget:.0%}"] = QEvictConfig.paper(budget=budget)
        named[f"q = 0 {budget:.0%}"] = QEvictConfig.paper(budget=budget, quantized_fraction=0.0)
        named[f"default {budget:.0%}"] = QEvictConfig(budget=budget)
    return {name: config.replace(store_dtype=torch.bfloat16) for name, config in named.items()}


def prompt_ids(tokenizer, needle: Needle, length: int, depth: float) -> torch.Tensor:
    """The longest prompt of at most `length` tokens, `[1, tokens]`."""

    def build(repeats: int) -> torch.Tensor:
        haystack = hide("\n".join([FILLER] * repeats), needle, depth)
        message = {"role": "user", "content": f"{INTRODUCTION}\n{haystack}\n{needle.question}"}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return tokenizer(text + needle.answer_prefix, add_special_tokens=False, return_tensors="pt").input_ids

    per_line = build(2).shape[1] - build(1).shape[1]
    repeats = max(1, (length - build(0).shape[1]) // per_line)
    while build(repeats).shape[1] > length:
        repeats -= 1
    return build(repeats)


@torch.no_grad()
def ask(model, tokenizer, config: QEvictConfig, ids: torch.Tensor) -> tuple[str, float, int]:
    """The answer, the measured share of full KV's bytes, and the bytes over budget."""
    cache = QEvictCache(model, config, max_new_tokens=ANSWER_TOKENS + 1)
    decoder(model)(ids[:, :-1], **cache_argument(cache))
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        **cache_argument(cache),
    )
    report = cache.memory()
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True), report.ratio, report.overshoot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens, at most")
    parser.add_argument("--out", type=Path, default=Path("needle.jsonl"))
    options = parser.parse_args()
    done = {}
    if options.out.exists():
        done = {(row["sample"], row["cache"]): row for row in map(json.loads, options.out.read_text().splitlines())}

    model, tokenizer = load(options.model)
    with options.out.open("a") as out:
        for sample in track(range(options.samples), description="samples", console=Console(stderr=True)):
            needle = Needle.random(seed=sample)
            ids = prompt_ids(tokenizer, needle, options.length, depth=(sample + 0.5) / options.samples)
            for name, config in conditions().items():
                if (sample, name) in done:
                    continue
                answer, ratio, over = ask(model, tokenizer, config, ids)
                row = {
                    "sample": sample,
                    "cache": name,
                    "tokens": ids.shape[1],
                    "found": needle.found(answer),
                    "ratio": ratio,
                    "over": over,
                    "answer": answer,
                }
                done[sample, name] = row
                out.write(json.dumps(row) + "\n")
                out.flush()

    table = Table(title=f"single needle, {options.length} tokens of filler, {options.samples} samples")
    for column in ("cache", "accuracy", "bytes of full KV", "over budget"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    summary = {}
    for name in conditions():
        rows = [done[sample, name] for sample in range(options.samples)]
        accuracy = sum(row["found"] for row in rows) / len(rows)
        ratio = max(row["ratio"] for row in rows)
        over = max(row["over"] for row in rows)
        summary[name] = {"accuracy": accuracy, "ratio": ratio, "over": over}
        table.add_row(name, f"{accuracy:.2f}", f"{ratio:.1%}", f"{over:,}" if over else "")
    Console().print(table)
    print(json.dumps({"benchmark": "needle", "length": options.length, "samples": options.samples, "caches": summary}))


if __name__ == "__main__":
    main()
