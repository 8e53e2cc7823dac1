"""Samples through the SDK: the trainer's numbers, frozen snapshots, what is asked about a prompt, the cache.

Invariant: A snapshot stays frozen while training goes on.
"""

import pickle

import numpy as np
import tinker
import torch
from tinker import types

from tests.acceptance.talking import datum, image_input, learn, numbers, scores, text_input, train, with_inputs


def sampling_client(client: tinker.TrainingClient) -> tinker.SamplingClient:
    sampler: tinker.SamplingClient = client.save_weights_and_get_sampling_client().result()
    return sampler


def forward_logprobs(client: tinker.TrainingClient, model_input: types.ModelInput, tokens: list[int]) -> np.ndarray:
    """The trainer's log-probabilities of `tokens` after `model_input`."""
    whole = types.ModelInput(chunks=[*model_input.chunks, types.EncodedTextChunk(tokens=tokens)])
    targets = [0] * (model_input.length - 1) + tokens + [0]
    item = with_inputs(whole, target_tokens=targets, weights=[1.0] * whole.length)
    return scores(client, [item])[0][model_input.length - 1 : -1]


def assert_sampled_as_trained(
    client: tinker.TrainingClient, sampler: tinker.SamplingClient, prompt: types.ModelInput, seed: int | None = None
) -> types.SampleResponse:
    """Two samples of 15 tokens have the trainer's log-probabilities; returns the reply."""
    params = types.SamplingParams(max_tokens=15, temperature=1.0, stop=[], seed=seed)
    response: types.SampleResponse = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    for sequence in response.sequences:
        assert len(sequence.tokens) == 15
        expected = forward_logprobs(client, prompt, list(sequence.tokens))
        np.testing.assert_allclose(numbers(sequence.logprobs), expected, atol=1e-4)
    return response


def test_logprobs_of_samples_and_prompts_equal_forwards(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    sampler = sampling_client(learn(client, [datum(text_input(0, 9)), datum(image_input(client, 1))]))
    prompt = image_input(client, 2)
    for each in (text_input(1, 5), prompt):
        assert_sampled_as_trained(client, sampler, each)
    got = sampler.compute_logprobs(prompt).result()
    assert [got[0], *got[4:10]] == [None, *[0.0] * 6]
    tokens = [token for chunk in prompt.chunks if isinstance(chunk, types.EncodedTextChunk) for token in chunk.tokens]
    targets = tokens[1:4] + [0] * 6 + tokens[4:] + [0]
    expected = scores(client, [with_inputs(prompt, target_tokens=targets, weights=[1.0] * prompt.length)])[0]
    np.testing.assert_allclose(numbers([*got[1:4], *got[10:]]), [*expected[:3], *expected[9:-1]], atol=1e-4)


def test_everything_that_can_be_asked_about_a_prompt(service: tinker.ServiceClient) -> None:
    sampler = sampling_client(learn(train(service, "text"), [datum(text_input(0, 9))]))
    prompt = text_input(1, 30)
    own = numbers(sampler.compute_logprobs(prompt).result()[1:])
    tokens, some = prompt.to_ints(), torch.arange(5, 29)
    ids = torch.full((29, 40), -1)
    ids[some, some] = torch.tensor(tokens[6:])
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
    found, top = response.prompt_logprobs or [], response.topk_prompt_logprobs or []
    assert [*found[:20], *top[:20]] == [None] * 40
    np.testing.assert_allclose(numbers(found[20:]), own[19:], atol=1e-4)
    for likeliest, token, its_own in zip(top[20:], tokens[20:], own[19:], strict=True):
        assert likeliest is not None
        assert len(likeliest) == 3
        assert likeliest[0][1] >= its_own - 1e-4
        assert all(abs(logprob - its_own) < 1e-4 for likely, logprob in likeliest if likely == token)
    targets, alternatives = response.target_prompt_logprobs, response.prompt_alt_tokens
    assert targets is not None
    assert targets.sparse_crow_indices is not None
    np.testing.assert_allclose(targets.to_torch().to_dense()[some, some], own[5:], atol=1e-4)
    assert alternatives is not None
    drawn, logprobs = alternatives.tokens.to_torch(), alternatives.logprobs.to_torch()
    assert drawn.shape == logprobs.shape == (29, 5)
    same = drawn == torch.tensor(tokens[1:]).unsqueeze(1)
    np.testing.assert_allclose(logprobs[same], np.repeat(own, same.sum(1)), atol=1e-4)
    assert [[len(top or []) for top in sequence.topk_logprobs or []] for sequence in response.sequences] == [
        [2] * 6
    ] * 2


def test_the_next_turn_of_a_conversation_is_computed_from_the_cache(service: tinker.ServiceClient) -> None:
    client = train(service, "vision")
    sampler, prompt, hits = sampling_client(client), image_input(client, 5), []
    for turn in range(3):
        response = assert_sampled_as_trained(client, sampler, prompt, seed=turn)
        answer = list(response.sequences[0].tokens)
        hits.append((prompt.length, response.prompt_cache_hit_tokens))
        prompt = types.ModelInput(
            chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=answer), *text_input(turn, 12).chunks]
        )
    (first, nothing), *later = hits
    assert nothing == 0
    for (length, hit), (before, _) in zip(later, hits, strict=False):
        assert hit == (before + 14) // 16 * 16 < length
    assert first < later[0][1]


def test_inflight_samplers_share_the_newest_weights(service: tinker.ServiceClient) -> None:
    client, prompt = train(service, "text"), text_input(1, 20)
    first: tinker.SamplingClient = client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert_sampled_as_trained(client, first, prompt)
    learn(client, [datum(text_input(0, 12))])
    second: tinker.SamplingClient = client.save_weights_and_get_sampling_client(kind="inflight").result()
    for sampler in (second, first):
        assert_sampled_as_trained(client, sampler, prompt)


def test_copies_of_a_sampling_client_do_not_get_each_others_samples(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="text").result()
    copies = [sampler, *(pickle.loads(pickle.dumps(sampler)) for _ in range(2))]
    asked = []
    for n in range(3):
        for i, copy in enumerate(copies):
            prompt, params = text_input(10 * i + n, 5 + i), types.SamplingParams(max_tokens=3 + i, stop=[], seed=n)
            asked.append((prompt, params, copy.sample(prompt=prompt, num_samples=1, sampling_params=params)))
    for prompt, params, future in asked:
        (alone,) = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences
        assert list(future.result().sequences[0].tokens) == list(alone.tokens)


def test_a_base_model_saved_weights_and_snapshots_stay_frozen_while_training_goes_on(
    service: tinker.ServiceClient,
) -> None:
    client, prompt = train(service, "text"), text_input(1, 6)
    learn(client, [datum(text_input(9, 12), 9)])
    saved = client.save_weights_for_sampler("early").result().path
    samplers = [
        service.create_sampling_client(base_model="text").result(),
        service.create_sampling_client(model_path=saved).result(),
    ]
    samplers.append(service.create_sampling_client(model_path=saved, base_model="text").result())

    def sample(sampler: tinker.SamplingClient) -> tuple[list[list[int]], np.ndarray]:
        params = types.SamplingParams(max_tokens=10, seed=1, stop=[])
        sequences = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result().sequences
        return [list(sequence.tokens) for sequence in sequences], np.stack(
            [numbers(sequence.logprobs) for sequence in sequences]
        )

    before = [sample(sampler) for sampler in samplers]
    for step in range(3):
        samplers.append(sampling_client(client))
        before.append(sample(samplers[-1]))
        learn(client, [datum(text_input(step, 12), step)])
    after = [sample(sampler) for sampler in samplers]
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in before]
    np.testing.assert_allclose([logprobs for _, logprobs in after], [logprobs for _, logprobs in before], atol=1e-5)
    of_base, of_saved, again, published, later, _ = [logprobs for _, logprobs in before]
    np.testing.assert_allclose([of_saved, again], [published] * 2, atol=1e-5)
    assert min(np.abs(other - published).max() for other in (of_base, later)) > 1e-3
