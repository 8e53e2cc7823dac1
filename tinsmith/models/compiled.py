"""Elementwise work in few kernels: functions that torch.compile turns into one kernel each on a GPU, and that run as written elsewhere.

On a GPU the cost of such a function is the memory that it reads and writes, and the launches. As written it reads and writes its tensors
once for each operation; compiled, once in all.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters

from tinsmith.models.device import has_triton

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

VARIANTS = 64
"""How many forms of one function are compiled, for the widths, precisions and strides that models have, before it runs as written."""


class Compiled(Generic[P, R]):
    """A function of tensors, compiled where its first tensor is in half precision on CUDA.

    It is compiled once for each combination of widths and precisions: the first dimension, that of tokens or rows, may have any size.
    Where compiling fails, the function runs as written from then on.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self._compiled: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [x for x in args if isinstance(x, Tensor)]
        first = tensors[0]
        if not (first.is_cuda and first.dtype in (torch.bfloat16, torch.float16)):
            return self.function(*args, **kwargs)
        return self._call_compiled(tensors, *args, **kwargs)

    def _call_compiled(self, tensors: list[Tensor], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._compiled is None:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
            # dynamic=False: no size but those that are marked may vary, because kernels for a known width are faster.
            self._compiled = torch.compile(self.function, dynamic=False, fullgraph=True)
        if not torch.is_grad_enabled():  # or each function would be compiled for tensors that require gradients, and for those that do not
            args = tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in args)  # type: ignore[assignment]
            tensors = [x for x in args if isinstance(x, Tensor)]
        rows = tensors[0].shape[0]
        for tensor in tensors:
            if tensor.ndim and tensor.shape[0] == rows:
                maybe_mark_dynamic(tensor, 0)
        try:
            result: R = self._compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # raised before anything is computed
            log.warning("%s runs as written, which is slower: it cannot be compiled: %s", self.name, str(error).strip().splitlines()[0])
            self._compiled = self.function
            return self.function(*args, **kwargs)
        return result

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Decorator: `Compiled` of a function whose first dimension is tokens or rows in every tensor that has as many of them as the first.

    The function must not wait for the device, and must read nothing but its arguments.
    """
    return Compiled(function)


def import_compiler() -> None:
    """Begin to import PyTorch's compiler in a thread: it takes seconds, in which weights can be read."""
    Thread(target=import_module, args=("torch._inductor.compile_fx",), name="import-compiler", daemon=True).start()


def keep_compiled(directory: str) -> None:
    """Keep compiled functions in a directory, where the next process finds them; "" is one in the user's cache. Set variables stay."""
    kept = Path(directory or "~/.cache/tinsmith/compiled").expanduser()
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(variable, str(kept / name))


_kernels: Counter[str] = Counter()
"""Variants of our Triton kernels that are ready, by name."""


def count_kernels() -> None:
    """Count the variants of our own Triton kernels too: one for each combination of constants, precisions and alignments."""
    if not has_triton():
        return
    hooks = import_module("triton.knobs").runtime
    if getattr(hooks, "jit_post_compile_hook", "not in this version") is None:  # somebody else's stays
        hooks.jit_post_compile_hook = _count_kernel


def _count_kernel(*, fn: Any, **others: Any) -> None:
    """What Triton calls when a variant of a kernel is ready, whether it was compiled or found in its cache."""
    _kernels[fn.name] += 1
    log.debug("kernel %s: variant number %d is ready", fn.name, _kernels[fn.name])


def compilations() -> int:
    """How many graphs and variants of kernels this process has compiled, or found compiled, so far.

    A number that keeps growing means that shapes are compiled again and again.
    """
    return int(counters["stats"]["unique_graphs"]) + _kernels.total()
