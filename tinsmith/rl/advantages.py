"""Rewards of groups -> one advantage for each trajectory. A group is several episodes of one prompt."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tinsmith.rl.config import AdvantageKind

EPSILON = 1e-6
"""Keeps a division by a tiny deviation finite. Groups of exactly one reward never come to it."""


def advantages(kind: AdvantageKind, groups: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    """One array [g] for each group of g rewards. A group in which all rewards are equal gets exact zeros, and with "batch" a batch.

    grpo: (r - mean) / (standard deviation), both of the group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    rloo: r - mean of the group's other rewards (Ahmadian et al., arXiv 2402.14740).
    reinforce_pp: r - mean of the group, then divided by the standard deviation over the batch (REINFORCE++-baseline, arXiv 2501.03262).
    batch: r - mean of the batch, divided by the standard deviation over it: groups may be single episodes, of as many prompts.
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
            whole = np.concatenate([*centred, np.zeros(0)])
            return [group / (whole.std() + EPSILON) for group in centred] if len(whole) else centred


def _over_batch(groups: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    sizes = [len(group) for group in groups]
    centred = _centred(np.array([reward for group in groups for reward in group], dtype=np.float64))
    whole = centred / (centred.std() + EPSILON) if len(centred) else centred
    return np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []


def has_variance(rewards: Sequence[float]) -> bool:
    """Whether a group teaches anything: its rewards are not all exactly the same number."""
    return len(set(rewards)) > 1


def _centred(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    # The mean of equal numbers may differ from them in the last bit, which a division by the deviation would blow up.
    if not has_variance(rewards.tolist()):
        return np.zeros_like(rewards)
    centred: NDArray[np.float64] = rewards - rewards.mean()
    return centred
