"""The Tinker Cookbook's environments and policies as ours, and ours as its.

Its environments speak tokens (`Env.initial_observation`, `Env.step(tokens)`) and are played by its policies (`TokenCompleter`); ours speak
messages. So its environments come over as whole episodes, which `CookbookPlayer` plays to trajectories of ours, and ours go over with their
chat template in `CookbookEnv` and `CookbookEnvGroupBuilder`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.types import Env as TheirEnv
from tinker_cookbook.rl.types import EnvGroupBuilder, InitialObservationOverflow, StepResult

from tinsmith.errors import UserError
from tinsmith.rl import registry
from tinsmith.rl.assemble import assemble
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.conversation import Conversation
from tinsmith.rl.env import Prompt
from tinsmith.rl.pictures import Picture
from tinsmith.rl.policy import Answer, Policy, Request
from tinsmith.rl.stream import PlacedPicture, TokenStream, join, text_stream
from tinsmith.rl.trajectory import Origin, Trajectory, Turn


class PolicyOfCompleter:
    """One of the cookbook's policies as ours."""

    def __init__(self, completer: TokenCompleter, stop: Sequence[int]) -> None:
        self.completer, self.stop = completer, list(stop)

    async def answer(self, prompt: tinker.ModelInput, request: Request) -> Answer:
        """One answer; temperature, top_p and seed are the completer's own."""
        made = await self.completer(prompt, list(request.stop) or self.stop, max_tokens=request.max_tokens)
        return Answer(np.array(made.tokens, np.int32), np.array(made.logprobs, np.float32), made.stop_reason == "stop")


class CompleterOfPolicy(TokenCompleter):
    """One of our policies for the cookbook's rollouts."""

    def __init__(self, policy: Policy, request: Request) -> None:
        self.policy, self.request = policy, request

    async def __call__(self, model_input: tinker.ModelInput, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        """One answer. Stop strings are passed on; token ids are the model's own end, which ends every answer."""
        texts = tuple(text for text in stop if isinstance(text, str))
        limit = min(self.request.max_tokens, max_tokens or self.request.max_tokens)
        answer = await self.policy.answer(model_input, Request(**{**vars(self.request), "max_tokens": limit, "stop": texts}))
        return TokensWithLogprobs(answer.tokens.tolist(), answer.logprobs.tolist(), "stop" if answer.stopped else "length")


class CookbookEnv(TheirEnv):
    """One of our environments, with its chat template, for the cookbook's rollouts: plays one episode of `prompt`."""

    def __init__(self, name: str, options: dict[str, Any], prompt: Prompt, template: ChatTemplate) -> None:
        self.env = registry.make(name, **options)
        self.prompt, self.template = prompt, template

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        """The first prompt and the tokens that end an answer."""
        messages, _ = self.env.init(self.prompt)
        self.conversation = Conversation(self.template, messages)
        return self.conversation.prompt.model_input, sorted(self.template.stop_ids)

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        """The environment's answer to sampled tokens."""
        sampled = np.array(action, np.int32)
        stopped = (extra or {}).get("stop_reason", "stop") == "stop"
        observations, reward, done, _ = self.env.step(self.conversation.text_of(sampled))
        done = done or not stopped
        if not done:
            self.conversation.extend(sampled, stopped, observations)
        metrics = self.env.metrics() if done else {}
        if done:
            self.env.close()
        after = tinker.ModelInput.empty() if done else self.conversation.prompt.model_input
        return StepResult(reward, done, after, sorted(self.template.stop_ids), metrics=metrics)


class CookbookEnvGroupBuilder(EnvGroupBuilder):
    """A group of episodes of one prompt."""

    def __init__(self, name: str, options: dict[str, Any], prompt: Prompt, template: ChatTemplate, group_size: int) -> None:
        self.name, self.options, self.prompt, self.template, self.group_size = name, options, prompt, template, group_size

    async def make_envs(self) -> Sequence[TheirEnv]:
        """As many environments as the group has episodes."""
        return [CookbookEnv(self.name, self.options, self.prompt, self.template) for _ in range(self.group_size)]


async def play_group(
    builder: EnvGroupBuilder, policy: Policy, request: Request, template: ChatTemplate, origin: Origin
) -> tuple[Trajectory, ...]:
    """The episodes of one of the cookbook's groups, as trajectories of ours; the group's rewards are on the last sampled tokens."""
    envs = await builder.make_envs()
    episodes = [await _episode(env, policy, request, template) for env in envs]
    return tuple(
        Trajectory(Origin(origin.env, origin.seed, origin.group, member, origin.version), assemble(turns), "done", len(turns), metrics)
        for member, (turns, metrics) in enumerate(episodes)
    )


async def _episode(env: TheirEnv, policy: Policy, request: Request, template: ChatTemplate) -> tuple[list[Turn], dict[str, float]]:
    opening = await env.initial_observation()
    if isinstance(opening, InitialObservationOverflow):
        return [], {}
    prompt, stop = opening
    turns: list[Turn] = []
    metrics: dict[str, float] = {}
    done = False
    while not done:
        texts = tuple(text for text in stop if isinstance(text, str))
        answer = await policy.answer(prompt, Request(**{**vars(request), "stop": texts}))
        result = await env.step(answer.tokens.tolist(), extra={"stop_reason": "stop" if answer.stopped else "length"})
        turns.append(Turn(stream_of(prompt, template), answer.tokens, answer.logprobs, result.reward))
        metrics |= {name: float(value) for name, value in result.metrics.items()}
        done, prompt, stop = result.episode_done, result.next_observation, result.next_stop_condition
    return turns, metrics


def stream_of(model_input: tinker.ModelInput, template: ChatTemplate) -> TokenStream:
    """A ModelInput as a stream; pictures need their `expected_tokens`."""
    parts = []
    for chunk in model_input.chunks:
        if isinstance(chunk, tinker.types.ImageChunk):
            placeholder = template.processor.placeholder_id if template.processor is not None else 0
            picture = Picture(chunk.data, chunk.format, chunk.length)
            parts.append(TokenStream(np.full(chunk.length, placeholder, np.int32), (PlacedPicture(0, picture),)))
        elif isinstance(chunk, tinker.EncodedTextChunk):
            parts.append(text_stream(chunk.tokens))
        else:
            raise UserError(f"a chunk of type {chunk.type!r} has no place in a conversation; text and images do")
    return join(parts)
