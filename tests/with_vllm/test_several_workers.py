"""Several workers train beside a vLLM server of the first: it samples what all have trained, and nothing older.

They are replicas, or divide all weights among them. Then the first has a whole copy of the base alone, and a snapshot
of all weights is put together by all of them. Beside replicas the vLLM server divides its model over two processes
(tensor parallel), and each gets its share.

Invariant: A vLLM server samples exactly what several workers have trained, whole or sharded, each snapshot its own;
workers and servers share no GPU. Also: `tests/sampling/vllm/test_launch.py`, `tests/protocol/test_devices.py`.

Invariant: The processes of a vLLM server that divide a model hold the trainer's weights, each its share; an error of
one is told at once and lets none wait, and one that dies ends the server. Also:
`tests/sampling/inside_vllm/test_identity.py`, `tests/sampling/inside_vllm/test_transfer_group.py`,
`tests/sampling/vllm/test_launch.py`.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.talking import RAW_STEP, datum, image_input, numbers, text_input, train
from tests.extent import slow
from tests.running import Server
from tests.with_vllm.serving import process_of, processes_of, sampling_with_vllm, vllm_pids, wait_for_vllm
from tests.with_vllm.talking import FREE, check_snapshots, sample, snapshot, text_logprobs, worst_difference
from tests.with_vllm.test_a_sampler import bench_of
from tests.with_vllm.test_a_sampler import (
    test_an_adapter_of_other_weights_is_never_sampled as other_weights_are_never_sampled,
)
from tests.with_vllm.test_inflight import Story, check_replaced

BOUND = 1e-4
"""How far a log-probability may be from the trainer's, as in `test_agreement.py`."""
RANKS = {"adapter": 8, "full weights": 0}
MODES = {"replicas": ("--vllm-transfer", "broadcast", "--vllm-tensor-parallel", "2"), "divided": ("--shard", "weights")}
"""Replicas broadcast full weights, in a group of their own (Gloo stands for NCCL). Divided ones travel as a file."""


# Another start; `tests/distributed` has divided snapshots
@pytest.fixture(scope="module", params=["replicas", *slow("divided")])
def two_workers(
    vision_dir: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """Both have a share of each pass. `tests/distributed` has what they do to put divided weights together."""
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
    """A step of texts and images that no worker computes alone."""
    inputs = [text_input(10 * seed + i, 9 + 4 * i) for i in range(6)] + [image_input(client, seed)]
    client.forward_backward([datum(model_input, seed) for model_input in inputs], "cross_entropy")
    client.optim_step(RAW_STEP).result()


def test_another_adapter_than_the_trainers_is_never_sampled(
    two_workers: Server, vision_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process compares its share of what it has loaded.

    This comes first: once full weights were sent, the server is one engine's.
    """
    with bench_of(wait_for_vllm(two_workers), vision_dir, tmp_path) as bench:
        other_weights_are_never_sampled(bench, monkeypatch, "one value")


@pytest.mark.parametrize("kind", RANKS)
def test_what_all_have_trained_is_sampled(service: tinker.ServiceClient, two_workers: Server, kind: str) -> None:
    assert "applies no adapters" not in two_workers.log.read_text()
    check_snapshots(service, RANKS[kind], learn_together, BOUND)


def test_base_and_named_checkpoints_have_the_trainers_numbers(service: tinker.ServiceClient) -> None:
    """Each after the others have been on the server.

    What vLLM cannot answer about a prompt, the trainer's model does.
    """
    clients = [train(service, "tiny", rank=rank) for rank in (8, 0, 8)]
    samplers = []
    for seed, client in enumerate(clients[:2]):
        learn_together(client, 5 + seed)
        path = client.save_weights_for_sampler("named").result().path
        samplers.append(service.create_sampling_client(model_path=path))
    samplers.append(service.create_sampling_client(base_model="tiny"))
    prompt = text_input(1, 30)
    ids = torch.tensor(prompt.to_ints()[1:]).unsqueeze(1)  # of each position but the first
    target = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    for client, sampler in zip(clients, samplers, strict=True):
        reply = sample(sampler, prompt, FREE, 2, include_prompt_logprobs=True, target_prompt_logprobs=target)
        assert worst_difference(client, prompt, reply) < BOUND
        expected = text_logprobs(client, prompt)
        np.testing.assert_allclose(numbers(reply.prompt_logprobs), expected, atol=BOUND)
        np.testing.assert_allclose(
            reply.target_prompt_logprobs.to_torch().to_dense().flatten(), expected[1:], atol=BOUND
        )


@pytest.mark.parametrize("kind", RANKS)
def test_a_sample_goes_on_with_weights_that_replace_others(
    service: tinker.ServiceClient, two_workers: Server, kind: str
) -> None:
    """Each token has the log-probability of its own version: nothing is computed with a mixture of two."""
    story = Story(train(service, "tiny", rank=RANKS[kind]), service)
    check_replaced(two_workers, wait_for_vllm(two_workers), story, [text_input(1, 20)])


@pytest.mark.slow  # it takes another start; `tests/sampling/vllm` has processes that die, in small
def test_a_process_of_vllm_that_dies_while_another_stands_still_is_replaced(
    service: tinker.ServiceClient, two_workers: Server, request: pytest.FixtureRequest
) -> None:
    """VLLM waits ten seconds for the one that stands still before it tells its engine that the other has ended."""
    if "divided" in request.node.name:
        pytest.skip("this vLLM server is one process")
    (server,) = vllm_pids(two_workers)
    full = train(service, "tiny", rank=0)
    learn_together(full, 3)
    os.kill(process_of(server, "Worker_TP0"), signal.SIGSTOP)
    os.kill(process_of(server, "Worker_TP1"), signal.SIGKILL)
    prompt = text_input(1, 30)
    assert worst_difference(full, prompt, sample(snapshot(full), prompt, FREE, 2)) < BOUND
    assert not processes_of(server)
