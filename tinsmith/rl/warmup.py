"""Supervised steps on demonstrations, so that a model that knows nothing begins with some reward."""

import numpy as np
import tinker

from tinsmith.errors import ConfigError
from tinsmith.rl import registry
from tinsmith.rl.assemble import assemble
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import EnvSection, WarmupSection
from tinsmith.rl.conversation import Conversation
from tinsmith.rl.datums import likelihood_datum
from tinsmith.rl.env import Prompt, Teacher
from tinsmith.rl.trajectory import Sample, Turn


def warm_up(client: tinker.TrainingClient, env: EnvSection, warmup: WarmupSection, template: ChatTemplate) -> list[float]:
    """The loss per token of each step; the learning rate falls to zero. Raises ConfigError if the environment cannot demonstrate."""
    losses = []
    for step in range(warmup.steps):
        first = warmup.seed + step * warmup.episodes
        samples = [s for seed in range(first, first + warmup.episodes) for s in demonstration(env, Prompt(seed), template, warmup.thought)]
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        forward = client.forward_backward([likelihood_datum(sample, 1.0 / tokens) for sample in samples], "cross_entropy")
        rate = warmup.learning_rate * (1 - step / warmup.steps)
        update = client.optim_step(tinker.AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0))
        losses.append(float(forward.result().metrics["loss:sum"]))
        update.result()
    return losses


def demonstration(env: EnvSection, prompt: Prompt, template: ChatTemplate, thought: str) -> tuple[Sample, ...]:
    """An episode as the environment itself would play it; `thought` stands before every answer. Raises ConfigError if it cannot."""
    player = registry.make(env.name, **env.options)
    if not isinstance(player, Teacher):
        raise ConfigError(f"warmup: steps: the environment {env.name!r} has no demonstrations; it would have to be a Teacher")
    messages, _ = player.init(prompt)
    conversation, turns, done = Conversation(template, messages), [], False
    while not done:
        text = thought + player.demonstrate()
        said = np.array([*template.ids(text), *template.end_of_turn_ids], dtype=np.int32)
        observations, reward, done, _ = player.step(text)
        turns.append(Turn(conversation.prompt, said, np.zeros(len(said), dtype=np.float32), reward))
        if not done:
            conversation.extend(said, True, observations)
    player.close()
    return assemble(turns)
