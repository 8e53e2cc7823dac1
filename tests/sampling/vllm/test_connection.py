"""What a vLLM server refuses, what it fails at, and what is lost, on a real socket."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from aiohttp import web

from tinsmith.sampling.vllm.connection import Connection, RefusedError, ServerFailedError, ServerLostError


async def refuse(request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": f"no such model: {await request.text()}", "code": 404}}, status=404)


async def fail(_: web.Request) -> web.Response:
    return web.Response(text="Internal Server Error", status=500)


FAILED = web.AppKey("failed", set[asyncio.Transport])
"""The connections on which a request failed."""


async def fail_and_close(request: web.Request) -> web.Response:
    """As vLLM does: it answers and keeps the connection in its words, but what comes on it afterwards is lost."""
    assert request.transport is not None
    request.app[FAILED].add(request.transport)
    return await fail(request)


async def ok_unless_failed(request: web.Request) -> web.Response:
    assert request.transport is not None
    if request.transport in request.app[FAILED]:
        request.transport.abort()
    return await say_ok(request)


async def vanish(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def answer(request: web.Request) -> web.Response:
    return web.json_response({"mode": request.query["mode"], "body": await request.json()})


async def stream(request: web.Request) -> web.StreamResponse:
    """As many numbers as it is asked for, and then what `last` says."""
    asked = await request.json()
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for number in range(asked["numbers"]):
        await reply.write(b'data: {"number": %d}\n\n' % number)
    if asked["last"] == "abort":
        assert request.transport is not None
        request.transport.abort()
    elif asked["last"]:
        await reply.write(b"data: %b\n\n" % asked["last"].encode())
    return reply


async def say_ok(_: web.Request) -> web.Response:
    return web.Response(text="Success: LoRA adapter loaded.")


def with_server(directory: Path, story: Callable[[Connection], Awaitable[None]]) -> None:
    """Tell the story to a connection with a server whose socket lies in `directory`."""

    async def tell() -> None:
        app = web.Application()
        app[FAILED] = set()
        handlers = {"refuse": refuse, "fail": fail, "vanish": vanish, "answer": answer, "ok": say_ok, "stream": stream}
        handlers |= {"fail_and_close": fail_and_close, "ok_unless_failed": ok_unless_failed}
        for path, handler in handlers.items():
            app.router.add_post(f"/{path}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(directory / "vllm")).start()
        connection = Connection(f"unix:{directory / 'vllm'}")
        try:
            await story(connection)
        finally:
            await connection.close()
            await runner.cleanup()

    asyncio.run(tell())


def test_answers_are_json_or_nothing(tmp_path: Path) -> None:
    async def story(connection: Connection) -> None:
        assert await connection.post("/answer", {"a": 1}, mode="wait") == {"mode": "wait", "body": {"a": 1}}
        assert await connection.post("/ok") is None

    with_server(tmp_path, story)


def test_errors_keep_the_servers_text(tmp_path: Path) -> None:
    async def story(connection: Connection) -> None:
        with pytest.raises(RefusedError, match=r'vLLM answered 404 to /refuse: no such model: \{"a":1\}'):
            await connection.post("/refuse", {"a": 1})
        with pytest.raises(ServerFailedError, match="vLLM answered 500 to /fail: Internal Server Error"):
            await connection.post("/fail")

    with_server(tmp_path, story)


def test_a_request_after_a_failure_takes_another_connection(tmp_path: Path) -> None:
    """vLLM closes the connection on which it failed a moment after its answer: the next request would be lost with it."""

    async def story(connection: Connection) -> None:
        with pytest.raises(ServerFailedError):
            await connection.post("/fail_and_close")
        assert await connection.post("/ok_unless_failed") is None

    with_server(tmp_path, story)


def test_a_server_that_goes_away_is_lost_and_so_is_what_comes_after(tmp_path: Path) -> None:
    async def story(connection: Connection) -> None:
        with pytest.raises(ServerLostError, match="went away"):
            await connection.post("/vanish")
        await connection.close()
        with pytest.raises(ServerLostError, match="before it was asked"):
            await connection.post("/ok")

    with_server(tmp_path, story)


def test_a_stream_is_read_event_by_event(tmp_path: Path) -> None:
    async def story(connection: Connection) -> None:
        async with aclosing(connection.stream("/stream", {"numbers": 3, "last": "[DONE]"})) as events:
            assert [event["number"] async for event in events] == [0, 1, 2]

    with_server(tmp_path, story)


@pytest.mark.parametrize(
    ("last", "error", "message"),
    [
        ("abort", ServerLostError, "went away"),
        ("", ServerLostError, "ended an answer before it was whole"),
        ('{"error": {"message": "no memory left"}}', ServerFailedError, "while it answered /stream: no memory left"),
    ],
)
def test_a_stream_that_breaks_off_gives_what_came_before(tmp_path: Path, last: str, error: type[Exception], message: str) -> None:
    async def story(connection: Connection) -> None:
        async with aclosing(connection.stream("/stream", {"numbers": 2, "last": last})) as events:
            assert [await anext(events), await anext(events)] == [{"number": 0}, {"number": 1}]
            with pytest.raises(error, match=message):
                await anext(events)

    with_server(tmp_path, story)


def test_a_stream_that_is_refused_says_why(tmp_path: Path) -> None:
    async def story(connection: Connection) -> None:
        with pytest.raises(RefusedError, match="no such model"):
            await anext(connection.stream("/refuse", {}))

    with_server(tmp_path, story)
