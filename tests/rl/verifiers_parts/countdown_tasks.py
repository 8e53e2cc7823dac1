"""A taskset, a harness and an environment for `verifiers`, which finds them by the name of this module."""

import base64
import io
from typing import Any

import httpx
from PIL import Image
from verifiers import v1

__all__ = ["Countdown", "CountdownTasks", "InProcess"]


def image() -> str:
    file = io.BytesIO()
    Image.new("RGB", (64, 32), "red").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class CountdownData(v1.TaskData):
    answer: str
    """What the task wants to hear."""


class CountdownTask(v1.Task[CountdownData, v1.State, v1.TaskConfig]):
    @v1.reward
    async def heard(self, trace: Any) -> float:
        said = [message.content for message in trace.messages if message.role == "assistant"]
        return 1.0 / len(said) if said[-1] == self.data.answer else 0.0


class CountdownConfig(v1.TasksetConfig):
    shows: bool = False
    """Whether the question has an image."""


class CountdownTasks(v1.Taskset[CountdownTask, CountdownConfig]):
    def load(self) -> Any:
        for answer in ("hot", "cold", "dead"):
            text = v1.TextContentPart(text="hot or cold?")
            shown = v1.ImageUrlContentPart(image_url=v1.ImageUrlSource(url=image()))
            prompt = [v1.UserMessage(content=[shown, text])] if self.config.shows else "hot or cold?"
            yield CountdownTask(CountdownData(prompt=prompt, answer=answer), self.config.task)


class InProcess(v1.Harness[v1.HarnessConfig]):
    """Asks the model once, from this process."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    tools: Any = None

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        prompt = data.prompt if isinstance(data.prompt, list) else [v1.UserMessage(content=data.prompt)]
        body = {"model": ctx.model, "messages": [message.model_dump(exclude_none=True) for message in prompt]}
        if data.answer == "dead":
            body["tools"] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return v1.ProgramResult(exit_code=0 if reply.is_success else 1, stdout="", stderr=reply.text)


class CountdownEnvConfig(v1.EnvConfig):
    player: v1.AgentConfig = v1.AgentConfig()


class Countdown(v1.Env[CountdownEnvConfig]):
    """Gives three tries."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for number in (2, 3):
                if segment.terminated or segment.last_reply == task.data.answer:
                    break
                segment = await interaction.turn(f"no, try {number}")
