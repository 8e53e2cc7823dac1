"""Several workers train beside a vLLM server, which the first of them has: it samples what all have trained, and nothing older."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker

from tests.acceptance.talking import RAW_STEP, datum, image_input, numbers, text_input, train
from tests.running import Server
from tests.with_vllm.serving import sampling_with_vllm, wait_for_vllm
from tests.with_vllm.talking import FREE, sample, snapshot, trainers_logprobs, worst_difference

BOUND = 1e-4
"""How far a log-probability may be from the trainer's, as in `test_agreement.py`."""
RANKS = {"adapter": 8, "full weights": 0}


@pytest.fixture(scope="module")
def replicas(vision_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers, both with a share of each pass. Full weights are broadcast, by a group beside that of the workers."""
    options = ("--base-model", f"tiny={vision_dir}", "--workers", "2", "--tokens-per-pass", "64", "--vllm-transfer", "broadcast")
    with sampling_with_vllm(tmp_path_factory.mktemp("replicas"), *options) as running:
        yield running


@pytest.fixture
def service(replicas: Server) -> Iterator[tinker.ServiceClient]:
    """An SDK client of the server, once vLLM is ready."""
    wait_for_vllm(replicas)
    with tinker.ServiceClient(base_url=replicas.url, api_key="tml-several") as client:
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


def test_the_second_worker_is_missed_and_what_comes_back_is_sampled(service: tinker.ServiceClient, replicas: Server) -> None:
    """All workers are started again, and with the first its vLLM server."""
    client = train(service, "tiny", rank=8)
    learn_together(client, 3)
    client.save_state("kept").result()
    before = wait_for_vllm(replicas)
    workers = sorted(psutil.Process(replicas.engine_pid()).children(), key=lambda process: process.cmdline()[-2:])
    assert len(workers) == 2
    os.kill(workers[1].pid, signal.SIGKILL)
    replicas.wait_for_log("the worker process ended unexpectedly (signal 9)")
    replicas.wait_for_health()
    prompt = text_input(1, 30)
    assert worst_difference(client, prompt, sample(snapshot(client), prompt, FREE, 2)) < BOUND
    assert wait_for_vllm(replicas) != before
