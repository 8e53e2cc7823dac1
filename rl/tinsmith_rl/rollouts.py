"""Plays episodes: environment, conversation and policy take turns until one of them ends the episode.

Thousands run at a time.

Tokens in, tokens out: sampled tokens go into the next prompt and into the training sample unchanged.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from tinsmith_rl.calls import EnvError, env_error
from tinsmith_rl.chat import ChatTemplate, Conversation, TemplateError
from tinsmith_rl.env import Prompt, Step
from tinsmith_rl.errors import UserError, foreign_code
from tinsmith_rl.policy import Completion, Policy, PromptRefusedError, SamplingRequest, derived_seed
from tinsmith_rl.trajectory import EpisodeId, StopReason, Trajectory, Turn, assemble
from tinsmith_rl.workers import EnvSession, EnvTimeoutError, Workers


@dataclass(frozen=True)
class RolloutSettings:
    """The rules of an episode."""

    request: SamplingRequest
    """How each answer is sampled; `max_tokens` is lowered near the end of the context, and `seed` differs by turn."""
    max_turns: int
    max_context: int
    """Longest sequence in tokens, prompt and answer together."""
    seed: int | None = 0
    """Seed of the run, from which the seed of each turn is derived; None samples without seeds."""
    end_turn_after_stop_string: bool = True
    """Put the end-of-turn token behind an answer that ended on a stop string."""
    context_turns: int = 0
    """The number of turns that the model sees, including the one that it is about to answer; 0 is all."""
    thought: str = ""
    """Text before every demonstrated answer."""


class Rollouts(Protocol):
    """Plays groups of episodes of one environment, whose name is `env`."""

    env: str

    async def play_group(self, policy: Policy, prompt: Prompt, episodes: Sequence[EpisodeId]) -> tuple[Trajectory, ...]:
        """Play the episodes, all of the same prompt. A failure of an environment ends its episode with the reason."""
        ...


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An asyncio.TaskGroup that raises the first failure itself, instead of an ExceptionGroup with all of them.

    The first failure has a type that callers know how to report. The others are mostly its consequences.
    """
    first: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        first = group.exceptions[0]
    if first is not None:  # raised here, outside the handler, so that it keeps its own cause and context
        raise first


@asynccontextmanager
async def ended_by(end: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Await `end` after the body. If the body raised, errors of `end` are dropped: they are often its consequences."""
    dropped: tuple[type[Exception], ...] = (EnvError, EnvTimeoutError)
    try:
        yield
        dropped = ()
    finally:
        with suppress(*dropped):
            await end()


class EnvRollouts:
    """Rollouts of an `Env`, with one chat template; at most `in_flight` episodes at a time."""

    def __init__(
        self,
        env: str,
        options: Mapping[str, Any],
        settings: RolloutSettings,
        template: ChatTemplate,
        workers: Workers,
        in_flight: int = 4096,
    ) -> None:
        self.env, self.options = env, dict(options)
        self.settings, self.template, self.workers = settings, template, workers
        self._slots = asyncio.Semaphore(in_flight)

    async def play_group(self, policy: Policy, prompt: Prompt, episodes: Sequence[EpisodeId]) -> tuple[Trajectory, ...]:
        """Play the episodes at the same time. Raises as `play` does."""
        async with task_group() as tasks:
            playing = [tasks.create_task(self.play(policy, prompt, episode)) for episode in episodes]
        return tuple(task.result() for task in playing)

    async def play(self, policy: Policy | None, prompt: Prompt, episode: EpisodeId) -> Trajectory:
        """Play one episode; without a policy the environment gives the answers itself.

        What it does wrong ends its episode with the reason.

        Raises what the policy raises, but for refused prompts; TemplateError; ConfigError if the environment cannot
        demonstrate.
        """
        async with self._slots:
            record = _EpisodeRecord(self.settings, self.template, policy, episode)
            try:
                session = await self.workers.open(self.env, self.options)
                async with ended_by(session.end):
                    await record.play(session, prompt)
            except (EnvError, EnvTimeoutError, PromptRefusedError) as error:
                record.fail(error, prompt)
            return record.trajectory()


def _blaming_the_environment() -> AbstractContextManager[None]:
    """Blame the environment for messages that the model cannot be shown, but not for a template that changes them."""

    def say(error: BaseException) -> EnvError:
        # Ours says all there is to say
        return EnvError(str(error)) if isinstance(error, UserError) else env_error(error)

    return foreign_code(say, EnvError, TemplateError, MemoryError)


@dataclass
class _EpisodeRecord:
    """An episode while it is played."""

    settings: RolloutSettings
    template: ChatTemplate
    policy: Policy | None
    episode: EpisodeId
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = "done"
    error: str = ""
    details: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    async def play(self, session: EnvSession, prompt: Prompt) -> None:
        """Play turn by turn until something ends the episode."""
        messages, self.notes = await self._timed(session.call("init", prompt))
        with _blaming_the_environment():
            conversation = Conversation(
                self.template, messages, self.settings.end_turn_after_stop_string, self.settings.context_turns
            )
        if len(conversation.prompt) >= self.settings.max_context:
            raise EnvError(
                f"the first messages have {len(conversation.prompt)} tokens, and a conversation has room for "
                f"{self.settings.max_context}; "
                "shorten them or their images, or raise generation: max_context, if the server's context allows it"
            )
        while True:
            room = self.settings.max_context - len(conversation.prompt)
            if room < 1:
                self.stop_reason = "context"
                break
            answer = await self._answer(session, conversation, room)
            if not len(answer.tokens) and not self.turns:
                self.stop_reason = "empty"
                break
            # Recorded before the environment reads it: if that fails, the answer that it failed on is kept.
            tail = conversation.tail_of(answer.tokens, answer.stopped)
            self.turns.append(Turn(conversation.prompt, answer.tokens, answer.logprobs, 0.0, tail, answer.sequence_id))
            step: Step = await self._timed(session.call("step", conversation.text_of(answer.tokens)))
            self.turns[-1] = replace(self.turns[-1], reward=step.reward)
            if reason := self._reason_to_stop(answer, step):
                self.stop_reason = reason
                break
            with _blaming_the_environment():
                conversation.extend(answer.tokens, answer.stopped, step.observations)
        self.metrics = await self._timed(session.call("metrics"))

    def fail(self, error: EnvError | EnvTimeoutError | PromptRefusedError, prompt: Prompt) -> None:
        """End the episode by a failure, and note what it was about."""
        self.stop_reason = "env_timeout" if isinstance(error, EnvTimeoutError) else "env_error"
        self.error = str(error)
        about = [f"prompt: {prompt!r:.1000}"]
        if self.turns:
            last = self.turns[-1]
            about.append(f"the model saw, at its end: {self.template.decode(last.prompt.ids[-500:].tolist())!r}")
            about.append(f"the model said: {self.template.decode(last.sampled.tolist())!r:.2000}")
        self.details = "\n".join([*about, error.details if isinstance(error, EnvError) else self.error])

    def trajectory(self) -> Trajectory:
        """The finished episode."""
        return Trajectory(
            self.episode,
            assemble(self.turns),
            self.stop_reason,
            len(self.turns),
            self.metrics,
            self.error,
            self.details,
            dict(self.seconds),
            dict(self.notes),
        )

    def _reason_to_stop(self, answer: Completion, step: Step) -> StopReason | None:
        if not answer.stopped:
            return "length"  # even if the environment is done: it saw an answer that was cut off
        if step.done:
            return "done"
        return "max_turns" if len(self.turns) == self.settings.max_turns else None

    async def _answer(self, session: EnvSession, conversation: Conversation, room: int) -> Completion:
        """The next answer: sampled from the policy, or demonstrated by the environment."""
        if self.policy is None:
            text = self.settings.thought + self.template.broken(await self._timed(session.call("demonstrate")))
            ids = np.array([*self.template.ids(text), *self.template.end_of_turn_ids], dtype=np.int32)  # [s]
            return Completion(ids[:room], np.zeros(min(len(ids), room), dtype=np.float32), len(ids) <= room)
        request, seed = self.settings.request, self.settings.seed
        if seed is not None:
            seed = derived_seed(seed, self.episode.group, self.episode.member, len(self.turns))
        request = replace(request, max_tokens=min(request.max_tokens, room), seed=seed)
        start = time.perf_counter()
        answer = await self.policy.complete(conversation.prompt.model_input, request)
        self.seconds["sample"] += time.perf_counter() - start
        return answer

    async def _timed(self, call: Any) -> Any:
        start = time.perf_counter()
        value = await call
        self.seconds["env"] += time.perf_counter() - start
        return value
