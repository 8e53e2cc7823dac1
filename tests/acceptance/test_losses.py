"""Every loss through the SDK: value, gradient and outputs against plain torch, however the data is split; custom losses of the client."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.types.provenance_spans import PromptProvenanceSpan, ProvenanceSpans, SampledProvenanceSpan

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import RAW_STEP, assert_close, image_input, logprobs, scores, text_input, train, with_inputs
from tests.extent import slow
from tests.plain_losses import DEFAULTS, FORMULAS
from tests.running import Server

NAMES = sorted(FORMULAS.keys() - {"stable_reinforce"})
"""What that one compares with is recorded when it is sampled: `test_stable_reinforce.py` has it."""

SETTINGS: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in NAMES),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.3}),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("dro", {"beta": 0.3}),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
]


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


def policy_data(client: tinker.TrainingClient, base_model: str) -> list[types.Datum]:
    """Sequences of several lengths, one of them with a picture if the model takes pictures."""
    inputs = [text_input(seed, 9 + 4 * seed) for seed in range(4)]
    if base_model == "vision":
        inputs.append(image_input(client, 1))
    generator = torch.Generator().manual_seed(5)
    targets = [torch.randint(0, 1500, (model_input.length,), generator=generator) for model_input in inputs]
    now = scores(client, [with_inputs(model_input, target_tokens=ids) for model_input, ids in zip(inputs, targets, strict=True)])
    return [policy_datum(*parts, seed) for seed, parts in enumerate(zip(inputs, targets, now, strict=True))]


def in_the_client(
    name: str, config: Mapping[str, float], data: Sequence[types.Datum], now: Sequence[np.ndarray]
) -> tuple[float, list[types.Datum]]:
    """The loss by its formula, and cross-entropy datums that have its gradient."""
    total, linear = 0.0, []
    for item, lp in zip(data, now, strict=True):
        leaf = torch.tensor(lp, requires_grad=True)
        tensors = {key: tensor.to_torch() for key, tensor in item.loss_fn_inputs.items()}
        loss = FORMULAS[name](leaf, tensors, {**DEFAULTS[name], **config})
        (gradient,) = torch.autograd.grad(loss, [leaf])
        total += loss.item()
        linear.append(with_inputs(item.model_input, target_tokens=tensors["target_tokens"], weights=-gradient))
    return total, linear


def step(client: tinker.TrainingClient) -> float:
    """One optimizer step; returns the gradient norm."""
    metrics = client.optim_step(RAW_STEP).result().metrics
    assert metrics is not None
    return metrics["grad_norm"]


@pytest.mark.parametrize("base_model", ["vision", *slow("text")])
@pytest.mark.parametrize(("name", "config"), SETTINGS)
def test_a_policy_loss_has_the_value_and_gradient_of_its_formula(
    service: tinker.ServiceClient, base_model: str, name: Any, config: dict[str, float]
) -> None:
    client, twin = train(service, base_model), train(service, base_model)
    data = policy_data(client, base_model)
    output = client.forward_backward(data, name, config or None).result()
    expected, linear = in_the_client(name, config, data, logprobs(output))
    assert set(output.metrics) == {"loss:sum"}
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert_close(logprobs(output), scores(twin, data), 1e-5)
    twin.forward_backward(linear, "cross_entropy").result()
    norm = step(client)
    assert norm == pytest.approx(step(twin), rel=1e-4)
    assert norm > 0.01
    assert_close(scores(client, data), scores(twin, data))


@pytest.mark.parametrize("name", NAMES)
def test_a_split_call_adds_up_to_the_whole(service: tinker.ServiceClient, chunking_server: Server, name: Any) -> None:
    whole = train(service, "text")
    data = policy_data(whole, "text")
    expected = whole.forward_backward(data, name).result()
    with tinker.ServiceClient(base_url=chunking_server.url, api_key=API_KEY) as splitting:
        split = train(splitting, "text")
        only_forward = split.forward(data, name).result()
        output = split.forward_backward(data, name).result()
        assert step(split) == pytest.approx(step(whole), rel=1e-4)
        assert_close(scores(split, data), scores(whole, data))
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert only_forward.metrics == pytest.approx(expected.metrics, rel=1e-5)


def test_a_mask_decides_what_dro_counts_however_the_call_is_split(service: tinker.ServiceClient, chunking_server: Server) -> None:
    """A mask that takes in a prompt's last position and leaves out every third sampled one, advantage or not."""
    client = train(service, "text")
    data = []
    for item in policy_data(client, "text"):
        mask = item.loss_fn_inputs["sequence_ratio_mask"].to_torch().clone()
        mask[len(mask) // 3 - 1], mask[len(mask) // 3 :: 3] = 1.0, 0.0
        data.append(with_inputs(item.model_input, **item.loss_fn_inputs, mask=mask))
    output = client.forward_backward(data, "dro").result()
    expected, linear = in_the_client("dro", {}, data, logprobs(output))
    unmasked, _ = in_the_client("dro", {}, policy_data(client, "text"), logprobs(output))
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert output.metrics["loss:sum"] != pytest.approx(unmasked, rel=1e-3)
    with tinker.ServiceClient(base_url=chunking_server.url, api_key=API_KEY) as splitting:
        split, twin = train(splitting, "text"), train(splitting, "text")
        assert split.forward_backward(data, "dro").result().metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
        twin.forward_backward(linear, "cross_entropy").result()
        norms = [step(model) for model in (client, split, twin)]
    assert norms[1:] == pytest.approx(norms[:1] * 2, rel=1e-4)


def test_bounds_that_come_for_each_position_are_obeyed(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    data = policy_data(client, "text")
    tight = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    bounded = [with_inputs(d.model_input, **d.loss_fn_inputs, **{k: [v] * d.model_input.length for k, v in tight.items()}) for d in data]
    losses = [client.forward(*call).result().metrics["loss:sum"] for call in ((data, "ppo", tight), (bounded, "ppo"), (data, "ppo"))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)


def test_a_ratio_beyond_float32_is_clipped_or_refused_with_the_step(service: tinker.ServiceClient) -> None:
    client, twin = train(service, "text"), train(service, "text")
    model_input = text_input(0, 6)
    item = with_inputs(model_input, target_tokens=[1] * 6, logprobs=[-200.0] * 6, advantages=[1.0] * 6)
    before = scores(client, [item])
    assert client.forward_backward([item], "importance_sampling").result().metrics["loss:sum"] == -np.inf
    with pytest.raises(tinker.RequestFailedError, match="the gradient norm is nan: the step was refused"):
        step(client)
    assert_close(scores(client, [item]), before, 0.0)
    for model in (client, twin):
        assert model.forward_backward([item], "cispo").result().metrics["loss:sum"] == pytest.approx(-4 * before[0].sum(), rel=1e-5)
    assert step(client) == pytest.approx(step(twin), rel=1e-6)


def test_provenance_spans_change_nothing_for_other_losses(service: tinker.ServiceClient) -> None:
    client = train(service, "text")
    data = policy_data(client, "text")
    named = []
    for item in data:
        length = item.model_input.length
        spans: ProvenanceSpans = [
            PromptProvenanceSpan(sequence_id="p", offset=0, length=3),
            SampledProvenanceSpan(sequence_id="s", offset=0, length=length - 3),
        ]
        named.append(item.with_provenance(model_input=spans, loss_fn_inputs=spans))
    plain, with_names = (client.forward(items, "importance_sampling").result() for items in (data, named))
    assert with_names.metrics == plain.metrics


@pytest.mark.parametrize("density", [1.0, 0.05])
@pytest.mark.parametrize("kind", ["server", "chunking_server"])
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
    with tinker.ServiceClient(base_url=request.getfixturevalue(kind).url, api_key=API_KEY) as other:
        client = train(other, "text")
        output = client.forward_backward_custom(data, mass).result()
        assert step(client) == pytest.approx(step(by_hand), rel=1e-3)
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    assert output.metrics["data:sum"] == 2.0
    assert [tuple(lp.shape) for lp in logprobs(output)] == [(10, 30), (7, 30)]


def test_a_loss_handle_runs_in_the_client(service: tinker.ServiceClient, http: httpx.Client) -> None:
    """It is not uploaded, as client/config says; a client that uploads all the same is told what to do."""

    def likelihood(logprobs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * advantages).sum()
        return loss, {"custom/likelihood:sum": loss}

    handle = service.create_custom_loss(likelihood, input_ranks={"logprobs": 1, "advantages": 1}).result()
    client = train(service, "text")
    data = policy_data(client, "text")
    output = client.forward_backward_custom(data, handle).result()
    expected = -sum(float(item.loss_fn_inputs["advantages"].to_numpy() @ lp) for item, lp in zip(data, logprobs(output), strict=True))
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    body = {"session_id": client.model_id.partition(":")[0], "custom_loss_seq_id": 0, "name": "x", "inputs": [], "graph": {}}
    refused = http.post("create_custom_loss", json=body)
    assert refused.status_code == 400
    assert "pass the function itself to forward_backward_custom" in refused.json()["detail"]
