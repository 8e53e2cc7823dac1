"""What is logged of a batch of trajectories, under names that mean the same in training and evaluation."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tinsmith.rl.advantages import has_variance
from tinsmith.rl.trajectory import STOP_REASONS, Trajectory

Metrics = dict[str, float]


def trajectory_metrics(groups: Sequence[Sequence[Trajectory]]) -> Metrics:
    """Rewards, lengths, endings, the sampler's entropy, and the environment's own metrics under `env/`.

    Means are over usable trajectories, endings over all. The entropy is estimated by the mean of -logprob of what was sampled.
    """
    everyone = [trajectory for group in groups for trajectory in group]
    usable = [trajectory for trajectory in everyone if trajectory.usable]
    rewards = [[trajectory.reward for trajectory in group if trajectory.usable] for group in groups]
    samples = [sample for trajectory in usable for sample in trajectory.samples]
    sampled = [sample.logprobs[sample.loss_mask] for sample in samples]
    logprobs = np.concatenate([np.zeros(0, dtype=np.float32), *sampled])
    endings = Counter(trajectory.stop_reason for trajectory in everyone)
    return {
        **_reward([trajectory.reward for trajectory in usable]),
        "trajectories": float(len(everyone)),
        "dropped": float(len(everyone) - len(usable)),
        "turns": _mean([trajectory.turns for trajectory in usable]),
        "response_tokens": _mean([trajectory.sampled_tokens for trajectory in usable]),
        "samples_per_trajectory": _mean([len(trajectory.samples) for trajectory in usable]),
        "truncated": _mean([trajectory.truncated for trajectory in everyone]),
        "entropy": float(-logprobs.mean()) if len(logprobs) else 0.0,
        "zero_variance_groups": _mean([not has_variance(group) for group in rewards]),
        "tokens/sampled": float(len(logprobs)),
        "tokens/sequence": float(sum(len(sample.stream) for sample in samples)),
        **{f"stop/{reason}": endings[reason] / max(len(everyone), 1) for reason in STOP_REASONS},
        **_env_metrics([trajectory.metrics for trajectory in usable]),
        **_seconds(everyone),
    }


def _reward(rewards: Sequence[float]) -> Metrics:
    """Nothing where no trajectory is usable: 0.0 would look like a reward."""
    return {"reward": _mean(rewards), "reward_std": float(np.std(rewards))} if rewards else {}


def succeeded(reward: float, wanted: float) -> bool:
    """Whether an episode counts as a success. Rewards of several turns may miss the sum that is meant by a rounding."""
    return reward > wanted or math.isclose(reward, wanted, rel_tol=1e-9, abs_tol=1e-9)


def pass_at_k(successes: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over prompts of the chance that one of k attempts succeeds.

    Estimated without bias from n >= k attempts with c successes: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374).
    """
    return _mean([_pass_at_k(len(attempts), sum(attempts), k) for attempts in successes])


def _pass_at_k(n: int, c: int, k: int) -> float:
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def _env_metrics(reports: Sequence[Mapping[str, float]]) -> Metrics:
    names = sorted({name for report in reports for name in report})
    return {f"env/{name}": _mean([report[name] for report in reports if name in report]) for name in names}


def _seconds(trajectories: Sequence[Trajectory]) -> Metrics:
    """Mean seconds that a trajectory spent in a stage."""
    stages = sorted({stage for trajectory in trajectories for stage in trajectory.seconds})
    return {f"seconds/{stage}_of_a_trajectory": _mean([t.seconds.get(stage, 0.0) for t in trajectories]) for stage in stages}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
