"""Policy losses through the SDK, however a call is split, and custom losses of the client.

That a loss has the value and gradient of its formula is in `tests/training/test_losses.py`.
"""

from typing import Any

import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.conftest import connect
from tests.acceptance.talking import (
    assert_close,
    grad_norm,
    image_input,
    logprobs,
    scores,
    text_input,
    train,
    with_inputs,
)
from tests.plain_losses import DEFAULTS, FORMULAS
from tests.running import Server


def policy_data(client: tinker.TrainingClient, base_model: str) -> list[types.Datum]:
    """Sequences of several lengths as recipes make them, one of them with an image if the model takes images.

    The first third is the prompt, padded with 0. The policy has moved a little since it sampled the rest, of which
    every fourth token has no advantage and every third is masked.
    """
    inputs = [text_input(seed, 9 + 4 * seed) for seed in range(4)] + (
        [image_input(client, 1)] if base_model == "vision" else []
    )
    random, data = torch.Generator().manual_seed(5), []
    for model_input in inputs:
        targets, prompt = torch.randint(0, 1500, (model_input.length,), generator=random), model_input.length // 3
        (now,) = scores(client, [with_inputs(model_input, target_tokens=targets)])
        sampled, advantages = (
            torch.from_numpy(now) + 0.3 * torch.randn(len(now), generator=random),
            torch.randn(len(now), generator=random),
        )
        mask = torch.ones(len(now))
        advantages[prompt::4], mask[prompt + 1 :: 3] = 0.0, 0.0
        for tensor in (sampled, advantages, mask):
            tensor[:prompt] = 0.0
        data.append(
            with_inputs(
                model_input, target_tokens=targets, logprobs=sampled, advantages=advantages, sequence_ratio_mask=mask
            )
        )
    return data


@pytest.mark.parametrize(
    ("name", "config"),
    [("gspo", {}), ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.3}), ("dro", {"beta": 0.3})],
)
def test_a_policy_loss_is_that_of_its_settings_however_the_call_is_split(
    service: tinker.ServiceClient, chunking_server: Server, name: Any, config: dict[str, float]
) -> None:
    whole = train(service, "vision")
    data = plain = policy_data(whole, "vision")
    if name == "dro":
        data = [
            with_inputs(item.model_input, **item.loss_fn_inputs, mask=item.loss_fn_inputs["sequence_ratio_mask"])
            for item in plain
        ]
    output = whole.forward_backward(data, name, config or None).result()
    tensors = [{key: tensor.to_torch() for key, tensor in item.loss_fn_inputs.items()} for item in data]
    pairs = zip(logprobs(output), tensors, strict=True)
    expected = sum(float(FORMULAS[name](torch.tensor(lp), inputs, DEFAULTS[name] | config)) for lp, inputs in pairs)
    assert output.metrics == pytest.approx({"loss:sum": expected}, rel=1e-5, abs=1e-5)
    with connect(chunking_server) as splitting:
        split = train(splitting, "vision")
        for call in (split.forward, split.forward_backward):
            assert call(data, name, config or None).result().metrics == pytest.approx(
                output.metrics, rel=1e-5, abs=1e-5
            )
        norms = [grad_norm(model) for model in (whole, split)]
        assert norms[0] > 0.01
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
        assert_close(scores(whole, plain), scores(split, plain))


@pytest.mark.parametrize(("kind", "density"), [("server", 1.0), ("chunking_server", 0.05)])
def test_a_custom_loss_over_many_targets_a_position(
    service: tinker.ServiceClient, request: pytest.FixtureRequest, kind: str, density: float
) -> None:
    """The SDK sends its gradient as weights of the same shape, as CSR where most are 0, and a split call after all of
    its forwards."""
    generator = torch.Generator().manual_seed(0)
    inputs = [text_input(1, 10), text_input(2, 7)]
    targets = [torch.randint(1, 1500, (item.length, 30), generator=generator) for item in inputs]
    chosen = [(torch.rand(ids.shape, generator=generator) < density).float() for ids in targets]
    data = [with_inputs(item, target_tokens=ids.numpy()) for item, ids in zip(inputs, targets, strict=True)]

    def mass(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        squares = [(lp.exp() * mask).sum().square() for lp, mask in zip(logprobs, chosen, strict=True)]
        return 1e4 * torch.stack(squares).sum(), {"data:sum": float(len(data))}

    by_hand = train(service, "text")
    now = [torch.tensor(lp, requires_grad=True) for lp in scores(by_hand, data)]
    loss, _ = mass(data, now)
    gradients = torch.autograd.grad(loss, now)
    pieces = zip(inputs, targets, gradients, strict=True)
    by_hand.forward_backward(
        [with_inputs(item, target_tokens=ids, weights=-g) for item, ids, g in pieces], "cross_entropy"
    ).result()
    with connect(request.getfixturevalue(kind)) as other:
        client = train(other, "text")
        output = client.forward_backward_custom(data, mass).result()
        assert grad_norm(client) == pytest.approx(grad_norm(by_hand), rel=1e-3)
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    assert output.metrics["data:sum"] == 2.0
    assert [tuple(lp.shape) for lp in logprobs(output)] == [(10, 30), (7, 30)]


def test_a_loss_handle_runs_in_the_client(service: tinker.ServiceClient) -> None:
    """It is not uploaded, as client/config says."""

    def likelihood(logprobs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * advantages).sum()
        return loss, {"custom/likelihood:sum": loss}

    handle = service.create_custom_loss(likelihood, input_ranks={"logprobs": 1, "advantages": 1}).result()
    client = train(service, "text")
    data = policy_data(client, "text")
    output = client.forward_backward_custom(data, handle).result()
    expected = -sum(
        float(item.loss_fn_inputs["advantages"].to_numpy() @ lp)
        for item, lp in zip(data, logprobs(output), strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
