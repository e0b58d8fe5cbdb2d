"""The paper's tables and figures as runs of `qevict bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qevict.report.families import longbench_paper_tasks

_EVICTORS = ("streamingllm", "snapkv", "adakv", "criticalkv", "defensivekv", "layerdefensivekv")
_QUANTISERS = ("kivi-2", "zipcache", "kvquant-2", "kvquant-3")
_OURS = ("qevict", "qevict-paper")


@dataclass(frozen=True)
class Preset:
    """What a table or figure of the paper consists of.

    Attributes:
        tasks: as `qevict bench` names them.
        budgets: fractions of full KV.
        length: of the paper's prompts, in tokens, where it says so.
        room: tokens that a prompt of that length has to leave of the model's positions, for what is generated and the
            chat template; the length is cut to that. None where prompts are as long as they are.
        settings: what the paper sets otherwise for this benchmark, by method.
        methods: beside full KV.
    """

    tasks: tuple[str, ...]
    budgets: tuple[float, ...]
    length: int | None
    room: int | None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    methods: tuple[str, ...] = (*_EVICTORS, *_OURS, *_QUANTISERS)


def _longbench() -> Preset:
    paper = {"qevict-paper": {"recent_tokens": 128}}  # appendix C.1
    return Preset(longbench_paper_tasks(), (0.2, 0.1, 0.05), None, 700, paper)


PRESETS: Mapping[str, Preset] = {
    "table2": Preset(("ruler",), (0.2,), 32768, 0, {"qevict-paper": {"recent_tokens": 64}}),  # appendix E.1
    "table3": _longbench(),
    "table6": _longbench(),
    "fig3": Preset(
        ("gsm8k",),
        (1.0, 0.8, 0.6, 0.4, 0.2, 0.1),
        None,
        None,
        {"qevict-paper": {"recent_tokens": 0.25}},  # appendix F.1: a quarter of the budget
    ),
}
"""Tables 3 and 6 differ in their models alone: Llama-3.1-8B and Mistral-7B, and Qwen2.5-7B."""
