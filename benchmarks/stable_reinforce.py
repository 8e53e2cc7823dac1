"""Rewards of stable_reinforce, importance_sampling and ppo in asynchronous RL on samples that are `LAG` steps old.

A tiny model learns to sort four of eight symbols, through SDK and server; the reward is the share of right places. A
short supervised warm-up, the same for all, leaves much to learn. In each step weights are published, a batch of samples
begins with them, and the batch that began `LAG` steps ago is trained on while the newer ones are sampled. All losses
get the same prompts, sampling seeds, learning rate and staleness, three times with other seeds. No gradient clipping.

Run it with: taskset -c 0,1 nice -n 10 python -m benchmarks.stable_reinforce
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from benchmarks.servers import API_KEY, BASE_MODEL, tinsmith_server
from benchmarks.timing import report
from tests.acceptance.talking import with_inputs

Loss = Literal["stable_reinforce", "importance_sampling", "ppo"]
LOSSES: tuple[Loss, ...] = ("stable_reinforce", "importance_sampling", "ppo")
SEEDS = (0, 1, 2)

LAG = 8
"""How many steps older than the weights in training those are that sampled what is trained on."""
STEPS = 90
PROMPTS, GROUP = 16, 8
"""Prompts of a batch, and samples of each."""
SYMBOLS, LENGTH = 8, 4
WARM_UP = 25
LEARNING_RATE = 2e-3
TAIL = 10
"""Batches at the end whose mean reward is the result."""

_FIRST, _SEPARATOR = 100, 90
"""Token ids of the first symbol, and of what stands between a prompt's symbols and the answer."""


@dataclass(frozen=True)
class Batch:
    """Prompts [PROMPTS, LENGTH] and what answers them."""

    prompts: NDArray[np.int64]
    replies: list[tinker.APIFuture[types.SampleResponse]]


@dataclass
class Curve:
    """What a run did, step by step."""

    rewards: list[float] = field(default_factory=list)
    """Mean over the batch that was sampled with the weights of the step."""
    norms: list[float] = field(default_factory=list)
    """Of the gradients."""

    @property
    def final(self) -> float:
        """Mean reward of the last `TAIL` batches."""
        return statistics.mean(self.rewards[-TAIL:])

    @property
    def fall(self) -> float:
        """How far the reward fell at worst from the best of five-step means to a later one."""
        smooth = np.convolve(self.rewards, np.ones(5) / 5, mode="valid")
        return float((np.maximum.accumulate(smooth) - smooth).max())


def draw_prompts(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    """[count, LENGTH] symbols as token ids."""
    return generator.integers(_FIRST, _FIRST + SYMBOLS, (count, LENGTH))


def model_input(prompt: NDArray[np.int64]) -> types.ModelInput:
    """A prompt as the model gets it."""
    return types.ModelInput.from_ints([*prompt.tolist(), _SEPARATOR])


def warm_up(client: tinker.TrainingClient, generator: np.random.Generator) -> None:
    """Supervised steps on right answers."""
    for _ in range(WARM_UP):
        data = []
        for prompt in draw_prompts(generator, 32):
            tokens = [*prompt.tolist(), _SEPARATOR, *np.sort(prompt).tolist()]
            weights = [0.0] * LENGTH + [1.0 / LENGTH / 32] * LENGTH
            data.append(with_inputs(types.ModelInput.from_ints(tokens[:-1]), target_tokens=tokens[1:], weights=weights))
        steps = (
            client.forward_backward(data, "cross_entropy"),
            client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)),
        )
        for step in steps:
            step.result()


def begin_batch(client: tinker.TrainingClient, loss: Loss, generator: np.random.Generator, number: int) -> Batch:
    """Publish the weights as they are, and begin to sample with them."""
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=loss == "stable_reinforce").result()
    prompts = draw_prompts(generator, PROMPTS)
    params = [types.SamplingParams(max_tokens=LENGTH, stop=[], seed=1000 * number + i) for i in range(PROMPTS)]
    return Batch(prompts, [sampler.sample(model_input(p), GROUP, s) for p, s in zip(prompts, params, strict=True)])


def graded(batch: Batch, loss: Loss) -> tuple[float, list[types.Datum]]:
    """The mean reward of a batch, and its datums; the advantage is the reward minus the group's mean."""
    rewards, data = [], []
    for prompt, reply in zip(batch.prompts, batch.replies, strict=True):
        sequences = reply.result().sequences
        group = [float(np.mean(np.array(sequence.tokens) == np.sort(prompt))) for sequence in sequences]
        rewards += group
        for sequence, reward in zip(sequences, group, strict=True):
            advantage = (reward - statistics.mean(group)) / (PROMPTS * GROUP)
            data.append(policy_datum(prompt, sequence, advantage, loss))
    return statistics.mean(rewards), data


def policy_datum(
    prompt: NDArray[np.int64], sequence: types.SampledSequence, advantage: float, loss: Loss
) -> types.Datum:
    """A datum as the cookbook's rl_loop makes it."""
    datum = with_inputs(
        types.ModelInput.from_ints([*prompt.tolist(), _SEPARATOR, *sequence.tokens[:-1]]),
        target_tokens=[*prompt[1:].tolist(), _SEPARATOR, *sequence.tokens],
        logprobs=[0.0] * LENGTH + (sequence.logprobs or []),
        advantages=[0.0] * LENGTH + [advantage] * LENGTH,
    )
    if loss != "stable_reinforce":
        return datum
    name = sequence.sequence_id
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=LENGTH + 1),
            types.SampledProvenanceSpan(sequence_id=name, length=LENGTH - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=LENGTH),
            types.SampledProvenanceSpan(sequence_id=name, length=LENGTH),
        ],
    )


def run(url: str, loss: Loss, seed: int) -> Curve:
    """One run."""
    curve, batches = Curve(), deque[Batch]()
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        client: tinker.TrainingClient = service.create_lora_training_client(
            base_model=BASE_MODEL, rank=16, seed=seed
        ).result()
        generator = np.random.default_rng(seed)
        warm_up(client, generator)
        for number in range(STEPS + LAG):
            batches.append(begin_batch(client, loss, generator, number + 10_000 * seed))
            if len(batches) <= LAG:
                continue
            reward, data = graded(batches.popleft(), loss)
            curve.rewards.append(reward)
            steps = (
                client.forward_backward(data, loss),
                client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8)),
            )
            steps[0].result()
            curve.norms.append((steps[1].result().metrics or {})["grad_norm"])
        curve.rewards += [graded(batch, loss)[0] for batch in batches]
    return curve


def main() -> None:
    """Measure and print a line for each loss."""
    with tinsmith_server() as url:
        for loss in LOSSES:
            started = time.perf_counter()
            curves = [run(url, loss, seed) for seed in SEEDS]
            report(
                f"reward_with_{loss}",
                statistics.mean(curve.final for curve in curves),
                "higher is better",
                first=statistics.mean(curve.rewards[0] for curve in curves),
                worst_seed=min(curve.final for curve in curves),
                largest_fall=max(curve.fall for curve in curves),
                largest_norm=max(max(curve.norms) for curve in curves),
                seconds=time.perf_counter() - started,
            )
            for seed, curve in zip(SEEDS, curves, strict=True):
                means = [statistics.mean(curve.rewards[i : i + TAIL]) for i in range(0, len(curve.rewards), TAIL)]
                print(f"  seed {seed}, mean of each {TAIL} batches:", *(f"{mean:.2f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
