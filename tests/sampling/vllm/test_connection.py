"""What a vLLM server refuses, what it fails at, and what is lost, on a real socket."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from aiohttp import web

from tests.sampling.vllm.answering import answering, in_a_loop
from tinsmith.sampling.vllm.connection import RefusedError, ServerFailedError, ServerLostError


async def answer(request: web.Request) -> web.StreamResponse:
    if request.path == "/refuse":
        return web.json_response({"error": {"message": f"no such model: {await request.text()}", "code": 404}}, status=404)
    if request.path == "/fail":
        return web.Response(text="Internal Server Error", status=500)
    if request.path == "/json":
        return web.json_response({"mode": request.query["mode"], "body": await request.json()})
    if request.path == "/stream":
        return await stream(request)
    if request.path == "/vanish":
        abort(request)
    return web.Response(text="Success: LoRA adapter loaded.")


async def stream(request: web.Request) -> web.StreamResponse:
    """As many numbers as it is asked for, and then what `last` says."""
    asked = await request.json()
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for number in range(asked["numbers"]):
        await reply.write(b'data: {"number": %d}\n\n' % number)
    if asked["last"] == "abort":
        abort(request)
    elif asked["last"]:
        await reply.write(b"data: %b\n\n" % asked["last"].encode())
    return reply


def abort(request: web.Request) -> None:
    """Break the connection."""
    assert request.transport is not None
    request.transport.abort()


@in_a_loop
async def test_answers_are_json_or_nothing_and_errors_keep_the_servers_text(tmp_path: Path) -> None:
    async with answering(tmp_path, answer) as connection:
        assert await connection.post("/json", {"a": 1}, mode="wait") == {"mode": "wait", "body": {"a": 1}}
        assert await connection.post("/ok") is None
        with pytest.raises(RefusedError, match=r'vLLM answered 404 to /refuse: no such model: \{"a":1\}'):
            await connection.post("/refuse", {"a": 1})
        with pytest.raises(ServerFailedError, match="vLLM answered 500 to /fail: Internal Server Error"):
            await connection.post("/fail")
        with pytest.raises(RefusedError, match="no such model"):
            await anext(connection.stream("/refuse", {}))


@in_a_loop
async def test_a_request_after_a_failure_takes_another_connection(tmp_path: Path) -> None:
    """As vLLM does, this server keeps the connection in its words, but what comes on it after a failure is lost."""
    failed: list[asyncio.Transport | None] = []

    async def fail_once(request: web.Request) -> web.StreamResponse:
        if request.transport in failed:
            abort(request)
        failed.append(request.transport)
        return web.Response(status=500 if len(failed) == 1 else 200)

    async with answering(tmp_path, fail_once) as connection:
        with pytest.raises(ServerFailedError):
            await connection.post("/")
        assert await connection.post("/") is None


@in_a_loop
async def test_a_server_that_goes_away_is_lost_and_so_is_what_comes_after(tmp_path: Path) -> None:
    async with answering(tmp_path, answer) as connection:
        with pytest.raises(ServerLostError, match="went away"):
            await connection.post("/vanish")
        await connection.close()
        with pytest.raises(ServerLostError, match="before it was asked"):
            await connection.post("/ok")


@pytest.mark.parametrize(
    ("last", "error", "message"),
    [
        ("[DONE]", StopAsyncIteration, "^$"),
        ("abort", ServerLostError, "went away"),
        ("", ServerLostError, "ended an answer before it was whole"),
        ('{"error": {"message": "no memory left"}}', ServerFailedError, "while it answered /stream: no memory left"),
    ],
)
@in_a_loop
async def test_a_stream_is_read_event_by_event_until_it_ends_or_breaks_off(
    tmp_path: Path, last: str, error: type[Exception], message: str
) -> None:
    async with (
        answering(tmp_path, answer) as connection,
        aclosing(connection.stream("/stream", {"numbers": 2, "last": last})) as events,
    ):
        assert [await anext(events), await anext(events)] == [{"number": 0}, {"number": 1}]
        with pytest.raises(error, match=message):
            await anext(events)
