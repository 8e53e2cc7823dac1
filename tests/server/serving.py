"""A server's application without an engine, called in process."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import Any

import httpx
import numpy as np
import psutil
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_request import ForwardBackwardRequest

from tests.preloaded import REAL_PYTHON
from tinsmith.config import Config, ServerConfig
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.serving import Done
from tinsmith.server.app import create_app
from tinsmith.server.engine_process import EngineProcess
from tinsmith.server.front import Front, front_beside
from tinsmith.server.hub import Hub
from tinsmith.store.records import Checkpoint, Command, Outcome
from tinsmith.store.store import Store
from tinsmith.wire.paths import parse_path

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
PROTOBUF = {"Content-Type": "application/x-protobuf"}
ZSTD = {"Content-Encoding": "zstd"}
SHAPE = {"rank": 8, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": False}


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
    front: Front
    store: Store
    client: httpx.AsyncClient

    async def get(self, path: str) -> httpx.Response:
        return await self.client.get(f"/api/v1/{path}")

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.client.post(f"/api/v1/{path}", json=body, **options)

    async def train(self, body: bytes, **headers: str) -> httpx.Response:
        """POST a protobuf body to forward_backward, with more headers."""
        return await self.client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF | headers)

    async def shown(self, path: str) -> Any:
        """The JSON of a GET that succeeds."""
        return _json(await self.get(path))

    async def answer(self, path: str, body: Any = None, **options: Any) -> Any:
        """The JSON of a POST that succeeds."""
        return _json(await self.post(path, body, **options))

    async def result(self, request_id: str) -> Any:
        """The JSON with which an operation has ended."""
        return await self.answer("retrieve_future", {"request_id": request_id})

    async def refusal(self, path: str, body: Any = None, status: int = 400) -> str:
        """The reason for which a POST is refused with this status."""
        return refused(await self.post(path, body), status)

    async def new_session(self, **description: Any) -> str:
        """Create a session and return its id."""
        session_id: str = (await self.answer("create_session", {"sdk_version": "0.38.0"} | description))["session_id"]
        return session_id

    async def end_session(self, session_id: str, reason: str = "success", detail: str | None = None) -> None:
        await self.answer(f"sessions/{session_id}/finish", {"reason": {"type": reason}, "detail": detail})

    async def heartbeat(self, session_id: str) -> int:
        return (
            await self.post("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"})
        ).status_code

    async def new_model(self, session_id: str | None = None, **fields: Any) -> str:
        """Submit create_model, in a session of its own if none is given, and return the model's id."""
        body = {
            "session_id": session_id or await self.new_session(),
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 8},
        }
        model_id: str = (await self.answer("create_model", body | fields))["model_id"]
        return model_id

    async def new_run(self, session_id: str | None = None, **fields: Any) -> str:
        model_id = await self.new_model(session_id, **fields)
        self.end(f"{model_id}/0", b'{"model_id":""}')
        return model_id

    async def step(self, model_id: str, seq_id: int) -> str:
        request_id: str = (await self.answer("optim_step", step(model_id, seq_id)))["request_id"]
        return request_id

    async def new_sampler(self, base_model: str = "tiny", session_id: str | None = None) -> str:
        """A sampling session on a base model; returns its id."""
        body = {
            "session_id": session_id or await self.new_session(),
            "sampling_session_seq_id": 3,
            "base_model": base_model,
        }
        sampler: str = (await self.answer("create_sampling_session", body))["sampling_session_id"]
        return sampler

    def finish(self, outcome: Outcome) -> None:
        """End an operation as an engine does: in the log first, then by message."""
        self.store.record([outcome])
        self.hub.take(Done.of(outcome))

    def end(self, request_id: str, result: bytes = b'{"metrics":{}}') -> str:
        """End an operation with this JSON; returns its id."""
        self.finish(Outcome(request_id, result, "json", None, None))
        return request_id

    def queued(self) -> list[Command]:
        """The queued commands of all models, in the order in which they came."""
        commands = [command for model_id in self.store.queued_models() for command in self.store.queued(model_id)]
        return sorted(commands, key=lambda command: command.id)

    def save(self, path: str, files: Mapping[str, bytes] | None = None, **fields: Any) -> Checkpoint:
        """A checkpoint at this path as an engine leaves it; its files hold these bytes.

        `fields` are those of its row.
        """
        contents = {"weights": b"0123456789"} if files is None else files
        place = self.hub.files.new_place()
        self.store.announce_checkpoint(place)
        with self.hub.files.written(place) as directory:
            for name, content in contents.items():
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(content)
        parts, size = parse_path(path), sum(map(len, contents.values()))
        row = Checkpoint(
            path, *parts, place, "tiny", "qwen3", SHAPE, parts.kind == "training", size, None, time(), None
        )
        row = replace(row, **fields)
        self.store.put_checkpoint(row)
        return row


def step(model_id: str, seq_id: int) -> dict[str, Any]:
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": {}}


def forward_backward_body(model_id: str, seq_id: int) -> bytes:
    """The protobuf body of a forward_backward with an image, as the SDK writes it."""
    image = types.ImageChunk(data=b"not decoded here", format="png", expected_tokens=1)
    datum = types.Datum(
        model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), image]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([2, 3, 4]))},
    )
    content = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = ForwardBackwardRequest(forward_backward_input=content, model_id=model_id, seq_id=seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


def _json(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(reply: httpx.Response, status: int = 400) -> str:
    """The reason that a refusal with this status gives."""
    assert reply.status_code == status, reply.text
    detail: str = reply.json()["detail"]
    return detail


@asynccontextmanager
async def served(
    data_dir: Path, config: Config | None = None, facts: ModelFacts | None = FACTS, **settings: Any
) -> AsyncIterator[Served]:
    """Serve in process, with these settings of the server.

    `facts` describes the base model that an engine would have announced.
    """
    config = config or Config(server=ServerConfig(**settings))
    config.server.long_poll_s = min(config.server.long_poll_s, 2.0)
    store = Store.open(data_dir)
    hub = Hub(config, store, data_dir)
    if facts is not None:
        hub.base_models.replace([facts.to_dict()])
    front = front_beside(hub, data_dir)
    transport = httpx.ASGITransport(create_app(front))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield Served(hub, front, store, client)
    front.bodies.parser.close()
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
