"""Log-probabilities of two models on the same tokens: how far they are apart, and what is done about it.

All functions take arrays over the sampled tokens of a batch, in nats.
"""

import numpy as np
from numpy.typing import NDArray

Logprobs = NDArray[np.float32]


def importance_weights(trainer: Logprobs, sampler: Logprobs, cap: float) -> NDArray[np.float32]:
    """[n] min(p_trainer / p_sampler, cap): truncated importance sampling (TIS).

    It makes up for a sampler that computes a little differently from the trainer. The cap keeps single tokens from counting without bound.
    """
    weights: NDArray[np.float32] = np.exp(np.minimum(trainer - sampler, np.log(np.float32(cap))))
    return weights


def kl_penalty(policy: Logprobs, reference: Logprobs, coefficient: float) -> NDArray[np.float32]:
    """[n] what to add to the advantages: -coefficient · (log p - log p_reference), less its mean.

    The mean over the batch is taken out, so that the penalty moves probability between tokens and does not punish having sampled at all.
    """
    gap = policy - reference
    return (-coefficient * (gap - gap.mean())).astype(np.float32) if len(gap) else gap


def kl(sampler: Logprobs, other: Logprobs) -> float:
    """Estimate of KL(sampler ‖ other) from the sampler's tokens, never negative: mean of r - 1 - log r with r = p_other / p_sampler.

    It is "k3" in Schulman's note on approximating KL divergence.
    """
    if not len(sampler):
        return 0.0
    log_ratio = np.asarray(other - sampler, dtype=np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))
