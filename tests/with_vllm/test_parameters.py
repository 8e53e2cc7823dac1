"""Every parameter of a sample does with vLLM what it does with the local sampler, or is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.talking import image_input, numbers, scores, text_input, train, with_inputs
from tests.running import Server
from tests.with_vllm.serving import wait_for_vllm
from tests.with_vllm.talking import FREE, learn, sample, snapshot, text_logprobs, worst_difference


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


def whole_vocabulary(model: tinker.TrainingClient, prompt: types.ModelInput) -> torch.Tensor:
    """The trainer's logprobs [2048] of the token behind the prompt, at temperature 1."""
    targets = torch.zeros(prompt.length, 2048, dtype=torch.int64)
    targets[-1] = torch.arange(2048)
    weights = torch.ones(prompt.length, 2048)
    return torch.from_numpy(scores(model, [with_inputs(prompt, target_tokens=targets, weights=weights)])[0][-1])


def test_logprobs_are_at_the_temperature_of_the_request(
    model: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    """Those of greedy samples, of which vLLM itself refuses several, are at temperature 1 over the whole vocabulary."""
    prompt = image_input(model, 1)
    plain = whole_vocabulary(model, prompt)
    greedy: dict[str, Any] = {"temperature": 0.0, "top_k": 3, "top_p": 0.5}
    for params, n, logprobs in (({"temperature": 0.5}, 40, (plain / 0.5).log_softmax(-1)), (greedy, 3, plain)):
        reply = sample(
            sampler, prompt, types.SamplingParams(max_tokens=1, stop=[], seed=2, **params), n, topk_sample_logprobs=5
        )
        top = logprobs.topk(5)
        for sequence in reply.sequences:
            assert abs(sequence.logprobs[0] - logprobs[sequence.tokens[0]]) < 1e-4
            assert [token for token, _ in sequence.topk_logprobs[0]] == top.indices.tolist()
            np.testing.assert_allclose([logprob for _, logprob in sequence.topk_logprobs[0]], top.values, atol=1e-4)
    assert [sequence.tokens for sequence in reply.sequences] == [[int(plain.argmax())]] * 3


def test_top_k_and_top_p_with_logprobs_over_the_whole_vocabulary(
    model: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    prompt = image_input(model, 2)
    likeliest = whole_vocabulary(model, prompt).argsort(descending=True).tolist()
    reply = sample(
        sampler, prompt, types.SamplingParams(max_tokens=6, top_k=4, stop=[], seed=1), 30, topk_sample_logprobs=2
    )
    first = {s.tokens[0] for s in reply.sequences}
    assert first <= set(likeliest[:4])
    assert len(first) > 1
    assert worst_difference(model, prompt, reply) < 1e-4
    assert [token for token, _ in reply.sequences[0].topk_logprobs[0]] == likeliest[:2]
    reply = sample(sampler, prompt, types.SamplingParams(max_tokens=6, top_p=1e-6, stop=[], seed=1), 3)
    assert {s.tokens[0] for s in reply.sequences} == {likeliest[0]}
    assert worst_difference(model, prompt, reply) < 1e-4


def test_stop_rules(model: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    tokenizer = model.get_tokenizer()

    def greedy(stop: list[int] | list[str]) -> Any:
        (found,) = sample(
            sampler, text_input(4, 12), types.SamplingParams(max_tokens=30, temperature=0.0, stop=stop)
        ).sequences
        return found

    free = greedy([])
    assert (len(free.tokens), free.stop_reason) == (30, "length")
    by_id = greedy([free.tokens[6]])
    assert (by_id.tokens, by_id.stop_reason) == (free.tokens[: free.tokens.index(free.tokens[6]) + 1], "stop")
    end = str(tokenizer.decode(free.tokens[:8]))[-4:]
    by_text = greedy([end])
    assert (by_text.tokens, by_text.stop_reason) == (free.tokens[: len(by_text.tokens)], "stop")
    assert [end in tokenizer.decode(tokens) for tokens in (by_text.tokens, by_text.tokens[:-1])] == [True, False]


def test_the_end_of_sequence_ends_it_unless_stop_is_empty(service: tinker.ServiceClient) -> None:
    client, prompt = train(service, "tiny"), text_input(5, 6)
    end = client.get_tokenizer().eos_token_id
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


def test_everything_that_can_be_asked_about_a_prompt(
    model: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    prompt = image_input(model, 3)
    own = text_logprobs(model, prompt)
    ids = torch.full((13, 40), -1)
    ids[11, 7] = 99
    target = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    asked: dict[str, Any] = {
        "prompt_logprobs_last_n": 4,
        "topk_prompt_logprobs": 3,
        "topk_sample_logprobs": 2,
        "prompt_alt_tokens_k": 5,
    }
    reply = sample(sampler, prompt, FREE, 2, include_prompt_logprobs=True, target_prompt_logprobs=target, **asked)
    assert reply.prompt_logprobs[:10] == reply.topk_prompt_logprobs[:10] == [None] * 10
    np.testing.assert_allclose(numbers(reply.prompt_logprobs[10:]), own[10:], atol=1e-4)
    assert all(len(top) == 3 for top in reply.topk_prompt_logprobs[10:])
    assert reply.topk_prompt_logprobs[13][0][1] >= own[13] - 1e-4
    assert reply.prompt_alt_tokens.tokens.to_torch().shape == (13, 5)
    assert worst_difference(model, prompt, reply) < 1e-4
