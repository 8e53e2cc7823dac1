"""Samples through the SDK: the trainer's numbers, frozen snapshots, stop rules, seeds.

Invariant: A snapshot stays frozen while training goes on.
"""

import asyncio
import pickle
import time
from collections.abc import Callable

import httpx
import numpy as np
import tinker
import torch
from tinker import types

from tests.acceptance.talking import datum, image_input, learn, numbers, scores, text_input, train, with_inputs
from tests.running import START_S


def sampling_client(client: tinker.TrainingClient) -> tinker.SamplingClient:
    """A client of the model's weights as they are now."""
    sampler: tinker.SamplingClient = client.save_weights_and_get_sampling_client().result()
    return sampler


def forward_logprobs(client: tinker.TrainingClient, model_input: types.ModelInput, tokens: list[int]) -> np.ndarray:
    """The trainer's log-probabilities of `tokens` after `model_input`."""
    whole = types.ModelInput(chunks=[*model_input.chunks, types.EncodedTextChunk(tokens=tokens)])
    targets = [0] * (model_input.length - 1) + tokens + [0]
    item = with_inputs(whole, target_tokens=targets, weights=[1.0] * whole.length)
    return scores(client, [item])[0][model_input.length - 1 : -1]


def test_logprobs_equal_forwards(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    learn(client, [datum(text_input(0, 9)), datum(image_input(client, 1))])
    sampler = sampling_client(client)
    for prompt in (text_input(1, 5), image_input(client, 2)):
        params = types.SamplingParams(max_tokens=15, temperature=1.0, stop=[])
        response = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
        for sequence in response.sequences:
            assert len(sequence.tokens) == 15
            expected = forward_logprobs(client, prompt, list(sequence.tokens))
            np.testing.assert_allclose(numbers(sequence.logprobs), expected, atol=1e-4)


def test_prompt_logprobs_with_an_image(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    prompt = image_input(client, 2)
    got = sampling_client(client).compute_logprobs(prompt).result()
    assert got[0] is None
    assert got[4:10] == [0.0] * 6
    tokens = [token for chunk in prompt.chunks if isinstance(chunk, types.EncodedTextChunk) for token in chunk.tokens]
    targets = tokens[1:4] + [0] * 6 + tokens[4:] + [0]
    item = with_inputs(prompt, target_tokens=targets, weights=[1.0] * prompt.length)
    expected = scores(client, [item])[0]
    np.testing.assert_allclose(numbers(got[1:4]), expected[:3], atol=1e-4)
    np.testing.assert_allclose(numbers(got[10:]), expected[9:-1], atol=1e-4)


def test_everything_that_can_be_asked_about_a_prompt(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    learn(client, [datum(text_input(0, 9))])
    sampler = sampling_client(client)
    prompt = text_input(1, 30)
    own = numbers(sampler.compute_logprobs(prompt).result()[1:])
    tokens = prompt.to_ints()
    ids = torch.full((29, 40), -1)
    ids[torch.arange(5, 29), torch.arange(5, 29)] = torch.tensor(tokens[6:])
    response = sampler.sample(
        prompt=prompt,
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=6, stop=[], seed=2**64 - 1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=10,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch_sparse(ids, pad_value=-1),
        prompt_alt_tokens_k=5,
    ).result()
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[:20] == [None] * 20
    np.testing.assert_allclose(numbers(response.prompt_logprobs[20:]), own[19:], atol=1e-4)
    assert response.topk_prompt_logprobs is not None
    assert response.topk_prompt_logprobs[:20] == [None] * 20
    for (position, top), token in zip(enumerate(response.topk_prompt_logprobs[20:], 20), tokens[20:], strict=True):
        assert top is not None
        assert len(top) == 3
        assert top[0][1] >= own[position - 1] - 1e-4
        assert all(abs(logprob - own[position - 1]) < 1e-4 for likely, logprob in top if likely == token)
    targets = response.target_prompt_logprobs
    assert targets is not None
    assert targets.sparse_crow_indices is not None
    scored = targets.to_torch().to_dense()[torch.arange(5, 29), torch.arange(5, 29)]
    np.testing.assert_allclose(scored, own[5:], atol=1e-4)
    alternatives = response.prompt_alt_tokens
    assert alternatives is not None
    drawn, logprobs = alternatives.tokens.to_torch(), alternatives.logprobs.to_torch()
    assert drawn.shape == logprobs.shape == (29, 5)
    same = drawn == torch.tensor(tokens[1:]).unsqueeze(1)
    np.testing.assert_allclose(logprobs[same], np.repeat(own, same.sum(1)), atol=1e-4)
    for sequence in response.sequences:
        assert sequence.topk_logprobs is not None
        assert [len(top or []) for top in sequence.topk_logprobs] == [2] * 6


def test_the_next_turn_of_a_conversation_is_computed_from_the_cache(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    sampler = sampling_client(client)
    prompt = image_input(client, 5)
    hits = []
    for turn in range(3):
        params = types.SamplingParams(max_tokens=20, stop=[], seed=turn)
        response = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
        answer = list(response.sequences[0].tokens)
        np.testing.assert_allclose(numbers(response.sequences[0].logprobs), forward_logprobs(client, prompt, answer), atol=1e-4)
        hits.append((prompt.length, response.prompt_cache_hit_tokens))
        prompt = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=answer), *text_input(turn, 7).chunks])
    (first, nothing), *later = hits
    assert nothing == 0
    for (length, hit), (before, _) in zip(later, hits, strict=False):
        assert hit == (before + 19) // 16 * 16 < length
    assert first < later[0][1]


def test_inflight_samplers_share_the_newest_weights(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    prompt = text_input(1, 20)
    params = types.SamplingParams(max_tokens=8, seed=1, stop=[])

    def of_now(sampler: tinker.SamplingClient) -> None:
        (sequence,) = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences
        np.testing.assert_allclose(numbers(sequence.logprobs), forward_logprobs(client, prompt, list(sequence.tokens)), atol=1e-4)

    first: tinker.SamplingClient = client.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = sampling_client(client)
    of_now(first)
    before = snapshot.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0]
    learn(client, [datum(text_input(0, 12))])
    second: tinker.SamplingClient = client.save_weights_and_get_sampling_client(kind="inflight").result()
    of_now(second)
    of_now(first)
    after = snapshot.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0]
    np.testing.assert_allclose(numbers(after.logprobs), numbers(before.logprobs), atol=1e-5)


def test_copies_of_a_sampling_client_do_not_get_each_others_samples(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="text").result()
    copies = [sampler, *(pickle.loads(pickle.dumps(sampler)) for _ in range(2))]
    asked = []
    for n in range(3):
        for i, copy in enumerate(copies):
            prompt = text_input(10 * i + n, 5 + i)
            params = types.SamplingParams(max_tokens=3 + i, stop=[], seed=n)
            asked.append((prompt, params, copy.sample(prompt=prompt, num_samples=1, sampling_params=params)))
    for prompt, params, future in asked:
        (got,) = future.result().sequences
        (alone,) = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences
        assert list(got.tokens) == list(alone.tokens)


def test_a_cancelled_sample_stops(service: tinker.ServiceClient, http: httpx.Client) -> None:
    """One that would take minutes is gone from the engine seconds after its client gave it up."""
    sampler = service.create_sampling_client(base_model="text").result()

    def running() -> int:
        return int(http.get("status").json()["samples"]["running"])

    async def give_up() -> None:
        params = types.SamplingParams(max_tokens=20_000, stop=[])
        task = asyncio.ensure_future(sampler.sample_async(text_input(0, 5), 8, params))
        await until(lambda: running() == 8)
        task.cancel()
        await until(lambda: running() == 0)

    asyncio.run(give_up())


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def test_a_base_model_and_snapshots_stay_frozen_while_training_goes_on(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    prompt = text_input(1, 6)
    params = types.SamplingParams(max_tokens=10, seed=1, stop=[])
    samplers: list[tinker.SamplingClient] = [service.create_sampling_client(base_model="text").result()]
    before = [samplers[0].sample(prompt=prompt, num_samples=2, sampling_params=params).result()]
    for step in range(3):
        samplers.append(sampling_client(client))
        before.append(samplers[-1].sample(prompt=prompt, num_samples=2, sampling_params=params).result())
        learn(client, [datum(text_input(step, 12), step)])
    assert before[1].sequences[0].logprobs != before[2].sequences[0].logprobs
    for sampler, first in zip(samplers, before, strict=True):
        again = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
        for old, new in zip(first.sequences, again.sequences, strict=True):
            assert list(new.tokens) == list(old.tokens)
            np.testing.assert_allclose(numbers(new.logprobs), numbers(old.logprobs), atol=1e-5)
