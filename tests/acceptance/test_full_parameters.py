"""Full-parameter training through the SDK, which asks for it with rank 0: trained, sampled, saved, resumed, exported."""

from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.acceptance.talking import datum, image_input, numbers, scores, text_input, train, with_inputs
from tests.acceptance.test_sampling import forward_logprobs, learn, sampling_client
from tests.running import Server, tinsmith_here

STEP = types.AdamParams(learning_rate=0.001, grad_clip_norm=0.5, weight_decay=0.1)


def losses(client: tinker.TrainingClient, first: int, count: int) -> list[float]:
    """Train on one datum a step; the losses."""
    passes = []
    for step in range(first, first + count):
        passes.append(client.forward_backward([datum(text_input(step, 12), step)], "cross_entropy"))
        client.optim_step(STEP)
    return [done.result().metrics["loss:sum"] for done in passes]


def test_it_is_sampled_as_trained_and_nobody_else_changes(service: tinker.ServiceClient) -> None:
    prompt = text_input(1, 8)
    base = service.create_sampling_client(base_model="vision").result()
    neighbour = train(service, "vision")
    learn(neighbour, [datum(prompt)])
    client = train(service, "vision", rank=0)
    assert (client.get_info().is_lora, client.get_info().lora_rank) == (False, None)
    data = [datum(text_input(0, 9)), datum(image_input(client, 1))]
    scored = with_inputs(prompt, target_tokens=[*prompt.to_ints()[1:], 0], weights=[1.0] * 8)
    before = [base.compute_logprobs(prompt).result(), scores(neighbour, [scored])[0].tolist()]
    early = sampling_client(client)
    assert early.compute_logprobs(prompt).result() == before[0]

    learn(client, data)
    sampler = sampling_client(client)
    for each in (prompt, image_input(client, 2)):
        params = types.SamplingParams(max_tokens=9, temperature=1.0, stop=[])
        for sequence in sampler.sample(prompt=each, num_samples=2, sampling_params=params).result().sequences:
            expected = forward_logprobs(client, each, list(sequence.tokens))
            np.testing.assert_allclose(numbers(sequence.logprobs), expected, atol=1e-4)
    late = sampler.compute_logprobs(prompt).result()
    learn(client, data)
    assert sampler.compute_logprobs(prompt).result() == late
    assert early.compute_logprobs(prompt).result() == before[0]
    assert np.abs(numbers(late[1:]) - numbers(before[0][1:])).max() > 0.01
    assert [base.compute_logprobs(prompt).result(), scores(neighbour, [scored])[0].tolist()] == before


def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(service: tinker.ServiceClient) -> None:
    client = train(service, "text", rank=0)
    losses(client, 0, 2)
    path = client.save_state("two").result().path
    uninterrupted = losses(client, 2, 2)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().is_lora is False
    assert losses(resumed, 2, 2) == uninterrupted
    fresh = losses(service.create_training_client_from_state(path).result(), 2, 2)
    assert fresh[0] == uninterrupted[0]
    assert fresh[1] != uninterrupted[1]
    older = train(service, "text", rank=0)
    older.load_state_with_optimizer(path).result()
    assert losses(older, 2, 2) == uninterrupted
    with pytest.raises(Exception, match="their sizes must agree"):
        train(service, "text", rank=8).load_state(path).result()


def test_saved_weights_are_sampled_and_exported(service: tinker.ServiceClient, server: Server, tmp_path: Path) -> None:
    client = train(service, "text", rank=0)
    learn(client, [datum(text_input(0, 12))])
    tokens = text_input(5, 10).to_ints()
    item = with_inputs(types.ModelInput.from_ints(tokens[:-1]), target_tokens=tokens[1:], weights=[1.0] * 9)
    expected = scores(client, [item])[0]
    path = client.save_weights_for_sampler("out").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    got = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(numbers(got[1:]), expected, atol=1e-4)

    data = ["--data-dir", str(server.log.parent / "data")]
    refused = tinsmith_here("export", path, str(tmp_path / "out"), *data)
    assert (refused.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "is of rank 0: all parameters were trained, and there is no adapter to write; add --merge" in refused.stderr
    done = tinsmith_here("export", path, str(tmp_path / "out"), "--merge", *data)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=1e-4)


def test_a_request_without_lora_config_asks_for_it(http: httpx.Client) -> None:
    session_id = http.post("create_session", json={}).json()["session_id"]
    created = http.post("create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "text"}).json()
    assert http.post("retrieve_future", json={"request_id": created["request_id"]}).json()["model_id"] == created["model_id"]
    assert http.post("get_info", json={"model_id": created["model_id"]}).json()["is_lora"] is False
