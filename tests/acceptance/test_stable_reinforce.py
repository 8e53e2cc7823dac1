"""The loss stable_reinforce with the real SDK: what is sampled with record_stability_info is trained on, by the id of its sequence."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, assert_close, grad_norm, image_input, logprobs, scores, text_input, train, with_inputs
from tests.plain_losses import DEFAULTS, FORMULAS
from tests.running import Server, serving

METRICS = {"tinsmith_stable_reinforce/weight:mean", "tinsmith_stable_reinforce/limited:mean", "tinsmith_stable_reinforce/drift:mean"}

Sampled = tuple[types.ModelInput, types.SampledSequence]


def sample(client: tinker.SamplingClient, prompts: Sequence[types.ModelInput], max_tokens: int = 6) -> list[Sampled]:
    """Two sequences for each prompt."""
    params = types.SamplingParams(max_tokens=max_tokens, stop=[], seed=1)
    replies = [client.sample(prompt, 2, params) for prompt in prompts]
    return [(prompt, sequence) for prompt, reply in zip(prompts, replies, strict=True) for sequence in reply.result().sequences]


def policy_datum(sampled: Sampled, seed: int, **more: Any) -> types.Datum:
    """As rl_loop of the cookbook makes it, but without the log-probabilities, which Tinker's documentation does not ask for."""
    prompt, sequence = sampled
    before, count = prompt.length, len(sequence.tokens)
    advantages = torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()
    datum = with_inputs(
        types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=sequence.tokens[:-1])]),
        target_tokens=[0] * (before - 1) + sequence.tokens,
        advantages=[0.0] * (before - 1) + advantages,
        **more,
    )
    return datum.with_provenance(
        [
            PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=before),
            SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=count - 1),
        ],
        [
            PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=before - 1),
            SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=count),
        ],
    )


def padded(sampled: Sampled) -> list[float]:
    """The log-probabilities of a sequence, with 0 for the prompt, as other losses take them."""
    prompt, sequence = sampled
    assert sequence.logprobs is not None
    return [0.0] * (prompt.length - 1) + sequence.logprobs


def moved(client: tinker.TrainingClient, prompts: Sequence[types.ModelInput]) -> None:
    """Train it away from what it was."""
    data = [with_inputs(prompt, target_tokens=[7] * prompt.length, weights=[0.2] * prompt.length) for prompt in prompts]
    client.forward_backward(data, "cross_entropy").result()
    grad_norm(client)


def test_where_sampler_and_trainer_agree_it_is_importance_sampling(service: tinker.ServiceClient) -> None:
    client, twin = train(service, "vision"), train(service, "vision")
    prompts = [*(text_input(seed, 5 + seed) for seed in range(3)), image_input(client, 1)]
    sampled = sample(client.save_weights_and_get_sampling_client(record_stability_info=True).result(), prompts)
    data = [policy_datum(one, seed) for seed, one in enumerate(sampled)]
    output = client.forward_backward(data, "stable_reinforce").result()
    plain = [with_inputs(datum.model_input, **datum.loss_fn_inputs, logprobs=padded(one)) for datum, one in zip(data, sampled, strict=True)]
    expected = twin.forward_backward(plain, "importance_sampling").result()
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-4, abs=1e-4)
    assert_close(logprobs(output), logprobs(expected), 1e-5)
    assert output.metrics.keys() == {"loss:sum"} | METRICS
    assert output.metrics["tinsmith_stable_reinforce/weight:mean"] == pytest.approx(1.0, abs=1e-3)
    assert grad_norm(client) == pytest.approx(grad_norm(twin), rel=1e-3)
    assert_close(scores(client, data), scores(twin, data), 1e-4)


@pytest.mark.parametrize(("kind", "config"), [("server", {}), ("chunking_server", {"kl_coeff": 0.5})])
def test_on_samples_of_older_weights_it_has_the_value_and_gradient_of_its_formula(
    request: pytest.FixtureRequest, kind: str, config: dict[str, float]
) -> None:
    """However the call is split, and whatever logprobs the datums bring along."""
    with tinker.ServiceClient(base_url=request.getfixturevalue(kind).url, api_key=API_KEY) as service:
        client, twin = train(service, "text"), train(service, "text")
        prompts = [text_input(seed, 5 + seed) for seed in range(3)]
        sampled = sample(client.save_weights_and_get_sampling_client(record_stability_info=True).result(), prompts)
        for model in (client, twin):
            moved(model, prompts)
        data = [policy_datum(one, seed, logprobs=[-0.5] * len(padded(one))) for seed, one in enumerate(sampled)]
        output = client.forward_backward(data, "stable_reinforce", config).result()
        total, linear = 0.0, []
        for datum, one, now in zip(data, sampled, logprobs(output), strict=True):
            q = torch.tensor(padded(one))
            inputs = {"logprobs": q, "advantages": datum.loss_fn_inputs["advantages"].to_torch(), "sequence_ratio_mask": (q != 0).float()}
            leaf = torch.tensor(now, requires_grad=True)
            loss = FORMULAS["stable_reinforce"](leaf, inputs, DEFAULTS["stable_reinforce"] | config)
            (gradient,) = torch.autograd.grad(loss, [leaf])
            total += loss.item()
            linear.append(with_inputs(datum.model_input, target_tokens=datum.loss_fn_inputs["target_tokens"], weights=-gradient))
        assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4, abs=1e-5)
        assert output.metrics["tinsmith_stable_reinforce/drift:mean"] > 0.2
        assert output.metrics["tinsmith_stable_reinforce/weight:mean"] < 0.9
        assert output.metrics == pytest.approx(client.forward(data, "stable_reinforce", config).result().metrics)
        twin.forward_backward(linear, "cross_entropy").result()
        assert grad_norm(client) == pytest.approx(grad_norm(twin), rel=1e-3)


def test_what_is_missing_is_named_and_the_step_is_refused(service: tinker.ServiceClient, server: Server) -> None:
    client = train(service, "text")
    prompts = [text_input(0, 5)]
    unrecorded = sample(client.save_weights_and_get_sampling_client().result(), prompts)[0]
    for datum, message in (
        (with_inputs(prompts[0], target_tokens=[1] * 5, advantages=[1.0] * 5), "datum 0: the datum does not say which sampled sequences"),
        (
            policy_datum(unrecorded, 0),
            f"names sequence '{unrecorded[1].sequence_id}', which is not recorded: it was sampled without record_stab",
        ),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            client.forward_backward([datum], "stable_reinforce").result()
        with pytest.raises(tinker.RequestFailedError, match="the step was refused and the gradients are cleared"):
            client.optim_step(RAW_STEP).result()
    recorded = sample(service.create_sampling_client(base_model="text", record_stability_info=True).result(), prompts)[0]
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as other:
        stranger = train(other, "text")
        with pytest.raises(tinker.RequestFailedError, match="sample and train with clients of one ServiceClient"):
            stranger.forward_backward([policy_datum(recorded, 0)], "stable_reinforce").result()
    client.forward_backward([policy_datum(recorded, 0)], "stable_reinforce").result()
    assert np.isfinite(grad_norm(client))


def test_recordings_outlive_a_server_that_is_killed(text_only: list[str], tmp_path: Path) -> None:
    """The model goes on from its checkpoint in the same session, with what it sampled before. Lost weights are to be published again."""
    with serving(tmp_path, *text_only) as first:
        first.wait_for_health()
        port = first.url.rpartition(":")[2]
        service = tinker.ServiceClient(base_url=first.url, api_key=API_KEY)
        client = train(service, "text")
        path = client.save_state("before").result().path
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        sampled = sample(sampler, [text_input(0, 5)])
        expected = client.forward([policy_datum(sampled[0], 0)], "stable_reinforce").result().metrics
        os.kill(first.pid, signal.SIGKILL)
        first.process.wait()
    with serving(tmp_path, *text_only, "--port", port) as second:
        second.wait_for_health()
        resumed = service.create_training_client_from_state(path).result()
        assert resumed.forward([policy_datum(sampled[0], 0)], "stable_reinforce").result().metrics == pytest.approx(expected)
        with pytest.raises(
            tinker.NotFoundError,
            match=r"are gone: the server was restarted; publish weights again \(save_weights_and_get_sampling_client\)",
        ):
            sample(sampler, [text_input(0, 5)])
        sample(resumed.save_weights_and_get_sampling_client(record_stability_info=True).result(), [text_input(0, 5)])
        service.close("success")
