"""Key norm: tokens whose keys are short are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qevict.methods.base import LayerPrefill, Selector, best
from qevict.methods.store import Kept


@dataclass(frozen=True)
class KeyNorm(Selector):
    """The keys with the lowest L2 norm of each head; no attention is looked at.

    Norms are taken in float32: in 16 bits many of them would tie. The authors leave the first two layers uncompressed
    in their experiments; here every layer has the same budget, as in kvpress.
    """

    name: ClassVar[str] = "keynorm"
    paper: ClassVar[str] = "A Simple and Effective L2 Norm-Based Strategy (Devoto et al., 2024, arXiv 2406.11430)"
    source: ClassVar[str] = "NVIDIA/kvpress, kvpress/presses/knorm_press.py"

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        """The `tokens` shortest keys of each head."""
        return best(-prefill.keys.float().norm(dim=-1), tokens)
