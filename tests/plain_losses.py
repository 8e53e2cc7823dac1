"""The policy losses as the Tinker documentation writes them, in a few lines of plain torch, to compare ours with."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Formula = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
"""(logprobs, inputs, settings) -> scalar loss. All shapes [N]."""


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    return -(torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    return _smaller(torch.exp(logprobs - inputs["logprobs"]), inputs["advantages"], config)


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(logprobs - inputs["logprobs"])
    return -(_clip(ratio, config).detach() * logprobs * inputs["advantages"]).sum()


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    total = torch.zeros((), dtype=logprobs.dtype)
    for i in range(len(logprobs)):
        advantage, sampled = inputs["advantages"][i], inputs["logprobs"][i]
        given = [inputs[name][i] for name in ("mask", "weights") if name in inputs]
        is_prompt = 0 in given if given else advantage == 0 and sampled == 0
        if not is_prompt:
            total = total - (logprobs[i] * advantage - 0.5 * config["beta"] * (logprobs[i] - sampled) ** 2)
    return total


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    marked = inputs["sequence_ratio_mask"] != 0
    ratio = torch.exp((logprobs.detach() - inputs["logprobs"])[marked].mean())
    return _smaller(ratio * torch.exp(logprobs - logprobs.detach()), inputs["advantages"], config)


def stable_reinforce(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Not of the documentation: Tinsmith's own, as docs/losses.md has it."""
    sampled = [i for i in range(len(logprobs)) if inputs["sequence_ratio_mask"][i] != 0]
    gaps = [float(logprobs[i].detach() - inputs["logprobs"][i]) for i in sampled]
    drift = (sum(min(abs(gap), 1.0) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    trust = 1.0 if drift <= 0.2 else 0.2 / drift
    total = torch.zeros((), dtype=logprobs.dtype)
    for i, gap in zip(sampled, gaps, strict=True):
        moved = (inputs["advantages"][i] > 0 and gap > math.log(1.5)) or (
            inputs["advantages"][i] < 0 and gap < -math.log(1.5)
        )
        weight = 0.0 if moved else trust * (2.0 if gap > math.log(2.0) else math.exp(gap))
        total = total - weight * inputs["advantages"][i] * torch.exp(logprobs[i] - logprobs[i].detach())
        total = total + config["kl_coeff"] * torch.nn.functional.huber_loss(
            logprobs[i], inputs["logprobs"][i], reduction="sum"
        )
    return total


def _clip(ratio: Tensor, config: Mapping[str, float]) -> Tensor:
    return torch.clamp(ratio, config["clip_low_threshold"], config["clip_high_threshold"])


def _smaller(ratio: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    return -torch.min(ratio * advantages, _clip(ratio, config) * advantages).sum()


FORMULAS: dict[str, Formula] = {f.__name__: f for f in (importance_sampling, ppo, cispo, dro, gspo, stable_reinforce)}

DEFAULTS: dict[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "stable_reinforce": {"kl_coeff": 0.0},
}
"""Settings where a client sends none."""
