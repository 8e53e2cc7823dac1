"""A step that cannot be taken is refused through the SDK, and reaches nothing: no weights, no next step, no neighbour.

Invariant: A spoiled step reaches no weights, no later step, no neighbour, not the base.
"""

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.talking import RAW_STEP, assert_close, datum, grad_norm, scores, text_input, train, with_inputs

PROBE = [datum(text_input(7, 12), 7)]
LESSON = [datum(text_input(1, 12), 1)]
INFINITE_GRADIENT = with_inputs(text_input(2, 8), target_tokens=list(range(8)), weights=[3e38] * 8)
"""Weights that are finite, and a gradient that is not."""
INVALID_ID = with_inputs(text_input(2, 8), target_tokens=[1] * 7 + [10**6], weights=[1.0] * 8)


def step(client: tinker.TrainingClient) -> float:
    client.forward_backward(LESSON, "cross_entropy")
    return grad_norm(client)


@pytest.mark.parametrize("base_model", ["text", "vision"])
@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (INFINITE_GRADIENT, "the gradient norm is .*the weights stay as they were"),
        (INVALID_ID, "the gradients are cleared"),
    ],
    ids=["infinite gradient", "invalid id"],
)
def test_a_spoiled_step_leaves_the_model_its_neighbour_and_the_base_alone(
    service: tinker.ServiceClient, spoiled: types.Datum, reason: str, base_model: str
) -> None:
    client, neighbour, twin = (train(service, base_model, seed=seed) for seed in (3, 4, 4))
    fresh = train(service, base_model, seed=3)
    base = service.create_sampling_client(base_model=base_model)
    said = base.compute_logprobs(text_input(7, 12)).result()
    before = scores(client, PROBE)

    # All of it is on its way before the first result is there, so that the models may share a pass.
    passed = client.forward_backward([*LESSON, spoiled], "cross_entropy")
    beside, its_step = neighbour.forward_backward(LESSON, "cross_entropy"), neighbour.optim_step(RAW_STEP)
    refused = client.optim_step(RAW_STEP)
    with pytest.raises(tinker.RequestFailedError, match=reason) as failed:
        refused.result()
    assert "user" in str(failed.value.category)
    if spoiled is INVALID_ID:
        with pytest.raises(tinker.RequestFailedError, match="datum 1: target_tokens at position 7 is 1000000"):
            passed.result()

    assert np.array_equal(scores(client, PROBE), before)
    assert base.compute_logprobs(text_input(7, 12)).result() == said
    beside.result()
    its_step.result()
    step(twin)
    assert_close(scores(neighbour, PROBE), scores(twin, PROBE), atol=1e-6)
    assert step(client) == pytest.approx(step(fresh), rel=1e-6)
    assert_close(scores(client, PROBE), scores(fresh, PROBE), atol=1e-6)


@pytest.mark.parametrize("adam", [types.AdamParams(learning_rate=1e-3, eps=0.0), types.AdamParams(learning_rate=1e38)])
def test_an_update_that_is_not_finite_is_refused_and_the_next_step_is_as_if_it_had_not_been(
    service: tinker.ServiceClient, adam: types.AdamParams
) -> None:
    client, fresh = train(service, "text", seed=3), train(service, "text", seed=3)
    before = scores(client, PROBE)
    client.forward_backward(LESSON, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match=r"the update is not finite: .* the step was refused") as failed:
        client.optim_step(adam).result()
    assert "user" in str(failed.value.category)
    assert np.array_equal(scores(client, PROBE), before)
    assert step(client) == step(fresh)
    assert np.array_equal(scores(client, PROBE), scores(fresh, PROBE))
