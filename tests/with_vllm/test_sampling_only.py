"""A server that only samples (--train none) and does so with vLLM: it has the numbers of the server that trains, or
gives none.

Invariant: A server that only samples, with vLLM, has the trainer's numbers for base, adapters and full weights, and
gives none where vLLM computes over other weights. Also: `tests/sampling/vllm/test_launch.py`.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker

from tests.acceptance.talking import image_input, numbers, text_input, train
from tests.running import START_S, Server
from tests.with_vllm.serving import client_of, sampling_with_vllm, vllm_pids, wait_for_vllm, wait_until_gone
from tests.with_vllm.talking import FREE, learn, sample, trainers_logprobs, worst_difference


@pytest.fixture(scope="module")
def sampling_server(server: Server, vision_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It may look into the checkpoints of the server that trains."""
    root = server.log.parent / "data" / "checkpoints"
    server.wait_for_health()
    root.mkdir(exist_ok=True)  # that server makes it when it saves something
    options = ("--base-model", f"tiny={vision_dir}", "--train", "none", "--checkpoint-root", str(root))
    with sampling_with_vllm(tmp_path_factory.mktemp("sampling-only"), *options) as running:
        yield running


def test_adapters_full_weights_and_base_have_the_trainers_numbers(
    service: tinker.ServiceClient, sampling_server: Server
) -> None:
    """Saved before and after the server that samples has started.

    Full weights come and go, and the base's are back behind them.
    """
    adapters, full, bare = (train(service, "tiny", rank=rank) for rank in (8, 0, 8))
    paths = []
    for client in (adapters, full):
        learn(client)
        paths.append(client.save_weights_for_sampler("shared").result().path)
    wait_for_vllm(sampling_server)
    log = sampling_server.log.read_text()
    assert "base models go into the host's memory" in log
    assert "applies no adapters" not in log
    with tinker.ServiceClient(base_url=sampling_server.url, api_key="tml-sampling") as other:
        of_adapters, of_full = (other.create_sampling_client(model_path=path) for path in paths)
        base = other.create_sampling_client(base_model="tiny")
        for client, sampler in ((adapters, of_adapters), (full, of_full), (bare, base), (adapters, of_adapters)):
            for prompt in (text_input(1, 30), image_input(client, 2)):
                assert worst_difference(client, prompt, sample(sampler, prompt, FREE, 4)) < 1e-4
        learn(adapters, seed=5)
        learned = other.create_sampling_client(model_path=adapters.save_weights_for_sampler("later").result().path)
        prompt = text_input(1, 30)
        reply = sample(learned, prompt)
        assert worst_difference(adapters, prompt, reply) < 1e-4
        (sequence,) = reply.sequences
        assert np.abs(numbers(sequence.logprobs) - trainers_logprobs(bare, prompt, sequence.tokens)).max() > 1e-2


def test_nothing_is_sampled_over_other_weights_than_the_bases(
    service: tinker.ServiceClient, sampling_server: Server
) -> None:
    """The bits of the adapter are right.

    Only what is computed with it shows that the weights below it are lost (set to zero).
    """
    with client_of(wait_for_vllm(sampling_server)) as vllm:
        assert vllm.post("/collective_rpc", json={"method": "reset_weights"}).status_code == 200
    client = train(service, "tiny", rank=8)
    learn(client)
    path = client.save_weights_for_sampler("over-zero").result().path
    with tinker.ServiceClient(base_url=sampling_server.url, api_key="tml-sampling") as other:
        sampler = other.create_sampling_client(model_path=path)
        with pytest.raises(
            tinker.RequestFailedError, match="vLLM computes other log-probabilities than the trainer with adapter"
        ):
            sample(sampler, text_input(1, 6))


def test_nothing_is_left_when_the_worker_or_the_engine_is_killed(sampling_server: Server) -> None:
    """A vLLM server that runs, and one that is starting, end by themselves: their standard input is closed.

    This comes last.
    """
    wait_for_vllm(sampling_server)
    for victim in (sampling_server.worker_pid, sampling_server.engine_pid):
        deadline = time.monotonic() + START_S
        while not (pids := vllm_pids(sampling_server)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(victim(), signal.SIGKILL)
        wait_until_gone(pids[0])
