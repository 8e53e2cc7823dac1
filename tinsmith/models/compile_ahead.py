"""Compiling Triton kernels in threads before they are first needed: one behind the other they would take a minute at the first start.

Code runs once as a rehearsal. It launches no kernel, so that it only says which variants it needs, and threads compile these meanwhile.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

THREADS = 16
"""Variants that are compiled at a time, at most; as many as the machine has processors, if these are fewer."""


@contextmanager
def rehearsal() -> Iterator[None]:
    """Around code on CUDA that shall only say which variants of kernels it needs; they are compiled when this ends.

    Inside, no Triton kernel of ours is launched in this process, and tensors that kernels would fill hold zeros: what is computed means
    nothing, and must not be kept. A variant that cannot be compiled raises its error when it is needed.
    """
    kernel, contexts = import_module("triton.runtime.jit").JITFunction, import_module("triton.runtime._async_compile")
    launch, zeros = kernel.run, cast("Callable[[], AbstractContextManager[object]]", _Zeros)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        compiler = import_module("triton").AsyncCompileMode(threads, ignore_errors=True)

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            token = contexts.active_mode.set(compiler)  # of this thread: backwards run in threads of their own
            try:
                return launch(self, *args, grid=grid, warmup=True, **kwargs)
            finally:
                contexts.active_mode.reset(token)

        kernel.run = compile_only
        try:
            with compiler, zeros():
                yield
        finally:
            kernel.run = launch


class _Zeros(TorchDispatchMode):
    """New tensors whose numbers nobody has written hold zeros, which are indices and tokens that exist."""

    UNWRITTEN = (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket in self.UNWRITTEN and isinstance(result, Tensor) else result
