"""Functions that are compiled on a GPU: they compute the same, once for each width, and as written where they cannot be compiled."""

import logging
import os
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.models.compiled import Compiled, compilations, compiled, count_kernels, keep_compiled


@compiled
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x.float().sigmoid().to(x.dtype) * weight


def test_as_written_on_a_cpu() -> None:
    before = compilations()
    assert torch.equal(scaled(torch.zeros(2, 4), torch.ones(4)), torch.full((2, 4), 0.5))
    assert compilations() == before


@pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.slow
def test_once_for_each_width_whatever_the_number_of_rows() -> None:
    function = Compiled(scaled.function)
    before = compilations()
    for rows, width in ((3, 8), (5, 8), (7, 8), (3, 16), (9, 16)):
        x, weight = torch.randn(rows, width, device=DEVICE), torch.randn(width, device=DEVICE)
        torch.testing.assert_close(function._call_compiled([x, weight], x, weight), scaled.function(x, weight))
    assert compilations() == before + 2


def test_what_cannot_be_compiled_runs_as_written(caplog: pytest.LogCaptureFixture) -> None:
    def cut(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * x.sum()

    function = Compiled(cut)
    x = torch.ones(3, device=DEVICE)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(function._call_compiled([x], x), torch.full((3,), 3.0, device=DEVICE))
    assert [record.message.split(" runs as written")[0] for record in caplog.records] == [function.name]


def test_variants_of_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton calls a hook when one is ready: on a GPU each width is one."""
    knobs, jit = pytest.importorskip("triton.knobs"), pytest.importorskip("triton.runtime.jit")
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    count_kernels()
    before = compilations()
    if DEVICE == "cuda":
        for width in (72, 72, 88):
            import_module("tinsmith.models.row_kernels").swiglu(torch.zeros(3, 2 * width, dtype=torch.bfloat16, device=DEVICE))
    else:
        for _ in range(2):
            ready = jit.JitFunctionInfo("module", "_swiglu", None)
            knobs.runtime.jit_post_compile_hook(key="", repr="", fn=ready, compile={}, is_manual_warmup=False, already_compiled=False)
    assert compilations() == before + 2
    foreign = knobs.runtime.jit_post_compile_hook = lambda **_: None
    count_kernels()
    assert knobs.runtime.jit_post_compile_hook is foreign


def test_what_is_compiled_is_kept_in_the_directory_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by a user")
    keep_compiled(str(tmp_path))
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]) == ("set by a user", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_compiled("")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / ".cache/tinsmith/compiled/triton")
