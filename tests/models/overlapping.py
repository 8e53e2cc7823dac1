"""What kernels that overlap do before they wait for those ahead, read from their code for a GPU: `python -m tests.models.overlapping`.

Triton compiles it here without a GPU, if it does not interpret kernels. Prints one line for each kernel: its name, whether it waits, and
how it accesses memory before that.
"""

import importlib
import inspect
import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ACCESSES = ("ld.global", "st.global", "cp.async", "red.global", "atom.global")
INTEGERS = {"columns": "*i64", "tiles": "*i32", "table": "*i32", "lengths": "*i32"}
NUMBERS = ("rows", "outputs", "heads", "inputs", "width", "targets", "share", "splits", "tokens")
WIDE = ("reduced", "parts", "weights", "cos", "sin", "decay", "d_decay", "d_a_log")
"""Tensors of float32; the others are of bfloat16."""

ATTENTION = {"HEAD_DIM": 128, "HEAD_PADDED": 128, "BLOCK": 16, "TILE": 64, "WINDOW": 20}
ROTATED = {"WIDTH": 128, "PADDED": 128, "PAIRS": 64, "HEADS": 8, "HAS_NORM": True, "ZERO_CENTRED": False}
KERNELS: dict[str, dict[str, Any]] = {
    "one_row_kernels._multiply": {
        "INPUTS": 2048,
        "PADDED": 2048,
        "NORMS": True,
        "ADDS": True,
        "ZERO_CENTRED": False,
        "HAS_BIAS": True,
        "OUTPUTS": 4,
        "STEP": 1024,
        "EVEN": True,
    },
    "row_kernels._norm": {"WIDTH": 2048, "PADDED": 2048, "ZERO_CENTRED": False, "ADDS": True},
    "row_kernels._swiglu": {"WIDTH": 2048, "COLUMNS": 1024},
    "row_kernels._rotate": ROTATED,
    "row_kernels._rotate_backward": ROTATED,
    "lora_kernels._reduce": {"ROWS": 16, "CHUNK": 32, "STEP": 128},
    "lora_kernels._expand": {"ALPHA": 32, "SPLITS": 4, "ROWS": 16, "CHUNK": 32, "OUTPUTS": 64, "PARTS": 2},
    "gate_kernels._gated": {"WIDTH": 128, "PADDED": 128, "HEADS": 8, "NORMS": True},
    "gate_kernels._gated_backward": {"WIDTH": 128, "PADDED": 128, "HEADS": 8, "NORMS": True},
    "gate_kernels._memory_gates": {"NUMBERS": 1024},
    "gate_kernels._memory_gates_backward": {"NUMBERS": 1024},
    "paged_kernels._attend": {"KV_HEADS": 8, "GROUP": 2, "GROUP_PADDED": 16, "STORES": True, **ATTENTION},
    "paged_kernels._merge": {"HEADS": 16, "SPLITS_PADDED": 8, **ATTENTION},
}
"""All that have the parameter `OVERLAPS`, with their other constants."""


def signature(kernel: Any) -> dict[str, str]:
    """The types of a kernel's parameters, by its annotations and their names."""
    found = {}
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        if parameter.annotation in ("tl.constexpr", triton.language.constexpr):
            found[name] = "constexpr"
        elif name in ("eps", "scale"):
            found[name] = "fp32"
        elif name in NUMBERS or name.endswith(("_stride", "_token", "_head")):
            found[name] = "i32"
        else:
            found[name] = INTEGERS.get(name, "*fp32" if name in WIDE else "*bf16")
    return found


def main() -> None:
    """Compile and print."""
    for name, constants in KERNELS.items():
        module, _, function = name.partition(".")
        kernel = getattr(importlib.import_module(f"tinsmith.models.{module}"), function)
        types = signature(kernel)
        given = {**constants, "OVERLAPS": True}
        source = ASTSource(
            kernel, types, constexprs={(i,): given[name] for i, name in enumerate(types) if types[name] == "constexpr" and name in given}
        )
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True}).asm["ptx"]
        before, wait, _ = code.partition("griddepcontrol.wait")
        print(json.dumps([name, bool(wait), [line.strip() for line in before.splitlines() if any(access in line for access in ACCESSES)]]))


if __name__ == "__main__":
    main()
