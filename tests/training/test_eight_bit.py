"""Moments in 8 bits: how far a code is from its number, that chance is fair, and that codes survive being written out."""

import pytest
import torch

from tests.bases import DEVICE
from tinsmith.training.eight_bit import BLOCK, FIRST, SECOND, Code, chances, decode, encode

CODES = [pytest.param(FIRST, id="first"), pytest.param(SECOND, id="second")]


def spread(code: Code, blocks: int = 64) -> torch.Tensor:
    """Numbers of very different sizes, positive and negative if the code has signs, with zeros among them."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(-0.8 * code.octaves * torch.rand(blocks, BLOCK, generator=generator))
    values = sizes * torch.exp2(torch.randint(-60, 60, (blocks, 1), generator=generator).float())
    values[torch.rand(values.shape, generator=generator) < 0.1] = 0
    if code.signed:
        values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    return values.to(DEVICE)


@pytest.mark.parametrize("code", CODES)
def test_a_number_is_no_further_off_than_half_a_code(code: Code) -> None:
    values = spread(code)
    back = decode(*encode(values, code, None), code)
    assert torch.equal(back == 0, values == 0)
    assert torch.equal(back.sign(), values.sign())
    ratio = (back / values)[values != 0]
    half = (2**code.octaves_each - 1) / 2
    assert (ratio - 1).abs().max() <= 1.01 * half
    assert torch.equal(back.abs().amax(-1), values.abs().amax(-1))


@pytest.mark.parametrize("code", CODES)
def test_codes_that_are_decoded_become_the_same_codes(code: Code) -> None:
    """Also where chance decided: a checkpoint holds the decoded numbers."""
    values = spread(code)
    codes, scales = encode(values, code, chances(values, torch.tensor(5, device=DEVICE)))
    again, scales_again = encode(decode(codes, scales, code), code, None)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again, scales)


@pytest.mark.parametrize("code", CODES)
def test_chance_is_fair(code: Code) -> None:
    values = spread(code, blocks=1)
    total = torch.zeros_like(values, dtype=torch.float64)
    rounds = 400
    for seed in range(rounds):
        total += decode(*encode(values, code, chances(values, torch.tensor(seed * 7919, device=DEVICE))), code)
    ratio = (total / rounds / values)[values != 0]
    spacing = 2**code.octaves_each - 1
    assert (ratio - 1).abs().max() < 5 * spacing / 2 / rounds**0.5
    assert (ratio - 1).mean().abs() < 5 * spacing / 2 / (rounds * ratio.numel()) ** 0.5


def test_numbers_too_small_for_a_code() -> None:
    """First moments become 0 or the smallest, by chance; second moments never 0."""
    values = torch.full((1, BLOCK), 2.0**-60, device=DEVICE)
    values[0, 0] = 1.0
    first = decode(*encode(values, FIRST, None), FIRST)
    assert first[0, 1:].eq(0).all()
    second = decode(*encode(values, SECOND, None), SECOND)
    assert second[0, 1:].eq(2.0**-40).all()
    assert decode(*encode(torch.zeros(1, BLOCK), SECOND, None), SECOND).eq(0).all()


def test_a_moment_that_changes_little_in_a_step_still_follows() -> None:
    """An average of 1,000 steps: rounding to the nearest code would leave it where it is."""
    value, target, beta = torch.full((1, BLOCK), 1.0, device=DEVICE), 0.25, 0.999
    value[:, 0] = 100.0  # the scale
    nearest = stochastic = value
    for step in range(1500):
        fresh = torch.full_like(value, target)
        fresh[:, 0] = 100.0
        chance = chances(value, torch.tensor(step * 104729, device=DEVICE))
        stochastic = decode(*encode(beta * stochastic + (1 - beta) * fresh, SECOND, chance), SECOND)
        nearest = decode(*encode(beta * nearest + (1 - beta) * fresh, SECOND, None), SECOND)
    expected = target + (1 - target) * beta**1500
    assert stochastic[:, 1:].mean().item() == pytest.approx(expected, rel=0.1)
    assert nearest[:, 1:].mean().item() > 0.9


def test_chances_are_spread_evenly_and_differ_between_seeds() -> None:
    like = torch.empty(1000, BLOCK, device=DEVICE)
    one, other = (chances(like, torch.tensor(seed, device=DEVICE)) for seed in (1, 2**40 + 3))
    for found in (one, other):
        assert found.min() >= 0
        assert found.max() < 1
        counts = torch.histc(found.cpu(), 16, 0, 1)
        assert (counts / found.numel() - 1 / 16).abs().max() < 0.002
    assert torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].abs() < 0.01
    assert torch.corrcoef(torch.stack([one[:, 1:].flatten(), one[:, :-1].flatten()]))[0, 1].abs() < 0.01
