"""Environments of the `verifiers` library (0.4) as ours: it runs its own episodes, and asks us where it would ask a model.

    registry.register("wordle", VerifiersEpisodes({"taskset": {"id": "textarena", "game": "Wordle-v0"}, "player": PLAYER}))

with PLAYER = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}: a configuration as `verifiers` takes it. Whatever happens
between two answers, in its harness and on its runtime, and how the episode is scored, is `verifiers`' own. Pictures come through; tools
are refused: here a model answers in text. Run it in threads (`workers: thread`), of which every episode holds one while it waits.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from verifiers import v1

from tinsmith.errors import UserError
from tinsmith.rl.adapters.chat_endpoint import ChatEndpoint, Conversation
from tinsmith.rl.env import Env, Message, Prompt, Step


class VerifiersEpisodes:
    """Makes episodes of one environment, which they share: a factory for the registry. Its tasks are numbered by the prompts' seeds."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.environment: Any = v1.load_environment(v1.resolve_env_config(dict(config)))
        self.endpoint = ChatEndpoint(header="X-Session-ID")
        client = v1.EvalClientConfig(base_url=self.endpoint.url, api_key_var="TINSMITH_NO_KEY")
        self.context = v1.ModelContext(model="policy", client=client)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._serving: AbstractAsyncContextManager[None] = self.environment.serving()
        asyncio.run_coroutine_threadsafe(self._serving.__aenter__(), self.loop).result()
        self._lock = threading.Lock()
        self._tasks: list[Any] = []
        self._coming: Iterator[Any] = iter(self.environment.taskset)
        self._playing: set[asyncio.Task[Any]] = set()

    def __call__(self) -> "VerifiersEnv":
        """A new episode."""
        return VerifiersEnv(self)

    def task(self, number: int) -> Any:
        """The task of that number, counted round in a set that ends."""
        with self._lock:
            while len(self._tasks) <= number and (task := next(self._coming, None)) is not None:
                self._tasks.append(task)
            return self._tasks[number % len(self._tasks)]

    def start(self, task: Any, on_trace: Callable[[Any], None]) -> "Future[Any]":
        """Begin to play a task; `on_trace` is told of each of its traces before that asks anything."""
        return asyncio.run_coroutine_threadsafe(self._play(task, on_trace), self.loop)

    def close(self) -> None:
        """Give back what the environment serves, once the episodes that were left have ended."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.endpoint.close()

    async def _play(self, task: Any, on_trace: Callable[[Any], None]) -> Any:
        playing = asyncio.ensure_future(self.environment.run_episode(task, self.context, on_trace=on_trace))
        self._playing.add(playing)
        playing.add_done_callback(self._playing.discard)
        return await playing

    async def _end(self) -> None:
        await asyncio.gather(*self._playing, return_exceptions=True)
        await self._serving.__aexit__(None, None, None)


class VerifiersEnv(Env):
    """An episode of the task that the prompt's seed numbers. The reward comes at the end."""

    def __init__(self, episodes: VerifiersEpisodes) -> None:
        self.episodes = episodes
        self._conversation = Conversation()
        self._traces: list[str] = []
        self._said: list[Message] = []
        self._metrics: dict[str, float] = {}

    def init(self, prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
        """Begin the episode, up to its first question."""
        task = self.episodes.task(prompt.seed)
        self._episode = self.episodes.start(task, self._expect)
        self._episode.add_done_callback(lambda _: self._conversation.questions.put(None))
        question = self._conversation.questions.get()
        if question is None:
            raise UserError(f"the environment asked nothing: {self._fault() or 'its episode is over'}")
        self._said = question
        return list(question), {"task": task.key}

    def step(self, text: str) -> Step:
        """Give the answer; the next question, or the reward. Raises UserError for an episode that failed."""
        self._conversation.answer(text)
        question = self._conversation.questions.get()
        if question is None:
            if fault := self._fault():
                raise UserError(fault)
            traces = self._episode.result().traces
            self._metrics = _numbers(traces)
            return Step([], sum(trace.reward for trace in traces if trace.agent.trainable), True)
        seen, self._said = self._said, question
        if question[: len(seen)] != seen:
            raise UserError("the environment asks about another conversation than before; only those that grow can be played")
        return Step(question[len(seen) + 1 :], 0.0, False)  # behind what was seen comes the answer itself

    def close(self) -> None:
        """End the episode."""
        self._conversation.hang_up()
        self._episode.cancel()
        self.episodes.endpoint.forget(self._traces)

    def metrics(self) -> dict[str, float]:
        """The environment's metrics, and its rewards by name."""
        return self._metrics

    def _expect(self, trace: Any) -> None:
        self._traces.append(trace.id)
        self.episodes.endpoint.expect(trace.id, self._conversation)

    def _fault(self) -> str:
        """What went wrong in an episode that is over; empty if nothing did."""
        if self._conversation.refusal:
            return self._conversation.refusal
        if self._episode.cancelled():
            return "the episode was cancelled"
        episode = self._episode.result()
        errors = [error for part in (episode, *episode.traces) for error in part.errors]
        return f"{errors[0].type}: {errors[0].message}" if errors else ""


def _numbers(traces: Any) -> dict[str, float]:
    """Metrics of all traces, and their rewards by name."""
    found: dict[str, float] = {}
    for trace in traces:
        found |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        found |= {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
    return found
