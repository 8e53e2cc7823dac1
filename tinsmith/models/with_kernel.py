"""Elementwise functions that have a Triton kernel of ours: it runs on a GPU in half precision, the function as written elsewhere."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

HALF = (torch.bfloat16, torch.float16)


class WithKernel(Generic[P, R]):
    """A function whose first argument is a tensor, and the kernel of its name in `models/row_kernels.py`."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self._kernel: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if not (isinstance(first, Tensor) and first.is_cuda and first.dtype in HALF and _has_triton()):
            return self.function(*args, **kwargs)
        if self._kernel is None:
            self._kernel = getattr(import_module("tinsmith.models.row_kernels"), self.function.__name__)
        result: R = self._kernel(*args, **kwargs)
        return result


def with_kernel(function: Callable[P, R]) -> WithKernel[P, R]:
    """Decorator: `WithKernel` of a function of fused pieces."""
    return WithKernel(function)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
