"""Bodies of megabytes that arrive together.

Invariant: Small requests are answered while large ones arrive; the process that parses these is replaced when it dies
and ends with the server. Also: `tests/server/test_parser_process.py`, `tests/server/test_supervision.py`.
"""

import asyncio
import pkgutil
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import httpx
import orjson
import pytest
import zstandard
from fastapi.routing import APIRoute
from pydantic import BaseModel
from tinker.types import ModelInput, SamplingParams
from tinker.types.sample_request import SampleRequest

from tests.server.serving import PROTOBUF, ZSTD, Served, forward_backward_body, parsers, refused
from tinsmith.errors import UserError
from tinsmith.server import routes
from tinsmith.server.app import create_app, http_config
from tinsmith.store.store import Store
from tinsmith.wire.forward_backward import decode_stored
from tinsmith.wire.json_body import StrictModel, TolerantModel

PARTS, PART_BYTES = 6, 32 * 1024
JSON = {"Content-Type": "application/json"}


async def test_large_bodies_are_read_in_turns_and_one_that_stops_keeps_no_other_waiting(server: Served) -> None:
    asked: list[int] = []
    """Whose next part the server asked for, in order."""
    model_id, never = await server.new_model(), asyncio.Event()

    async def parts(seq_id: int) -> AsyncIterator[bytes]:
        body = forward_backward_body(model_id, seq_id) + b"\x2a\x00" * (PARTS * PART_BYTES // 2)
        for start in range(0, PARTS * PART_BYTES, PART_BYTES):
            asked.append(seq_id)
            yield body[start : start + PART_BYTES]
            if seq_id == 1:
                await never.wait()
        yield body[PARTS * PART_BYTES :]

    async def post(seq_id: int) -> int:
        return (
            await server.client.post("/api/v1/forward_backward", content=parts(seq_id), headers=PROTOBUF)
        ).status_code

    slow = asyncio.create_task(post(1))
    assert await asyncio.gather(*(post(seq_id) for seq_id in range(2, 10))) == [200] * 8
    assert not slow.done()
    slow.cancel()
    so_far: Counter[int] = Counter()
    for seq_id in asked:
        so_far[seq_id] += 1
        if so_far.total() > 9:  # all have begun
            others = [so_far[other] for other in range(2, 10)]
            assert max(others) - min(others) <= 2
    assert so_far[1] == 1


async def test_what_is_small_once_decompressed_does_not_wait_for_what_is_large(server: Served) -> None:
    model_id = await server.new_model()
    small, rest = zstandard.compress(forward_backward_body(model_id, 1)), zstandard.compress(b"\x2a\x00" * 10_000)
    for seq_id, body, children in (
        (1, small, 0),
        (2, zstandard.compress(forward_backward_body(model_id, 2)) + rest, 1),
    ):
        assert (await server.train(body, **ZSTD)).json()["request_id"] == f"{model_id}/{seq_id}"
        assert len(parsers()) == children
    command = server.queued()[-1]
    stored = decode_stored(server.store.payload(command), command.image_digests)
    assert stored.loss_fn_config == {"": 0.0}  # from the second frame
    assert refused(await server.train(small[:-1], **ZSTD)) == "the zstd body ends in the middle of a frame"


async def test_a_large_body_waits_in_the_queue_of_its_session(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the SDK writes it, plain and compressed. Ids that nobody was given have one queue together, of each client."""
    queues = list[tuple[str, str]]()
    run = server.front.bodies.parser.run

    async def noted(*args: Any, client: str, session: str) -> Any:
        queues.append((client, session))
        return await run(*args, client=client, session=session)

    monkeypatch.setattr(server.front.bodies.parser, "run", noted)
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    sample = SampleRequest(
        prompt=ModelInput.from_ints([1] * 20_000),
        sampling_params=SamplingParams(),
        sampling_session_id=f"{session_id}:sample:0",
        seq_id=0,
        prompt_logprobs=True,
    )
    body = forward_backward_body(model_id, 1) + b"\x2a\x00" * 100_000
    unknown = forward_backward_body(model_id.replace(session_id[:8], "0" * 8), 1) + b"\x2a\x00" * 100_000
    await server.train(body)
    await server.train(zstandard.compress(body), **ZSTD)
    await server.post("asample", sample.model_dump(exclude_unset=True, mode="json"))
    await server.train(unknown)
    await server.train(unknown[:100] * 1000, **ZSTD)
    assert queues == [("127.0.0.1", session) for session in (session_id, session_id, session_id, "", "")]


@pytest.mark.parametrize(
    ("connects_from", "known_as"),
    [("127.0.0.1", "203.0.113.7"), ("::1", "203.0.113.7"), ("203.0.113.9", "203.0.113.9")],
)
async def test_clients_behind_a_proxy_on_this_machine_are_told_apart(
    server: Served, monkeypatch: pytest.MonkeyPatch, connects_from: str, known_as: str
) -> None:
    """By what the proxy has added. Nobody else can choose an address."""
    clients = list[str]()

    async def noted(*_: Any, client: str, session: str) -> None:
        clients.append(client)
        raise UserError(session)

    monkeypatch.setattr(server.front.bodies.parser, "run", noted)
    uvicorn = http_config(create_app(server.front), server.hub.config.server)
    uvicorn.load()
    server.client._transport = httpx.ASGITransport(uvicorn.loaded_app, client=(connects_from, 1))
    headers = JSON | {"X-Forwarded-For": "127.0.0.1, 198.51.100.1, 203.0.113.7"}
    assert (await server.client.post("/api/v1/asample", content=bytes(20_000), headers=headers)).status_code == 400
    assert clients == [known_as]


async def test_a_heartbeat_waits_for_nothing_that_is_written(server: Served) -> None:
    """A session is looked up once: its second heartbeat does not even wait for those who read."""
    session_id, written, started = await server.new_session(), threading.Event(), threading.Event()

    def write(_store: Store) -> None:
        started.set()
        written.wait()

    writing = asyncio.create_task(server.hub.store.write(write))
    await asyncio.to_thread(started.wait)
    assert [await server.heartbeat(each) for each in (session_id, "x")] == [200, 410]
    assert not writing.done()
    reading = [asyncio.create_task(server.hub.store.read(write)) for _ in range(8)]
    assert await server.heartbeat(session_id) == 200
    written.set()
    await asyncio.gather(writing, *reading)
    for _ in range(2):
        await server.end_session(session_id)
    assert await server.heartbeat(session_id) == 410


async def test_no_route_parses_a_large_body_where_all_requests_are_served(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small it is compressed. Other routes refuse it unread."""
    parsed: list[int] = []

    def note(model: type[BaseModel], body: bytes) -> BaseModel:
        parsed.append(len(body))
        return model.model_validate(orjson.loads(body))

    for model in (StrictModel, TolerantModel):
        monkeypatch.setattr(model, "model_validate_json", classmethod(note))
    huge = b'{"retrieved_request_ids": [' + b'"",' * 1_000_000 + b'""]}'
    assert len(zstandard.compress(huge)) < 1000
    modules = [import_module(found.name) for found in pkgutil.iter_modules(routes.__path__, f"{routes.__name__}.")]
    every = [route for module in modules for route in module.router.routes if isinstance(route, APIRoute)]
    taking = [
        (method, re.sub(r"\{[^}]*\}", "x", f"/api/v1{route.path}".replace("{segment}", "weights")))
        for route in every
        for method in ("POST", "PUT")
        if method in (route.methods or ())
    ]
    assert Counter(method for method, _ in taking).keys() == {"POST", "PUT"}
    assert len(taking) > 17
    for method, path in taking:
        for media_type in (JSON, PROTOBUF):
            for content, encoding in ((zstandard.compress(huge), ZSTD), (huge, {})):
                reply = await server.client.request(method, path, content=content, headers=media_type | encoding)
                assert reply.status_code < 500, (method, path, reply.text)
    assert max(parsed, default=0) <= 128 * 1024


async def test_a_poll_with_too_many_ids_is_refused_and_one_with_many_is_answered(server: Served) -> None:
    poll = {"target": {"sampling_session_id": await server.new_sampler()}, "timeout": 0}
    answered = await server.answer("retrieve_futures", poll | {"retrieved_request_ids": ["x"] * 2**16})
    assert answered == {"completions": [], "cursor": 0}
    reason = await server.refusal("retrieve_futures", poll | {"retrieved_request_ids": ["x"] * (2**16 + 1)})
    assert "retrieved_request_ids: List should have at most 65536 items" in reason
