"""LongBench's English tasks of the paper's table 3, and its two synthetic ones (Bai et al. 2024).

Prompts, generation lengths, post-processing and metrics are the benchmark's (github.com/THUDM/LongBench,
LongBench/config/dataset2prompt.json, dataset2maxlen.json, pred.py, eval.py, metrics.py). `longbench.json` holds each
prompt in two parts; one after the other they are the official prompt, letter by letter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qevict.bench import metrics
from qevict.bench.data import find_file, hub_rows, read_rows
from qevict.bench.sample import Sample, shuffled

_SOURCE = "It is in the benchmark's data.zip: https://huggingface.co/datasets/THUDM/LongBench (folder data)."

_METRICS: dict[str, Callable[[str, str], float]] = {
    "qa_f1": metrics.qa_f1,
    "rouge_l": metrics.rouge_l,
    "count": metrics.count,
    "retrieval": metrics.retrieval,
}


@dataclass(frozen=True)
class LongBenchTask:
    """One data set of LongBench: `longbench/<data set>.jsonl` in the data folder, or without a folder the Hub's."""

    name: str
    data: Path | None

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """See `Task.samples`.

        `length` is the official `max_length`: a prompt of more tokens, counted without the chat template and the tokens
        to be generated, keeps its first and its last half of them. None keeps prompts whole.
        """
        dataset = self.name.rpartition("/")[2]
        settings = official_settings()[dataset]
        for number, row in shuffled(list(enumerate(self._rows(dataset))), self.name, seed)[:count]:
            context = settings["context"].format(**row)
            question = settings["question"].format(**row)
            if length is not None:
                context, question = truncate_middle(tokenizer, context, question, length)
            few_shot = settings.get("few_shot", False)
            yield Sample(
                task=self.name,
                id=str(row.get("_id") or number),
                document=hashlib.sha256(row["context"].encode()).hexdigest()[:12],
                context=context,
                question=question,
                answer_prefix="",
                answers=tuple(row["answers"]),
                max_new_tokens=settings["max_new_tokens"],
                extra={"all_classes": row["all_classes"]} if row.get("all_classes") else {},
                chat=not few_shot,
                stop=("\n",) if few_shot else (),
            )

    def _rows(self, dataset: str) -> list[dict[str, Any]]:
        if self.data is None:
            return hub_rows("THUDM/LongBench", "data.zip", f"data/{dataset}.jsonl")
        return read_rows(find_file(self.data, (f"longbench/{dataset}.jsonl", f"{dataset}.jsonl"), _SOURCE))

    def score(self, prediction: str, sample: Sample) -> float:
        return score(self.name.rpartition("/")[2], prediction, sample)


def score(dataset: str, prediction: str, sample: Sample) -> float:
    """The official score of a prediction: the best over the gold answers; few-shot tasks' by their first line."""
    settings = official_settings()[dataset]
    if settings.get("few_shot", False):
        prediction = metrics.first_line(prediction)
    if settings["metric"] == "classification":
        classes = sample.extra["all_classes"]
        return max(metrics.classification(prediction, answer, classes) for answer in sample.answers)
    metric = _METRICS[settings["metric"]]
    return max(metric(prediction, answer) for answer in sample.answers)


def truncate_middle(tokenizer: PreTrainedTokenizerBase, context: str, question: str, length: int) -> tuple[str, str]:
    """Context and question whose sum is the sum's first and last `length // 2` tokens, if it has more than `length`.

    The parts are then divided where the question begins, or at the cut if the question itself was cut.
    """
    tokens = tokenizer(context + question, verbose=False).input_ids
    if len(tokens) <= length:
        return context, question
    half = length // 2
    if half == 0:
        raise ValueError(f"A LongBench prompt cannot be cut to {length} tokens: choose a greater length.")
    head, tail = (_text(tokenizer, part) for part in (tokens[:half], tokens[-half:]))
    if tail.endswith(question):
        return head + tail.removesuffix(question), question
    return head, tail


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    # Some tokenizers would else take out spaces before punctuation, and the text would no longer be the prompt's.
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=1)
def official_settings() -> dict[str, dict[str, Any]]:
    """Each data set's `context` and `question` templates, `max_new_tokens`, `metric`, and whether it is `few_shot`.

    Few-shot tasks go without a chat template, and only the first line of a prediction counts.
    """
    settings: dict[str, dict[str, Any]] = json.loads(
        resources.files("qevict.bench").joinpath("longbench.json").read_text(encoding="utf-8")
    )
    return settings


def longbench_tasks(data: Path | None) -> list[LongBenchTask]:
    """The paper's twelve, passage_count and passage_retrieval_en."""
    return [LongBenchTask(f"longbench/{dataset}", data) for dataset in official_settings()]
