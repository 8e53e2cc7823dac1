"""Trainer and vLLM agree: on text and images, for base, adapters and full weights, whatever runs side by side."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.talking import image_input, numbers, text_input, train
from tests.bases import png
from tests.rl.test_run import QUIET, config_of, logged
from tests.running import Server
from tests.with_vllm.talking import FREE, check_snapshots, learn, sample, snapshot, text_logprobs, worst_difference
from tinsmith_rl.trainer import train as train_policy


@pytest.fixture
def bound(request: pytest.FixtureRequest) -> float:
    """How far a log-probability may be from the trainer's.

    In a random hybrid model transformers' own are 1e-4 from those in float64.
    """
    return 5e-4 if "hybrid" in request.node.callspec.id else 1e-4


def test_base_adapters_and_full_weights_side_by_side(each_service: tinker.ServiceClient, bound: float) -> None:
    """The server takes full weights and gives them up again in between; at last the base's are back."""
    clients = [train(each_service, "tiny", rank=rank, seed=seed) for rank, seed in ((8, 3), (8, 3), (16, 4), (0, 3))]
    base, *learned = clients
    for seed, client in enumerate(learned, 1):
        learn(client, seed=5 * seed, steps=seed)
    samplers = [
        each_service.create_sampling_client(base_model="tiny").result(),
        *(snapshot(client) for client in learned),
    ]
    one, two = image_input(base, 4), image_input(base, 5)
    large = types.ImageChunk(data=png(6, 160, 96), format="png", expected_tokens=15)
    in_turn = types.ModelInput(chunks=[*one.chunks, large, *two.chunks, types.EncodedTextChunk(tokens=[7, 8])])
    prompts = [text_input(1, 30), image_input(base, 2), in_turn]
    with ThreadPoolExecutor(12) as pool:
        asked = [
            (client, prompt, pool.submit(sample, sampler, prompt, FREE, 3, include_prompt_logprobs=True))
            for client, sampler in zip(clients, samplers, strict=True)
            for prompt in prompts
        ]
        replies = [(client, prompt, reply.result()) for client, prompt, reply in asked]
    replies += [
        (clients[i], prompts[0], sample(samplers[i], prompts[0], FREE, 3, include_prompt_logprobs=True)) for i in (3, 0)
    ]
    for client, prompt, reply in replies:
        assert worst_difference(client, prompt, reply) < bound
        np.testing.assert_allclose(numbers(reply.prompt_logprobs), text_logprobs(client, prompt), atol=bound)
    assert len({tuple(reply.sequences[0].tokens) for _, prompt, reply in replies if prompt is prompts[0]}) == 4


@pytest.mark.parametrize("rank", [8, 0], ids=["adapter", "full weights"])
def test_each_snapshot_has_its_own_weights(each_service: tinker.ServiceClient, bound: float, rank: int) -> None:
    check_snapshots(each_service, rank, learn, bound)


def test_many_seeded_requests_of_mixed_lengths(service: tinker.ServiceClient) -> None:
    """The same seed gives the same tokens whatever runs beside it, and neighbouring seeds others."""
    client = train(service, "tiny")
    learn(client)
    sampler = snapshot(client)
    lengths = [7, 7, *np.random.default_rng(0).integers(1, 400, 62).tolist()]
    prompts = [text_input(max(i, 1), length) for i, length in enumerate(lengths)]  # the first two are the same
    params = [types.SamplingParams(max_tokens=4 + i // 2 % 13, stop=[], seed=2**64 - 1 - i) for i in range(64)]

    def all_at_once() -> list[list[list[int]]]:
        futures = [
            sampler.sample(prompt=p, num_samples=2, sampling_params=s) for p, s in zip(prompts, params, strict=True)
        ]
        return [[list(s.tokens) for s in future.result().sequences] for future in futures]

    first = all_at_once()
    assert [[len(tokens) for tokens in two] for two in first] == [[4 + i // 2 % 13] * 2 for i in range(64)]
    assert sum(two[0] != two[1] for two in first) > 60
    assert len({tuple(tokens) for two in first[:2] for tokens in two}) == 4
    assert all_at_once() == first


def test_reinforcement_learning_trains_on_what_vllm_samples(server: Server, socket: str, tmp_path: Path) -> None:
    """Nothing of its configuration is about vLLM. `tests/rl` has the same with the local sampler."""
    assert socket
    assert train_policy(config_of(server.url, tmp_path, model={"base_model": "tiny"}), QUIET).step == 4
    lines = [line for line in logged(tmp_path) if line["step"] >= 0]
    assert all(0.0 <= line["kl_sampler_trainer"] < 1e-6 and line["dropped"] == 0.0 for line in lines)
    assert sum(line["optimizer_steps"] for line in lines) > 0.0
