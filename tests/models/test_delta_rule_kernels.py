"""The Triton kernels of the gated delta rule: values, gradients, and neighbours full of NaN. Triton's interpreter runs them on a CPU."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.bases import DEVICE
from tinsmith.models import delta_rule_kernels
from tinsmith.models.delta_chunks import chunks_of, delta_rule_in_chunks

WIDTH = 16
ROUNDED = 2**-7
"""How far bfloat16 rounds at most, as a share: the interpreter cuts numbers off."""
EXACT = 2**-13
"""How far float32 results may lie from those of float64: numbers are kept in two bfloat16."""


def inputs(lengths: Sequence[int], key_heads: int, groups: int, states: bool) -> list[Tensor]:
    """Query, key, value, decay, beta and perhaps states."""
    generator, tokens, heads = torch.Generator().manual_seed(0), sum(lengths), key_heads * groups

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys = [random(tokens, key_heads, WIDTH).bfloat16() for _ in range(2)]
    made = [
        *keys,
        random(tokens, heads, WIDTH).bfloat16(),
        logsigmoid(random(tokens, heads) + 2),
        random(tokens, heads).sigmoid().bfloat16(),
    ]
    return [x.to(DEVICE) for x in [*made, *([random(len(lengths), heads, WIDTH, WIDTH)] if states else [])]]


def results(lengths: tuple[int, ...], given: Sequence[Tensor], weights: Sequence[Tensor], exact: bool) -> list[Tensor]:
    """Outputs and gradients; the last states too if there is a second weight."""
    leaves = [(x.double() if exact else x).detach().requires_grad_() for x in given]
    query, key, value, decay, beta, *rest = leaves
    before, keeps = rest[0] if rest else None, len(weights) > 1
    if exact:
        chunks = chunks_of(lengths, WIDTH, value.device)
        found = delta_rule_in_chunks(query, key, value, decay, beta, chunks, before, keeps)
    else:
        found = delta_rule_kernels.delta_rule(query, key, value, decay, beta, lengths, before, keeps)
    outs = found[: len(weights)]
    gradients = torch.autograd.grad(outs, leaves, [weight.to(out.dtype) for weight, out in zip(weights, outs, strict=True)])
    return [x.detach() for x in (*outs, *gradients)]


@pytest.mark.parametrize(("lengths", "groups", "states"), [((1, 65, 64), 2, True), ((130,), 1, False)])
def test_values_and_gradients(lengths: tuple[int, ...], groups: int, states: bool) -> None:
    given = inputs(lengths, 1, groups, states)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(given[2].shape, generator=generator).bfloat16().to(DEVICE)]
    if states:
        weights.append(torch.randn(given[5].shape, generator=generator).to(DEVICE))
    got = results(lengths, given, weights, exact=False)
    for ours, theirs in zip(got, results(lengths, given, weights, exact=True), strict=True):
        bound = ROUNDED if ours.dtype == torch.bfloat16 else EXACT
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


def test_heads_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that are computed one after the other, for the memory, give the same bits."""
    given = inputs((70,), 2, 1, states=True)
    weights = [torch.ones_like(given[2]), torch.ones_like(given[5])]
    whole = results((70,), given, weights, exact=False)
    monkeypatch.setattr(delta_rule_kernels, "STATE_BYTES", 1)
    for ours, theirs in zip(results((70,), given, weights, exact=False), whole, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("neighbour", [0, 1, 2])
def test_no_nan_crosses(neighbour: int) -> None:
    """A neighbour whose inputs and gradients are NaN leaves the bits of all others as they are."""
    lengths = (3, 66, 2)
    given = inputs(lengths, 1, 1, states=False)
    weight = torch.ones_like(given[2])
    theirs = slice(sum(lengths[:neighbour]), sum(lengths[: neighbour + 1]))
    others = torch.ones(sum(lengths), dtype=torch.bool, device=weight.device)
    others[theirs] = False
    expected = results(lengths, given, [weight], exact=False)
    for x in (*given, weight):
        x[theirs] = torch.nan
    for ours, wanted in zip(results(lengths, given, [weight], exact=False), expected, strict=True):
        assert ours[theirs].isnan().all()
        assert torch.equal(ours[others], wanted[others])


def test_what_heads_are_served() -> None:
    head = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    assert delta_rule_kernels.serves(head, head)
    assert not delta_rule_kernels.serves(head.float(), head.float())
    assert not delta_rule_kernels.serves(head[:, :, :24], head)
