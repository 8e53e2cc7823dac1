"""Deterministic numbers: the same bits alone and in any company, and the trainer's are the sampler's.

Invariant: With `--deterministic` a request has the same bits alone and in any company, and sampler and trainer agree to
1e-6.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bases import DEVICE, datum, image_chunks, load, random_adapter, renderer
from tests.sampling.local.test_kernels import whole
from tests.sampling.local.test_sampler import PARAMS, ask, check, prompt_of, run, sampled, sampler_of
from tinsmith.config import TrainingConfig
from tinsmith.errors import ConfigError
from tinsmith.models.attention import PackedBlocks
from tinsmith.models.base import BaseModel
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.sampler import SampleResult
from tinsmith.training.backend import LocalBackend
from tinsmith.training.optimizer import ModelOptimizer

pytestmark = pytest.mark.usefixtures("two_threads")  # their sums must not depend on what else is computed either


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> BaseModel:
    """A model that takes images, and computes deterministically."""
    return load(family_dir("qwen3_vl"), dtype=request.param, deterministic=True)


def numbers(result: SampleResult) -> list[object]:
    """All that a client gets of a sample, to the last bit."""
    prompt = result.answers.logprobs
    assert prompt is not None
    return [prompt.tobytes(), *((s.tokens, s.logprobs) for s in result.sequences)]


def two_prompts(base: BaseModel) -> dict[str, RenderedInput]:
    return {"text": prompt_of(base, (1, 45)), "image": renderer(base).render(image_chunks(base, 20, 30))}


def test_a_sample_has_the_same_bits_alone_and_in_any_company_and_the_trainers(base: BaseModel) -> None:
    """Beside other models, lengths and images, in other pieces, and with a prefix that is cached."""
    asked, adapter = two_prompts(base), random_adapter(base, 4, 1)
    questions = ask(replace(PARAMS, max_tokens=6), num_samples=2, prompt_logprobs=True)
    without_scores = replace(questions, questions=replace(questions.questions, logprobs=False))
    expected = {}
    for name, rendered in asked.items():
        alone = sampled(sampler_of(base), rendered, questions, adapter)
        check(base, rendered, adapter, alone, 1e-6)
        expected[name] = numbers(alone)
    for prefill_tokens in (4096, 13):
        crowded = sampler_of(base, prefill_tokens=prefill_tokens)
        for i in range(3):
            crowded.add(
                f"before{i}", ask(replace(PARAMS, seed=i, max_tokens=2 + 4 * i)), prompt_of(base, (i + 5, 9 + i)), None
            )
        crowded.step()
        for name, rendered in asked.items():
            crowded.add(name, questions, rendered, adapter)
        after = renderer(base).render(image_chunks(base, 24, 5))
        crowded.add("after", ask(replace(PARAMS, temperature=0.3), 2), after, random_adapter(base, 8, 2))
        done = run(crowded)
        for name, rendered in asked.items():
            assert numbers(done[name]) == expected[name]
            crowded.add(name, without_scores, rendered, adapter)
        again = run(crowded)
        for name in asked:
            assert again[name].cached_tokens > 0
            assert [(s.tokens, s.logprobs) for s in again[name].sequences] == expected[name][1:]


def test_training_reports_the_same_bits_in_any_company_and_learns(base: BaseModel) -> None:
    """The gradients are those of a pass that is not deterministic."""
    backend, plain = (LocalBackend(replace(base, deterministic=which), TrainingConfig()) for which in (True, False))
    found, expected = (
        {name: ModelOptimizer(random_adapter(base, rank, rank)) for rank, name in enumerate("abc", 2)} for _ in range(2)
    )
    backend.optimizers.update(found)
    plain.optimizers.update(expected)
    data = [prompt_of(base, (0, 20)), *two_prompts(base).values()]
    work = [datum(name, rendered) for name, rendered in zip("abc", data, strict=True)]
    together = backend.run_pass(work, backward=True).results
    for one, result in zip(work, together, strict=True):
        assert result is not None
        (alone,) = backend.run_pass([one], backward=False).results
        assert alone is not None
        np.testing.assert_array_equal(result.logprobs, alone.logprobs)
    plain.run_pass(work, backward=True)
    for name, optimizer in found.items():
        allowed = 0.05 if base.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(
            optimizer.accumulator.gradients, expected[name].accumulator.gradients, atol=1e-6, rtol=allowed
        )


@pytest.mark.parametrize(
    ("window", "dtype"), [(None, torch.float64), (3, torch.float64), (70, torch.float64), (70, torch.bfloat16)]
)
@pytest.mark.parametrize("sinks", [None, [0.5, -2.0, 3.0, 6.0]])
def test_stable_attention_is_attention(dtype: torch.dtype, window: int | None, sinks: list[float] | None) -> None:
    lengths = [1, 90, 17, 140]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), heads, 16, generator=generator).to(DEVICE, dtype) for heads in (4, 2, 2)
    )
    of_heads = None if sinks is None else torch.tensor(sinks, dtype=dtype, device=DEVICE)
    packed = PackedBlocks(lengths, torch.device(DEVICE)).attend(query, key, value, 0.3, window, of_heads)
    for out, q, k, v, length in zip(
        packed.split(lengths), *(x.double().split(lengths) for x in (query, key, value)), lengths, strict=True
    ):
        expected = whole(q, k, v, length, window, of_heads)
        torch.testing.assert_close(out.double(), expected, atol=1e-10 if dtype == torch.float64 else 2e-2, rtol=0)


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("qwen3_5", "gated delta nets"),
        ("qwen3_moe", "mixtures of experts"),
        ("qwen3_vl_moe", "mixtures of experts"),
        ("qwen3_5_moe", "gated delta nets"),
    ],
)
def test_what_is_not_computed_in_tiles_is_refused_by_name(
    family: str, what: str, family_dir: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=f"deterministic: tiny has {what}.*; leave out --deterministic, or serve"):
        load(family_dir(family), deterministic=True)
