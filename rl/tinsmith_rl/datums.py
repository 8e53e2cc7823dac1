"""Makes training data of rewards: advantages, their corrections, and datums in the SDK's form.

A group is several episodes of one prompt; advantages compare their rewards. The corrections work on logprobs of two
models for the same sampled tokens, in nats. A datum predicts target i at position i of its input, so a sample of n
tokens has n - 1 positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import TensorData

from tinsmith_rl.config import AdvantageKind, LossScale, PolicyLoss
from tinsmith_rl.trajectory import TrainingSample

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it. Groups whose rewards are all equal are not divided at all."""

Logprobs = NDArray[np.float32]
Spans = list[tinker.types.PromptProvenanceSpan | tinker.types.SampledProvenanceSpan]


def advantages(kind: AdvantageKind, groups: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    """An array [g] for each group of g rewards.

    Rewards that are all equal, in a group or with "batch" in the batch, give exact zeros.

    grpo: (r - mean) / (standard deviation), both of the group (DeepSeekMath, arXiv 2402.03300, section 4.1.2). rloo: r
    - mean of the group's other rewards (Ahmadian et al., arXiv 2402.14740). reinforce_pp: r - mean of the group,
    divided by the standard deviation of the batch (REINFORCE++-baseline, arXiv 2501.03262). batch: r - mean of the
    batch, divided by the standard deviation of the batch; groups may be single episodes of different prompts.
    """
    if kind == "batch":
        return _over_batch(groups)
    centred = [_centred(np.asarray(rewards, dtype=np.float64)) for rewards in groups]
    match kind:
        case "grpo":
            return [group / (group.std() + EPSILON) if len(group) else group for group in centred]
        case "rloo":
            return [group * len(group) / max(len(group) - 1, 1) for group in centred]
        case "reinforce_pp":
            batch = np.concatenate([*centred, np.zeros(0)])
            return [group / (batch.std() + EPSILON) for group in centred] if len(batch) else centred


def _over_batch(groups: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    sizes = [len(group) for group in groups]
    centred = _centred(np.array([reward for group in groups for reward in group], dtype=np.float64))
    batch = centred / (centred.std() + EPSILON) if len(centred) else centred
    return np.split(batch, np.cumsum(sizes)[:-1]) if sizes else []


def has_variance(rewards: Sequence[float]) -> bool:
    """Whether rewards differ at all. A group in which they do not teaches nothing."""
    return len(set(rewards)) > 1


def _centred(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    # The mean of equal numbers may differ from them in the last bit, which the standard deviation would magnify.
    if not has_variance(rewards.tolist()):
        return np.zeros_like(rewards)
    centred: NDArray[np.float64] = rewards - rewards.mean()
    return centred


def importance_weights(trainer: Logprobs, sampler: Logprobs, cap: float) -> NDArray[np.float32]:
    """[n] min(p_trainer / p_sampler, cap): truncated importance sampling (TIS).

    It corrects for a sampler that differs a little from the trainer. The cap bounds the weight of a single token.
    """
    weights: NDArray[np.float32] = np.exp(np.minimum(trainer - sampler, np.log(np.float32(cap))))
    return weights


def kl_penalty(policy: Logprobs, reference: Logprobs, coefficient: float) -> NDArray[np.float32]:
    """[n] what to add to the advantages: -coefficient · (log p - log p_reference), minus its mean over the batch.

    Without its mean, the penalty moves probability from token to token and does not punish sampling as such.
    """
    gap = policy - reference
    return (-coefficient * (gap - gap.mean())).astype(np.float32) if len(gap) else gap


def kl(sampler: Logprobs, other: Logprobs) -> float:
    """KL(sampler ‖ other), estimated on the sampler's tokens: the mean of r - 1 - log r, r = p_other / p_sampler.

    It is never negative. This is "k3" in Schulman's note on approximating KL divergence.
    """
    if not len(sampler):
        return 0.0
    log_ratio = np.asarray(other - sampler, dtype=np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


@dataclass(frozen=True)
class WeightedSample:
    """A sample with the advantages of its tokens."""

    sample: TrainingSample
    advantages: NDArray[np.float32]
    """[r] over the response; 0.0 where nothing was sampled."""
    logprobs: NDArray[np.float32]
    """[r] what the loss compares with: the sampler's logprobs, or the trainer's before the step."""


def policy_datum(weighted: WeightedSample, loss: PolicyLoss, scale: float) -> tinker.Datum:
    """A datum for the losses that take advantages; `scale` multiplies them."""
    if loss == "stable_reinforce":
        return _datum_with_provenance(weighted, scale)
    inputs = {
        "target_tokens": _targets(weighted.sample),
        "logprobs": _over_positions(weighted.sample, weighted.logprobs),
        "advantages": _over_positions(weighted.sample, weighted.advantages * np.float32(scale)),
    }
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = _over_positions(weighted.sample, weighted.sample.loss_mask)
    return _datum(weighted.sample, inputs)


def _datum_with_provenance(weighted: WeightedSample, scale: float) -> tinker.Datum:
    """A datum that names the prompt or answer of each token, up to the last sampled one.

    It holds no logprobs: the server has them.
    """
    sample, spans, at = weighted.sample, Spans(), 0
    for name, start, stop in sample.answers:
        spans += [
            tinker.types.PromptProvenanceSpan(sequence_id=name, offset=at, length=start - at),
            tinker.types.SampledProvenanceSpan(sequence_id=name, length=stop - start),
        ]
        at = stop
    advantages = _over_positions(sample, weighted.advantages * np.float32(scale)).to_numpy()[: at - 1]
    inputs = {
        "target_tokens": TensorData.from_numpy(sample.sequence.ids[1:at].astype(np.int64)),
        "advantages": TensorData.from_numpy(advantages),
    }
    datum = tinker.Datum(model_input=sample.sequence.head(at - 1).model_input, loss_fn_inputs=inputs)
    last, first = spans[-1], spans[0]
    return datum.with_provenance(
        [*spans[:-1], replace(last, length=last.length - 1)],
        [replace(first, offset=first.offset + 1, length=first.length - 1), *spans[1:]],
    )


def likelihood_datum(sample: TrainingSample, scale: float = 1.0) -> tinker.Datum:
    """A datum for `cross_entropy`, in which every sampled token has the weight `scale`."""
    weights = _over_positions(sample, sample.loss_mask * np.float32(scale))
    return _datum(sample, {"target_tokens": _targets(sample), "weights": weights})


def response_logprobs(
    output: tinker.ForwardBackwardOutput, samples: Sequence[TrainingSample]
) -> list[NDArray[np.float32]]:
    """[r] for each sample: the trainer's logprobs of the response, from the server's output for the samples' datums.

    0.0 for tokens at its end that the datum leaves out, which nobody sampled.
    """
    responses = []
    for entry, sample in zip(output.loss_fn_outputs, samples, strict=True):
        computed = entry["logprobs"].to_numpy()[sample.prompt_length - 1 :]
        responses.append(np.pad(computed.astype(np.float32), (0, len(sample.loss_mask) - len(computed))))
    return responses


def scales(samples: Sequence[TrainingSample], kind: LossScale) -> list[float]:
    """A factor for each sample's advantages. The server's losses are sums over tokens, so a mean is made here.

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


def _datum(sample: TrainingSample, inputs: dict[str, TensorData]) -> tinker.Datum:
    return tinker.Datum(model_input=sample.sequence.head(len(sample.sequence) - 1).model_input, loss_fn_inputs=inputs)


def _targets(sample: TrainingSample) -> TensorData:
    return TensorData.from_numpy(sample.sequence.ids[1:].astype(np.int64))  # [n - 1]


def _over_positions(sample: TrainingSample, values: NDArray[np.float32] | NDArray[np.bool_]) -> TensorData:
    """[n - 1] from [r]: values of the response, at the positions that predict it; 0.0 before."""
    positions = np.zeros(len(sample.sequence) - 1, dtype=np.float32)
    positions[len(positions) - len(values) :] = values
    return TensorData.from_numpy(positions)
