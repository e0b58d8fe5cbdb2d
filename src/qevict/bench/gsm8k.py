"""GSM8K: grade-school arithmetic in words (Cobbe et al. 2021), solved step by step.

The eight worked examples are those of Wei et al. 2022 (chain-of-thought prompting), in `gsm8k_exemplars.json` as
EleutherAI/lm-evaluation-harness has them (lm_eval/tasks/gsm8k/gsm8k-cot.yaml), whose prompt format, end of the answer
("Q:") and 256 new tokens are taken too, as is the zero-shot prompt of its gsm8k-cot-zeroshot.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qevict.bench import metrics
from qevict.bench.data import find_file, read_rows
from qevict.bench.sample import Sample, shuffled

MAX_NEW_TOKENS = 256

_NEXT_QUESTION = "Q:"
_SOURCE = "It is github.com/openai/grade-school-math, grade_school_math/data/test.jsonl."


@dataclass(frozen=True)
class Gsm8kTask:
    """The test set, after eight worked examples (the context) or after none (no context)."""

    name: str
    data: Path | None
    few_shot: bool = True

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, count: int, *, length: int | None, seed: int
    ) -> Iterator[Sample]:
        """See `Task.samples`; prompts are as long as they are."""
        rows = read_rows(find_file(self.data, ("gsm8k_test.jsonl", "gsm8k/test.jsonl"), _SOURCE))
        begin = "" if self.few_shot else " Let's think step by step."
        for number, row in shuffled(list(enumerate(rows)), self.name, seed)[:count]:
            yield Sample(
                task=self.name,
                id=str(number),
                document=str(number),
                context=worked_examples() if self.few_shot else "",
                question=f"Q: {row['question']}\nA:{begin}",
                answer_prefix="",
                answers=(row["answer"].rpartition("####")[2].strip(),),
                max_new_tokens=MAX_NEW_TOKENS,
                stop=(_NEXT_QUESTION,),
            )

    def score(self, prediction: str, sample: Sample) -> float:
        return score(prediction, sample)


def score(prediction: str, sample: Sample) -> float:
    """1 if the number arrived at is right; what follows the next "Q:" does not count."""
    return metrics.same_number(prediction.partition(_NEXT_QUESTION)[0], sample.answers[0])


@lru_cache(maxsize=1)
def worked_examples() -> str:
    """The eight, each with its solution and followed by an empty line."""
    text = resources.files("qevict.bench").joinpath("gsm8k_exemplars.json").read_text(encoding="utf-8")
    return "".join(f"Q: {example['question']}\nA: {example['answer']}\n\n" for example in json.loads(text))


def gsm8k_tasks(data: Path | None) -> list[Gsm8kTask]:
    """With eight worked examples before the question, and with none."""
    return [Gsm8kTask("gsm8k", data), Gsm8kTask("gsm8k-zero-shot", data, few_shot=False)]
