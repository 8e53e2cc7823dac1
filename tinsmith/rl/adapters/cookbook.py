"""The Tinker Cookbook's (0.6) environments and policies as ours, and ours as its.

Its environments speak tokens (`Env.initial_observation`, `Env.step(tokens)`) and are played by its policies (`TokenCompleter`); ours speak
messages. So its environments come over as whole episodes, which `CookbookPlayer` plays to trajectories of ours, and ours go over with their
chat template in `CookbookEnv` and `CookbookEnvGroupBuilder`.
"""

import asyncio
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

from tinsmith.errors import ConfigError, TinsmithError, UserError
from tinsmith.rl import registry
from tinsmith.rl.assemble import assemble
from tinsmith.rl.calls import EnvError, call, checked_reward, env_error
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.conversation import Conversation
from tinsmith.rl.env import Prompt
from tinsmith.rl.generator import Rules
from tinsmith.rl.pictures import Picture
from tinsmith.rl.policy import Answer, Policy, Request, derived_seed
from tinsmith.rl.stream import PlacedPicture, TokenStream, join, text_stream
from tinsmith.rl.trajectory import Origin, StopReason, Trajectory, Turn

T = TypeVar("T")


class PolicyOfCompleter:
    """One of the cookbook's policies as ours."""

    def __init__(self, completer: TokenCompleter, stop: Sequence[int]) -> None:
        self.completer, self.stop = completer, list(stop)

    async def answer(self, prompt: tinker.ModelInput, request: Request) -> Answer:
        """One answer; temperature, top_p and seed are the completer's own."""
        stop: list[Any] = list(request.stop_ids) or list(request.stop) or self.stop
        made = await self.completer(prompt, stop, max_tokens=request.max_tokens)
        return Answer(np.array(made.tokens, np.int32), np.array(made.logprobs, np.float32), made.stop_reason == "stop")


class CompleterOfPolicy(TokenCompleter):
    """One of our policies for the cookbook's rollouts. Every answer gets a seed of its own, if the request has one."""

    def __init__(self, policy: Policy, request: Request) -> None:
        self.policy, self.request = policy, request
        self.answers = 0

    async def __call__(self, model_input: tinker.ModelInput, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        """One answer, which ends on `stop`: texts or token ids."""
        number, self.answers = self.answers, self.answers + 1
        request = replace(
            self.request,
            max_tokens=min(self.request.max_tokens, max_tokens or self.request.max_tokens),
            seed=None if self.request.seed is None else derived_seed(self.request.seed, number),
            stop=tuple(end for end in stop if isinstance(end, str)),
            stop_ids=tuple(end for end in stop if isinstance(end, int)),
        )
        answer = await self.policy.answer(model_input, request)
        return TokensWithLogprobs(answer.tokens.tolist(), answer.logprobs.tolist(), "stop" if answer.stopped else "length")


class CookbookEnv(TheirEnv):
    """One of our environments, with its chat template, for the cookbook's rollouts: plays one episode of `prompt`."""

    def __init__(self, name: str, options: dict[str, Any], prompt: Prompt, template: ChatTemplate) -> None:
        self.env = registry.make(name, **options)
        self.prompt, self.template = prompt, template

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        """The first prompt and the tokens that end an answer."""
        messages, _ = call(self.env, "init", self.prompt)
        self.conversation = Conversation(self.template, messages)
        return self.conversation.prompt.model_input, sorted(self.template.stop_ids)

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        """The environment's answer to sampled tokens."""
        sampled = np.array(action, np.int32)
        stopped = (extra or {}).get("stop_reason", "stop") == "stop"
        observations, reward, done, _ = call(self.env, "step", self.conversation.text_of(sampled))
        done = done or not stopped
        if not done:
            self.conversation.extend(sampled, stopped, observations)
        metrics = call(self.env, "metrics") if done else {}
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


class CookbookPlayer:
    """A player of the cookbook's environments. `env` names a function (prompt, group_size, **options) -> EnvGroupBuilder.

    Their rollouts run in the event loop, within the rules' limits or, if they have some, within their own.
    """

    def __init__(self, env: str, options: Mapping[str, Any], rules: Rules, template: ChatTemplate, in_flight: int = 4096) -> None:
        self.env, self.options = env, dict(options)
        self.rules, self.template = rules, template
        self._slots = asyncio.Semaphore(in_flight)

    async def play_group(self, policy: Policy, prompt: Prompt, origins: Sequence[Origin]) -> tuple[Trajectory, ...]:
        """The episodes of one of their groups; the group's rewards are on the last sampled tokens.

        What an environment raises ends its episode, what the group's builder raises all of them. Raises ConfigError for a builder that
        makes another number of environments, and what the policy raises.
        """
        try:
            builder = _built(registry.find(self.env), prompt, len(origins), self.options)
        except EnvError as error:
            return tuple(_failed(origin, error) for origin in origins)
        try:
            envs = await _guarded(builder.make_envs())
            if len(envs) != len(origins):
                raise ConfigError(f"env={self.env!r} made {len(envs)} environments for a group of {len(origins)}")
            played = await asyncio.gather(*(self._rollout(env, policy, origin) for env, origin in zip(envs, origins, strict=True)))
            finished = [(env, made) for env, made in zip(envs, played, strict=True) if not isinstance(made, EnvError)]
            rewards = iter(await _group_rewards(builder, [made for _, made in finished], [env for env, _ in finished]))
        except EnvError as error:
            return tuple(_failed(origin, error) for origin in origins)
        finally:
            await builder.cleanup()
        return tuple(
            _failed(origin, made) if isinstance(made, EnvError) else self._trajectory(origin, made, *next(rewards))
            for origin, made in zip(origins, played, strict=True)
        )

    async def _rollout(self, env: TheirEnv, policy: Policy, origin: Origin) -> TheirTrajectory | EnvError:
        rules = self.rules
        limits = RolloutLimits(max_turns=rules.max_turns, max_trajectory_tokens=rules.max_context, max_turn_tokens=rules.request.max_tokens)
        seed = None if rules.seed is None else derived_seed(rules.seed, origin.group, origin.member)
        completer = CompleterOfPolicy(policy, replace(rules.request, seed=seed))
        async with self._slots:
            try:
                return await run_rollout(completer, _Guarded(env), limits=getattr(env, "rollout_limits", None) or limits)
            except EnvError as error:
                return error

    def _trajectory(self, origin: Origin, made: TheirTrajectory, reward: float, metrics: Mapping[str, Any]) -> Trajectory:
        turns = [
            Turn(stream_of(step.ob, self.template), np.array(step.ac.tokens, np.int32), _logprobs(step.ac), step.reward)
            for step in made.transitions
        ]
        if turns:
            turns[-1] = replace(turns[-1], reward=turns[-1].reward + reward)
        merged = {name: float(value) for step in made.transitions for name, value in step.metrics.items()}
        merged |= {name: float(value) for name, value in metrics.items()}
        return Trajectory(origin, assemble(turns), _stop_reason(made), len(turns), merged)


class _Guarded(TheirEnv):
    """An environment that raises nothing but EnvError."""

    def __init__(self, env: TheirEnv) -> None:
        self.env = env

    async def initial_observation(self) -> Any:
        return await _guarded(self.env.initial_observation())

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        result: StepResult = await _guarded(self.env.step(action, extra=extra))
        return replace(result, reward=checked_reward(f"{type(self.env).__qualname__}.step", result.reward))


async def _guarded(call: Awaitable[T]) -> T:
    try:
        return await call
    except Exception as error:  # somebody's program: see workers.py
        raise env_error(error) from error


async def _group_rewards(
    builder: EnvGroupBuilder, played: list[TheirTrajectory], envs: list[TheirEnv]
) -> list[tuple[float, Mapping[str, Any]]]:
    """One reward with its metrics for each episode. Raises EnvError."""
    where = f"{type(builder).__qualname__}.compute_group_rewards"
    rewards = await _guarded(builder.compute_group_rewards(played, envs))
    if len(rewards) != len(played):
        raise EnvError(f"{where} returned {len(rewards)} rewards for {len(played)} episodes")
    return [(checked_reward(where, reward), metrics) for reward, metrics in rewards]


def _built(factory: Any, prompt: Prompt, size: int, options: Mapping[str, Any]) -> EnvGroupBuilder:
    try:
        builder: EnvGroupBuilder = factory(prompt, size, **options)
    except (TypeError, TinsmithError):  # arguments that it does not take, and what cannot be: no episode would begin
        raise
    except Exception as error:  # see workers.py
        raise env_error(error) from error
    return builder


def _failed(origin: Origin, error: EnvError) -> Trajectory:
    return Trajectory(origin, (), "env_error", 0, error=str(error), details=error.details)


def _logprobs(said: TokensWithLogprobs) -> NDArray[np.float32]:
    """[s]; an opening that overflows the context has an answer without any."""
    return np.array(said.maybe_logprobs or [], np.float32)


def _stop_reason(made: TheirTrajectory) -> StopReason:
    if made.stop_reason == TheirStopReason.MAX_TURNS:
        return "max_turns"
    if made.transitions and made.transitions[-1].ac.stop_reason == "length":
        return "length"
    return "context" if made.stop_reason in (TheirStopReason.MAX_TOKENS, TheirStopReason.CONTEXT_OVERFLOW) else "done"


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
    return join([text_stream([]), *parts])
