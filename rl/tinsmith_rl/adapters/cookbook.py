"""Environments and policies of the Tinker Cookbook (0.6) for `tinsmith_rl`, and ours for the cookbook.

The cookbook's environments exchange tokens with its policies (`TokenCompleter`); ours exchange messages. So its
episodes are played by its own rollout code, and `CookbookRollouts` converts them to our trajectories. Ours are offered
to the cookbook together with a chat template, as `CookbookEnv` and `CookbookEnvGroupBuilder`.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Env as TheirEnv
from tinker_cookbook.rl.types import EnvGroupBuilder, StepResult
from tinker_cookbook.rl.types import StopReason as TheirStopReason
from tinker_cookbook.rl.types import Trajectory as TheirTrajectory

from tinsmith_rl.calls import EnvError, call, checked_reward, environment_code
from tinsmith_rl.chat import ChatTemplate, Conversation
from tinsmith_rl.env import Prompt, find, make
from tinsmith_rl.errors import ConfigError, RlError, UserError
from tinsmith_rl.policy import Completion, Policy, PromptRefusedError, SamplingRequest, derived_seed
from tinsmith_rl.rollouts import RolloutSettings, ended_by, task_group
from tinsmith_rl.sequences import EncodedImage, TokenSequence, concatenate, image_sequence, text_sequence
from tinsmith_rl.trajectory import EpisodeId, StopReason, Trajectory, Turn, assemble

T = TypeVar("T")


class PolicyOfCompleter:
    """A policy of the cookbook for our rollouts."""

    def __init__(self, completer: TokenCompleter, stop: Sequence[int]) -> None:
        self.completer, self.stop = completer, list(stop)

    async def complete(self, prompt: tinker.ModelInput, request: SamplingRequest) -> Completion:
        """One answer. The completer decides on temperature, top_p and seed."""
        stop: list[Any] = list(request.stop_ids) or list(request.stop) or self.stop
        answer = await self.completer(prompt, stop, max_tokens=request.max_tokens)
        return Completion(
            np.array(answer.tokens, np.int32), np.array(answer.logprobs, np.float32), answer.stop_reason == "stop"
        )


class CompleterOfPolicy(TokenCompleter):
    """One of our policies for the cookbook's rollouts.

    If the request has a seed, each answer gets another one derived from it.
    """

    def __init__(self, policy: Policy, request: SamplingRequest) -> None:
        self.policy, self.request = policy, request
        self.answers = 0

    async def __call__(
        self, model_input: tinker.ModelInput, stop: Any, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """One answer, which ends at any of `stop`: texts or token ids."""
        number, self.answers = self.answers, self.answers + 1
        request = replace(
            self.request,
            max_tokens=min(self.request.max_tokens, max_tokens or self.request.max_tokens),
            seed=None if self.request.seed is None else derived_seed(self.request.seed, number),
            stop=tuple(end for end in stop if isinstance(end, str)),
            stop_ids=tuple(end for end in stop if isinstance(end, int)),
        )
        answer = await self.policy.complete(model_input, request)
        return TokensWithLogprobs(
            answer.tokens.tolist(), answer.logprobs.tolist(), "stop" if answer.stopped else "length"
        )


class CookbookEnv(TheirEnv):
    """One of our environments for the cookbook's rollouts: one episode of `prompt`, with a chat template."""

    def __init__(self, name: str, options: dict[str, Any], prompt: Prompt, template: ChatTemplate) -> None:
        self.env = make(name, **options)
        self.prompt, self.template = prompt, template

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        """The first prompt, and the tokens that end an answer."""
        messages, _ = await self._call("init", self.prompt)
        self.conversation = Conversation(self.template, messages)
        return self.conversation.prompt.model_input, sorted(self.template.stop_ids)

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        """Pass the sampled tokens to the environment as text, and return its reply as the next prompt."""
        sampled = np.array(action, np.int32)
        stopped = (extra or {}).get("stop_reason", "stop") == "stop"
        observations, reward, done, _ = await self._call("step", self.conversation.text_of(sampled))
        done = done or not stopped
        if not done:
            self.conversation.extend(sampled, stopped, observations)
        metrics = await self._call("metrics") if done else {}
        if done:
            await self._call("close")
        after = tinker.ModelInput.empty() if done else self.conversation.prompt.model_input
        return StepResult(reward, done, after, sorted(self.template.stop_ids), metrics=metrics)

    async def _call(self, method: str, *arguments: Any) -> Any:
        value = call(self.env, method, *arguments)
        return await value if inspect.isawaitable(value) else value


class CookbookEnvGroupBuilder(EnvGroupBuilder):
    """A group of episodes of one prompt, for the cookbook."""

    def __init__(
        self, name: str, options: dict[str, Any], prompt: Prompt, template: ChatTemplate, group_size: int
    ) -> None:
        self.name, self.options, self.prompt, self.template, self.group_size = (
            name,
            options,
            prompt,
            template,
            group_size,
        )

    async def make_envs(self) -> Sequence[TheirEnv]:
        return [CookbookEnv(self.name, self.options, self.prompt, self.template) for _ in range(self.group_size)]


class CookbookRollouts:
    """Rollouts of the cookbook's environments.

    `env` names a function (prompt, group_size, **options) -> EnvGroupBuilder.

    They run in the event loop, with the limits of `settings` unless an environment has its own.
    """

    def __init__(
        self,
        env: str,
        options: Mapping[str, Any],
        settings: RolloutSettings,
        template: ChatTemplate,
        in_flight: int = 4096,
    ) -> None:
        self.env, self.options = env, dict(options)
        self.settings, self.template = settings, template
        self._slots = asyncio.Semaphore(in_flight)

    async def play_group(self, policy: Policy, prompt: Prompt, episodes: Sequence[EpisodeId]) -> tuple[Trajectory, ...]:
        """Play a group. The rewards that the builder computes for the group are added to the last sampled tokens.

        An exception in an environment ends its episode, one in the group's builder ends all episodes of the group.
        Raises ConfigError if the builder makes a wrong number of environments, and what the policy raises.
        """
        try:
            # TypeError and our own errors mean wrong options and other mistakes in the configuration: no episode could
            # begin.
            with environment_code(TypeError, RlError):
                builder: EnvGroupBuilder = find(self.env)(prompt, len(episodes), **self.options)
            async with ended_by(lambda: _guarded(builder.cleanup())):
                return await self._played(builder, policy, episodes)
        except EnvError as error:
            return tuple(_failed(episode, error) for episode in episodes)

    async def _played(
        self, builder: EnvGroupBuilder, policy: Policy, episodes: Sequence[EpisodeId]
    ) -> tuple[Trajectory, ...]:
        envs = await _guarded(builder.make_envs())
        if len(envs) != len(episodes):
            raise ConfigError(f"env={self.env!r} made {len(envs)} environments for a group of {len(episodes)}")
        async with task_group() as tasks:
            playing = [
                tasks.create_task(self._rollout(env, policy, episode))
                for env, episode in zip(envs, episodes, strict=True)
            ]
        outcomes = [task.result() for task in playing]
        finished = [
            (env, outcome) for env, outcome in zip(envs, outcomes, strict=True) if not isinstance(outcome, EnvError)
        ]
        rewards = iter(await _group_rewards(builder, [played for _, played in finished], [env for env, _ in finished]))
        return tuple(
            _failed(episode, outcome)
            if isinstance(outcome, EnvError)
            else self._trajectory(episode, outcome, *next(rewards))
            for episode, outcome in zip(episodes, outcomes, strict=True)
        )

    async def _rollout(self, env: TheirEnv, policy: Policy, episode: EpisodeId) -> TheirTrajectory | EnvError:
        settings = self.settings
        limits = RolloutLimits(
            max_turns=settings.max_turns,
            max_trajectory_tokens=settings.max_context,
            max_turn_tokens=settings.request.max_tokens,
        )
        seed = None if settings.seed is None else derived_seed(settings.seed, episode.group, episode.member)
        completer = CompleterOfPolicy(policy, replace(settings.request, seed=seed))
        async with self._slots:
            try:
                return await run_rollout(
                    completer, _Guarded(env), limits=getattr(env, "rollout_limits", None) or limits
                )
            except EnvError as error:
                return error
            except PromptRefusedError as error:
                return EnvError(str(error))

    def _trajectory(
        self, episode: EpisodeId, played: TheirTrajectory, reward: float, metrics: Mapping[str, Any]
    ) -> Trajectory:
        turns = [
            Turn(
                sequence_of(step.ob, self.template), np.array(step.ac.tokens, np.int32), _logprobs(step.ac), step.reward
            )
            for step in played.transitions
        ]
        if turns:
            turns[-1] = replace(turns[-1], reward=turns[-1].reward + reward)
        merged = {name: float(value) for step in played.transitions for name, value in step.metrics.items()}
        merged |= {name: float(value) for name, value in metrics.items()}
        return Trajectory(episode, assemble(turns), _stop_reason(played), len(turns), merged)


class _Guarded(TheirEnv):
    """An environment whose exceptions become EnvErrors."""

    def __init__(self, env: TheirEnv) -> None:
        self.env = env

    async def initial_observation(self) -> Any:
        return await _guarded(self.env.initial_observation())

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        result: StepResult = await _guarded(self.env.step(action, extra=extra))
        return replace(result, reward=checked_reward(f"{type(self.env).__qualname__}.step", result.reward))


async def _guarded(call: Awaitable[T]) -> T:
    """The value of a call into an environment. Raises EnvError."""
    with environment_code():
        return await call


async def _group_rewards(
    builder: EnvGroupBuilder, played: list[TheirTrajectory], envs: list[TheirEnv]
) -> list[tuple[float, Mapping[str, Any]]]:
    """One reward with its metrics for each episode. Raises EnvError."""
    where = f"{type(builder).__qualname__}.compute_group_rewards"
    rewards = await _guarded(builder.compute_group_rewards(played, envs))
    if len(rewards) != len(played):
        raise EnvError(f"{where} returned {len(rewards)} rewards for {len(played)} episodes")
    return [(checked_reward(where, reward), metrics) for reward, metrics in rewards]


def _failed(episode: EpisodeId, error: EnvError) -> Trajectory:
    return Trajectory(episode, (), "env_error", 0, error=str(error), details=error.details)


def _logprobs(answer: TokensWithLogprobs) -> NDArray[np.float32]:
    """[s]; the empty answer to a first prompt that overflows the context has none."""
    return np.array(answer.maybe_logprobs or [], np.float32)


def _stop_reason(played: TheirTrajectory) -> StopReason:
    if played.stop_reason == TheirStopReason.MAX_TURNS:
        return "max_turns"
    if played.transitions and played.transitions[-1].ac.stop_reason == "length":
        return "length"
    return "context" if played.stop_reason in (TheirStopReason.MAX_TOKENS, TheirStopReason.CONTEXT_OVERFLOW) else "done"


def sequence_of(model_input: tinker.ModelInput, template: ChatTemplate) -> TokenSequence:
    """A ModelInput as a sequence.

    Its images must have `expected_tokens`. Raises UserError for chunks of other types.
    """
    parts = []
    for chunk in model_input.chunks:
        if isinstance(chunk, tinker.types.ImageChunk):
            placeholder = template.processor.placeholder_id if template.processor is not None else 0
            parts.append(image_sequence(EncodedImage(chunk.data, chunk.format, chunk.length), placeholder))
        elif isinstance(chunk, tinker.EncodedTextChunk):
            parts.append(text_sequence(chunk.tokens))
        else:
            raise UserError(f"a chunk of type {chunk.type!r} has no place in a conversation; text and images do")
    return concatenate([text_sequence([]), *parts])
