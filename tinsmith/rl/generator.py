"""Plays episodes: an environment, a conversation and a policy, until one of them ends it; thousands at a time, bounded.

Token in, token out: the policy's tokens go into the next prompt and into the training sample as they are.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinsmith.rl.assemble import assemble, with_pixels
from tinsmith.rl.calls import EnvError
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.conversation import Conversation
from tinsmith.rl.env import Prompt, Step
from tinsmith.rl.policy import Answer, Policy, Request, derived_seed
from tinsmith.rl.trajectory import Origin, StopReason, Trajectory, Turn
from tinsmith.rl.workers import EnvTimeoutError, Session, Workers


@dataclass(frozen=True)
class Rules:
    """How an episode is played."""

    request: Request
    """What every turn asks for; `max_tokens` becomes less where the context ends, and `seed` the turn's own."""
    max_turns: int
    max_context: int
    """Longest sequence, prompt and answer together."""
    seed: int | None = 0
    """The run's. Turns get seeds that follow from it; None leaves sampling to chance."""
    end_turn_after_stop_string: bool = True
    """Put the end-of-turn token behind an answer that ended on a stop string, where the template has it."""
    context_turns: int = 0
    """Newest turns that the model sees, the one it is about to answer included; 0 is all."""
    pixel_values: bool = False
    """Give samples the pixel values of their pictures."""


class Player(Protocol):
    """Plays groups of episodes of what its environment's name stands for."""

    env: str

    async def play_group(self, policy: Policy, prompt: Prompt, origins: Sequence[Origin]) -> tuple[Trajectory, ...]:
        """Episodes of one prompt, one for each origin. What environments do wrong ends their episode with the reason."""
        ...


class Generator:
    """A player of our environments: plays episodes of one environment with one chat template, at most `in_flight` at a time."""

    def __init__(
        self, env: str, options: Mapping[str, Any], rules: Rules, template: ChatTemplate, workers: Workers, in_flight: int = 4096
    ) -> None:
        self.env, self.options = env, dict(options)
        self.rules, self.template, self.workers = rules, template, workers
        self._slots = asyncio.Semaphore(in_flight)

    async def play_group(self, policy: Policy, prompt: Prompt, origins: Sequence[Origin]) -> tuple[Trajectory, ...]:
        """Episodes of one prompt, side by side. Raises as `play` does."""
        return tuple(await asyncio.gather(*(self.play(policy, prompt, origin) for origin in origins)))

    async def play(self, policy: Policy, prompt: Prompt, origin: Origin) -> Trajectory:
        """One episode. What the environment does wrong ends it with the reason.

        Raises what the policy raises; TemplateError; UserError for messages that cannot be rendered.
        """
        async with self._slots:
            episode = _Episode(self.rules, self.template, policy, origin)
            try:
                async with self._session() as session:
                    await episode.play(session, prompt)
            except (EnvError, EnvTimeoutError) as error:
                episode.reason = "env_timeout" if isinstance(error, EnvTimeoutError) else "env_error"
                episode.error, episode.details = str(error), error.details if isinstance(error, EnvError) else str(error)
            return episode.finished()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        session = await self.workers.open(self.env, self.options)
        try:
            yield session
        finally:
            await session.end()


@dataclass
class _Episode:
    """What is known of an episode while it is played."""

    rules: Rules
    template: ChatTemplate
    policy: Policy
    origin: Origin
    turns: list[Turn] = field(default_factory=list)
    reason: StopReason = "done"
    error: str = ""
    details: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    async def play(self, session: Session, prompt: Prompt) -> None:
        """Turn by turn until something ends it."""
        messages, self.notes = await self._timed(session.call("init", prompt))
        conversation = Conversation(self.template, messages, self.rules.end_turn_after_stop_string, self.rules.context_turns)
        while True:
            room = self.rules.max_context - len(conversation.prompt)
            if room < 1:
                self.reason = "context"
                break
            answer = await self._ask(conversation, room)
            if not len(answer.tokens) and not self.turns:
                self.reason = "empty"
                break
            step: Step = await self._timed(session.call("step", conversation.text_of(answer.tokens)))
            tail = conversation.tail_of(answer.tokens, answer.stopped)
            self.turns.append(Turn(conversation.prompt, answer.tokens, answer.logprobs, step.reward, tail))
            if ended := self._ended(answer, step):
                self.reason = ended
                break
            conversation.extend(answer.tokens, answer.stopped, step.observations)
        self.metrics = await self._timed(session.call("metrics"))

    def finished(self) -> Trajectory:
        """What became of it."""
        samples = assemble(self.turns)
        if self.rules.pixel_values and self.template.processor is not None:
            samples = with_pixels(samples, self.template.processor)
        return Trajectory(
            self.origin,
            samples,
            self.reason,
            len(self.turns),
            self.metrics,
            self.error,
            self.details,
            dict(self.seconds),
            dict(self.notes),
        )

    def _ended(self, answer: Answer, step: Step) -> StopReason | None:
        if not answer.stopped:
            return "length"  # also if the environment is done: it judged half an answer
        if step.done:
            return "done"
        return "max_turns" if len(self.turns) == self.rules.max_turns else None

    async def _ask(self, conversation: Conversation, room: int) -> Answer:
        request, rules = self.rules.request, self.rules
        seed = rules.seed if rules.seed is None else derived_seed(rules.seed, self.origin.group, self.origin.member, len(self.turns))
        limits = {"max_tokens": min(request.max_tokens, room), "seed": seed}
        start = time.perf_counter()
        answer = await self.policy.answer(conversation.prompt.model_input, Request(**{**vars(request), **limits}))
        self.seconds["sample"] += time.perf_counter() - start
        return answer

    async def _timed(self, call: Any) -> Any:
        start = time.perf_counter()
        value = await call
        self.seconds["env"] += time.perf_counter() - start
        return value
