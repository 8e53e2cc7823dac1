"""Choosing a token from logits: what the distribution is, and that chance depends on nothing but seed, sample and
position."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.bases import DEVICE
from tests.extent import amount, slow
from tinsmith.sampling.choose import (
    COLDEST,
    WEIGHT_BITS,
    Choice,
    DeviceChoice,
    as_bits,
    choose,
    choose_reference,
    draw,
    draws_needed,
    last_kept_reference,
    logprobs_at,
    order_preserving,
    truncate,
    uniforms,
)
from tinsmith.wire.sample import SamplingParams, StopRule

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])


def numbers_of(
    seeds: NDArray[np.uint64], samples: NDArray[np.uint64], positions: NDArray[np.uint64], count: int = 1
) -> torch.Tensor:
    """`uniforms` of unsigned numbers."""
    bits = [as_bits(array).to(DEVICE) for array in (seeds, samples, positions)]
    return uniforms(bits[0], bits[1], bits[2], count).cpu()


def draws_of(logprobs: Tensor, draws: int) -> Tensor:
    """So many draws from one row of log-probabilities [1, vocabulary], at positions one after the other."""
    zeros, count = np.zeros(draws, np.uint64), np.arange(draws, dtype=np.uint64)
    return draw(logprobs, numbers_of(zeros, zeros, count, draws_needed(logprobs.shape[1])).unsqueeze(1))[0]


def choice(
    position: int, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, seed: int = 0, topk: int = 0
) -> Choice:
    return Choice(
        SamplingParams(None, temperature, top_p, top_k, seed, StopRule(False, (), ())), seed, 0, position, topk
    )


def same_for_all(
    count: int, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, topk: int = 0
) -> list[Choice]:
    """`count` draws that differ in their position only."""
    return [choice(position, temperature, top_k, top_p, topk=topk) for position in range(count)]


def chosen(logits: torch.Tensor, how: list[Choice]) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    found = choose(logits.to(DEVICE), how)
    return [c.token for c in found], [c.logprob for c in found]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    draws = 10_000
    tokens, logprobs = chosen(LOGITS.expand(draws, -1), same_for_all(draws, temperature))
    expected = (LOGITS / temperature).softmax(-1)
    counts = np.bincount(tokens, minlength=6) / draws
    np.testing.assert_allclose(counts, expected.numpy(), atol=0.02)
    np.testing.assert_allclose(logprobs, expected.log()[tokens].numpy(), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-40, 1e-38, 1.0, 1e30, float("inf")])
def test_the_likeliest_stays_the_likeliest_at_any_temperature(temperature: float) -> None:
    """At zero log-probabilities are those at one. At 1e30 those of all tokens are the same number."""
    logits = LOGITS.roll(3).expand(50, -1)
    how = same_for_all(50, temperature, top_k=1, topk=3)
    found = choose(logits.to(DEVICE), how)
    assert {c.token for c in found} == {3}
    assert {tuple(c.top[0]) for c in found} == {(3, 4, 5)}
    expected = (logits[0].double() - 2.0).div(max(temperature or 1.0, COLDEST)).log_softmax(-1)
    np.testing.assert_allclose(found[0].logprob, expected[3].item(), atol=1e-6)
    np.testing.assert_allclose(found[0].top[1], expected[[3, 4, 5]].numpy(), atol=1e-6, rtol=1e-6)
    tokens, _ = chosen(logits, same_for_all(50, temperature, top_k=2))
    assert set(tokens) <= {3, 4}


KEPT = [(2, 1.0, 2), (1, 1.0, 1), (100, 1.0, 6), (-1, 0.5, 1), (-1, 0.6, 2), (-1, 1e-50, 1), (2, 0.75, 2)]


# Of the first two tokens the first has 0.73 of the probability
@pytest.mark.parametrize(("top_k", "top_p", "kept"), [*KEPT, (2, 0.7, 1)])
def test_truncation_keeps_exactly_these(top_k: int, top_p: float, kept: int) -> None:
    """Log-probabilities are over the whole vocabulary, before truncation."""
    logprobs = LOGITS.log_softmax(-1).unsqueeze(0)
    rest = truncate(LOGITS.unsqueeze(0), logprobs, torch.tensor([top_k]), torch.tensor([top_p]))[0]
    assert rest.isfinite().tolist() == [token < kept for token in range(6)]
    tokens, reported = chosen(LOGITS.expand(500, -1), same_for_all(500, top_k=top_k, top_p=top_p))
    assert max(tokens) < kept
    np.testing.assert_allclose(reported, logprobs[0][tokens].numpy(), atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 15, 17, 256, 300, 5000])
def test_draws_follow_the_distribution_whatever_the_size_of_the_vocabulary(vocabulary: int) -> None:
    draws = 40_000
    logprobs = torch.linspace(0, 4, vocabulary).log_softmax(0).unsqueeze(0)
    # Ten parts of the vocabulary, each with the probability that is its due.
    part = np.arange(vocabulary) * 10 // vocabulary
    expected = np.bincount(part, logprobs[0].exp().numpy(), minlength=10)
    np.testing.assert_allclose(
        np.bincount(part[draws_of(logprobs, draws).numpy()], minlength=10) / draws, expected, atol=0.012
    )


def test_what_has_no_probability_is_never_drawn() -> None:
    logprobs = torch.full((1, 300), -torch.inf)
    logprobs[0, [0, 17, 130]] = 0.0
    # 1.0 is more than there can be
    edges = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(draws_needed(300), 1, 2)
    assert draw(logprobs, edges).tolist() == [[0, 130]]


def test_rounding_differences_hardly_ever_change_a_draw() -> None:
    """As batch mates cause them.

    With one border for each token of the vocabulary, over 200 of these draws would differ.
    """
    generator = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(1, 5000, generator=generator) * scale for scale in (3, 1e-4))
    assert (draws_of(logits.log_softmax(-1), 20_000) != draws_of((logits + noise).log_softmax(-1), 20_000)).sum() < 20


def split_mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The mixing function of SplitMix64, in unsigned numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def test_random_numbers_are_those_of_split_mix_bit_for_bit() -> None:
    generator = np.random.default_rng(0)
    seeds, samples, positions = (generator.integers(0, 2**64, 1000, dtype=np.uint64) for _ in range(3))
    gamma = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = split_mix(seeds + gamma)
        state = split_mix(state ^ split_mix(samples + gamma * np.uint64(2)))
        state = split_mix(state ^ split_mix(positions + gamma * np.uint64(3)))
        state = split_mix(state + gamma * np.arange(4, dtype=np.uint64)[:, np.newaxis])
    expected = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    np.testing.assert_array_equal(numbers_of(seeds, samples, positions, 4).numpy(), expected)


def kept_by_sorting(logits: Tensor, logprobs: Tensor, top_k: int, top_p: float) -> set[int]:
    """The tokens that are left of one row, found by sorting: the shortest beginning whose weight is at least `top_p` of
    the whole.

    Weights are whole numbers and `top_p` is a fraction, so that a beginning of exactly that weight counts as enough on
    any processor.
    """
    order = np.argsort(-logits.cpu().numpy(), kind="stable")[: top_k if top_k > 0 else None]
    # The likeliest token weighs 2**44
    weights = ((logprobs - logprobs.amax()).exp() * 2.0**WEIGHT_BITS).to(torch.int64).tolist()
    kept: set[int] = set()
    for token in order.tolist():
        if (
            kept
            and top_p < 1
            and sum(weights[one] for one in kept) >= Fraction(top_p) * sum(weights[one] for one in order)
        ):
            break
        kept.add(token)
    return kept


@settings(deadline=None, max_examples=40)
@example([0] * 8, -1, 0.5, 0.5)  # four of eight equal tokens are exactly half
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    st.sampled_from([-1, 1, 2, 3, 7, 100]),
    st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.77, 0.99]),
    st.sampled_from([0.5, 1.0, 1e30]),
)
def test_truncation_is_that_of_a_sorted_vocabulary(
    steps: list[int], top_k: int, top_p: float, temperature: float
) -> None:
    """Among equal logits the lower id comes first.

    The rows beside it change nothing, nor do those that truncate nothing change.
    """
    logits = torch.tensor([steps, [0] * len(steps), steps], dtype=torch.float32, device=DEVICE) / 3
    logprobs = (logits / temperature).log_softmax(-1)
    on = torch.tensor([top_k, 1, -1], device=DEVICE), torch.tensor([top_p, 0.3, 1.0], device=DEVICE)
    rest = truncate(logits, logprobs, *on)
    kept = kept_by_sorting(logits[0], logprobs[0], top_k, float(np.float32(top_p)))
    assert set(rest[0].isfinite().nonzero().flatten().tolist()) == kept
    assert rest[1].isfinite().nonzero().flatten().tolist() == [0]
    torch.testing.assert_close(rest[2], logprobs[2], atol=0, rtol=0)


@pytest.mark.parametrize("vocabulary", [3, 300, 5000, *slow(70_000)])  # the tree of 70,000 has one level more
@pytest.mark.parametrize("truncates", [False, True])
def test_the_kernels_choose_what_the_reference_chooses(vocabulary: int, truncates: bool) -> None:
    """In Triton's interpreter on a CPU. The tree has one to five levels."""
    pytest.importorskip("triton")
    from tinsmith.kernels.choose import choose_kernel

    rows = 6
    logits = (torch.randn(rows, 2 * vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3).to(DEVICE)[
        :, :vocabulary
    ]
    logits[1, vocabulary // 2 :] = -torch.inf
    each = zip(
        (0, 0.7, 1, 2, 1e-40, 1),
        (-1, 5, 50, -1, -1, -1),
        (1, 1, 0.5, 0.9, 1, 1),
        range(2**64 - rows, 2**64),
        strict=True,
    )
    how = DeviceChoice.of([choice(position, *own) for position, own in enumerate(each)], logits.device)
    tokens, logprobs = choose_reference(logits, how, truncates)
    left = (
        truncate(logits, logprobs_at(logits, how.temperature.unsqueeze(1)), how.top_k, how.top_p) if truncates else None
    )

    def kernel(left: Tensor | None) -> tuple[Tensor, Tensor]:
        return choose_kernel(
            logits, how.temperature, how.seed, how.sample, how.position, draws_needed(vocabulary), left, COLDEST
        )

    found = kernel(left)
    assert found[0].tolist() == tokens.tolist()
    torch.testing.assert_close(found[1], logprobs, atol=1e-5, rtol=1e-6)
    if truncates and vocabulary == 300:
        # A row draws by the same numbers whether another truncates or not. Of the log-probabilities that are left only
        # -inf counts.
        others = torch.zeros_like(logits)
        others[2, 2:] = -torch.inf
        alone, beside = kernel(None), kernel(others)
        assert all(
            torch.equal(one[[0, 1, 3, 4, 5]], two[[0, 1, 3, 4, 5]]) for one, two in zip(alone, beside, strict=True)
        )
        assert beside[0][2] < 2


@pytest.mark.parametrize("vocabulary", [300, *slow(1, 9000)])
def test_the_kernels_find_the_last_token_that_is_kept(vocabulary: int) -> None:
    """In Triton's interpreter on a CPU, half a second for each row: each share of the weight in each row only where
    everything runs."""
    pytest.importorskip("triton")
    from tinsmith.kernels.choose import last_kept_kernel

    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(5, vocabulary, generator=generator)
    logits[1] = (logits[1] * 2).round()  # many are equal
    logits[2, vocabulary // 2 :] = -torch.inf
    logits[3] = -0.0
    keys = order_preserving(logits.to(DEVICE))
    weights = torch.randint(0, 2**44, keys.shape, generator=generator).to(DEVICE)
    for counts in (None, weights):
        total = torch.full((5,), vocabulary, device=DEVICE) if counts is None else counts.sum(-1)
        for thirds in amount([[1, 1, 3, 1, 0]], [[0] * 5, [1] * 5, [3] * 5]):
            least = (total * torch.tensor(thirds, device=DEVICE) // 3 + 1).clamp(max=total)
            assert last_kept_kernel(keys, counts, least).tolist() == last_kept_reference(keys, counts, least).tolist()
