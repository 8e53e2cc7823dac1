"""What the tests here say to a server, beside `tests/acceptance/talking.py`."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray
from PIL import Image
from tinker import types

from tests.acceptance.talking import RAW_STEP, datum, image_input, numbers, scores, text_input, with_inputs

FREE = types.SamplingParams(max_tokens=12, stop=[], seed=1)
"""Twelve tokens, whatever they are."""


def learn(client: tinker.TrainingClient, seed: int = 0, steps: int = 1, pictures: bool = True) -> None:
    """Steps that move the weights visibly: B is far from zero afterwards. From texts, and pictures if the model takes them."""
    for step in range(steps):
        inputs = [text_input(seed + step, 9), *([image_input(client, seed + step)] if pictures else [])]
        client.forward_backward([datum(model_input, seed) for model_input in inputs], "cross_entropy")
        client.optim_step(RAW_STEP).result()


def snapshot(client: tinker.TrainingClient) -> tinker.SamplingClient:
    """A client of the model's weights as they are now."""
    sampler: tinker.SamplingClient = client.save_weights_and_get_sampling_client().result()
    return sampler


def sample(sampler: tinker.SamplingClient, prompt: types.ModelInput, params: types.SamplingParams = FREE, n: int = 1, **more: Any) -> Any:
    """The reply to one request."""
    return sampler.sample(prompt=prompt, num_samples=n, sampling_params=params, **more).result()


def trainers_logprobs(client: tinker.TrainingClient, prompt: types.ModelInput, tokens: Sequence[int]) -> NDArray[np.float32]:
    """The trainer's log-probabilities of `tokens` after `prompt`, with the weights as they are now."""
    whole = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=list(tokens))])
    targets = [0] * (prompt.length - 1) + list(tokens) + [0]
    scored = scores(client, [with_inputs(whole, target_tokens=targets, weights=[1.0] * whole.length)])[0]
    part: NDArray[np.float32] = scored[prompt.length - 1 : -1]
    return part


def worst_difference(client: tinker.TrainingClient, prompt: types.ModelInput, reply: Any) -> float:
    """The largest difference between the log-probabilities of a reply and the trainer's."""
    differences = [np.abs(numbers(s.logprobs) - trainers_logprobs(client, prompt, s.tokens)).max() for s in reply.sequences]
    return float(max(differences))


def text_logprobs(client: tinker.TrainingClient, prompt: types.ModelInput) -> NDArray[np.float64]:
    """The trainer's log-probabilities of the prompt's own tokens; NaN for the first, 0 at image positions."""
    ids: list[int | None] = []
    for chunk in prompt.chunks:
        ids += list(chunk.tokens) if isinstance(chunk, types.EncodedTextChunk) else [None] * chunk.length
    targets = [token or 0 for token in ids[1:]] + [0]
    scored = scores(client, [with_inputs(prompt, target_tokens=targets, weights=[1.0] * prompt.length)])[0]
    return np.array([np.nan, *(0.0 if token is None else score for token, score in zip(ids[1:], scored[:-1], strict=True))])


def square(color: tuple[int, int, int], seed: int) -> bytes:
    """A square of one color, almost."""
    noise = np.random.default_rng(seed).integers(-20, 21, (64, 64, 3))
    pixels = np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
