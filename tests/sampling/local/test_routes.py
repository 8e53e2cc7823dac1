"""The experts that the local sampler says have computed its samples.

Invariant: A sample's recorded experts are those that computed each of its tokens, prompt included, whatever was found
in the cache, forked, preempted or cut; in float32 they are the trainer's own choices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.bases import image_chunks, load, new_ref, random_adapter, random_tokens, renderer
from tests.sampling.local.test_sampler import PARAMS, Bench, ask, followed_by, prompt_of, sampler_of
from tests.training.test_replay import free_routes
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.leaks import Probe, packed_logprobs
from tinsmith.sampling.local.sequence import SequenceState
from tinsmith.sampling.sampler import SampleResult
from tinsmith.wire.sample import SampleRequest


def asking(tokens: int = 12, num_samples: int = 1) -> SampleRequest:
    return replace(ask(replace(PARAMS, max_tokens=tokens), num_samples), rollout_expert_indices=True)


def assert_as_trained(
    base: BaseModel, rendered: RenderedInput, result: SampleResult, weights: Weights | None = None
) -> list[NDArray[Any]]:
    """The experts of each sample are the trainer's choices for its tokens but the last; returns them."""
    found = []
    for sequence, sampled in zip(result.sequences, result.routes, strict=True):
        assert sampled is not None
        routes = sampled.arrived()
        whole = followed_by(rendered, sequence.tokens)
        np.testing.assert_array_equal(routes.tokens, whole.identity)
        assert routes.experts.dtype == np.uint8
        np.testing.assert_array_equal(routes.experts, free_routes(base, whole, weights)[:, :-1])
        found.append(routes.experts)
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_prompts_in_pieces_forks_and_what_the_cache_has_are_recorded(
    family_base: Callable[[str], BaseModel], family: str
) -> None:
    base = family_base(family)
    bench, adapter = Bench(base, prefill_tokens=40), random_adapter(base, 4, 1, ref=new_ref())
    first, second = prompt_of(base, (0, 100), (1, 7)), prompt_of(base, (0, 100), (2, 30))
    for rendered in (first, second, first):
        for weights in (None, adapter):
            result = bench.answer(rendered, asking(num_samples=3), weights)
            assert_as_trained(base, rendered, result, weights)
    assert result.cached_tokens == 96


def test_images_are_recorded_with_their_tokens(family_base: Callable[[str], BaseModel]) -> None:
    base = family_base("qwen3_5_moe")
    rendered = renderer(base).render([*image_chunks(base, 1, 20), random_tokens(5, 9)])
    result = Bench(base).answer(rendered, asking())
    (sampled,) = result.routes
    assert sampled is not None
    assert_as_trained(base, rendered, result)
    assert len(set(sampled.tokens[sampled.tokens < 0].tolist())) == 1


def test_preempted_samples_and_those_that_had_no_place_are_recorded(family_base: Callable[[str], BaseModel]) -> None:
    base = family_base("qwen3_moe")
    bench = Bench(base, blocks=14, max_running=3)
    prompts = {name: prompt_of(base, (0, 20), (number, 17)) for number, name in enumerate("abcd")}
    for name, rendered in prompts.items():
        bench.add(name, rendered, asking(tokens=40, num_samples=2))
    for name, result in bench.run().items():
        assert_as_trained(base, prompts[name], result)


def test_what_is_computed_again_keeps_the_experts_that_gave_its_tokens(family_dir: Callable[[str], Path]) -> None:
    """In half precision, where rounding sends some tokens of a preempted sample to other experts then."""
    base = load(family_dir("qwen3_moe"), dtype="bfloat16")
    adapter = random_adapter(base, 4, 1, ref=new_ref())
    sampler = sampler_of(base, blocks=12)
    prompts = {str(number): prompt_of(base, (number, 20)) for number in range(8)}
    for name, rendered in prompts.items():
        sampler.add(name, asking(tokens=90), rendered, adapter)
    preempted: set[str] = set()
    gaps = {}
    while sampler.has_work:
        events = sampler.step()
        preempted |= {sequence.job.request_id for sequence in sampler.queues.waiting if sequence.tokens}
        for event in events:
            assert isinstance(event, SampleResult)
            (sequence,), (sampled,) = event.sequences, event.routes
            assert sampled is not None
            whole, routes = followed_by(prompts[event.request_id], sequence.tokens), sampled.arrived()
            last = np.full_like(routes.experts[:, :1], -1, dtype=np.int16)
            rendered = replace(whole, routes=np.concatenate([routes.experts, last], axis=1, dtype=np.int16))
            with torch.no_grad():
                (logprobs,) = packed_logprobs(base, [Probe(rendered, adapter)])
            own = logprobs[-len(sequence.tokens) :].float().cpu().numpy()
            gaps[event.request_id] = float(np.abs(own - np.array(sequence.logprobs)).max())
    assert len(preempted) > 3
    assert max(gaps.values()) < 0.5


def test_a_sample_is_preempted_without_memory_for_its_experts(
    family_base: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = family_base("qwen3_moe")
    bench = Bench(base, blocks=14)
    fetch, failed = bench.sampler.cache.fetch_routes, []

    def fetch_of_ended(sequence: SequenceState, end: int, blocks: Sequence[int]) -> None:
        if sequence.reason is None:
            failed.append(sequence)
            raise torch.OutOfMemoryError
        fetch(sequence, end, blocks)

    monkeypatch.setattr(bench.sampler.cache, "fetch_routes", fetch_of_ended)
    prompts = {str(number): prompt_of(base, (number, 20)) for number in range(4)}
    for name, rendered in prompts.items():
        bench.add(name, rendered, asking(tokens=70))
    for name, result in bench.run().items():
        assert_as_trained(base, prompts[name], result)
    assert failed


@pytest.mark.parametrize("samples", [1, 5])
def test_a_sample_of_a_single_token_has_the_experts_of_its_prompt(
    family_base: Callable[[str], BaseModel], samples: int
) -> None:
    """Also the samples that find no place of their own, or no block."""
    base = family_base("qwen3_moe")
    rendered = prompt_of(base, (0, 37))
    result = Bench(base, blocks=4, max_running=2).answer(rendered, asking(1, samples))
    assert [len(each) for each in assert_as_trained(base, rendered, result)] == [2] * samples


def test_what_several_versions_of_the_weights_have_sampled_has_no_experts(
    family_base: Callable[[str], BaseModel],
) -> None:
    base = family_base("qwen3_moe")
    bench = Bench(base)
    former, newer = (random_adapter(base, 4, seed, ref=new_ref(inflight_of="s:train:0")) for seed in (1, 2))
    rendered = prompt_of(base, (0, 20))
    bench.sampler.add("x", asking(), rendered, former)
    bench.step(3)
    bench.sampler.publish(newer)
    events = []
    while bench.sampler.has_work:
        events += bench.sampler.step()
    (result,) = events
    assert isinstance(result, SampleResult)
    assert list(result.routes) == [None]


def test_experts_are_read_only_where_somebody_wants_them(family_base: Callable[[str], BaseModel]) -> None:
    base, dense = family_base("qwen3_moe"), family_base("qwen3")
    adapter = random_adapter(base, 4, 1, ref=new_ref())
    rendered = prompt_of(base, (0, 20))
    for gib, weights, count in ((1.0, adapter, 1), (1.0, None, 0), (0.0, adapter, 0)):
        assert len(Bench(base, recorded_routes_gib=gib).answer(rendered, ask(), weights).routes) == count
    for tokens, count in ((1, 0), (2, 1)):
        scored = ask(replace(PARAMS, max_tokens=tokens), prompt_logprobs=True)
        assert len(Bench(base).answer(rendered, scored, adapter).routes) == count
    tenant = random_adapter(dense, 4, 1, ref=new_ref())
    assert len(Bench(dense).answer(prompt_of(dense, (0, 20)), ask(), tenant).routes) == 0
