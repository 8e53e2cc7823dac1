"""The linear layers of a base model for one row, as in a decoding step of a single request: all the time goes into reading the weights.

Libraries multiply matrices by matrices. For one row on a GPU in half precision a kernel of ours reads the weights faster, and computes the
norm before a layer too (`models/one_row_kernels.py`).
"""

from torch import Tensor

from tinsmith.models.device import has_triton
from tinsmith.models.fused import Normed
from tinsmith.models.joined_linear import JoinedLinear
from tinsmith.models.packed_lora import Before, project_behind
from tinsmith.models.with_kernel import HALF


def is_one_row(x: Tensor) -> bool:
    """Whether the kernel serves x [rows, in]."""
    return len(x) == 1 and x.is_cuda and x.dtype in HALF and has_triton()


def multiply(linear: JoinedLinear, x: Tensor) -> Tensor:
    """The layer of a base model, whose weights do not change, without adapters and gradients: x [rows, in] -> [rows, out]."""
    if not is_one_row(x):
        return linear.multiply(x)
    from tinsmith.models import one_row_kernels

    return one_row_kernels.multiply(x, linear.weight, linear.bias)


class OneRow:
    """The `Adapters` of a row that has none, where `is_one_row` says that the kernel serves it; without gradients."""

    def apply(self, linear: JoinedLinear, x: Tensor) -> Tensor:
        return multiply(linear, x)

    def project(self, linear: JoinedLinear, before: Before, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        if not isinstance(before, Normed):
            return project_behind(self, linear, before, *inputs)
        from tinsmith.models import one_row_kernels

        x, delta, factor = inputs
        assert x is not None
        assert factor is not None
        return one_row_kernels.multiply_norm(x, delta, factor, linear.weight, linear.bias, before.eps, before.zero_centred)
