"""Several workers train beside a vLLM server, which the first of them has: it samples what all have trained, and nothing older.

They are replicas, or divide all weights among them. Then the first has a whole copy of the base alone, and a snapshot of all weights is put
together by all of them.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.talking import RAW_STEP, datum, image_input, numbers, text_input, train
from tests.running import Server
from tests.with_vllm.serving import sampling_with_vllm, wait_for_vllm
from tests.with_vllm.talking import FREE, sample, snapshot, text_logprobs, trainers_logprobs, worst_difference
from tests.with_vllm.test_inflight import ATTEMPTS, LENGTH, Story, begun, go_on, replies

BOUND = 1e-4
"""How far a log-probability may be from the trainer's, as in `test_agreement.py`."""
RANKS = {"adapter": 8, "full weights": 0}


MODES = {"replicas": ("--vllm-transfer", "broadcast"), "divided": ("--shard", "weights")}
"""Replicas broadcast full weights, in a group beside that of the workers; from a host's memory they travel as a file."""


@pytest.fixture(scope="module", params=MODES)
def two_workers(vision_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Both have a share of each pass."""
    options = ("--base-model", f"tiny={vision_dir}", "--workers", "2", "--tokens-per-pass", "64", *MODES[request.param])
    with sampling_with_vllm(tmp_path_factory.mktemp(request.param), *options) as running:
        yield running


@pytest.fixture
def service(two_workers: Server) -> Iterator[tinker.ServiceClient]:
    """An SDK client of the server, once vLLM is ready."""
    wait_for_vllm(two_workers)
    with tinker.ServiceClient(base_url=two_workers.url, api_key="tml-several") as client:
        yield client


def learn_together(client: tinker.TrainingClient, seed: int) -> None:
    """A step of texts and pictures that no worker computes alone."""
    inputs = [text_input(10 * seed + i, 9 + 4 * i) for i in range(6)] + [image_input(client, seed)]
    client.forward_backward([datum(model_input, seed) for model_input in inputs], "cross_entropy")
    client.optim_step(RAW_STEP).result()


@pytest.mark.parametrize("kind", RANKS)
def test_what_all_have_trained_is_sampled(service: tinker.ServiceClient, kind: str) -> None:
    """Each snapshot its own weights: also the older one, after the newer has been sampled."""
    client, bare = train(service, "tiny", rank=RANKS[kind]), train(service, "tiny")
    prompts = [text_input(1, 30), image_input(client, 2)]
    learn_together(client, 1)
    first = snapshot(client)
    replies = [sample(first, prompt, FREE, 2) for prompt in prompts]
    assert max(worst_difference(client, prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)) < BOUND
    tokens = replies[0].sequences[0].tokens
    of_first = trainers_logprobs(client, prompts[0], tokens)
    assert np.abs(of_first - trainers_logprobs(bare, prompts[0], tokens)).max() > 1e-2
    learn_together(client, 2)
    assert np.abs(of_first - trainers_logprobs(client, prompts[0], tokens)).max() > 1e-2
    second = snapshot(client)
    for prompt in prompts:
        assert worst_difference(client, prompt, sample(second, prompt, FREE, 2)) < BOUND
    again = sample(first, prompts[0], FREE, 2)
    assert [sequence.tokens for sequence in again.sequences] == [sequence.tokens for sequence in replies[0].sequences]
    np.testing.assert_allclose(numbers(again.sequences[0].logprobs), of_first, atol=BOUND)


def test_base_and_named_checkpoints_have_the_trainers_numbers(service: tinker.ServiceClient) -> None:
    """Each after the others have been on the server. What vLLM cannot answer about a prompt, the trainer's model does."""
    adapter, full, bare = (train(service, "tiny", rank=rank) for rank in (8, 0, 8))
    paths = []
    for seed, client in enumerate((adapter, full)):
        learn_together(client, 5 + seed)
        paths.append(client.save_weights_for_sampler("named").result().path)
    samplers = [service.create_sampling_client(model_path=path) for path in paths]
    samplers.append(service.create_sampling_client(base_model="tiny"))
    prompt = text_input(1, 30)
    ids = torch.tensor(prompt.to_ints()[1:]).unsqueeze(1)  # of each position but the first
    for client, sampler in zip((adapter, full, bare), samplers, strict=True):
        target = types.TensorData.from_torch_sparse(ids, pad_value=-1)
        reply = sample(sampler, prompt, FREE, 2, include_prompt_logprobs=True, target_prompt_logprobs=target)
        assert worst_difference(client, prompt, reply) < BOUND
        expected = text_logprobs(client, prompt)
        np.testing.assert_allclose(numbers(reply.prompt_logprobs), expected, atol=BOUND)
        np.testing.assert_allclose(reply.target_prompt_logprobs.to_torch().to_dense().flatten(), expected[1:], atol=BOUND)


@pytest.mark.parametrize("kind", RANKS)
def test_a_sample_goes_on_with_weights_that_replace_others(service: tinker.ServiceClient, two_workers: Server, kind: str) -> None:
    """Each token has the log-probability of its own version: nothing is computed with a mixture of two."""
    socket, story, prompt = wait_for_vllm(two_workers), Story(train(service, "tiny", rank=RANKS[kind]), service), text_input(1, 20)
    sampler = begun(story)
    for _ in range(ATTEMPTS):
        with ThreadPoolExecutor(1) as pool:
            pending = [pool.submit(replies, two_workers, sampler, prompt, 2, max_tokens=LENGTH)]
            go_on(socket, pending, story, 1)
        for reply in pending[0].result():
            story.check(prompt, reply)
        if all(len(reply.versions) == 2 for reply in pending[0].result()):
            break
    else:
        pytest.fail("saving always took longer than sampling")


def test_the_second_worker_is_missed_and_what_comes_back_is_sampled(service: tinker.ServiceClient, two_workers: Server) -> None:
    """All workers are started again, and with the first its vLLM server."""
    client = train(service, "tiny", rank=8)
    learn_together(client, 3)
    client.save_state("kept").result()
    before = wait_for_vllm(two_workers)
    workers = sorted(psutil.Process(two_workers.engine_pid()).children(), key=lambda process: process.cmdline()[-2:])
    assert len(workers) == 2
    os.kill(workers[1].pid, signal.SIGKILL)
    two_workers.wait_for_log("the worker process ended unexpectedly (signal 9)")
    two_workers.wait_for_health()
    prompt = text_input(1, 30)
    assert worst_difference(client, prompt, sample(snapshot(client), prompt, FREE, 2)) < BOUND
    assert wait_for_vllm(two_workers) != before
