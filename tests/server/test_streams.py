"""How often the stream of an answer tells its tokens. The engine here computes nothing.

Invariant: Parts of an answer that are told together are those that are told one by one, and none is held back for good.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message as Sent

from tests.server.test_applications import ASKED, Engine, with_engine
from tests.server.test_engine_process import until
from tinsmith.chat.template import ChatFormat
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import CancelSample, Recovering, Sample
from tinsmith.server.app import create_app

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/anthropic/api/v1/messages"
MANY = 10**9
"""Streams, so many that no part of one is due again."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
COLUMNS = ("tokens", "token_logprobs", "text_offset")
TOOL = {"name": "weather", "description": "tells it"}
SCHEMA = {"type": "object"}
OPENAI = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, ASKED | OPENAI | {"tools": [{"type": "function", "function": TOOL | {"parameters": SCHEMA}}]}),
    (TEXT, {"model": "tiny", "prompt": "a", "max_tokens": 4} | OPENAI | {"logprobs": 0}),
    (MESSAGES, ASKED | {"tools": [TOOL | {"input_schema": SCHEMA}]}),
]


class Reader:
    """A client that reads a stream while it comes."""

    def __init__(self, engine: Engine) -> None:
        self._app = create_app(engine.server.front)
        self._sent: asyncio.Queue[bytes] = asyncio.Queue()
        self._goes = asyncio.Event()
        self.reads = asyncio.Event()
        """Set while it takes what is sent."""
        self.reads.set()
        self._reading: asyncio.Task[None] | None = None

    def ask(self, path: str, asked: dict[str, Any]) -> None:
        body = json.dumps(asked | {"stream": True}).encode()
        coming: list[Sent] = [{"type": "http.request", "body": body, "more_body": False}]
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]

        async def receive() -> Sent:
            if not coming:
                await self._goes.wait()
                return {"type": "http.disconnect"}
            return coming.pop()

        async def send(sent: Sent) -> None:
            assert sent.get("status", 200) == 200
            if sent.get("body"):
                self._sent.put_nowait(sent["body"])
                await self.reads.wait()

        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
        }
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
        scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
        self._reading = asyncio.create_task(self._app(scope, receive, send))

    async def next(self) -> list[dict[str, Any]]:
        """The events that were sent together next."""
        async with asyncio.timeout(60):
            return list(events_in(await self._sent.get()))

    async def rest(self) -> list[list[dict[str, Any]]]:
        """What is sent until the stream ends."""
        assert self._reading is not None
        async with asyncio.timeout(60):
            await self._reading
        return [list(events_in(self._sent.get_nowait())) for _ in range(self._sent.qsize())]

    @property
    def has_more(self) -> bool:
        return not self._sent.empty()

    async def leave(self) -> None:
        self._goes.set()
        await self.rest()


def events_in(sent: bytes) -> Iterator[dict[str, Any]]:
    for event in sent.decode().split("\n\n"):
        content = event.partition("data: ")[2]
        if content and content != "[DONE]":
            yield json.loads(content)


@asynccontextmanager
async def asked(
    tmp_path: Path, model: Path, others: int, path: str = CHAT, params: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Engine, Reader, Sample]]:
    """A stream that was asked for beside so many others."""
    async with with_engine(tmp_path, model) as engine:
        engine.server.front.applications.streams = others
        facts = engine.server.hub.base_models.find("tiny")
        engine.server.hub.base_models.replace([facts.to_dict() | {"max_context": 2048, "max_sampled": 2048}])
        reader = Reader(engine)
        reader.ask(path, params or ASKED | OPENAI)
        async with asyncio.timeout(60):
            sample = await engine.sample()
        yield engine, reader, sample
        assert engine.server.front.applications.streams == others


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


async def test_each_token_of_one_stream_is_told_before_the_next_one_comes(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    async with asked(tmp_path, family_dir("qwen3"), 0) as (engine, reader, sample):
        for token in range(40, 60):
            engine.sampled(sample, [token])
            assert ids_of(await reader.next()) == [token]
        engine.done(sample, list(range(40, 60)))
        (last,) = await reader.rest()
        assert [event["choices"][0]["finish_reason"] for event in last[:-1]] == ["stop"]
        assert last[-1]["usage"]["completion_tokens"] == 20


async def test_what_is_held_is_told_when_its_time_comes_though_no_other_token_does(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    async with asked(tmp_path, family_dir("qwen3"), 99) as (engine, reader, sample):
        for tokens in ([40], [41], [42, 43]):
            engine.sampled(sample, tokens)
            assert ids_of(await reader.next()) == tokens
        engine.done(sample, [40, 41, 42, 43])
        await reader.rest()


async def test_many_streams_tell_the_first_token_and_the_end_at_once_and_all_between_together(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    async with asked(tmp_path, family_dir("qwen3"), MANY) as (engine, reader, sample):
        engine.sampled(sample, [40])
        assert ids_of(await reader.next()) == [40]
        for token in (41, 42, 43):
            engine.sampled(sample, [token])
            await asyncio.sleep(0.05)
            assert not reader.has_more
        engine.done(sample, [40, 41, 42, 43])
        (last,) = await reader.rest()
        assert ids_of(last) == [41, 42, 43]
        assert last[-1]["usage"]["completion_tokens"] == 4


async def test_a_first_token_that_is_half_a_character_delays_no_text(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    model = ChatFormat(str(family_dir("qwen3")))
    halves = model.ids("😀")
    assert len(halves) > 1
    async with asked(tmp_path, family_dir("qwen3"), MANY, params=ASKED) as (engine, reader, sample):
        for token in halves:
            engine.sampled(sample, [token])
            await asyncio.sleep(0.01)
        (event,) = await reader.next()
        assert event["choices"][0]["delta"]["content"] == "😀"
        engine.done(sample, halves)
        await reader.rest()


def sum_of_openai(events: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [choice for event in events for choice in event["choices"]]
    said = [choice.get("delta", choice) for choice in choices]
    scores = [choice["logprobs"] for choice in choices]
    return {
        "said": "".join(each.get("content") or each.get("text") or "" for each in said),
        "roles": [each["role"] for each in said if "role" in each],
        "calls": [(call["index"], call["function"]) for each in said for call in each.get("tool_calls", ())],
        "ids": ids_of(events),
        "prompts": [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event],
        "scores": [score for each in scores for score in each.get("content", ())],
        "columns": [[value for each in scores for value in each.get(name) or ()] for name in COLUMNS],
        "reasons": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in events if event.get("usage")],
    }


def sum_of_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks, said, end = [], dict[int, str](), []
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            said[event["index"]] = said.get(event["index"], "") + (delta.get("text") or delta["partial_json"])
        elif event["type"] == "message_delta":
            end.append(event)
        else:
            blocks.append((event["type"], event.get("index"), event.get("content_block", {}).get("name")))
    return {"blocks": blocks, "said": said, "end": end}


@pytest.mark.parametrize(("path", "params"), ROUTES, ids=["chat", "text", "messages"])
async def test_what_is_told_together_adds_up_to_what_is_told_one_by_one(
    tmp_path: Path, family_dir: Callable[[str], Path], path: str, params: dict[str, Any]
) -> None:
    shutil.copytree(family_dir("qwen3"), tmp_path / "model")
    shutil.copy(Path(__file__).parents[1] / "chat" / "tools.jinja", tmp_path / "model" / "chat_template.jinja")
    model = ChatFormat(str(tmp_path / "model"))
    tokens = model.ids(f"Köln 😀: <tool {CALL} and {CALL}\n{CALL} then € nothing <tool_call> more <|im_end|>")
    told = []
    for others in (0, MANY):
        data_dir = tmp_path / str(others)
        data_dir.mkdir()
        async with asked(data_dir, tmp_path / "model", others, path, params) as (engine, reader, sample):
            for token in tokens:
                engine.sampled(sample, [token])
                await asyncio.sleep(0.01 if others == 0 else 0)
            engine.done(sample, tokens)
            sent = await reader.rest()
            assert len(sent) > 5 if others == 0 else len(sent) == 2
            summed = sum_of_messages if path == MESSAGES else sum_of_openai
            told.append(summed([event for together in sent for event in together]))
    one_by_one, together = told
    assert together == one_by_one
    said = json.dumps(together, ensure_ascii=False)
    assert "Köln 😀: <tool" in said
    assert "then € nothing <tool_call> more" in said
    calls = together["calls"] if path != MESSAGES else [each for each in together["blocks"] if each[2]]
    assert len(calls) == (0 if path == TEXT else 3)


async def test_a_client_that_does_not_read_slows_no_other_stream(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    async with asked(tmp_path, family_dir("qwen3"), 0) as (engine, reader, sample):
        applications = engine.server.front.applications
        reader.reads.clear()
        engine.sampled(sample, [40])
        await reader.next()
        engine.sampled(sample, [41])
        await asyncio.sleep(0.05)
        assert applications.streams == 0
        reader.reads.set()
        assert ids_of(await reader.next()) == [41]
        await until(lambda: applications.streams == 1)
        engine.done(sample, [40, 41])
        await reader.rest()


async def test_a_client_that_leaves_while_tokens_are_held_ends_its_sample(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    async with asked(tmp_path, family_dir("qwen3"), MANY) as (engine, reader, sample):
        engine.sampled(sample, [40])
        await reader.next()
        engine.sampled(sample, [41])
        await asyncio.sleep(0.05)
        await reader.leave()
        async with asyncio.timeout(60):
            cancelled: Message = await engine.told.get()
        assert cancelled == CancelSample(sample.request_id, sample.run)
        assert engine.server.hub.samples.unfinished == (0, None)


async def test_a_sample_that_fails_while_tokens_are_held_tells_the_reason_at_once(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    endings: list[tuple[Callable[[Engine, Sample], None], str]] = [
        (lambda engine, sample: engine.failed(sample, "it is broken"), "it is broken"),
        (lambda engine, _: engine.server.hub.take(Recovering("")), "lost with its engine"),
    ]
    for number, (end, reason) in enumerate(endings):
        data_dir = tmp_path / str(number)
        data_dir.mkdir()
        async with asked(data_dir, family_dir("qwen3"), MANY) as (engine, reader, sample):
            engine.sampled(sample, [40])
            await reader.next()
            engine.sampled(sample, [41])
            await asyncio.sleep(0.05)
            end(engine, sample)
            *_, (last,) = await reader.rest()
            assert reason in last["error"]["message"]
