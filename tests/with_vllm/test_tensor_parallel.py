"""A server that divides its model over two processes (tensor parallel) computes what the trainer does, and no other adapter is sampled."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.acceptance.talking import image_input, text_input, train
from tests.running import Server
from tests.with_vllm.serving import processes_of, sampling_with_vllm, vllm_pids, wait_for_vllm, workers_of
from tests.with_vllm.talking import FREE, learn, sample, snapshot, worst_difference
from tests.with_vllm.test_a_sampler import bench_of
from tests.with_vllm.test_a_sampler import test_an_adapter_of_other_weights_is_never_sampled as other_weights_are_never_sampled


@pytest.fixture(scope="module")
def divided(vision_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose vLLM server has two processes for the tiny vision model."""
    directory = tmp_path_factory.mktemp("divided")
    with sampling_with_vllm(directory, "--base-model", f"tiny={vision_dir}", "--vllm-tensor-parallel", "2") as running:
        yield running


def check(client: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    """Text and pictures."""
    for prompt in (text_input(1, 30), image_input(client, 2)):
        assert worst_difference(client, prompt, sample(sampler, prompt, FREE, 8)) < 1e-4


def test_another_adapter_than_the_trainers_is_never_sampled(
    divided: Server, vision_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process compares its share of what it has loaded. This comes first: once full weights were sent, the server is one engine's."""
    with bench_of(1, wait_for_vllm(divided), vision_dir, tmp_path) as bench:
        other_weights_are_never_sampled(bench, monkeypatch, "one value")


def test_base_adapter_and_full_weights_agree_also_after_a_restart(divided: Server) -> None:
    wait_for_vllm(divided)
    assert "applies no adapters" not in divided.log.read_text()
    with tinker.ServiceClient(base_url=divided.url, api_key="tml-divided") as service:
        adapters, full = train(service, "tiny", rank=8), train(service, "tiny", rank=0)
        check(adapters, snapshot(adapters))
        learn(adapters)
        learn(full)
        sampler = snapshot(adapters)
        check(adapters, sampler)
        check(full, snapshot(full))
        check(adapters, sampler)
        for stopped in (False, True):
            (server,) = vllm_pids(divided)
            before, (first, second) = processes_of(server), workers_of(server)
            if stopped:  # vLLM waits ten seconds for it before it tells its engine that the other has ended
                os.kill(first, signal.SIGSTOP)
            os.kill(second, signal.SIGKILL)
            check(full, snapshot(full))
            check(adapters, sampler)
            assert not {pid for pid in before if Path(f"/proc/{pid}").exists()}


def test_full_weights_get_to_all_processes_by_broadcast(vision_dir: Path, tmp_path: Path) -> None:
    """Gloo stands for NCCL. Each process receives all tensors and loads its share."""
    options = ("--base-model", f"tiny={vision_dir}", "--vllm-tensor-parallel", "2", "--vllm-transfer", "broadcast")
    with sampling_with_vllm(tmp_path, *options) as running:
        wait_for_vllm(running)
        with tinker.ServiceClient(base_url=running.url, api_key="tml-broadcast") as service:
            full, bare = train(service, "tiny", rank=0), train(service, "tiny", rank=8)
            for step in range(2):
                learn(full, seed=step)
                check(full, snapshot(full))
            check(bare, snapshot(bare))
