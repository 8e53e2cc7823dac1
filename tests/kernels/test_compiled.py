"""Kernels that Triton compiles are kept where the next process finds them."""

import os
from pathlib import Path

import pytest

from tinsmith.kernels.compiled import keep_kernels


def test_kernels_are_kept_in_the_directory_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "set by a user")
    keep_kernels(str(tmp_path))
    assert os.environ["TRITON_CACHE_DIR"] == "set by a user"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for directory, kept in ((str(tmp_path), tmp_path), ("", tmp_path / "home/.cache/tinsmith/compiled")):
        monkeypatch.delenv("TRITON_CACHE_DIR")
        keep_kernels(directory)
        assert os.environ["TRITON_CACHE_DIR"] == str(kept / "triton")
