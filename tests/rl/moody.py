"""Environments that raise, hang or die on demand, or kill the run.

A module of its own: worker processes import it without torch.
"""

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, ClassVar

from tinsmith_rl.env import ChatMessage, Env, Prompt, Step, user

CLOSED: list[str] = []
FREED = threading.Event()
"""Ends the step of "slow" environments."""


class Moody(Env):
    """Does in its step what the prompt's field "mood" says; reports where it ran."""

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        self.mood = prompt.fields["mood"]
        if self.mood == "unwilling":
            raise ValueError("no game today")
        return [user("hot or cold?")], {"process": os.getpid(), "thread": threading.get_ident()}

    def step(self, text: str) -> Step:
        if self.mood == "slow":
            FREED.wait(600)
        elif self.mood == "raises":
            raise KeyError("lost")
        elif self.mood == "leaves":
            sys.exit("enough")
        elif self.mood == "gives up":
            raise CancelledError
        elif self.mood == "dies":
            os._exit(3)
        return Step([], 1.0, True)

    def close(self) -> None:
        CLOSED.append(self.mood)
        if self.mood == "unwilling":
            raise RuntimeError("closed before it began")


class Patient(Moody):
    """Does the same asynchronously: all its methods run in one event loop."""

    async def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:  # type: ignore[override]
        self.loop = asyncio.get_running_loop()
        return super().init(prompt)

    async def step(self, text: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop
        if self.mood == "slow":
            await asyncio.sleep(600)
        if self.mood == "gives up":
            raise asyncio.CancelledError
        return super().step(text)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class Absent(Moody):
    """An environment that cannot be made."""

    def __init__(self) -> None:
        raise ConnectionError("the simulator is busy")


class Chatty(Env):
    """Rewards long answers, and each episode more than the one before: a run learns without a warm-up, as no two
    rewards are equal.

    If there is a file `plan`, it holds the number of the episode in which the process gets SIGKILL.
    """

    episodes: ClassVar[int] = 0

    def __init__(self, plan: str = "/nowhere") -> None:
        self.plan = Path(plan)

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        Chatty.episodes += 1
        self.number = Chatty.episodes
        if self.plan.exists() and self.number == int(self.plan.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        return [user("say much")], {}

    def step(self, text: str) -> Step:
        return Step([], len(text) + self.number / 1000, True)
