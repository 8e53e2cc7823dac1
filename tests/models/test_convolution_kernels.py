"""The Triton kernels of the convolution: values, gradients, and neighbours full of NaN. Triton's interpreter runs them on a CPU."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.models.convolution_kernels import convolution
from tinsmith.models.delta_rule import Lengths, convolve

CHANNELS, TAPS = 130, 4
ROUNDED = 2**-7
"""How far bfloat16 rounds at most, as a share: the interpreter cuts numbers off."""


def inputs(lengths: tuple[int, ...], continues: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x in rows that are wider than it, weight, perhaps what came before, and the gradient of the outputs."""
    generator, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(DEVICE)

    x = drawn(tokens, CHANNELS + 6)[:, 3 : CHANNELS + 3]
    return x, drawn(CHANNELS, TAPS), drawn(len(lengths), TAPS - 1, CHANNELS) if continues else None, drawn(tokens, CHANNELS)


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("lengths", [(1, 2, 3, 40), (97,)])
def test_values_and_gradients(lengths: tuple[int, ...], continues: bool) -> None:
    x, weight, before, d_out = inputs(lengths, continues)
    ours = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    out = convolution(ours[0], ours[1], lengths, before)
    wanted, _ = convolve(exact[0], exact[1], Lengths(lengths), None if before is None else before.double())
    pairs = [(out, wanted), *zip(torch.autograd.grad(out, ours, d_out), torch.autograd.grad(wanted, exact, d_out.double()), strict=True)]
    for one, other in pairs:
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() <= ROUNDED * other.norm()


@pytest.mark.parametrize("neighbour", [0, 1, 2])
def test_no_nan_crosses(neighbour: int) -> None:
    """A neighbour whose inputs and gradients are NaN leaves the bits of all others as they are."""
    lengths = (3, 35, 2)
    x, weight, before, d_out = inputs(lengths, continues=True)
    assert before is not None
    start, end = list(itertools.accumulate((0, *lengths)))[neighbour : neighbour + 2]
    others = torch.ones(len(x), dtype=torch.bool, device=x.device)
    others[start:end] = False

    def computed() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = convolution(leaf, weight, lengths, before)
        return [out.detach(), *torch.autograd.grad(out, leaf, d_out)]

    expected = computed()
    for tensor in (x, d_out):
        tensor[start:end] = torch.nan
    before[neighbour] = torch.nan
    for ours, wanted in zip(computed(), expected, strict=True):
        assert ours[start:end].isnan().all()
        assert torch.equal(ours[others], wanted[others])


def test_what_came_before_is_that_of_the_same_sequence() -> None:
    """A row that is cut anywhere, and goes on with what came before, has the bits of the whole row."""
    x, weight, _, _ = inputs((20,), continues=False)
    whole = convolution(x, weight, (20,), None)
    for cut in (1, 2, 3, 11):
        _, after = convolve(x[:cut], weight, Lengths((cut,)), None)
        assert torch.equal(convolution(x[cut:], weight, (20 - cut,), after), whole[cut:])
