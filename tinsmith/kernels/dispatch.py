"""The table of what our Triton kernels serve, and the only place that asks whether they do.

Elsewhere PyTorch computes the same.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

HALF = (torch.bfloat16, torch.float16)

Kernels = Literal[
    "adamw",
    "choose",
    "convolution",
    "delta_rule",
    "delta_step",
    "experts",
    "gates",
    "logits",
    "lora",
    "one_row",
    "paged_attention",
    "quantized",
    "rows",
]
SERVED: dict[Kernels, tuple[torch.dtype, ...]] = {
    # Training and sampling
    "rows": HALF,  # norms, rotary positions, SwiGLU; in PyTorch: models/fused.py
    "gates": HALF,  # gates of attention and of gated delta nets; models/fused.py
    "quantized": (*HALF, torch.float32),  # matrices of experts in fewer bits; models/quantized.py
    "convolution": (torch.bfloat16,),  # of gated delta nets; models/delta_rule.py
    # kernels/delta_chunks.py; kernels/delta_nets.py first tries both kernels of delta nets
    "delta_rule": (torch.bfloat16,),
    # Training
    "logits": HALF,  # softmax over the vocabulary; training/logprobs.py
    "adamw": HALF,  # a step of full weights in this precision; kernels/adamw_formula.py
    # Sampling
    # attention to blocks of a cache, see `on_paged_kernel`; sampling/local/cached_attention.py
    "paged_attention": HALF,
    "lora": HALF,  # each row with its own adapter; models/batched_lora.py
    "experts": HALF,  # mixtures of experts of a decoding step, with such adapters; models/batched_lora.py
    "one_row": HALF,  # multiplication of a single row; models/joined_linear.py
    "delta_step": (*HALF, torch.float32),  # one token of each row through a delta net; sampling/local/states.py
    "choose": (torch.float32, torch.int32),  # the next token, from its logits or their order; sampling/choose.py
}
"""The modules of kernels, and their dtypes on CUDA. PyTorch itself attends over packed rows: `half_on_gpu`."""

OLDEST_CUDA = 13
"""Oldest CUDA of PyTorch's build whose drivers capture overlapping kernels in graphs; before 12.3 they cannot."""
MOST_ROWS = 512
"""Most rows of a decoding step. Kernels of more rows take so long that an early start gains nothing.

Passes of training and of prompts are computed in the plain order of the stream.
"""


@cache
def has_triton() -> bool:
    """Whether Triton is installed: PyTorch's builds for CUDA bring it on Linux."""
    return find_spec("triton") is not None


def half_on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether numbers are in half precision on a GPU, which PyTorch's variable-length attention needs."""
    return device.type == "cuda" and dtype in HALF


def on_kernels(kernels: Kernels, x: Tensor) -> bool:
    """Whether these kernels compute tensors like x."""
    return x.is_cuda and x.dtype in SERVED[kernels] and has_triton()


def on_paged_kernel(x: Tensor) -> bool:
    """Whether `kernels/paged_attention.py` attends with queries or keys [..., head_dim] like x."""
    return x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 and on_kernels("paged_attention", x)


def with_plain_rows(x: Tensor) -> Tensor:
    """The tensor with the numbers of each row one behind the other; rows may lie anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()


class WithKernel(Generic[P, R]):
    """A function whose first argument is a tensor, and the function of its name in a module of kernels."""

    def __init__(self, function: Callable[P, R], kernels: Kernels) -> None:
        self.function = function
        self.kernels = kernels
        self.__doc__ = function.__doc__
        self._kernel: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if not (isinstance(first, Tensor) and on_kernels(self.kernels, first)):
            return self.function(*args, **kwargs)
        if self._kernel is None:
            self._kernel = getattr(import_module(f"tinsmith.kernels.{self.kernels}"), self.function.__name__)
        result: R = self._kernel(*args, **kwargs)
        return result


def with_kernel(kernels: Kernels) -> Callable[[Callable[P, R]], WithKernel[P, R]]:
    """Decorator: where these kernels serve, run their function of this name; their module is imported on first use."""
    return lambda function: WithKernel(function, kernels)


def overlapping(device: torch.device, rows: int) -> dict[str, Any]:
    """Options of a kernel that computes so many rows, and may start while the one before still runs (Hopper and later).

    Launching a kernel and filling the GPU takes a microsecond or two: much, where hundreds of kernels take a few each.
    A kernel that overlaps ("programmatic dependent launch") has the constant `OVERLAPS`, and calls `gdc_wait` until all
    that was launched before is done and can be seen. Each of its programs waits before it writes, and before it reads
    what other kernels write. Before that it may read only what nothing has written since the last kernel that began in
    the stream's order: the weights of a base model, but nothing computed now.
    """
    overlaps = rows <= MOST_ROWS and device.type == "cuda" and _can_overlap(device)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    version = torch.version.cuda  # None for AMD's GPUs, for which Triton has no such kernels
    return (
        version is not None
        and int(version.split(".")[0]) >= OLDEST_CUDA
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
