"""The paper's tables and figures as runs of `qevict bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qevict.report.families import longbench_paper_tasks

_EVICTORS = ("streamingllm", "snapkv", "adakv", "criticalkv", "defensivekv", "layerdefensivekv")
_QUANTISERS = ("kivi-2", "zipcache", "kvquant-2", "kvquant-3")


def _methods(recent_tokens: int | float) -> tuple[str, ...]:
    """The paper's, with as many recent tokens as it keeps in this benchmark, and our default."""
    return (*_EVICTORS, "qevict", f"qevict-paper[recent_tokens={recent_tokens}]", *_QUANTISERS)


@dataclass(frozen=True)
class Preset:
    """What a table or figure of the paper consists of.

    Attributes:
        tasks: as `qevict bench` names them.
        budgets: fractions of full KV.
        methods: beside full KV.
        length: of the paper's prompts, in tokens, where it says so.
        room: tokens that a prompt of that length has to leave of the model's positions, for what is generated and the
            chat template; the length is cut to that. None where prompts are as long as they are.
    """

    tasks: tuple[str, ...]
    budgets: tuple[float, ...]
    methods: tuple[str, ...]
    length: int | None = None
    room: int | None = None


_LONGBENCH = Preset(longbench_paper_tasks(), (0.2, 0.1, 0.05), _methods(128), room=700)  # appendix C.1

PRESETS: Mapping[str, Preset] = {
    "table2": Preset(("ruler",), (0.2,), _methods(64), length=32768, room=0),  # appendix E.1
    "table3": _LONGBENCH,
    "table6": _LONGBENCH,
    "fig3": Preset(("gsm8k",), (1.0, 0.8, 0.6, 0.4, 0.2, 0.1), _methods(0.25)),  # appendix F.1: of the budget
}
"""Tables 3 and 6 differ in their models alone: Llama-3.1-8B and Mistral-7B, and Qwen2.5-7B."""
