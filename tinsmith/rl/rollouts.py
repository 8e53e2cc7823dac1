"""Plays episodes: environment, conversation and policy take turns until one of them ends the episode. Thousands run at a time.

Tokens in, tokens out: the tokens that the policy sampled go into the next prompt and into the training sample unchanged.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tinsmith.errors import ConfigError, UserError
from tinsmith.rl.calls import EnvError, environment_code
from tinsmith.rl.chat import ChatTemplate, Conversation, TemplateError
from tinsmith.rl.config import RlConfig, config_error
from tinsmith.rl.env import Prompt, Step
from tinsmith.rl.policy import Completion, Policy, PromptRefusedError, SamplingRequest, derived_seed
from tinsmith.rl.trajectory import EpisodeId, StopReason, Trajectory, Turn, assemble
from tinsmith.rl.workers import EnvSession, EnvTimeoutError, Workers


def prompts_of(file: str, seed: int, count: int, seeds: int) -> list[Prompt]:
    """The first `count` rows of `file`, or prompts of as many seeds from `seed` on. With 0 these are all rows, or `seeds` seeds."""
    return file_prompts(Path(file), count) if file else seed_prompts(seed, count or seeds)


def seed_prompts(first: int, count: int) -> list[Prompt]:
    """Prompts that differ in their seed only."""
    return [Prompt(seed) for seed in range(first, first + count)]


def file_prompts(file: Path, count: int) -> list[Prompt]:
    """The first `count` rows of a JSONL file, or all with 0, each {"messages": [...], "fields": {...}}. A prompt's seed is its row.

    Raises ConfigError if the file does not exist, is empty or holds something else.
    """
    with config_error(f"cannot read the prompts in {file}", OSError, ValueError), file.open(encoding="utf-8") as lines:
        prompts = [_prompt(file, number, json.loads(line)) for number, line in enumerate(islice(lines, count or None))]
    if not prompts:
        raise ConfigError(f"there are no prompts in {file}: it is empty")
    return prompts


def _prompt(file: Path, number: int, row: Any) -> Prompt:
    if not isinstance(row, dict) or set(row) - {"messages", "fields"}:
        raise ConfigError(f"{file}, row {number + 1}: a prompt has the keys messages and fields, got {row!r:.200}")
    messages, fields = row.get("messages", []), row.get("fields", {})
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not isinstance(fields, dict):
        raise ConfigError(f"{file}, row {number + 1}: messages is a list of messages, and fields an object, got {row!r:.200}")
    return Prompt(number, tuple(messages), fields)


def prompt_of_group(prompts: Sequence[Prompt], group: int, seed: int) -> Prompt:
    """The prompt of a group, by its number. Every pass over the prompts has its own order."""
    epoch, place = divmod(group, len(prompts))
    return prompts[int(np.random.default_rng([seed, epoch]).permutation(len(prompts))[place])]


@dataclass(frozen=True)
class RolloutSettings:
    """The rules of an episode."""

    request: SamplingRequest
    """The sampling of each answer. `max_tokens` is lowered near the end of the context, and `seed` differs from turn to turn."""
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


def rollout_settings(config: RlConfig, max_context: int, template: ChatTemplate) -> RolloutSettings:
    """The settings of a run, for a server whose sequences have at most `max_context` tokens."""
    section = config.generation
    request = SamplingRequest(section.max_tokens, section.temperature, section.top_p, section.top_k, tuple(section.stop))
    end_turn = section.end_turn_after_stop_string
    longest = max_context - _reserved_tokens(config, template)
    return RolloutSettings(
        request, section.max_turns, longest, config.training.seed, end_turn, section.context_turns, thought=config.warmup.thought
    )


def _reserved_tokens(config: RlConfig, template: ChatTemplate) -> int:
    """Tokens of the context that no answer may take: those put behind it, and one for vLLM.

    It samples that one when it scores an answer of top_p or top_k.
    """
    section = config.generation
    tail = len(template.end_of_turn_ids) if section.stop and section.end_turn_after_stop_string else 0
    scored = section.top_p < 1 or section.top_k > 0
    return tail + scored


class Rollouts(Protocol):
    """Plays groups of episodes of one environment, whose name is `env`."""

    env: str

    async def play_group(self, policy: Policy, prompt: Prompt, episodes: Sequence[EpisodeId]) -> tuple[Trajectory, ...]:
        """Play the episodes, all of the same prompt. A failure of an environment ends its episode with the reason."""
        ...


def make_rollouts(
    config: RlConfig, options: Mapping[str, Any], settings: RolloutSettings, template: ChatTemplate, workers: Workers
) -> Rollouts:
    """Rollouts of the environment that the configuration names. Raises ConfigError if it needs a package that is not installed."""
    if config.env.kind == "env":
        return EnvRollouts(config.env.name, options, settings, template, workers, config.generation.in_flight)
    with config_error("env: kind=cookbook needs the package tinker_cookbook", ImportError, remedy="pip install tinker-cookbook"):
        from tinsmith.rl.adapters.cookbook import CookbookRollouts
    return CookbookRollouts(config.env.name, options, settings, template, config.generation.in_flight)


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
    try:
        yield
    except BaseException:
        with suppress(EnvError, EnvTimeoutError):
            await end()
        raise
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
        """Play one episode; without a policy the environment gives the answers itself. What it does wrong ends its episode with the reason.

        Raises what the policy raises, but for refused prompts; TemplateError; ConfigError if the environment cannot demonstrate.
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


@contextmanager
def _blaming_the_environment() -> Iterator[None]:
    """Blame the environment for messages that cannot be shown to the model, but not for a template that changes them."""
    with environment_code(TemplateError, MemoryError):
        try:
            yield
        except TemplateError:
            raise
        except UserError as error:  # says all there is to say
            raise EnvError(str(error)) from error


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
            conversation = Conversation(self.template, messages, self.settings.end_turn_after_stop_string, self.settings.context_turns)
        if len(conversation.prompt) >= self.settings.max_context:
            raise EnvError(
                f"the first messages have {len(conversation.prompt)} tokens, and a conversation has room for {self.settings.max_context}; "
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
