"""The paper's benchmarks: tasks and their metrics.

from qevict.bench import find_tasks

for task in find_tasks("ruler", data=Path("data")):
    for sample in task.samples(tokenizer, 10, length=2048, seed=0):
        ...  # generate, then task.score(prediction, sample)
"""

from __future__ import annotations

from qevict.bench.data import DataNotFoundError
from qevict.bench.prompt import prompt_ids, token_count
from qevict.bench.sample import Sample, Task
from qevict.bench.tasks import find_tasks

__all__ = ["DataNotFoundError", "Sample", "Task", "find_tasks", "prompt_ids", "token_count"]
