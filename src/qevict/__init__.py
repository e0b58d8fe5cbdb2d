"""A KV cache for Hugging Face Transformers in three tiers under a byte budget."""

from __future__ import annotations

__version__ = "0.1.0"
