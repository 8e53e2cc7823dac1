"""A server's application without an engine, called in process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.preloaded import REAL_PYTHON
from tinsmith.config import Config
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.serving import Done
from tinsmith.server.app import create_app
from tinsmith.server.engine_process import EngineProcess
from tinsmith.server.hub import Hub
from tinsmith.store.records import Command, Outcome
from tinsmith.store.store import Store

FACTS = ModelFacts(
    name="tiny",
    tokenizer_id="/models/tiny",
    architecture="qwen3",
    vocab_size=100,
    max_context=32,
    max_trained=24,
    max_sampled=32,
    takes_images=False,
    max_lora_rank=16,
)


def parsers() -> list[psutil.Process]:
    """The processes of this one that parse large bodies. Other children, of which some have ended, are not counted."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # also raised for a child that has ended and that nobody has waited for
            if "tinsmith.server.parser_process" in child.cmdline():
                found.append(child)
    return found


@dataclass
class Served:
    """One application, the store below it, and a client of it."""

    hub: Hub
    store: Store
    client: httpx.AsyncClient

    def finish(self, outcome: Outcome) -> None:
        """End an operation as an engine does: in the log first, then by message."""
        self.store.record([outcome])
        self.hub.take(Done.of(outcome))

    def queued(self) -> list[Command]:
        """The queued commands of all models, in the order in which they came."""
        commands = [command for model_id in self.store.queued_models() for command in self.store.queued(model_id)]
        return sorted(commands, key=lambda command: command.id)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """POST JSON to a path below /api/v1."""
        return await self.client.post(f"/api/v1/{path}", json=body, **options)

    async def new_session(self) -> str:
        """Create a session and return its id."""
        reply = await self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"})
        session_id: str = reply.json()["session_id"]
        return session_id

    async def new_model(self, session_id: str) -> str:
        """Submit create_model and return the model's id."""
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
        reply = await self.post("create_model", body)
        model_id: str = reply.json()["model_id"]
        return model_id


@asynccontextmanager
async def served(data_dir: Path, config: Config | None = None, facts: ModelFacts | None = FACTS) -> AsyncIterator[Served]:
    """Serve in process. `facts` describes the base model that an engine would have announced."""
    config = config or Config()
    config.server.long_poll_s = min(config.server.long_poll_s, 2.0)
    store = Store.open(data_dir)
    hub = Hub(config, store, data_dir)
    if facts is not None:
        hub.base_models.replace([facts.to_dict()])
    transport = httpx.ASGITransport(create_app(hub))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield Served(hub, store, client)
    hub.bodies.parser.close()
    hub.store.close()
    store.close()


LIGHT_ENGINE = (REAL_PYTHON, str(Path(__file__).with_name("light_engine.py")))
"""An engine process without models that is ready at once."""


@asynccontextmanager
async def running(engine: EngineProcess) -> AsyncIterator[None]:
    """Run an engine process, and stop it at the end."""
    task = asyncio.create_task(engine.run())
    try:
        yield
    finally:
        await engine.stop()
        await task
