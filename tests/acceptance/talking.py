"""Short ways to say things with the SDK."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from numpy.typing import NDArray
from tinker import types

from tests.bases import png

RAW_STEP = types.AdamParams(learning_rate=0.05, beta1=0.0, beta2=0.0, eps=1.0)
"""eps=1 makes an Adam step about learning_rate · gradient / (|gradient| + 1): it shows sizes, not only signs."""

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"


def train(
    service: tinker.ServiceClient, base_model: str, rank: int = 8, seed: int = 3, train_unembed: bool = True
) -> tinker.TrainingClient:
    """A new LoRA model; the same seed gives the same weights."""
    client: tinker.TrainingClient = service.create_lora_training_client(
        base_model=base_model, rank=rank, seed=seed, train_unembed=train_unembed
    ).result()
    return client


def text_input(seed: int, length: int) -> types.ModelInput:
    """Random text tokens."""
    return types.ModelInput.from_ints(np.random.default_rng(seed).integers(0, 1500, length).tolist())


def image_input(client: tinker.TrainingClient, seed: int) -> types.ModelInput:
    """Text, a 6-token image between its markers, and text."""
    tokenizer = client.get_tokenizer()
    start, end = (tokenizer.get_vocab()[marker] for marker in (VISION_START, VISION_END))
    words = np.random.default_rng(seed).integers(0, 1500, 6).tolist()
    chunks: list[types.ModelInputChunk] = [
        types.EncodedTextChunk(tokens=[*words[:3], start]),
        types.ImageChunk(data=png(seed), format="png", expected_tokens=6),
        types.EncodedTextChunk(tokens=[end, *words[3:]]),
    ]
    return types.ModelInput(chunks=chunks)


def datum(model_input: types.ModelInput, seed: int = 0) -> types.Datum:
    """Random targets with weights of any sign."""
    generator = np.random.default_rng(seed)
    targets = torch.from_numpy(generator.integers(0, 1500, model_input.length))
    weights = torch.from_numpy(generator.normal(size=model_input.length).astype(np.float32))
    return with_inputs(model_input, target_tokens=targets, weights=weights)


def with_inputs(model_input: types.ModelInput, **loss_fn_inputs: Any) -> types.Datum:
    """A datum of lists or torch tensors, which the SDK converts."""
    return types.Datum(model_input=model_input, loss_fn_inputs=loss_fn_inputs)


def numbers(values: Sequence[float | None] | None) -> NDArray[np.float64]:
    """Log-probabilities as an array, NaN where the SDK has None."""
    assert values is not None
    return np.array([np.nan if value is None else value for value in values])


def grad_norm(client: tinker.TrainingClient, step: types.AdamParams = RAW_STEP) -> float:
    """Take a step; the norm of its gradient."""
    metrics = client.optim_step(step).result().metrics
    assert metrics is not None
    return float(metrics["grad_norm"])


def learn(client: tinker.TrainingClient, data: Sequence[types.Datum]) -> tinker.TrainingClient:
    """Take a step that moves the weights visibly; the client."""
    client.forward_backward(list(data), "cross_entropy")
    client.optim_step(RAW_STEP).result()
    return client


def logprobs(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    """The logprobs of each datum."""
    return [entry["logprobs"].to_numpy() for entry in output.loss_fn_outputs]


def scores(client: tinker.TrainingClient, data: Sequence[types.Datum]) -> list[np.ndarray]:
    """Log-probabilities of the data with the weights as they are."""
    return logprobs(client.forward(list(data), "cross_entropy").result())


def assert_close(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], atol: float = 1e-4) -> None:
    """Equal array by array."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=atol, rtol=1e-5)


def assert_losses_close(actual: Sequence[float], expected: Sequence[float], within: float) -> None:
    """Losses are equal, one by one.

    Weights of any sign cancel in each: it is rounded as its terms are, as large as the largest loss.
    """
    assert actual == pytest.approx(expected, rel=within, abs=within * max(map(abs, expected)))
