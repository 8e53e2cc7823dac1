"""Learns on the server: supervised steps on demonstrations first, then optimizer steps on batches of groups."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise

import numpy as np
import tinker
from numpy.typing import NDArray

from tinsmith_rl.calls import FailureCounter
from tinsmith_rl.config import TrainingSection, WarmupSection
from tinsmith_rl.datums import (
    WeightedSample,
    advantages,
    importance_weights,
    kl,
    kl_penalty,
    likelihood_datum,
    policy_datum,
    response_logprobs,
    scales,
)
from tinsmith_rl.env import Prompt
from tinsmith_rl.episode_files import Learned, Lessons
from tinsmith_rl.groups import Group
from tinsmith_rl.metrics import Metrics
from tinsmith_rl.rollouts import EnvRollouts, task_group
from tinsmith_rl.trajectory import EpisodeId, TrainingSample, Trajectory

log = logging.getLogger(__name__)

REPLAYED = "tinsmith_replay/tokens:mean"
"""Metric of a Tinsmith server: the share of the tokens that the sampler's experts computed."""
MEASURED = 8
"""Samples of a batch whose experts are also chosen freely, to measure what replay spares."""


async def warm_up(
    client: tinker.TrainingClient, rollouts: EnvRollouts, warmup: WarmupSection, failures: FailureCounter
) -> list[float]:
    """Train on demonstrations, so that a model that knows nothing begins with some reward.

    Returns the loss per token of each step.

    The learning rate falls linearly to zero. Raises TooManyFailuresError; ConfigError if there are no demonstrations.
    """
    losses, cut, played = [], 0, warmup.steps * warmup.episodes
    for step in range(warmup.steps):
        seeds = range(warmup.seed + step * warmup.episodes, warmup.seed + (step + 1) * warmup.episodes)
        async with task_group() as tasks:
            playing = [
                tasks.create_task(rollouts.play(None, Prompt(seed), EpisodeId(rollouts.env, seed))) for seed in seeds
            ]
        demonstrated = [task.result() for task in playing]
        failures.count(demonstrated)
        failures.judge(min_episodes=len(demonstrated))
        cut += sum(trajectory.truncated or trajectory.stop_reason == "max_turns" for trajectory in demonstrated)
        samples = [sample for trajectory in demonstrated if trajectory.usable for sample in trajectory.samples]
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        if not tokens:
            continue
        forward = client.forward_backward(
            [likelihood_datum(sample, 1.0 / tokens) for sample in samples], "cross_entropy"
        )
        rate = warmup.learning_rate * (1 - step / warmup.steps)
        update = client.optim_step(tinker.AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0))
        losses.append(float((await forward).metrics["loss:sum"]))
        await update
    if cut:
        log.warning("warm-up: %d of %d demonstrations were cut at generation: max_turns or max_context", cut, played)
    return losses


@dataclass
class Learner:
    """Turns batches into optimizer steps of `client`'s model; `reference` scores sequences for the KL penalty."""

    client: tinker.TrainingClient
    settings: TrainingSection
    reference: tinker.SamplingClient | None
    replays: bool = False
    """Whether the server has let experts of the sampler compute a batch (router replay)."""

    async def learn(self, groups: Sequence[Group], step: int) -> tuple[Metrics, list[Learned]]:
        """All epochs and substeps of one batch. A substep whose advantages are all zero makes no optimizer step.

        Returns the metrics, and what was learnt of each usable sample, in order.
        """
        metrics: Metrics = {}
        weighted = weighted_samples(groups, self.settings)
        if self.reference is not None:
            weighted, metrics["kl_reference"] = await self._with_kl_penalty(weighted, self.reference)
        if self.settings.tis_cap:
            weighted, corrected = await self._with_importance_weights(weighted)
            metrics |= corrected
        parts = [part for part in _split(weighted, self.settings.substeps) if part]
        scores = dict[int, NDArray[np.float32]]()
        metrics |= await self._optimize(parts * self.settings.epochs, step, scores)
        return metrics, [Learned(each.advantages, scores.get(id(each))) for each in weighted]

    async def _with_kl_penalty(
        self, weighted: list[WeightedSample], reference: tinker.SamplingClient
    ) -> tuple[list[WeightedSample], float]:
        futures = [reference.compute_logprobs(each.sample.model_input) for each in weighted]
        scores = [
            np.array((await future)[each.sample.prompt_length :], np.float32)
            for future, each in zip(futures, weighted, strict=True)
        ]
        masks = [each.sample.loss_mask for each in weighted]
        policy, other = _masked([each.sample.logprobs for each in weighted], masks), _masked(scores, masks)
        penalties = _unmasked(kl_penalty(policy, other, self.settings.kl_coefficient), masks)
        changed = [
            replace(each, advantages=each.advantages + penalty)
            for each, penalty in zip(weighted, penalties, strict=True)
        ]
        return changed, kl(policy, other)

    async def _with_importance_weights(self, weighted: list[WeightedSample]) -> tuple[list[WeightedSample], Metrics]:
        """Scale advantages by the capped ratio trainer / sampler; the loss then compares to the trainer's logprobs."""
        samples = [each.sample for each in weighted]
        scores = await self._trainer_logprobs(samples)
        masks = [sample.loss_mask for sample in samples]
        trainer, sampler = _masked(scores, masks), _masked([sample.logprobs for sample in samples], masks)
        ratios = importance_weights(trainer, sampler, self.settings.tis_cap)
        corrected = [
            replace(
                each,
                advantages=each.advantages * np.where(mask, ratio, 1.0),
                logprobs=np.where(mask, score, 0.0).astype(np.float32),
            )
            for each, ratio, score, mask in zip(weighted, _unmasked(ratios, masks), scores, masks, strict=True)
        ]
        capped = float(np.mean(ratios >= np.float32(self.settings.tis_cap))) if len(ratios) else 0.0
        return corrected, {"tis_weight": float(ratios.mean()) if len(ratios) else 1.0, "tis_capped": capped}

    async def _optimize(
        self, parts: Sequence[Sequence[WeightedSample]], step: int, scores: dict[int, NDArray[np.float32]]
    ) -> Metrics:
        """An optimizer step for each part. All requests are sent before the first result is awaited.

        Samples whose advantages are all zero add nothing to a gradient and are not sent. The trainer's first logprobs
        of each sample go to `scores`, by its `id`.
        """
        settings = self.settings
        scaled = [
            list(zip(part, scales([each.sample for each in part], settings.loss_scale), strict=True)) for part in parts
        ]
        useful = [[(each, factor) for each, factor in part if each.advantages.any()] for part in scaled]
        first = next(filter(None, useful), None)
        free = None if first is None or not self.replays else self._send_free(first)
        sent = [(part, *self._send(part, step)) for part in useful if part]
        metrics: Metrics = {
            "learning_rate": self._learning_rate(step),
            "optimizer_steps": float(len(sent)),
            "loss": 0.0,
        }
        for number, (part, forward, update) in enumerate(sent):
            output, updated = await forward, await update
            metrics["loss"] += float(output.metrics["loss:sum"]) / len(sent)
            metrics |= {f"optimizer/{name}": float(value) for name, value in (updated.metrics or {}).items()}
            samples = [each.sample for each, _ in part]
            computed = response_logprobs(output, samples)
            for (each, _), logprobs in zip(part, computed, strict=True):
                scores.setdefault(id(each), logprobs)
            if number == 0:  # later parts are computed with weights that the sampler did not have
                metrics |= _gap_to_sampler(samples, computed)
                if REPLAYED in output.metrics:
                    metrics["replayed_tokens"] = float(output.metrics[REPLAYED])
                    self.replays = metrics["replayed_tokens"] > 0
        if free is not None:
            samples, output = free[0], await free[1]
            gap = _gap_to_sampler(samples, response_logprobs(output, samples))
            metrics |= {f"{name}_free": value for name, value in gap.items()}
        if not sent:  # there is no output to compare the sampler with
            everyone = [each for each, _ in chain(*scaled)]
            samples = [each.sample for each in everyone]
            computed = await self._trainer_logprobs(samples)
            scores |= {id(each): logprobs for each, logprobs in zip(everyone, computed, strict=True)}
            metrics |= _gap_to_sampler(samples, computed)
        return metrics

    async def _trainer_logprobs(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """[r] for each sample: the trainer's logprobs of the response.

        The loss, which is 0, compares with the sampler, as do the losses that train: only then experts are replayed.
        """
        if not samples:
            return []
        unweighted = [
            WeightedSample(sample, np.zeros(len(sample.loss_mask), np.float32), sample.logprobs) for sample in samples
        ]
        data = [policy_datum(each, "importance_sampling", 1.0) for each in unweighted]
        return response_logprobs(await self.client.forward(data, "importance_sampling"), samples)

    def _send_free(
        self, part: Sequence[tuple[WeightedSample, float]]
    ) -> "tuple[list[TrainingSample], tinker.APIFuture[tinker.ForwardBackwardOutput]]":
        """Let routers choose the experts of a few samples, to measure what replay spares."""
        samples = [each.sample for each, _ in part[:MEASURED]]
        return samples, self.client.forward([likelihood_datum(sample) for sample in samples], "cross_entropy")

    def _send(
        self, part: Sequence[tuple[WeightedSample, float]], step: int
    ) -> "tuple[tinker.APIFuture[tinker.ForwardBackwardOutput], tinker.APIFuture[tinker.OptimStepResponse]]":
        settings = self.settings
        data = [policy_datum(each, settings.loss, factor) for each, factor in part]
        forward = self.client.forward_backward(data, settings.loss, settings.loss_options or None)
        adam = tinker.AdamParams(
            learning_rate=self._learning_rate(step),
            eps=1e-8,
            weight_decay=settings.weight_decay,
            grad_clip_norm=settings.grad_clip_norm,
        )
        return forward, self.client.optim_step(adam)

    def _learning_rate(self, step: int) -> float:
        settings = self.settings
        rising = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        falling = 1.0 - step / settings.steps if settings.decay == "linear" else 1.0
        return settings.learning_rate * rising * falling


def weighted_samples(groups: Sequence[Group], settings: TrainingSection) -> list[WeightedSample]:
    """Every usable sample with the advantage of its trajectory, which all samples of a trajectory share.

    Overlong filtering takes truncated trajectories out of the loss mask; their rewards still count in their group.
    """
    rewards = [[trajectory.reward for trajectory in group.usable] for group in groups]
    weighted = []
    for group, values in zip(groups, advantages(settings.advantages, rewards), strict=True):
        for trajectory, value in zip(group.usable, values, strict=True):
            kept = not (settings.overlong_filtering and trajectory.truncated)
            for sample in trajectory.samples:
                filtered = replace(sample, loss_mask=sample.loss_mask & kept)
                weighted.append(
                    WeightedSample(filtered, (filtered.loss_mask * value).astype(np.float32), sample.logprobs)
                )
    return weighted


def by_place(trajectories: Sequence[Trajectory], lessons: Sequence[Learned]) -> Lessons:
    """The result of `learn`, by the place of the trajectory among all."""
    left = iter(lessons)
    return {
        place: list(islice(left, len(trajectory.samples)))
        for place, trajectory in enumerate(trajectories)
        if trajectory.usable
    }


def _gap_to_sampler(samples: Sequence[TrainingSample], scores: Sequence[NDArray[np.float32]]) -> Metrics:
    masks = [sample.loss_mask for sample in samples]
    sampler, trainer = _masked([sample.logprobs for sample in samples], masks), _masked(scores, masks)
    furthest = float(np.abs(sampler - trainer).max()) if len(sampler) else 0.0
    return {"kl_sampler_trainer": kl(sampler, trainer), "gap_sampler_trainer": furthest}


def _split(weighted: Sequence[WeightedSample], parts: int) -> list[Sequence[WeightedSample]]:
    """`parts` pieces of nearly equal length, in order."""
    edges = [len(weighted) * part // parts for part in range(parts + 1)]
    return [weighted[start:stop] for start, stop in pairwise(edges)]


def _masked(values: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float32]:
    """[tokens] the values of the sampled tokens of all samples, from [r] for each sample."""
    return np.concatenate(
        [np.zeros(0, dtype=np.float32), *(value[mask] for value, mask in zip(values, masks, strict=True))]
    )


def _unmasked(values: NDArray[np.float32], masks: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.float32]]:
    """The inverse of `_masked`: an array [r] for each sample, 0.0 where nothing was sampled."""
    spread, at = [], 0
    for mask in masks:
        count = int(mask.sum())
        response = np.zeros(len(mask), dtype=np.float32)
        response[mask] = values[at : at + count]
        spread.append(response)
        at += count
    return spread
