"""Kernels that start before the kernels ahead have ended: what they touch before they wait for them.

Invariant: A kernel that starts before the ones ahead have ended touches nothing but weights of a base model until it has waited for them;
in a captured step it gets what they compute.
Also: `tests/models/test_one_row.py`.
"""

import importlib
import inspect
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.bases import DEVICE
from tests.preloaded import REAL_PYTHON
from tinsmith.models.overlap import MOST_ROWS, overlapping

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # compiles every kernel for a GPU, which `make test-slow` does in CI
def test_nothing_but_weights_is_touched_before_the_wait() -> None:
    """By any kernel that overlaps."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [REAL_PYTHON, "-m", "tests.models.overlapping"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    overlap, found = set(), set()
    for path in (ROOT / "tinsmith").rglob("*_kernels.py"):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            if inspect.isfunction(function) and "OVERLAPS" in inspect.signature(function).parameters:
                overlap.add(f"{path.stem}.{name}")
    for name, waits, lines in map(json.loads, done.stdout.splitlines()):
        found.add(name)
        assert waits, name
        if name == "one_row_kernels._multiply":
            assert lines
            assert all("ld.global" in line and "evict_first" in line for line in lines)  # which only tiles of the matrix are
        else:
            assert lines == [], name
    assert found == overlap


def test_where_kernels_overlap() -> None:
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    assert overlapping(torch.device("cpu"), 1) == {"OVERLAPS": False}
    assert overlapping(torch.device(DEVICE), MOST_ROWS) == ({"OVERLAPS": True, "launch_pdl": True} if hopper else {"OVERLAPS": False})
    assert overlapping(torch.device(DEVICE), MOST_ROWS + 1) == {"OVERLAPS": False}
