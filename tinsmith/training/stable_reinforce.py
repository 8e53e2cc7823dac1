"""The loss stable_reinforce: REINFORCE that stays stable when the policy that sampled is not the policy in training.

Thinking Machines documents what its loss of this name is for, what it takes and how samples are recorded for it, but not its formula. This
formula is Tinsmith's own. With the notation of `losses.py`, d = lp - q, and S the positions that were sampled:

    loss  = -Σ w · A · exp(lp - sg(lp)) + kl_coeff · Σ h(d)                       both sums over S
    w     = sg(trust · min(exp(d), MAX_RATIO)), but 0 where A > 0 and exp(d) > STOP, or A < 0 and exp(d) < 1 / STOP
    trust = min(1, MAX_DRIFT / drift),  drift = sqrt(mean over S of min(|d|, 1)²)
    h(d)  = d² / 2 up to |d| = 1, |d| - 1/2 beyond

- exp(lp - sg(lp)) is 1 and has the gradient of lp, so each token's gradient is that of REINFORCE times w, which lies in [0, MAX_RATIO].
- min(exp(d), MAX_RATIO) is truncated importance sampling (Ionides 2008, doi:10.1198/106186008X320456; as the weight of a policy gradient:
  IMPALA, Espeholt et al. 2018, arXiv:1802.01561, section 4.1). It corrects each token for the policy that sampled it.
- A token stops counting once it has moved by the factor STOP the way that its advantage wants, as in PPO (Schulman et al. 2017,
  arXiv:1707.06347). Without that, samples of old weights push further what newer steps have pushed already.
- trust corrects for the sequence as a whole: a token's ratio says nothing of how unlikely the tokens before it have become. It measures the
  second moment of the log-ratios, as M2PO does (Zheng et al. 2025, arXiv:2510.01161), but takes weight from the sequence instead of masking
  tokens. |d| counts up to 1, so that one token in a long sequence cannot discard it.
- h is the Huber loss of d (Huber 1964), a penalty for moving away from the sampler whose slope is at most 1.

Where no bound is reached, value and gradient are those of importance_sampling, and so they are where sampler and trainer agree.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.training.datum_spans import DatumSpans

MAX_RATIO = 2.0
"""Largest weight of a token."""

STOP = 1.5
"""Factor by which a token's probability may move in its advantage's direction before it is no longer counted."""

MAX_DRIFT = 0.2
"""Largest root mean square of a sequence's log-ratios at which it has its whole weight: about as far as ppo lets a ratio move."""

METRICS = ("tinsmith_stable_reinforce/weight", "tinsmith_stable_reinforce/limited", "tinsmith_stable_reinforce/drift")
"""Metrics of `diagnose`: mean weight of the sampled tokens, share of them limited by `MAX_RATIO` or `STOP`, and drift."""

NOTICE = (
    "loss_fn stable_reinforce: this formula is Tinsmith's own, because Thinking Machines has not published theirs; docs/losses.md has it, "
    "and replies name it in their metrics (tinsmith_stable_reinforce)"
)


def stable_reinforce(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float], spans: DatumSpans) -> Tensor:
    """The loss of each position [positions], as above. S is where the input "sequence_ratio_mask" is not 0. All shapes [positions]."""
    sampled = inputs["sequence_ratio_mask"] != 0
    gap, weights, _ = _weights(logprobs, inputs, sampled, spans)
    moving = (logprobs - logprobs.detach()).masked_fill(logprobs.isinf() | ~sampled, 0.0)  # 0, and the gradient of lp
    loss = -(weights * inputs["advantages"] * moving.exp())
    if config["kl_coeff"]:
        near = gap.clamp(-1.0, 1.0)  # the slope of h
        loss = loss + config["kl_coeff"] * (near * (gap - near / 2) + near * moving)
    return loss


def diagnose(logprobs: Tensor, inputs: Mapping[str, Tensor], spans: DatumSpans) -> Tensor:
    """[3, datums] one number of each datum for each of `METRICS`."""
    sampled = inputs["sequence_ratio_mask"] != 0
    gap, weights, drift = _weights(logprobs, inputs, sampled, spans)
    count = spans.sums(sampled.to(gap.dtype))
    limited = (gap > math.log(MAX_RATIO)) | _has_moved(gap, inputs["advantages"])
    return torch.stack([spans.sums(weights) / count, spans.sums(limited.to(gap.dtype)) / count, drift])


def _weights(logprobs: Tensor, inputs: Mapping[str, Tensor], sampled: Tensor, spans: DatumSpans) -> tuple[Tensor, Tensor, Tensor]:
    """The gaps d and weights w [positions], 0 where nothing was sampled, and the drifts [datums]; without gradients."""
    gap = torch.where(sampled, logprobs.detach() - inputs["logprobs"], 0.0)
    drift = (spans.sums(gap.clamp(-1.0, 1.0).square()) / spans.sums(sampled.to(gap.dtype))).sqrt()
    trust = spans.spread(torch.where(drift > MAX_DRIFT, MAX_DRIFT / drift, torch.ones_like(drift)))
    ratio = gap.clamp(max=math.log(MAX_RATIO)).exp()  # clamped before exp, which float32 could not hold
    return gap, torch.where(sampled & ~_has_moved(gap, inputs["advantages"]), trust * ratio, 0.0), drift


def _has_moved(gap: Tensor, advantages: Tensor) -> Tensor:
    """Return the tokens that have moved by the factor `STOP` the way that their advantage wants [N, bool]."""
    return gap * advantages.sign() > math.log(STOP)
