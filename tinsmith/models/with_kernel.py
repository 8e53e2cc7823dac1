"""Functions over rows that have a Triton kernel of ours: it runs on a GPU in half precision, the function as written elsewhere."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from tinsmith.models.device import has_triton

P = ParamSpec("P")
R = TypeVar("R")

HALF = (torch.bfloat16, torch.float16)


class WithKernel(Generic[P, R]):
    """A function whose first argument is a tensor, and the function of its name in a module of kernels."""

    def __init__(self, function: Callable[P, R], kernels: str) -> None:
        self.function = function
        self.kernels = kernels
        self.__doc__ = function.__doc__
        self._kernel: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if not (isinstance(first, Tensor) and first.is_cuda and first.dtype in HALF and has_triton()):
            return self.function(*args, **kwargs)
        if self._kernel is None:
            self._kernel = getattr(import_module(self.kernels), self.function.__name__)
        result: R = self._kernel(*args, **kwargs)
        return result


def with_kernel(kernels: str) -> Callable[[Callable[P, R]], WithKernel[P, R]]:
    """Decorator: `WithKernel` of a function that the module `kernels` has too, which is imported where it is needed."""
    return lambda function: WithKernel(function, kernels)
