"""Environments of the `verifiers` library (0.1.x) as ours: its own rollout runs in a thread, and asks us where it would ask a model.

    def wordle() -> VerifiersEnv:
        return VerifiersEnv(verifiers.load_environment("wordle"))

    registry.register("wordle", wordle)

Whatever the environment does between two answers, and its rubric at the end, is done by `verifiers` itself. Tools are refused: here a model
answers in text.
"""

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from typing import Any

import verifiers
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage

from tinsmith.errors import UserError
from tinsmith.rl.env import Env, Message, Prompt, Step


class VerifiersEnv(Env):
    """An episode of `environment`, of the row in the prompt's fields or else of row `seed` of its data set. The reward comes at the end."""

    def __init__(self, environment: verifiers.Environment) -> None:
        self.environment = environment
        self._thread = ThreadPoolExecutor(1)
        self._model = _AskedModel()
        self._seen = 0
        self._output: dict[str, Any] = {}

    def init(self, prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
        """Begin the rollout, up to its first question."""
        row = dict(prompt.fields) or self._row(prompt.seed)
        self._rollout: Future[Any] = self._thread.submit(asyncio.run, self.environment.run_rollout(row, self._model, "policy", {}))
        self._rollout.add_done_callback(lambda _: self._model.asked.put(None))
        messages = self._model.asked.get()
        if messages is None:
            raise UserError(f"the environment ended before it asked anything: {self._rollout.result()!r:.500}")
        self._seen = len(messages)
        return messages, {"example_id": row.get("example_id")}

    def step(self, text: str) -> Step:
        """Give the answer; the next question, or the rubric's reward."""
        self._model.answer(text)
        messages = self._model.asked.get()
        if messages is None:
            self._output = dict(self._rollout.result())
            return Step([], float(self._output["reward"] or 0.0), True)
        new = messages[self._seen + 1 :]  # behind what was seen comes the answer itself
        self._seen = len(messages)
        return Step(new, 0.0, False)

    def close(self) -> None:
        """End the rollout."""
        self._model.hang_up()
        self._thread.shutdown(wait=False)

    def metrics(self) -> dict[str, float]:
        """The rubric's functions."""
        return {name: float(value) for name, value in (self._output.get("metrics") or {}).items()}

    def _row(self, number: int) -> dict[str, Any]:
        rows = self.environment.get_dataset()
        return dict(rows[number % len(rows)])


class _AskedModel(Client[None, Any, Any, Any]):
    """The model as the rollout sees it. Its questions go to `asked`; the rollout waits until `answer` is called from another thread."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: Queue[list[Message] | None] = Queue()
        self._waiting: asyncio.Future[str] | None = None

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Response:
        """Ask, and wait for the answer."""
        if tools:
            raise UserError(f"the environment offers tools ({', '.join(tool.name for tool in tools)}), and answers here are text")
        self._waiting = asyncio.get_running_loop().create_future()
        self.asked.put([{"role": message.role, "content": _content(message.content)} for message in prompt])
        text = await self._waiting
        message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        return Response(id="", created=int(time.time()), model=model, message=message)

    def answer(self, text: str) -> None:
        """What the model says."""
        assert self._waiting is not None
        self._waiting.get_loop().call_soon_threadsafe(self._waiting.set_result, text)

    def hang_up(self) -> None:
        """End a rollout that still waits."""
        if self._waiting is not None and not self._waiting.done() and not self._waiting.get_loop().is_closed():
            self._waiting.get_loop().call_soon_threadsafe(self._waiting.cancel)

    def setup_client(self, config: Any) -> None:
        """There is no client underneath."""

    async def to_native_tool(self, tool: Any) -> Any:
        """Not asked: `get_response` needs no native form."""
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        """Not asked."""
        return messages, {}

    async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        """Not asked."""
        return await self.get_response(prompt, model, sampling_args, tools)

    async def raise_from_native_response(self, response: Any) -> None:
        """Every answer is good."""

    async def from_native_response(self, response: Any) -> Any:
        """It has the form already."""
        return response

    async def close(self) -> None:
        """Nothing is open."""


def _content(content: Any) -> Any:
    """A message's content as plain data."""
    return content if isinstance(content, str) else [part if isinstance(part, dict) else part.model_dump() for part in content]
