"""vLLM servers that die, and adapters that come and go.

Invariant: A killed vLLM server's samples are sent again, to the weights they began with; adapters come back and leave.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tinker
from tinker import types

from tests.acceptance.talking import image_input, text_input, train
from tests.running import START_S, Server
from tests.with_vllm.serving import asked_at, generated, processes_of, vllm_pids
from tests.with_vllm.talking import learn, sample, snapshot, worst_difference
from tests.with_vllm.test_inflight import LENGTH, Story, begun, go_on, replies


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
        answers = [sample(sampler, prompt) for sampler in (*samplers, samplers[0])]
        assert answers[0].sequences[0].tokens == answers[18].sequences[0].tokens
        np.testing.assert_allclose(answers[0].sequences[0].logprobs, answers[18].sequences[0].logprobs, atol=1e-4)
        assert worst_difference(client, prompt, answers[17]) < 1e-4
        assert len(adapters_at(socket) - before) == 18
    deadline = time.monotonic() + START_S
    while adapters_at(socket) - before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_samples_of_a_killed_server_are_sent_again(server: Server, socket: str, service: tinker.ServiceClient) -> None:
    """To the weights that they began with. One that follows its model's weights keeps what each version gave."""
    story, full = Story(train(service, "tiny"), service), train(service, "tiny", rank=0)
    follows = begun(story)
    fixed, copy = snapshot(story.client), story.states[-1]
    learn(full, seed=2)
    of_full = snapshot(full)
    prompts = [image_input(full, seed) for seed in range(6)]
    assert worst_difference(full, prompts[0], sample(of_full, prompts[0])) < 1e-4
    long = types.SamplingParams(max_tokens=100, stop=[])
    with ThreadPoolExecutor(1) as pool:
        inflight = pool.submit(replies, server, follows, prompts[0], 2, max_tokens=LENGTH)
        go_on(socket, [inflight], story, 1)
        under_way = [[(p, sampler.sample(p, 2, long)) for p in prompts] for sampler in (fixed, of_full)]
        before = generated(socket)
        while generated(socket) < before + 20 and not inflight.done():
            time.sleep(0.02)
        (pid,) = vllm_pids(server)
        assert len(processes_of(pid)) > 1
        os.kill(pid, signal.SIGKILL)
        story.learn()  # training goes on meanwhile
    for reply in inflight.result():
        assert len(reply.tokens) == LENGTH
        story.check(prompts[0], reply)
    for client, asked in zip((service.create_training_client_from_state(copy).result(), full), under_way, strict=True):
        for prompt, future in asked:
            answer = future.result()
            assert [len(sequence.tokens) for sequence in answer.sequences] == [100, 100]
            assert worst_difference(client, prompt, answer) < 1e-4
    assert not processes_of(pid)
