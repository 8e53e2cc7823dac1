"""Environments of the `verifiers` library (0.4).

`verifiers` runs its own episodes, and asks us where it would ask a model.

    register("wordle", VerifiersEpisodes({"taskset": {"id": "textarena", "game": "Wordle-v0"}, "player": PLAYER}))

where PLAYER = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}} is a configuration of `verifiers`.
Everything between two answers, and how an episode is scored, is up to `verifiers`, its harness and its runtime. Images
are supported. Tools are refused, because models answer in text here. Run it in threads (`workers: thread`): each
episode occupies one while it waits.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from verifiers import v1

from tinsmith_rl.adapters.chat_endpoint import ChatEndpoint, ExternalChat
from tinsmith_rl.env import ChatMessage, Env, Prompt, Step
from tinsmith_rl.errors import UserError


class VerifiersEpisodes:
    """A factory of episodes that share one environment of `verifiers`. The prompt's seed is the number of the task."""

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
        self._new_tasks: Iterator[Any] = iter(self.environment.taskset)
        self._playing: set[asyncio.Task[Any]] = set()

    def __call__(self) -> "VerifiersEnv":
        return VerifiersEnv(self)

    def task(self, number: int) -> Any:
        """The task of this number; in a finite set counting starts over after the last task."""
        with self._lock:
            while len(self._tasks) <= number and (task := next(self._new_tasks, None)) is not None:
                self._tasks.append(task)
            return self._tasks[number % len(self._tasks)]

    def start(self, task: Any, on_trace: Callable[[Any], None]) -> "Future[Any]":
        """Start to play a task. `on_trace` is called with each of its traces before the trace asks anything."""
        return asyncio.run_coroutine_threadsafe(self._play(task, on_trace), self.loop)

    def close(self) -> None:
        """Stop the environment, once the episodes that were cancelled have ended."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.endpoint.close()

    async def _play(self, task: Any, on_trace: Callable[[Any], None]) -> Any:
        playing = asyncio.ensure_future(self.environment.run_episode(task, self.context, on_trace=on_trace))
        self._playing.add(playing)
        playing.add_done_callback(self._playing.discard)
        return await playing

    async def _end(self) -> None:
        if self._playing:
            await asyncio.wait(self._playing)
        await self._serving.__aexit__(None, None, None)


class VerifiersEnv(Env):
    """An episode of one task. The reward comes at the end."""

    def __init__(self, episodes: VerifiersEpisodes) -> None:
        self.episodes = episodes
        self._chat = ExternalChat()
        self._traces: list[str] = []
        self._question: list[ChatMessage] = []
        self._metrics: dict[str, float] = {}

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Start the episode and wait for its first question."""
        task = self.episodes.task(prompt.seed)
        self._episode = self.episodes.start(task, self._expect)
        self._episode.add_done_callback(lambda _: self._chat.questions.put(None))
        question = self._chat.questions.get()
        if question is None:
            raise UserError(f"the environment asked nothing: {self._fault() or 'its episode ended'}")
        self._question = question
        return list(question), {"task": task.key}

    def step(self, text: str) -> Step:
        """Pass on the answer, and wait for the next question or the end. Raises UserError if the episode failed."""
        self._chat.answer(text)
        question = self._chat.questions.get()
        if question is None:
            if fault := self._fault():
                raise UserError(fault)
            traces = self._episode.result().traces
            self._metrics = _numbers(traces)
            return Step([], sum(trace.reward for trace in traces if trace.agent.trainable), True)
        previous, self._question = self._question, question
        if question[: len(previous)] != previous:
            raise UserError("the environment changed earlier messages of its conversation; it may only append messages")
        # Without the answer itself, which follows the previous messages
        return Step(question[len(previous) + 1 :], 0.0, False)

    def close(self) -> None:
        """End the episode."""
        self._chat.hang_up()
        self._episode.cancel()
        self.episodes.endpoint.forget(self._traces)

    def metrics(self) -> dict[str, float]:
        """The environment's metrics and its rewards, by name."""
        return self._metrics

    def _expect(self, trace: Any) -> None:
        self._traces.append(trace.id)
        self.episodes.endpoint.expect(trace.id, self._chat)

    def _fault(self) -> str:
        """Return the reason why a finished episode failed; empty if it did not."""
        if self._chat.refusal:
            return self._chat.refusal
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
