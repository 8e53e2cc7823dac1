"""Every parameter of a sample does with vLLM what it does with the local sampler, or is refused."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.talking import image_input, numbers, scores, text_input, train, with_inputs
from tests.running import Server
from tests.with_vllm.serving import wait_for_vllm
from tests.with_vllm.talking import FREE, learn, sample, snapshot, text_logprobs, trainers_logprobs, worst_difference


@pytest.fixture(scope="module")
def model(server: Server) -> Iterator[tinker.TrainingClient]:
    """A model far from its base."""
    wait_for_vllm(server)
    with tinker.ServiceClient(base_url=server.url, api_key="tml-parameters") as service:
        client = train(service, "tiny")
        learn(client)
        yield client


@pytest.fixture(scope="module")
def sampler(model: tinker.TrainingClient) -> tinker.SamplingClient:
    """Its weights."""
    return snapshot(model)


def whole_vocabulary(model: tinker.TrainingClient, prompt: types.ModelInput) -> np.ndarray:
    """The trainer's logprobs [2048] of the token behind the prompt, at temperature 1."""
    targets = torch.zeros(prompt.length, 2048, dtype=torch.int64)
    targets[-1] = torch.arange(2048)
    last: np.ndarray = scores(model, [with_inputs(prompt, target_tokens=targets, weights=torch.ones(prompt.length, 2048))])[0][-1]
    return last


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_logprobs_are_at_the_temperature_of_the_request(
    model: tinker.TrainingClient, sampler: tinker.SamplingClient, temperature: float
) -> None:
    prompt = image_input(model, 1)
    params = types.SamplingParams(max_tokens=1, temperature=temperature, stop=[], seed=2)
    expected = torch.from_numpy(whole_vocabulary(model, prompt) / temperature).log_softmax(-1)
    reply = sample(sampler, prompt, params, 40, topk_sample_logprobs=5)
    top = expected.topk(5)
    for sequence in reply.sequences:
        assert abs(sequence.logprobs[0] - expected[sequence.tokens[0]]) < 1e-4
        assert [token for token, _ in sequence.topk_logprobs[0]] == top.indices.tolist()
        np.testing.assert_allclose([logprob for _, logprob in sequence.topk_logprobs[0]], top.values, atol=1e-4)


def test_greedy_takes_the_likeliest_at_temperature_1(model: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    prompt = text_input(1, 10)
    params = types.SamplingParams(max_tokens=1, temperature=0.0, top_k=3, top_p=0.5, stop=[])
    (sequence,) = sample(sampler, prompt, params).sequences
    expected = whole_vocabulary(model, prompt)
    assert sequence.tokens == [int(expected.argmax())]
    assert abs(sequence.logprobs[0] - expected.max()) < 1e-4


def test_top_k_and_top_p_with_logprobs_over_the_whole_vocabulary(model: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    prompt = image_input(model, 2)
    likeliest = np.argsort(-whole_vocabulary(model, prompt))
    reply = sample(sampler, prompt, types.SamplingParams(max_tokens=6, top_k=4, stop=[], seed=1), 30, topk_sample_logprobs=2)
    assert {s.tokens[0] for s in reply.sequences} <= set(likeliest[:4].tolist())
    assert len({s.tokens[0] for s in reply.sequences}) > 1
    assert worst_difference(model, prompt, reply) < 1e-4
    assert [token for token, _ in reply.sequences[0].topk_logprobs[0]] == likeliest[:2].tolist()
    reply = sample(sampler, prompt, types.SamplingParams(max_tokens=6, top_p=1e-6, stop=[], seed=1), 3)
    assert {s.tokens[0] for s in reply.sequences} == {int(likeliest[0])}
    assert worst_difference(model, prompt, reply) < 1e-4


def test_seeds_give_the_same_samples_and_others(sampler: tinker.SamplingClient) -> None:
    first, again, other = (
        [tuple(s.tokens) for s in sample(sampler, text_input(3, 8), types.SamplingParams(max_tokens=8, stop=[], seed=seed), 50).sequences]
        for seed in (2**64 - 1, 2**64 - 1, 2**64 - 2)
    )
    assert first == again
    assert len({*first, *other}) == 100


def test_stop_rules(model: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    prompt, tokenizer = text_input(4, 12), model.get_tokenizer()
    free = sample(sampler, prompt, types.SamplingParams(max_tokens=30, temperature=0.0, stop=[])).sequences[0]
    assert (len(free.tokens), free.stop_reason) == (30, "length")
    by_id = sample(sampler, prompt, types.SamplingParams(max_tokens=30, temperature=0.0, stop=[free.tokens[6]])).sequences[0]
    end = free.tokens.index(free.tokens[6]) + 1
    assert (by_id.tokens, by_id.stop_reason) == (free.tokens[:end], "stop")
    text = str(tokenizer.decode(free.tokens[:8]))
    by_text = sample(sampler, prompt, types.SamplingParams(max_tokens=30, temperature=0.0, stop=[text[-4:]])).sequences[0]
    assert by_text.stop_reason == "stop"
    assert text[-4:] in tokenizer.decode(by_text.tokens)
    assert text[-4:] not in tokenizer.decode(by_text.tokens[:-1])
    assert by_text.tokens == free.tokens[: len(by_text.tokens)]


def test_the_end_of_sequence_ends_it_unless_stop_is_empty(service: tinker.ServiceClient) -> None:
    client = train(service, "tiny")
    end = client.get_tokenizer().eos_token_id
    prompt = text_input(5, 6)
    whole = types.ModelInput.from_ints([*prompt.to_ints(), end])
    lesson = with_inputs(whole, target_tokens=[0] * 5 + [end] * 2, weights=[0.0] * 5 + [1.0] * 2)
    for _ in range(20):
        client.forward_backward([lesson], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    sampler = snapshot(client)
    (ended,) = sample(sampler, prompt, types.SamplingParams(max_tokens=5, temperature=0.0)).sequences
    assert (ended.tokens, ended.stop_reason) == ([end], "stop")
    (free,) = sample(sampler, prompt, types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])).sequences
    assert (free.tokens[:2], len(free.tokens)) == ([end, end], 5)


@pytest.mark.parametrize("picture", [False, True])
def test_everything_that_can_be_asked_about_a_prompt(model: tinker.TrainingClient, sampler: tinker.SamplingClient, picture: bool) -> None:
    prompt = image_input(model, 3) if picture else text_input(6, 14)
    own = text_logprobs(model, prompt)
    ids = torch.full((13, 40), -1)
    ids[11, 7] = 99
    reply = sample(
        sampler,
        prompt,
        FREE,
        2,
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=4,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch_sparse(ids, pad_value=-1),
        prompt_alt_tokens_k=5,
    )
    assert reply.prompt_logprobs[:10] == [None] * 10
    np.testing.assert_allclose(numbers(reply.prompt_logprobs[10:]), own[10:], atol=1e-4)
    assert reply.topk_prompt_logprobs[:10] == [None] * 10
    assert all(len(top) == 3 for top in reply.topk_prompt_logprobs[10:])
    assert reply.topk_prompt_logprobs[13][0][1] >= own[13] - 1e-4
    scored = trainers_logprobs(model, types.ModelInput(chunks=prompt.chunks), [1])
    assert scored.shape == (1,)
    assert reply.prompt_alt_tokens.tokens.to_torch().shape == (13, 5)
    assert worst_difference(model, prompt, reply) < 1e-4


def test_a_refused_sample_fails_alone(model: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    good = sampler.sample(prompt=text_input(1, 6), num_samples=2, sampling_params=FREE)
    bad = sampler.sample(prompt=text_input(1, 6), num_samples=1, sampling_params=types.SamplingParams(max_tokens=1, temperature=0.001))
    with pytest.raises(tinker.RequestFailedError):
        bad.result()
    assert worst_difference(model, text_input(1, 6), good.result()) < 1e-4
