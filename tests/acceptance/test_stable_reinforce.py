"""The loss stable_reinforce with the real SDK: what is sampled with record_stability_info is trained on, by the id of
its sequence.

That recordings outlive a server is in `test_restarts.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from tests.acceptance.conftest import connect
from tests.acceptance.talking import RAW_STEP, grad_norm, image_input, logprobs, text_input, train, with_inputs
from tests.plain_losses import DEFAULTS, FORMULAS
from tests.running import Server

METRICS = {
    "tinsmith_stable_reinforce/weight:mean",
    "tinsmith_stable_reinforce/limited:mean",
    "tinsmith_stable_reinforce/drift:mean",
}

Sampled = tuple[types.ModelInput, types.SampledSequence]


def sample(client: tinker.SamplingClient, prompts: Sequence[types.ModelInput], max_tokens: int = 6) -> list[Sampled]:
    params = types.SamplingParams(max_tokens=max_tokens, stop=[], seed=1)
    replies = [client.sample(prompt, 2, params) for prompt in prompts]
    return [
        (prompt, sequence)
        for prompt, reply in zip(prompts, replies, strict=True)
        for sequence in reply.result().sequences
    ]


def policy_datum(sampled: Sampled, seed: int, **more: Any) -> types.Datum:
    """As rl_loop of the cookbook makes it, but without the log-probabilities, which Tinker's documentation does not ask
    for."""
    prompt, sequence = sampled
    before, count = prompt.length, len(sequence.tokens)
    advantages = torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()
    datum = with_inputs(
        types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=sequence.tokens[:-1])]),
        target_tokens=[0] * (before - 1) + sequence.tokens,
        advantages=[0.0] * (before - 1) + advantages,
        **more,
    )
    name: dict[str, Any] = {"sequence_id": sequence.sequence_id}
    return datum.with_provenance(
        [PromptProvenanceSpan(**name, length=before), SampledProvenanceSpan(**name, length=count - 1)],
        [PromptProvenanceSpan(**name, offset=1, length=before - 1), SampledProvenanceSpan(**name, length=count)],
    )


def padded(sampled: Sampled) -> list[float]:
    """The log-probabilities of a sequence, with 0 for the prompt, as other losses take them."""
    prompt, sequence = sampled
    assert sequence.logprobs is not None
    return [0.0] * (prompt.length - 1) + sequence.logprobs


@pytest.mark.parametrize(("kind", "config"), [("server", {}), ("chunking_server", {"kl_coeff": 0.5})])
def test_on_samples_of_older_weights_it_has_the_value_and_gradient_of_its_formula(
    request: pytest.FixtureRequest, kind: str, config: dict[str, float]
) -> None:
    """However the call is split, and whatever logprobs the datums bring along."""
    with connect(request.getfixturevalue(kind)) as service:
        client, twin = train(service, "vision"), train(service, "vision")
        prompts = [*(text_input(seed, 5 + seed) for seed in range(3)), image_input(client, 1)]
        sampled = sample(client.save_weights_and_get_sampling_client(record_stability_info=True).result(), prompts)
        for model in (client, twin):
            away = [
                with_inputs(prompt, target_tokens=[7] * prompt.length, weights=[0.2] * prompt.length)
                for prompt in prompts
            ]
            model.forward_backward(away, "cross_entropy").result()
            grad_norm(model)
        data = [policy_datum(one, seed, logprobs=[-0.5] * len(padded(one))) for seed, one in enumerate(sampled)]
        output = client.forward_backward(data, "stable_reinforce", config).result()
        total, linear = 0.0, []
        for datum, one, now in zip(data, sampled, logprobs(output), strict=True):
            q, leaf = torch.tensor(padded(one)), torch.tensor(now, requires_grad=True)
            inputs = {
                "logprobs": q,
                "advantages": datum.loss_fn_inputs["advantages"].to_torch(),
                "sequence_ratio_mask": (q != 0).float(),
            }
            loss = FORMULAS["stable_reinforce"](leaf, inputs, DEFAULTS["stable_reinforce"] | config)
            (gradient,) = torch.autograd.grad(loss, [leaf])
            total += loss.item()
            linear.append(
                with_inputs(datum.model_input, target_tokens=datum.loss_fn_inputs["target_tokens"], weights=-gradient)
            )
        assert output.metrics.keys() == {"loss:sum"} | METRICS
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
    silent, name = with_inputs(prompts[0], target_tokens=[1] * 5, advantages=[1.0] * 5), unrecorded[1].sequence_id
    for datum, message in (
        (silent, "datum 0: the datum does not say which sampled sequences"),
        (
            policy_datum(unrecorded, 0),
            f"names sequence '{name}', which is not recorded: it was sampled without record_stab",
        ),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            client.forward_backward([datum], "stable_reinforce").result()
        with pytest.raises(tinker.RequestFailedError, match="the step was refused and the gradients are cleared"):
            client.optim_step(RAW_STEP).result()
    of_base = sample(service.create_sampling_client(base_model="text", record_stability_info=True).result(), prompts)[0]
    with connect(server) as other:
        stranger = train(other, "text")
        with pytest.raises(tinker.RequestFailedError, match="sample and train with clients of one ServiceClient"):
            stranger.forward_backward([policy_datum(of_base, 0)], "stable_reinforce").result()
    client.forward_backward([policy_datum(of_base, 0)], "stable_reinforce").result()
    assert np.isfinite(grad_norm(client))
