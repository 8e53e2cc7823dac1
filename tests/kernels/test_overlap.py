"""Kernels that start before the kernels ahead have ended: what they touch before they wait for them, read from their
code for a GPU.

Triton compiles it here without a GPU, in a process that does not interpret kernels: `python -m
tests.kernels.test_overlap` prints a line for each, its name, whether it waits, and how it accesses memory before that.

Invariant: A kernel that starts before the ones ahead have ended touches nothing but weights of a base model until it
has waited for them; in a captured step it gets what they compute. Also: `tests/kernels/test_one_row.py`.
"""

import importlib
import inspect
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bases import DEVICE
from tests.preloaded import REAL_PYTHON
from tinsmith.kernels.dispatch import MOST_ROWS, overlapping

ROOT = Path(__file__).parents[2]
ACCESSES = ("ld.global", "st.global", "cp.async", "red.global", "atom.global")
INTEGERS = dict.fromkeys(("tiles", "table", "lengths", "order", "ends"), "*i32") | {
    "columns": "*i64",
    "chosen": "*i64",
}
NUMBERS = (
    "rows",
    "outputs",
    "heads",
    "inputs",
    "width",
    "targets",
    "share",
    "splits",
    "tokens",
    "pairs",
    "hidden",
    "down_tiles",
)
WIDE = ("reduced", "parts", "weights", "of_pairs", "cos", "sin", "decay", "d_decay", "d_a_log")
"""Tensors of float32; the others are of bfloat16."""

CONSTANTS = {
    name: value
    for value, names in {
        "": "CODED",
        False: "ZERO_CENTRED EXPONENTS",
        True: "SINKS NORMALIZED NORMS HAS_NORM ADDS HAS_BIAS EVEN STORES OVERLAPS",
        2: "GROUP PARTS",
        4: "SPLITS",
        8: "HEADS KV_HEADS SPLITS_PADDED PER_TOKEN KEPT",
        16: "GROUP_PADDED BLOCK ROWS",
        20: "WINDOW",
        32: "ALPHA CHUNK",
        64: "PAIRS OUTPUTS TILE",
        128: "EXPERTS WIDTH PADDED HEAD_DIM HEAD_PADDED STEP",
        1024: "COLUMNS NUMBERS",
        2048: "INPUTS HIDDEN",
    }.items()
    for name in names.split()
}
OF_ONE_ROW = {"PADDED": 2048, "STEP": 1024, "OUTPUTS": 4}
"""Which are other ones there."""


def kernels() -> dict[str, Any]:
    """All that have the parameter `OVERLAPS`."""
    found = {}
    for path in sorted((ROOT / "tinsmith" / "kernels").glob("*.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            if inspect.isfunction(function) and "OVERLAPS" in inspect.signature(function).parameters:
                found[f"{path.stem}.{name}"] = value
    return found


def signature(kernel: Any) -> dict[str, str]:
    """The types of a kernel's parameters, by its annotations and their names."""
    found = {}
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        if "constexpr" in str(parameter.annotation):
            found[name] = "constexpr"
        elif name in ("eps", "scale", "alpha", "limit"):
            found[name] = "fp32"
        elif name in NUMBERS or name.endswith(("_stride", "_token", "_head")):
            found[name] = "i32"
        else:
            found[name] = INTEGERS.get(name, "*fp32" if name in WIDE else "*bf16")
    return found


@pytest.mark.slow  # compiles every kernel for a GPU, which `make test-slow` does in CI
def test_nothing_but_weights_is_touched_before_the_wait() -> None:
    """By any kernel that overlaps."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [REAL_PYTHON, "-m", "tests.kernels.test_overlap"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = set()
    for name, waits, lines in map(json.loads, done.stdout.splitlines()):
        found.add(name)
        assert waits, name
        if name == "one_row._multiply":
            assert lines
            # Which only tiles of the matrix are
            assert all("ld.global" in line and "evict_first" in line for line in lines)
        else:
            assert lines == [], name
    assert found == set(kernels())


def test_where_kernels_overlap() -> None:
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    assert overlapping(torch.device("cpu"), 1) == {"OVERLAPS": False}
    assert overlapping(torch.device(DEVICE), MOST_ROWS) == (
        {"OVERLAPS": True, "launch_pdl": True} if hopper else {"OVERLAPS": False}
    )
    assert overlapping(torch.device(DEVICE), MOST_ROWS + 1) == {"OVERLAPS": False}


def main() -> None:
    """Compile and print."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, kernel in kernels().items():
        types, constants = signature(kernel), CONSTANTS | (OF_ONE_ROW if name.startswith("one_row") else {})
        given = {
            place: constants[parameter] for place, parameter in enumerate(types) if types[parameter] == "constexpr"
        }
        source = ASTSource(kernel, types, constexprs={(place,): value for place, value in given.items()})
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True}).asm["ptx"]
        before, wait, _ = code.partition("griddepcontrol.wait")
        print(
            json.dumps(
                [
                    name,
                    bool(wait),
                    [line.strip() for line in before.splitlines() if any(access in line for access in ACCESSES)],
                ]
            )
        )


if __name__ == "__main__":
    main()
