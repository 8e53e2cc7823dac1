"""What the tests here say to a server, beside `tests/acceptance/talking.py`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from tests.acceptance.talking import RAW_STEP, datum, image_input, numbers, scores, text_input, train, with_inputs

FREE = types.SamplingParams(max_tokens=12, stop=[], seed=1)
"""Twelve tokens, whatever they are."""


def learn(client: tinker.TrainingClient, seed: int = 0, steps: int = 1, images: bool = True) -> None:
    """Steps that move the weights visibly: B is far from zero afterwards.

    From texts, and images if the model takes them.
    """
    for step in range(steps):
        inputs = [text_input(seed + step, 9), *([image_input(client, seed + step)] if images else [])]
        client.forward_backward([datum(model_input, seed) for model_input in inputs], "cross_entropy")
        client.optim_step(RAW_STEP).result()


def snapshot(client: tinker.TrainingClient) -> tinker.SamplingClient:
    """A client of the model's weights as they are now."""
    sampler: tinker.SamplingClient = client.save_weights_and_get_sampling_client().result()
    return sampler


def sample(
    sampler: tinker.SamplingClient,
    prompt: types.ModelInput,
    params: types.SamplingParams = FREE,
    n: int = 1,
    **more: Any,
) -> Any:
    """The reply to one request."""
    return sampler.sample(prompt=prompt, num_samples=n, sampling_params=params, **more).result()


def trainers_logprobs(
    client: tinker.TrainingClient, prompt: types.ModelInput, tokens: Sequence[int]
) -> NDArray[np.float32]:
    """The trainer's log-probabilities of `tokens` after `prompt`, with the weights as they are now."""
    whole = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=list(tokens))])
    targets = [0] * (prompt.length - 1) + list(tokens) + [0]
    scored = scores(client, [with_inputs(whole, target_tokens=targets, weights=[1.0] * whole.length)])[0]
    part: NDArray[np.float32] = scored[prompt.length - 1 : -1]
    return part


def text_logprobs(client: tinker.TrainingClient, prompt: types.ModelInput) -> NDArray[np.float64]:
    """The trainer's log-probabilities of the prompt's own tokens; NaN for the first, 0 at image positions."""
    ids: list[int | None] = []
    for chunk in prompt.chunks:
        ids += list(chunk.tokens) if isinstance(chunk, types.EncodedTextChunk) else [None] * chunk.length
    targets = [token or 0 for token in ids[1:]] + [0]
    scored = scores(client, [with_inputs(prompt, target_tokens=targets, weights=[1.0] * prompt.length)])[0]
    return np.array(
        [np.nan, *(0.0 if token is None else score for token, score in zip(ids[1:], scored[:-1], strict=True))]
    )


def worst_difference(client: tinker.TrainingClient, prompt: types.ModelInput, reply: Any) -> float:
    """The largest difference between the log-probabilities of a reply and the trainer's."""
    return max(
        float(np.abs(numbers(s.logprobs) - trainers_logprobs(client, prompt, s.tokens)).max()) for s in reply.sequences
    )


def check_snapshots(
    service: tinker.ServiceClient, rank: int, teach: Callable[[tinker.TrainingClient, int], None], bound: float
) -> None:
    """Each snapshot must have its own weights, as the trainer has them: also the older one, after the newer has been
    sampled."""
    client = train(service, "tiny", rank=rank)
    prompts = [text_input(1, 30), image_input(client, 2)]
    teach(client, 1)
    first = snapshot(client)
    replies = [sample(first, prompt, FREE, 2) for prompt in prompts]
    assert max(worst_difference(client, prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)) < bound
    (one, _) = replies[0].sequences
    of_first = trainers_logprobs(client, prompts[0], one.tokens)
    teach(client, 2)
    for other in (client, train(service, "tiny")):  # neither the later weights nor the base's are near
        assert np.abs(of_first - trainers_logprobs(other, prompts[0], one.tokens)).max() > 1e-2
    second = snapshot(client)
    assert max(worst_difference(client, prompt, sample(second, prompt, FREE, 2)) for prompt in prompts) < bound
    again = sample(first, prompts[0], FREE, 2)
    assert [sequence.tokens for sequence in again.sequences] == [sequence.tokens for sequence in replies[0].sequences]
    np.testing.assert_allclose(numbers(again.sequences[0].logprobs), of_first, atol=bound)
