"""Compiles the GPU kernel, as it would be started, for GPUs that need not be here; a line of JSON for each variant.

    python tests/kernels/compile_for_gpus.py

`registers` are those of a thread, `spilled` the bytes of its that did not fit, `shared` the bytes of a program.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from views import SCALING, make_view, random_query

from qevict.codecs import AllottedCodec, KiviCodec, MinMaxCodec
from qevict.kernels import gpu
from qevict.rope import Rope

VARIANTS = [
    (MinMaxCodec(2, 2), 64, torch.float32),
    (MinMaxCodec(4, 4), 128, torch.bfloat16),
    (KiviCodec(2, 2), 128, torch.bfloat16),
    (AllottedCodec(3, 3), 64, torch.float32),
    (AllottedCodec(3, 3), 128, torch.bfloat16),
]
TARGETS = (80, 90)
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32"}


def kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_for(target: int, kernel: Any, values: dict[str, Any]) -> Any:
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    signature = {name: "constexpr" if name in constants else kind(values[name]) for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if isinstance(values[name], Tensor)
    }
    options = {name: value for name, value in values.items() if name not in signature}
    return triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", target, 32), options=options
    )


def resources(cubin: bytes) -> dict[str, int]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        told = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", told)}
    return {"registers": found["REG"], "spilled": found["STACK"]}


def main() -> None:
    started: list[tuple[Any, dict[str, Any]]] = []
    gpu.launch = lambda kernel, _, **values: started.append((kernel, values))
    for codec, dim, dtype in VARIANTS:
        rope = Rope(torch.ones(dim // 2), dtype=dtype)
        view = make_view(codec=codec, dim=dim, window=16, new=1, dtype=dtype, lanes=1, rope=rope)
        started.clear()
        assert gpu.attend(random_query(view, 4, 1), view, SCALING) is not None
        for kernel, values in started:
            for target in TARGETS:
                compiled = compile_for(target, kernel, values)
                variant = {"kernel": kernel.__name__, "codec": str(codec), "dim": dim, "dtype": str(dtype)}
                used = {"shared": compiled.metadata.shared, **resources(compiled.asm["cubin"])}
                print(json.dumps(variant | {"target": target} | used), flush=True)


if __name__ == "__main__":
    main()
