"""Training samples -> the SDK's datums. Position i of the input predicts target i, so a sample of n tokens has n - 1 positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import TensorData

from tinsmith.rl.config import LossScale, PolicyLoss
from tinsmith.rl.trajectory import Sample


@dataclass(frozen=True)
class WeightedSample:
    """A sample and what its sampled tokens are worth."""

    sample: Sample
    advantages: NDArray[np.float32]
    """[r] over the response; 0.0 where nothing was sampled."""
    logprobs: NDArray[np.float32]
    """[r] those that the loss compares with: the sampler's, or the trainer's before the step."""


def policy_datum(weighted: WeightedSample, loss: PolicyLoss, scale: float) -> tinker.Datum:
    """For the losses on the server that take advantages; `scale` multiplies them."""
    inputs = {
        "target_tokens": _targets(weighted.sample),
        "logprobs": _over_positions(weighted.sample, weighted.logprobs),
        "advantages": _over_positions(weighted.sample, weighted.advantages * np.float32(scale)),
    }
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = _over_positions(weighted.sample, weighted.sample.loss_mask)
    return _datum(weighted.sample, inputs)


def likelihood_datum(sample: Sample, scale: float = 1.0) -> tinker.Datum:
    """For `cross_entropy`: every sampled token weighs `scale`."""
    weights = _over_positions(sample, sample.loss_mask * np.float32(scale))
    return _datum(sample, {"target_tokens": _targets(sample), "weights": weights})


def response_logprobs(output: tinker.ForwardBackwardOutput, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """[r] for each sample: the trainer's log-probabilities of the response, from what it answered to the samples' datums."""
    whole = [entry["logprobs"].to_numpy() for entry in output.loss_fn_outputs]
    return [logprobs[-len(sample.loss_mask) :].astype(np.float32) for logprobs, sample in zip(whole, samples, strict=True)]


def scales(samples: Sequence[Sample], kind: LossScale) -> list[float]:
    """What each sample's tokens are multiplied with. Losses are sums on the server, so a mean is made here.

    tokens: 1 / (sampled tokens of the batch). sequences: 1 / (samples · the sample's tokens). sum: 1.
    """
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    match kind:
        case "tokens":
            return [1.0 / max(sum(counts), 1)] * len(samples)
        case "sequences":
            return [1.0 / (len(samples) * max(count, 1)) for count in counts]
        case "sum":
            return [1.0] * len(samples)


def _datum(sample: Sample, inputs: dict[str, TensorData]) -> tinker.Datum:
    return tinker.Datum(model_input=sample.stream.head(len(sample.stream) - 1).model_input, loss_fn_inputs=inputs)


def _targets(sample: Sample) -> TensorData:
    return TensorData.from_numpy(sample.stream.ids[1:].astype(np.int64))


def _over_positions(sample: Sample, values: NDArray[np.float32] | NDArray[np.bool_]) -> TensorData:
    """[r] values of the response as [n - 1] over the positions that predict it."""
    positions = np.zeros(len(sample.stream) - 1, dtype=np.float32)
    positions[len(positions) - len(values) :] = values
    return TensorData.from_numpy(positions)
