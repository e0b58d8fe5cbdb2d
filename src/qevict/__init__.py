"""A KV cache for Hugging Face Transformers in three tiers under a byte budget."""

from __future__ import annotations

from qevict.answer import Answer, answer
from qevict.attention import attach
from qevict.budget import MemoryReport
from qevict.cache import QEvictCache
from qevict.config import Budget, QEvictConfig
from qevict.trace import PrefillTrace, read_prompt

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Budget",
    "MemoryReport",
    "PrefillTrace",
    "QEvictCache",
    "QEvictConfig",
    "answer",
    "attach",
    "read_prompt",
]
