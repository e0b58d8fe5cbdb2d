"""The GPU kernel against the reference, on the CPU by Triton's interpreter, and compiled for GPUs that are not here.

The interpreter shows whether the kernel computes the right thing, not whether a GPU can run it: a compiler refuses
programs that the interpreter runs. So every kind of variant is compiled, too, in a process without the interpreter.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agreement
import pytest
import torch
from agreement import ASKED, ROPES, SIZES, check_random, swapped, unknown
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from views import SCALING, make_view, random_query

from qevict.codecs import AllottedCodec, Codec, KiviCodec, MinMaxCodec, PromptCodec
from qevict.kernels import gpu

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("Triton's interpreter is switched off (TRITON_INTERPRET)", allow_module_level=True)

by_kernel, check = partial(agreement.by_kernel, gpu.attend), partial(agreement.check, gpu.attend)
ALLOTTED = st.builds(AllottedCodec, st.sampled_from([0.5, 2, 3.3, 4, 8]), st.integers(1, 5))
SMALLER = SIZES | {
    "lanes": st.integers(1, 2),
    "heads": st.integers(1, 2),
    "dim": st.sampled_from([12, 64, 80, 96, 128, 256]),
    "codes": st.integers(0, 4) | st.just(9),
    "codec": SIZES["codec"] | ALLOTTED,
}


@settings(max_examples=20)
@given(
    sizes=st.fixed_dictionaries(SMALLER),
    queries=st.sampled_from([1, 1, 1, 2, 5, 11]),
    asked=ASKED,
)
def test_output_and_masses_are_the_reference_s(sizes: dict[str, Any], queries: int, asked: dict[str, Any]) -> None:
    check_random(gpu.attend, sizes, queries=queries, **asked)


@pytest.mark.parametrize("codec", [MinMaxCodec(3, 8), KiviCodec(3, 3, 12), KiviCodec(2, 4, 32), AllottedCodec(3, 3)])
@pytest.mark.parametrize("window", [1, 8, 20, 40])
def test_rows_of_codes_of_any_length(codec: Codec | PromptCodec, window: int) -> None:
    """Planes and rows that end within a word, and windows that are several units."""
    view = make_view(codec=codec, window=window, dim=60, new=1, rope=ROPES["partial"](60))
    check(random_query(view, 2, 1), view)


@pytest.mark.parametrize("programs", [1, 1000])
def test_how_the_tokens_are_divided_changes_little(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many programs every tile is a split of its own, and more of them than are put together at once."""
    monkeypatch.setattr(gpu, "_programs", lambda _: programs)
    view = make_view(codec=AllottedCodec(2, 2), codes=70, full=9, stored=75, window=16, lanes=1, heads=1, dim=64, new=1)
    check(random_query(view, 3, 1), view)


def test_long_drafts_are_several_blocks_of_rows() -> None:
    view = make_view(new=17, stored=3, sinks=9, window=8, lanes=1)
    check(random_query(view, 3, 17), view, None)
    check(random_query(view, 3, 17), view, 4)


def test_windows_that_are_not_there_get_nothing() -> None:
    view = make_view(codes=9, full=5, window=16)
    mass = by_kernel(random_query(view, 2, 4), view).mass
    absent = ~torch.cat([view.history.full_present, view.history.code_present], dim=1)
    assert bool(absent.any())
    assert bool((mass[:, :, : absent.shape[1]].masked_select(absent[:, None]) == 0).all())


def test_tensors_may_be_cut_out_of_larger_ones() -> None:
    view = make_view(dim=64, new=3)
    query = random_query(view, 2, 3)
    assert torch.equal(by_kernel(*swapped(query, view)).output, by_kernel(query, view).output)


def test_a_step_sees_what_its_history_holds_at_that_time() -> None:
    view = make_view(codes=3, holes=False)
    query = random_query(view, 2, 4)
    by_kernel(query, view)
    check(query, view._replace(history=make_view(codes=9, seed=1).history))


class Waits(TorchDispatchMode):
    """Counts operations after which a program has to wait for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func) in {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten._to_copy.default"}
        return func(*args, **kwargs or {})


def test_the_device_is_waited_for_only_when_a_history_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "launch", lambda *_, **__: None)
    view = make_view(codec=AllottedCodec(3, 3), window=8)
    with Waits() as first:
        by_kernel(random_query(view, 2, 4), view)
    query = random_query(view, 2, 4)
    with Waits() as later:
        by_kernel(query, view, 2)
    assert first.count > 0
    assert later.count == 0


@pytest.mark.parametrize(
    "what", ["codec", "odd head size", "large heads", "dtype", "storage", "text", "strides", "gradient"]
)
def test_what_the_kernel_does_not_know_is_left_to_the_reference(what: str) -> None:
    assert gpu.attend(*unknown(what, gpu.MOST_QUERIES), SCALING) is None


@pytest.mark.parametrize(("module", "found"), [(None, "none"), (SimpleNamespace(__version__="3.2.0"), "3.2.0")])
def test_without_triton_the_reference_attends(
    module: Any, found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", module)
    gpu.has_triton.cache_clear()
    try:
        view = make_view()
        with caplog.at_level(logging.WARNING, "qevict"):
            for _ in range(2):
                assert gpu.attend(random_query(view, 2, 4), view, SCALING) is None
    finally:
        gpu.has_triton.cache_clear()
    assert [record.message for record in caplog.records] == [
        f"the GPU kernel needs Triton 3.3 or newer, found {found}: plain PyTorch attends, which is slow"
    ]


def test_every_kind_of_variant_compiles_for_gpus(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_for_gpus.py")],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(variant["kernel"], variant["target"]) for variant in compiled} == {
        (kernel, target) for kernel in ("attend_split", "combine") for target in (80, 90)
    }
    # The least that a program may have of a GPU of these generations is 99 KiB.
    assert all(variant["shared"] <= 99 << 10 for variant in compiled), done.stdout
