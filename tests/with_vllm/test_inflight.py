"""Samples that run while their model is trained and saved again (`kind="inflight"`): every token is one of the version
that it names.

Invariant: Each token of an inflight sample is its version's, with adapters and full weights, locally and with vLLM,
whatever server is lost. Also: `tests/with_vllm/test_a_sampler.py`, `tests/sampling/local/test_sampler.py`.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.talking import image_input, text_input, train
from tests.running import Server
from tests.with_vllm.serving import generated
from tests.with_vllm.talking import learn, snapshot, trainers_logprobs, worst_difference
from tinsmith.wire import tinker_pb2


@dataclass(frozen=True)
class Reply:
    """What one sample came to."""

    tokens: list[int]
    logprobs: np.ndarray
    versions: list[tuple[str, int, int]]


def replies(
    server: Server, sampler: tinker.SamplingClient, prompt: types.ModelInput, n: int, **params: Any
) -> list[Reply]:
    """Samples with what the SDK leaves out of them: which version gave which tokens.

    It is asked for as the SDK does, without it.
    """
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": time.monotonic_ns() // 1000 % 10**9,
        "prompt": prompt.model_dump(mode="json"),
        "num_samples": n,
        "sampling_params": {"stop": []} | params,
    }
    with server.client() as http:
        http.headers["X-API-Key"] = "tml-inflight"
        asked = http.post("asample", json=body)
        assert asked.status_code == 200, asked.text
        while (
            answer := http.post("retrieve_future", json={"request_id": asked.json()["request_id"]})
        ).status_code == 408:
            pass
    assert answer.headers["Content-Type"] == "application/x-protobuf", answer.text
    response = tinker_pb2.SampleResponse.FromString(answer.content)
    found = []
    for sequence in response.sequences:
        versions = [(span.version, span.start, span.end) for span in sequence.versions]
        found.append(
            Reply(np.frombuffer(sequence.tokens, "<i4").tolist(), np.frombuffer(sequence.logprobs, "<f4"), versions)
        )
    return found


@dataclass
class Story:
    """A model that is trained, and saved for inflight sampling each time."""

    client: tinker.TrainingClient
    service: tinker.ServiceClient
    sampler: tinker.SamplingClient | None = None
    states: list[str] = field(default_factory=list)
    """Of each version."""

    def learn(self) -> None:
        """Another version, a visible step away, and a copy of it to compare with."""
        number = len(self.states) + 1
        learn(self.client, seed=number)
        self.states.append(self.client.save_state(f"v{number}").result().path)

    def publish(self) -> None:
        """Let it be sampled."""
        self.sampler = self.client.save_weights_and_get_sampling_client(kind="inflight").result()

    def check(self, prompt: types.ModelInput, reply: Reply) -> None:
        """Every span is what its version computes, and no other."""
        assert [start for _, start, _ in reply.versions] == [0, *(end for _, _, end in reply.versions[:-1])]
        assert reply.versions[-1][2] == len(reply.tokens)
        saves = [int(version.removeprefix(f"{self.client.model_id}/")) for version, _, _ in reply.versions]
        assert saves == sorted(set(saves))
        for save, (_, start, end) in zip(saves, reply.versions, strict=True):
            # A version takes four operations: two of a step, its copy, and this save
            state = self.states[save // 4 - 1]
            whole = self.service.create_training_client_from_state(state).result()
            expected = trainers_logprobs(whole, prompt, reply.tokens)
            np.testing.assert_allclose(reply.logprobs[start:end], expected[start:end], atol=1e-4)
            others = np.abs(reply.logprobs - expected) > 1e-3
            assert others[:start].mean() > 0.5 if start else True
            assert others[end:].mean() > 0.5 if end < len(reply.tokens) else True


LENGTH = 900
"""Of the samples that run meanwhile, in tokens."""
ATTEMPTS = 4
"""On a busy machine saving may take longer than sampling: then nothing was replaced, and it is tried again."""


def go_on(socket: str, pending: "list[Future[Any]]", story: Story, versions: int) -> None:
    """Publish so many versions while samples run, as long as these do.

    The first has been learned before they began, and one is after.
    """
    before = generated(socket)
    for _ in range(versions):
        while generated(socket) < before + 20 and not any(future.done() for future in pending):
            time.sleep(0.02)
        story.publish()
        story.learn()
        before = generated(socket)


def begun(story: Story) -> tinker.SamplingClient:
    """A client of the story's first version; the second is learned, and not published yet."""
    story.learn()
    story.publish()
    story.learn()
    assert story.sampler is not None
    return story.sampler


def check_replaced(
    server: Server, socket: str, story: Story, prompts: list[types.ModelInput], versions: int = 1, **params: Any
) -> None:
    """Samples that begin with one version go on with the next ones, and later ones of the same session have the newest
    alone."""
    sampler = begun(story)
    for _ in range(ATTEMPTS):
        with ThreadPoolExecutor(len(prompts)) as pool:
            pending = [
                pool.submit(replies, server, sampler, prompt, 2, max_tokens=LENGTH, **params) for prompt in prompts
            ]
            go_on(socket, pending, story, versions)
        found = [(prompt, reply) for prompt, future in zip(prompts, pending, strict=True) for reply in future.result()]
        for prompt, reply in found:
            assert len(reply.tokens) == LENGTH
            story.check(prompt, reply)
        if all(len(reply.versions) == versions + 1 for _, reply in found):
            break
    else:
        pytest.fail("saving always took longer than sampling")
    (after,) = replies(server, sampler, prompts[0], 1, max_tokens=8)
    assert len(after.versions) == 1
    story.check(prompts[0], after)


def test_samples_go_on_with_each_new_version(server: Server, socket: str, service: tinker.ServiceClient) -> None:
    """Text and images, several samples each, beside samples of a snapshot and of the base, which nothing disturbs."""
    story = Story(train(service, "tiny"), service)
    story.learn()
    fixed, base = snapshot(story.client), service.create_sampling_client(base_model="tiny").result()
    prompts = [text_input(1, 20), image_input(story.client, 3)]
    stay = [
        client.sample(prompts[1], 1, types.SamplingParams(max_tokens=LENGTH, stop=[], seed=1))
        for client in (fixed, base)
    ]
    check_replaced(server, socket, story, prompts, versions=2, seed=1)
    copy = service.create_training_client_from_state(story.states[0]).result()
    for client, future in zip((copy, train(service, "tiny")), stay, strict=True):
        assert worst_difference(client, prompts[1], future.result()) < 1e-4


@pytest.mark.parametrize(("rank", "params"), [(0, {}), (8, {"top_k": 50})], ids=["full weights", "top_k"])
def test_what_takes_requests_of_its_own_is_of_the_right_version(
    server: Server, socket: str, service: tinker.ServiceClient, rank: int, params: dict[str, Any]
) -> None:
    """The server takes full weights when all samples of the former version have been given up; with top_k each piece is
    scored."""
    story = Story(train(service, "tiny", rank=rank), service)
    check_replaced(server, socket, story, [image_input(story.client, 3)], **params)
