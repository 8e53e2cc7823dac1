"""Supervised steps on demonstrations, so that a model that knows nothing begins with some reward."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tinker

from tinsmith.errors import ConfigError
from tinsmith.rl import registry
from tinsmith.rl.assemble import assemble
from tinsmith.rl.calls import call
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import EnvSection, WarmupSection
from tinsmith.rl.conversation import Conversation
from tinsmith.rl.datums import likelihood_datum
from tinsmith.rl.env import Message, Prompt, Step, Teacher
from tinsmith.rl.trajectory import Sample, Turn


@dataclass(frozen=True)
class Demonstration:
    """An episode as the environment itself would play it."""

    opening: list[Message]
    turns: list[tuple[str, Step]]
    """What was said, and what the environment made of it."""


def warm_up(
    client: tinker.TrainingClient, env: EnvSection, warmup: WarmupSection, template: ChatTemplate, context_turns: int
) -> list[float]:
    """The loss per token of each step; the learning rate falls to zero. Raises ConfigError if the environment cannot demonstrate.

    `context_turns`: the newest turns that the model will see when it plays; 0 is all.
    """
    losses = []
    with ThreadPoolExecutor(env.worker_count if env.workers != "inline" else 1) as threads:
        for step in range(warmup.steps):
            first = warmup.seed + step * warmup.episodes
            prompts = [Prompt(seed) for seed in range(first, first + warmup.episodes)]
            played = threads.map(lambda prompt: demonstrated(env, prompt, warmup.thought), prompts)
            samples = [sample for demonstration in played for sample in samples_of(demonstration, template, context_turns)]
            tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
            forward = client.forward_backward([likelihood_datum(sample, 1.0 / tokens) for sample in samples], "cross_entropy")
            rate = warmup.learning_rate * (1 - step / warmup.steps)
            update = client.optim_step(tinker.AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0))
            losses.append(float(forward.result().metrics["loss:sum"]))
            update.result()
    return losses


def demonstrated(env: EnvSection, prompt: Prompt, thought: str) -> Demonstration:
    """One episode; `thought` stands before every answer. Raises ConfigError if the environment cannot demonstrate, EnvError if it fails."""
    player = registry.make(env.name, **env.options)
    if not isinstance(player, Teacher):
        raise ConfigError(f"warmup: steps: the environment {env.name!r} has no demonstrations; it would have to be a Teacher")
    opening, _ = call(player, "init", prompt)
    turns: list[tuple[str, Step]] = []
    while not turns or not turns[-1][1].done:
        text = thought + call(player, "demonstrate")
        turns.append((text, call(player, "step", text)))
    call(player, "close")
    return Demonstration(opening, turns)


def samples_of(demonstration: Demonstration, template: ChatTemplate, context_turns: int = 0) -> tuple[Sample, ...]:
    """The training samples of an episode."""
    conversation = Conversation(template, demonstration.opening, context_turns=context_turns)
    turns = []
    for text, step in demonstration.turns:
        said = np.array([*template.ids(text), *template.end_of_turn_ids], dtype=np.int32)
        turns.append(Turn(conversation.prompt, said, np.zeros(len(said), dtype=np.float32), step.reward))
        if not step.done:
            conversation.extend(said, True, step.observations)
    return assemble(turns)
