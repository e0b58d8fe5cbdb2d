"""The reference trace: attention of an uncompressed run, per layer, query head and token, in files of a few steps each.

A folder holds

    trace.json               what was run, and its tokens
    prompt.safetensors       mass that each prompt token received from the prompt's own queries
    steps-00000.safetensors  attention of decode steps 0, 1, ...; one tensor a layer, `[query_heads, steps, tokens]`

Decode step t is the forward that feeds token `prefill + t`; its queries see tokens 0 to `prefill + t`. Probabilities
are kept in float16 (relative error below 0.05 %, absolute below 3e-8 where they are tiny); sums are taken in float32.
Nothing but one chunk of steps is ever held while a trace is written, nothing but one layer while it is read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
_HEADER, _PROMPT = "trace.json", "prompt.safetensors"
_ELEMENT_BYTES = 2  # float16


@dataclass(frozen=True)
class TraceHeader:
    """What a trace is of.

    Attributes:
        title: of the text.
        model: its name or path.
        tokens: ids of the prompt and of all decode steps' tokens.
        prefill: how many of them are the prompt.
        layers: indices of the traced layers in the model.
        query_heads, kv_heads: of a layer.
        prompt_queries: numbers of last prompt queries whose mass was kept, beside that of all of them.
        chunk: decode steps of a file.
        forced: whether the continuation was given rather than generated.
    """

    title: str
    model: str
    tokens: tuple[int, ...]
    prefill: int
    layers: tuple[int, ...]
    query_heads: int
    kv_heads: int
    prompt_queries: tuple[int, ...] = (32,)
    chunk: int = 64
    forced: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.prefill < len(self.tokens):
            raise ValueError(
                f"a trace has a prompt and a continuation; prefill is {self.prefill} of {len(self.tokens)}"
            )
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; it has to be at least 1 decode step")

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.tokens) - self.prefill

    @property
    def chunks(self) -> list[range]:
        """Decode steps of each file."""
        return [range(start, min(start + self.chunk, self.steps)) for start in range(0, self.steps, self.chunk)]

    def columns(self, steps: range) -> int:
        """Tokens that a file's last step sees."""
        return self.prefill + steps.stop

    @property
    def step_bytes(self) -> int:
        """Bytes of the step files' tensors."""
        elements = sum(len(steps) * self.columns(steps) for steps in self.chunks)
        return len(self.layers) * self.query_heads * elements * _ELEMENT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk; known before anything is run."""
        prompts = len(self.layers) * (1 + len(self.prompt_queries)) * self.query_heads * self.prefill * 4
        return self.step_bytes + prompts

    @property
    def held_bytes(self) -> int:
        """Most bytes held at once while it is written."""
        return max(len(self.layers) * self.query_heads * len(s) * self.columns(s) for s in self.chunks) * _ELEMENT_BYTES


class TraceWriter:
    """Takes attention as it is computed, layer by layer and step by step; `close` makes the folder a trace."""

    def __init__(self, folder: Path, header: TraceHeader) -> None:
        self.folder, self.header = folder, header
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _HEADER).unlink(missing_ok=True)
        self._prompt: dict[str, Tensor] = {}
        self._chunk: dict[str, Tensor] = {}
        self._left = dict.fromkeys(header.layers, 0)

    def add_prompt(self, layer: int, queries: int | None, mass: Float[Tensor, "query_heads tokens"]) -> None:
        """Mass that prompt tokens received from the last `queries` prompt queries (None: from all)."""
        self._prompt[_prompt_key(layer, queries)] = mass.float().contiguous()

    def add_step(self, layer: int, weights: Float[Tensor, "query_heads tokens"]) -> None:
        """Attention of the layer's next decode step over all tokens up to its own."""
        step = self._left[layer]
        self._left[layer] += 1
        steps = self.header.chunks[step // self.header.chunk]
        if str(layer) not in self._chunk:
            shape = (self.header.query_heads, len(steps), self.header.columns(steps))
            self._chunk[str(layer)] = torch.zeros(shape, dtype=torch.float16)
        self._chunk[str(layer)][:, step - steps.start, : weights.shape[1]] = weights.half().cpu()
        if all(done == steps.stop for done in self._left.values()):
            save_file(self._chunk, self.folder / _chunk_name(steps.start))
            self._chunk = {}

    def close(self) -> Trace:
        """Write the header, without which the folder is no trace.

        Raises:
            RuntimeError: if steps are missing.
        """
        if any(done != self.header.steps for done in self._left.values()):
            raise RuntimeError(f"a trace of {self.header.steps} steps got {sorted(set(self._left.values()))}")
        save_file(self._prompt, self.folder / _PROMPT)
        content = json.dumps({"format": FORMAT, **asdict(self.header)}, indent=1)
        (self.folder / _HEADER).write_text(content, encoding="utf-8")
        return Trace.open(self.folder)


@dataclass(frozen=True)
class Trace:
    """A finished trace; its tensors are read when they are asked for, one layer at a time.

    Attributes:
        folder: where it lies.
        header: what it is of.
    """

    folder: Path
    header: TraceHeader

    @classmethod
    def open(cls, folder: Path) -> Trace:
        """The trace in a folder.

        Raises:
            ValueError: if there is none, or of another format.
        """
        path = folder / _HEADER
        if not path.is_file():
            raise ValueError(f"{folder} holds no finished reference trace; `qevict diagnose` makes one")
        content = json.loads(path.read_text(encoding="utf-8"))
        if (found := content.pop("format", None)) != FORMAT:
            raise ValueError(f"{folder} holds a trace of format {found}; this version reads format {FORMAT}")
        lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        return cls(folder, TraceHeader(**(content | lists)))

    def mass(self, layer: int) -> Float[Tensor, "query_heads steps tokens"]:
        """Attention of every decode step over every token, zero where it could not see it; float32."""
        header = self.header
        total = torch.zeros(header.query_heads, header.steps, len(header.tokens))
        for steps in header.chunks:
            with safe_open(self.folder / _chunk_name(steps.start), "pt") as file:
                total[:, steps.start : steps.stop, : header.columns(steps)] = file.get_tensor(str(layer)).float()
        return total

    def prompt(self, layer: int, queries: int | None = None) -> Float[Tensor, "query_heads tokens"]:
        """Mass that every token received from the last `queries` prompt queries (None: from all); zero after them.

        Raises:
            ValueError: if it was not kept for so many queries.
        """
        header = self.header
        if queries is not None and queries >= header.prefill:
            queries = None
        if queries is not None and queries not in header.prompt_queries:
            raise ValueError(
                f"this trace kept the mass of the last {header.prompt_queries} prompt queries, not of {queries}; trace "
                "the text anew for a condition whose scores begin with those"
            )
        total = torch.zeros(header.query_heads, len(header.tokens))
        with safe_open(self.folder / _PROMPT, "pt") as file:
            total[:, : header.prefill] = file.get_tensor(_prompt_key(layer, queries))
        return total


def _prompt_key(layer: int, queries: int | None) -> str:
    return f"{layer}.{'all' if queries is None else queries}"


def _chunk_name(start: int) -> str:
    return f"steps-{start:05}.safetensors"
