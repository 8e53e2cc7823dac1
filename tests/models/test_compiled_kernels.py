"""Kernels that Triton compiles: they are counted, and kept where the next process finds them."""

import os
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.bases import DEVICE
from tinsmith.models.compiled_kernels import compilations, count_kernels, keep_kernels


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


def test_kernels_are_kept_in_the_directory_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "set by a user")
    keep_kernels(str(tmp_path))
    assert os.environ["TRITON_CACHE_DIR"] == "set by a user"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for directory, kept in ((str(tmp_path), tmp_path), ("", tmp_path / "home/.cache/tinsmith/compiled")):
        monkeypatch.delenv("TRITON_CACHE_DIR")
        keep_kernels(directory)
        assert os.environ["TRITON_CACHE_DIR"] == str(kept / "triton")
