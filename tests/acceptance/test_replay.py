"""Router replay with the real SDK: losses with logprobs follow the experts that computed the samples.

Invariant: Training follows recorded experts only of sequences that the same training run's weights have sampled, and
only for losses that compare with the sampler. Also: `tests/worker/test_routes.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from numpy.typing import NDArray
from tinker import types

from tests.acceptance.conftest import connect, ready, without_sdk
from tests.acceptance.talking import datum as random_datum
from tests.acceptance.talking import learn, logprobs, text_input, train, with_inputs
from tests.running import Server
from tinsmith.wire import tinker_pb2

REPLAYED = "tinsmith_replay/tokens:mean"
PARAMS = types.SamplingParams(max_tokens=9, stop=[], seed=1)


@pytest.fixture(scope="module")
def server(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a mixture in half precision, where rounding sends some tokens to other experts."""
    models = ["--base-model", f"experts={family_dir('qwen3_moe')}", "--base-model", f"dense={family_dir('qwen3')}"]
    directory = tmp_path_factory.mktemp("replay")
    with ready(directory, *models, "--kv-cache-gib", "0.1", "--dtype", "bfloat16") as running:
        yield running


@pytest.fixture
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with connect(server) as client:
        yield client


Sampled = tuple[types.ModelInput, list[int], list[float]]
"""A prompt, the tokens of an answer, and their log-probabilities."""


def sample(client: tinker.TrainingClient, count: int) -> list[Sampled]:
    """Two answers to each of several prompts that begin alike."""
    sampler = client.save_weights_and_get_sampling_client().result()
    same = text_input(9, 40).to_ints()
    prompts = [types.ModelInput.from_ints(same + text_input(seed, 3 + seed).to_ints()) for seed in range(count)]
    return [
        (prompt, list(sequence.tokens), list(sequence.logprobs or ()))
        for prompt in prompts
        for sequence in sampler.sample(prompt, 2, PARAMS).result().sequences
    ]


def policy_datum(sampled: Sampled, further: int = 0, **more: Any) -> types.Datum:
    """As rl_loop of the cookbook makes it, with `further` tokens behind the answer."""
    prompt, answer, sampler = sampled
    tokens = [*answer, *range(further)]
    before = prompt.length - 1
    return with_inputs(
        types.ModelInput.from_ints([*prompt.to_ints(), *tokens[:-1]]),
        target_tokens=[0] * before + tokens,
        logprobs=[0.0] * before + sampler + [0.0] * further,
        advantages=[0.0] * before + [0.5] * len(answer) + [0.0] * further,
        **more,
    )


def gap(sampled: list[Sampled], found: list[NDArray[Any]]) -> float:
    """The largest distance of the trainer's log-probabilities from the sampler's."""
    return max(
        float(np.abs(np.array(sampler) - own[prompt.length - 1 :]).max())
        for (prompt, _, sampler), own in zip(sampled, found, strict=True)
    )


def test_losses_that_compare_with_the_sampler_follow_its_experts(service: tinker.ServiceClient) -> None:
    client = learn(train(service, "experts"), [random_datum(text_input(1, 30))])
    sampled = sample(client, 6)
    data = [policy_datum(each) for each in sampled]
    for loss in ("importance_sampling", "ppo"):
        output = client.forward(data, loss).result()
        assert output.metrics[REPLAYED] == 1.0
    backward = client.forward_backward(data, "importance_sampling").result()
    assert backward.metrics[REPLAYED] == 1.0
    assert gap(sampled, logprobs(backward)) < 0.2
    free = [with_inputs(each.model_input, target_tokens=each.loss_fn_inputs["target_tokens"]) for each in data]
    chosen = client.forward(free, "cross_entropy").result()
    assert REPLAYED not in chosen.metrics
    longer = client.forward([policy_datum(each, further=5) for each in sampled], "importance_sampling").result()
    lengths = [datum.model_input.length for datum in data]
    assert longer.metrics[REPLAYED] == pytest.approx(np.mean([length / (length + 5) for length in lengths]))
    for ours, theirs in zip(logprobs(longer), logprobs(backward), strict=True):
        # In half precision a row of another length rounds otherwise on some processors
        np.testing.assert_allclose(ours[: len(theirs)], theirs, rtol=0, atol=0.05)


def test_what_others_or_the_base_have_sampled_and_changed_samples_choose_freely(service: tinker.ServiceClient) -> None:
    first, twin = train(service, "experts"), train(service, "experts")
    sampled = sample(first, 2)
    data = [policy_datum(each) for each in sampled]
    assert twin.forward(data, "importance_sampling").result().metrics[REPLAYED] == 0.0
    base = service.create_sampling_client(base_model="experts").result()
    prompt = text_input(4, 8)
    own = [
        (prompt, list(each.tokens), list(each.logprobs or ()))
        for each in base.sample(prompt, 2, PARAMS).result().sequences
    ]
    assert first.forward([policy_datum(each) for each in own], "importance_sampling").result().metrics[REPLAYED] == 0.0
    prompt, answer, logps = sampled[0]
    changed = policy_datum((prompt, [*answer[:-1], answer[-1] ^ 1], logps))
    assert first.forward([changed], "importance_sampling").result().metrics[REPLAYED] == 0.0
    assert first.forward(data, "importance_sampling").result().metrics[REPLAYED] == 1.0


def test_to_score_tokens_is_not_to_sample_them(service: tinker.ServiceClient) -> None:
    """Also not the token that is drawn behind a scored prompt, with which a datum may go on."""
    client = train(service, "experts")
    ((prompt, answer, logps), _) = sample(client, 1)
    later = learn(client, [random_datum(text_input(1, 30))]).save_weights_and_get_sampling_client().result()
    whole = types.ModelInput.from_ints([*prompt.to_ints(), *answer])
    scored = later.sample(whole, 1, types.SamplingParams(max_tokens=1, stop=[], seed=1), include_prompt_logprobs=True)
    (drawn,) = scored.result().sequences[0].tokens
    longer = policy_datum((prompt, [*answer, drawn], [*logps, 0.0]))
    output = client.forward([longer], "importance_sampling").result()
    assert output.metrics[REPLAYED] == pytest.approx((whole.length - 1) / whole.length)


def asked(server: Server, client: tinker.TrainingClient, prompt: list[int]) -> tinker_pb2.SampledSequence:
    """A sample whose experts are asked for, over plain HTTP."""
    path = client.save_weights_for_sampler("asked").result().path
    with without_sdk(server) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        sampling = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
        request = {
            "sampling_session_id": sampling,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": 9, "seed": 1, "stop": []},
            "rollout_expert_indices": True,
        }
        name = http.post("asample", json=request).json()["request_id"]
        while (reply := http.post("retrieve_future", json={"request_id": name})).status_code == 408:
            pass
        assert reply.status_code == 200, reply.text
        (sequence,) = tinker_pb2.SampleResponse.FromString(reply.content).sequences
        return sequence


def test_a_sample_returns_its_experts_and_a_datum_brings_them(server: Server, service: tinker.ServiceClient) -> None:
    client, twin = train(service, "experts"), train(service, "experts")
    prompt = text_input(3, 21)
    reply = asked(server, client, prompt.to_ints())
    tokens = np.frombuffer(reply.tokens, "<i4").tolist()
    experts = np.frombuffer(reply.rollout_expert_indices.data, np.uint8).reshape(reply.rollout_expert_indices.shape)
    assert experts.shape[0] == prompt.length + len(tokens) - 1
    sampled = prompt, tokens, np.frombuffer(reply.logprobs, "<f4").tolist()
    indices = torch.from_numpy(experts.astype(np.int64))
    brought = policy_datum(sampled, rollout_expert_indices=indices)
    recorded = client.forward([policy_datum(sampled)], "importance_sampling").result()
    followed = twin.forward([brought], "importance_sampling").result()
    assert recorded.metrics[REPLAYED] == followed.metrics[REPLAYED] == 1.0
    np.testing.assert_array_equal(logprobs(followed)[0], logprobs(recorded)[0])
    other = policy_datum(sampled, rollout_expert_indices=(indices + 1) % (int(indices.max()) + 1))
    assert (
        np.abs(logprobs(twin.forward([other], "importance_sampling").result())[0] - logprobs(recorded)[0]).max() > 0.1
    )
    dense = train(service, "dense")
    with pytest.raises(tinker.RequestFailedError, match="rollout_expert_indices is given, but dense has no experts"):
        dense.forward([brought], "importance_sampling").result()
