"""Every loss through the SDK: value, gradient and outputs against plain torch, however the data is split; custom losses of the client."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.conftest import connect
from tests.acceptance.talking import assert_close, grad_norm, image_input, logprobs, scores, text_input, train, with_inputs
from tests.extent import slow
from tests.plain_losses import DEFAULTS, FORMULAS
from tests.running import Server

SETTINGS: list[Any] = [
    ("gspo", {}),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.3}),
    ("dro", {"beta": 0.3}),
    # The others differ from these in their formula alone, which tests/training/test_losses.py compares.
    *slow(*((name, {}) for name in sorted(FORMULAS.keys() - {"gspo", "stable_reinforce"}))),
]
"""What stable_reinforce compares with is recorded when it is sampled: `test_stable_reinforce.py` has it."""


def policy_datum(model_input: types.ModelInput, targets: torch.Tensor, current: np.ndarray, seed: int) -> types.Datum:
    """As recipes make it: the first third is the prompt, padded with 0; the policy has moved a little since it sampled the rest.

    Every fourth sampled token has no advantage.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = len(targets) // 3
    sampled = torch.from_numpy(current) + 0.3 * torch.randn(len(targets), generator=generator)
    advantages = torch.randn(len(targets), generator=generator)
    advantages[prompt::4] = 0.0
    mask = torch.ones(len(targets))
    for tensor in (sampled, advantages, mask):
        tensor[:prompt] = 0.0
    return with_inputs(model_input, target_tokens=targets, logprobs=sampled, advantages=advantages, sequence_ratio_mask=mask)


def policy_data(client: tinker.TrainingClient, pictures: bool = False) -> list[types.Datum]:
    """Sequences of several lengths, one of them with a picture if the model takes pictures."""
    inputs = [text_input(seed, 9 + 4 * seed) for seed in range(4)]
    if pictures:
        inputs.append(image_input(client, 1))
    generator = torch.Generator().manual_seed(5)
    targets = [torch.randint(0, 1500, (model_input.length,), generator=generator) for model_input in inputs]
    now = scores(client, [with_inputs(model_input, target_tokens=ids) for model_input, ids in zip(inputs, targets, strict=True)])
    return [policy_datum(*parts, seed) for seed, parts in enumerate(zip(inputs, targets, now, strict=True))]


def masked(item: types.Datum) -> types.Datum:
    """With a mask that takes in a prompt's last position and leaves out every third sampled one, advantage or not."""
    mask = item.loss_fn_inputs["sequence_ratio_mask"].to_torch().clone()
    mask[len(mask) // 3 - 1], mask[len(mask) // 3 :: 3] = 1.0, 0.0
    return with_inputs(item.model_input, **item.loss_fn_inputs, mask=mask)


def in_the_client(
    name: str, config: Mapping[str, float], data: Sequence[types.Datum], now: Sequence[np.ndarray], inputs: Sequence[Mapping[str, Any]] = ()
) -> tuple[float, list[types.Datum]]:
    """The loss by its formula of these inputs, if not those of the datums, and cross-entropy datums that have its gradient."""
    total, linear = 0.0, []
    own = [{key: tensor.to_torch() for key, tensor in item.loss_fn_inputs.items()} for item in data]
    for item, tensors, lp in zip(data, inputs or own, now, strict=True):
        leaf = torch.tensor(lp, requires_grad=True)
        loss = FORMULAS[name](leaf, tensors, {**DEFAULTS[name], **config})
        (gradient,) = torch.autograd.grad(loss, [leaf])
        total += loss.item()
        linear.append(with_inputs(item.model_input, target_tokens=item.loss_fn_inputs["target_tokens"], weights=-gradient))
    return total, linear


@pytest.mark.parametrize(("name", "config"), SETTINGS)
def test_a_policy_loss_has_the_value_and_gradient_of_its_formula_however_the_call_is_split(
    service: tinker.ServiceClient, chunking_server: Server, name: Any, config: dict[str, float]
) -> None:
    whole, twin = train(service, "vision"), train(service, "vision")
    plain = policy_data(whole, pictures=True)
    data = [masked(item) for item in plain] if name == "dro" else plain
    output = whole.forward_backward(data, name, config or None).result()
    expected, linear = in_the_client(name, config, data, logprobs(output))
    assert output.metrics == pytest.approx({"loss:sum": expected}, rel=1e-5, abs=1e-5)
    assert_close(logprobs(output), scores(twin, plain), 1e-5)
    twin.forward_backward(linear, "cross_entropy").result()
    with connect(chunking_server) as splitting:
        split = train(splitting, "vision")
        for call in (split.forward, split.forward_backward):
            assert call(data, name, config or None).result().metrics == pytest.approx(output.metrics, rel=1e-5, abs=1e-5)
        norms = [grad_norm(model) for model in (whole, twin, split)]
        after = [scores(model, plain) for model in (whole, twin, split)]
    assert norms[0] > 0.01
    assert norms[1:] == pytest.approx(norms[:1] * 2, rel=1e-4)
    for other in after[1:]:
        assert_close(after[0], other)


@pytest.mark.parametrize(("kind", "density"), [("server", 1.0), ("chunking_server", 0.05)])
def test_a_custom_loss_over_many_targets_a_position(
    service: tinker.ServiceClient, request: pytest.FixtureRequest, kind: str, density: float
) -> None:
    """The SDK sends its gradient as weights of the same shape, as CSR where most are 0, and a split call after all of its forwards."""
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
    by_hand.forward_backward([with_inputs(item, target_tokens=ids, weights=-g) for item, ids, g in pieces], "cross_entropy").result()
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
    data = policy_data(client)
    output = client.forward_backward_custom(data, handle).result()
    expected = -sum(float(item.loss_fn_inputs["advantages"].to_numpy() @ lp) for item, lp in zip(data, logprobs(output), strict=True))
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
