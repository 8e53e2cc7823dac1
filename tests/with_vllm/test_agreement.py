"""Trainer and vLLM agree: on text and pictures, for base, adapters and full weights, whatever runs side by side."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.talking import image_input, numbers, text_input, train, with_inputs
from tests.bases import png
from tests.running import Server
from tests.with_vllm.talking import FREE, learn, sample, snapshot, square, text_logprobs, trainers_logprobs, worst_difference


@pytest.fixture
def bound(each_server: Server, request: pytest.FixtureRequest) -> float:
    """How far a log-probability may be from the trainer's. In a random hybrid model transformers' own are 1e-4 from those in float64."""
    return 5e-4 if "hybrid" in request.node.callspec.id else 1e-4


def test_base_and_two_adapters_side_by_side(each_service: tinker.ServiceClient, bound: float) -> None:
    service = each_service
    base, first, second = train(service, "tiny"), train(service, "tiny", rank=8), train(service, "tiny", rank=16, seed=4)
    learn(first, seed=1)
    learn(second, seed=5, steps=2)
    clients = [base, first, second]
    samplers = [service.create_sampling_client(base_model="tiny").result(), snapshot(first), snapshot(second)]
    prompts = [text_input(1, 30), image_input(base, 2)]
    with ThreadPoolExecutor(6) as pool:
        asked = [
            (client, prompt, pool.submit(sample, sampler, prompt, FREE, 3, include_prompt_logprobs=True))
            for client, sampler in zip(clients, samplers, strict=True)
            for prompt in prompts
        ]
        replies = [(client, prompt, reply.result()) for client, prompt, reply in asked]
    for client, prompt, reply in replies:
        assert worst_difference(client, prompt, reply) < bound
        np.testing.assert_allclose(numbers(reply.prompt_logprobs), text_logprobs(client, prompt), atol=bound)
    answers = [tuple(reply.sequences[0].tokens) for _, prompt, reply in replies if prompt is prompts[0]]
    assert len(set(answers)) == 3


def test_snapshots_of_two_versions_side_by_side(each_service: tinker.ServiceClient, bound: float) -> None:
    service = each_service
    client = train(service, "tiny")
    learn(client, seed=1)
    prompt = image_input(client, 3)
    before = snapshot(client)
    first = sample(before, prompt, n=2)
    assert worst_difference(client, prompt, first) < bound
    scored = trainers_logprobs(client, prompt, first.sequences[0].tokens)
    learn(client, seed=2)
    after = snapshot(client)
    assert worst_difference(client, prompt, sample(after, prompt, n=2)) < bound
    again = sample(before, prompt, n=2)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in first.sequences]
    np.testing.assert_allclose(numbers(again.sequences[0].logprobs), scored, atol=bound)


def test_text_and_pictures_in_turn(each_service: tinker.ServiceClient, bound: float) -> None:
    service = each_service
    client = train(service, "tiny")
    learn(client)
    one, two = image_input(client, 4), image_input(client, 5)
    large = types.ImageChunk(data=png(6, 160, 96), format="png", expected_tokens=15)
    prompt = types.ModelInput(chunks=[*one.chunks, large, *two.chunks, types.EncodedTextChunk(tokens=[7, 8])])
    reply = sample(snapshot(client), prompt, n=2, include_prompt_logprobs=True)
    assert worst_difference(client, prompt, reply) < bound
    np.testing.assert_allclose(numbers(reply.prompt_logprobs), text_logprobs(client, prompt), atol=bound)


def test_full_weights_beside_base_and_adapter(each_service: tinker.ServiceClient, bound: float) -> None:
    service = each_service
    adapter, full = train(service, "tiny"), train(service, "tiny", rank=0)
    learn(adapter)
    learn(full, seed=3)
    prompts = [text_input(1, 20), image_input(full, 2)]
    clients = [full, adapter]
    first = [snapshot(client) for client in clients]
    with ThreadPoolExecutor(8) as pool:
        asked = [(client, p, pool.submit(sample, s, p, FREE, 2)) for p in prompts for client, s in zip(clients, first, strict=True)]
        for client, prompt, reply in asked:
            assert worst_difference(client, prompt, reply.result()) < bound
    learn(full, seed=4)
    reply = sample(snapshot(full), prompts[1], include_prompt_logprobs=True)
    assert worst_difference(full, prompts[1], reply) < bound
    np.testing.assert_allclose(numbers(reply.prompt_logprobs), text_logprobs(full, prompts[1]), atol=bound)
    base = service.create_sampling_client(base_model="tiny").result()
    assert worst_difference(train(service, "tiny"), prompts[1], sample(base, prompts[1])) < bound


def test_what_it_learned_about_squares(each_service: tinker.ServiceClient) -> None:
    service = each_service
    client = train(service, "tiny", rank=16)
    colors = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
    tokenizer = client.get_tokenizer()
    ask, end = tokenizer.encode("What colour?"), tokenizer.eos_token_id

    def question(name: str, seed: int) -> types.ModelInput:
        picture = types.ImageChunk(data=square(colors[name], seed), format="png", expected_tokens=4)
        return types.ModelInput(chunks=[picture, types.EncodedTextChunk(tokens=ask)])

    def lesson(name: str, seed: int) -> types.Datum:
        prompt, answer = question(name, seed), [*tokenizer.encode(name), end]
        whole = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=answer[:-1])])
        targets = [0] * (prompt.length - 1) + answer
        weights = [0.0] * (prompt.length - 1) + [1.0] * len(answer)
        return with_inputs(whole, target_tokens=targets, weights=weights)

    for step in range(60):
        client.forward_backward([lesson(name, 10 * step + i) for i, name in enumerate(colors)], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.003)).result()
    sampler = snapshot(client)
    for name in colors:
        reply = sample(sampler, question(name, 999), types.SamplingParams(max_tokens=8, temperature=0.0))
        assert tokenizer.decode(reply.sequences[0].tokens[:-1]) == name
        assert reply.sequences[0].stop_reason == "stop"


def test_many_seeded_requests_of_mixed_lengths(each_service: tinker.ServiceClient) -> None:
    service = each_service
    client = train(service, "tiny")
    learn(client)
    sampler = snapshot(client)
    lengths = np.random.default_rng(0).integers(1, 400, 64).tolist()
    prompts = [text_input(i, length) for i, length in enumerate(lengths)]
    params = [types.SamplingParams(max_tokens=4 + i % 13, stop=[], seed=i) for i in range(64)]

    def all_at_once() -> list[list[list[int]]]:
        futures = [sampler.sample(prompt=p, num_samples=2, sampling_params=s) for p, s in zip(prompts, params, strict=True)]
        return [[list(s.tokens) for s in future.result().sequences] for future in futures]

    first = all_at_once()
    assert [[len(tokens) for tokens in two] for two in first] == [[4 + i % 13] * 2 for i in range(64)]
    assert sum(two[0] != two[1] for two in first) > 60
    assert all_at_once() == first
