"""vLLM servers that die, and adapters that come and go."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.talking import image_input, text_input, train
from tests.running import Server
from tests.with_vllm.serving import asked_at, engine_of, processes_of, sampling_with_vllm, vllm_pids
from tests.with_vllm.talking import FREE, learn, sample, snapshot, worst_difference


def adapters_at(socket: str) -> set[str]:
    """What the vLLM server has loaded."""
    return {model["id"] for model in asked_at(socket, "/v1/models").json()["data"] if model["parent"]}


def test_adapters_come_back_and_leave_with_their_session(server: Server, socket: str) -> None:
    """More snapshots than vLLM keeps adapters: the first is still there, and none is when the session has ended."""
    before = adapters_at(socket)
    with tinker.ServiceClient(base_url=server.url, api_key="tml-many") as service:
        client = train(service, "tiny")
        samplers, prompt = [], text_input(1, 12)
        for seed in range(18):
            learn(client, seed=seed)
            samplers.append(snapshot(client))
        replies = [sample(sampler, prompt) for sampler in (*samplers, samplers[0])]
        assert replies[0].sequences[0].tokens == replies[18].sequences[0].tokens
        np.testing.assert_allclose(replies[0].sequences[0].logprobs, replies[18].sequences[0].logprobs, atol=1e-4)
        assert worst_difference(client, prompt, replies[17]) < 1e-4
        assert len(adapters_at(socket) - before) == 18
    deadline = time.monotonic() + 20
    while adapters_at(socket) - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert adapters_at(socket) <= before


def test_samples_of_a_killed_server_are_sent_again(server: Server, service: tinker.ServiceClient) -> None:
    adapter, full = train(service, "tiny"), train(service, "tiny", rank=0)
    learn(adapter, seed=1)
    learn(full, seed=2)
    samplers = [(adapter, snapshot(adapter)), (full, snapshot(full))]
    prompts = [image_input(adapter, seed) for seed in range(6)]
    long = types.SamplingParams(max_tokens=100, stop=[])
    for client, sampler in samplers:
        assert worst_difference(client, prompts[0], sample(sampler, prompts[0])) < 1e-4
    under_way = [
        (client, p, sampler.sample(prompt=p, num_samples=2, sampling_params=long)) for client, sampler in samplers for p in prompts
    ]
    time.sleep(0.5)
    (pid,) = vllm_pids(server)
    group = processes_of(pid)
    assert len(group) > 1
    os.kill(pid, signal.SIGKILL)
    learn(adapter, seed=5)  # training goes on meanwhile, and the samples stay those of the snapshot
    first = [under_way[0][2].result()]
    assert all(len(s.tokens) == 100 for s in first[0].sequences)
    replies = first + [future.result() for _, _, future in under_way[1:]]
    assert not {pid for pid in group if Path(f"/proc/{pid}").exists()}
    for (client, prompt, _), reply in zip(under_way, replies, strict=True):
        if client is full:
            assert worst_difference(client, prompt, reply) < 1e-4
    assert sample(samplers[0][1], prompts[0], FREE).sequences[0].tokens


def test_a_sample_whose_weights_were_under_way_when_the_engine_died_is_sent_again(server: Server, service: tinker.ServiceClient) -> None:
    """VLLM never answers these requests, and its server waits for them for ever before it ends."""
    client = train(service, "tiny", rank=0)
    learn(client, seed=3)
    prompt = text_input(1, 12)
    assert worst_difference(client, prompt, sample(snapshot(client), prompt)) < 1e-4
    learn(client, seed=4)
    (group,) = vllm_pids(server)
    engine = engine_of(group)
    os.kill(engine, signal.SIGSTOP)
    sampler, told = snapshot(client), len(server.log.read_text())
    under_way = sampler.sample(prompt=prompt, num_samples=1, sampling_params=FREE)
    time.sleep(3)
    assert not under_way.future().done()
    os.kill(engine, signal.SIGKILL)
    assert worst_difference(client, prompt, under_way.result()) < 1e-4
    assert "it answered nothing for" not in server.log.read_text()[told:]  # it was not waited for as for one that hangs


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_nothing_is_left_when_the_worker_or_the_engine_is_killed(vision_dir: Path, tmp_path: Path, victim: str) -> None:
    """The vLLM server ends by itself while it is starting: its standard input is closed."""
    with sampling_with_vllm(tmp_path, "--base-model", f"tiny={vision_dir}") as server:
        server.wait_for_health()
        deadline = time.monotonic() + 30
        while not (pids := vllm_pids(server)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(5)
        os.kill(server.worker_pid() if victim == "worker" else server.engine_pid(), signal.SIGKILL)
        while processes_of(pids[0]) and time.monotonic() < deadline + 30:
            time.sleep(0.1)
        assert not processes_of(pids[0])
