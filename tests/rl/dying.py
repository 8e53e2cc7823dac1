"""An environment that kills its own process, at the episode that a file names."""

import os
import signal
from pathlib import Path
from typing import Any, ClassVar

from tinsmith.rl.env import ChatMessage, Env, Prompt, Step, user


class Dying(Env):
    """Rewards long answers. If there is a file `plan`, it holds the number of the episode in which the process gets SIGKILL."""

    episodes: ClassVar[int] = 0

    def __init__(self, plan: str) -> None:
        self.plan = Path(plan)

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        Dying.episodes += 1
        if self.plan.exists() and Dying.episodes == int(self.plan.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        return [user("say much")], {}

    def step(self, text: str) -> Step:
        return Step([], float(len(text)), True)
