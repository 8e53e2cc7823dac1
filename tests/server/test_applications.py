"""Errors of OpenAI's API, and answers whose sample ends otherwise than it should. The engine here computes nothing.

Invariant: No answer of OpenAI's API is cut short without an error, and no sample goes on that nobody waits for.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import FACTS, LIGHT_ENGINE, Served, running, served
from tests.server.test_tenants import key, speaking
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import CancelSample, Recovering, Sample, SampleDone, SampleEvents, SampleFailed
from tinsmith.server.engine_process import EngineProcess
from tinsmith.store import catalog
from tinsmith.store.keys import add_key
from tinsmith.store.newest_weights import newest_weights
from tinsmith.store.records import Outcome, Used
from tinsmith.store.usage import DAY_S, used_between
from tinsmith.wire.prompt_scores import PromptAnswers
from tinsmith.wire.sample import SampledSequence, encode_sample_response

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}


class Engine:
    """An engine process that only takes notice, and what it was told about samples."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.told: asyncio.Queue[Message] = asyncio.Queue()

    async def sample(self) -> Sample:
        """The next sample that it is given."""
        message = await self.told.get()
        assert isinstance(message, Sample)
        return message

    def sampled(self, sample: Sample, tokens: list[int]) -> None:
        self.server.hub.take(SampleEvents([(sample.request_id, sample.run, 0, tokens, [-1.0] * len(tokens))]))

    def done(self, sample: Sample, tokens: list[int]) -> None:
        sequence = SampledSequence(tokens, [-1.0] * len(tokens), "stop")
        used = vars(Used(prefilled_tokens=3, cached_tokens=2, sampled_tokens=len(tokens)))
        payload = encode_sample_response([sequence], PromptAnswers(), 2)
        self.server.hub.take(SampleDone(sample.request_id, sample.run, payload, used))

    def failed(self, sample: Sample, error: str, category: str = "server", gone: bool = False) -> None:
        self.server.hub.take(SampleFailed(sample.request_id, sample.run, error, category, gone))


@asynccontextmanager
async def with_engine(data_dir: Path, model: Path, **settings: Any) -> AsyncIterator[Engine]:
    async with served(data_dir, **settings) as server:
        hub = server.hub
        ready = asyncio.Event()

        async def engine_ready() -> None:
            await hub.engine_ready()
            ready.set()

        hub.engine = EngineProcess(hub.config, hub.take, engine_ready, hub.engine_absent, LIGHT_ENGINE)
        engine, send = Engine(server), hub.engine.send

        async def sent(message: Message) -> None:
            if isinstance(message, Sample | CancelSample):
                engine.told.put_nowait(message)
            await send(message)

        hub.engine.send = hub.engine.notify = sent  # type: ignore[method-assign]
        async with running(hub.engine):
            await ready.wait()
            facts = replace(FACTS, tokenizer_id=str(model), vocab_size=2048, max_context=64)
            hub.base_models.replace([facts.to_dict()])
            yield engine


@pytest.fixture
async def engine(tmp_path: Path, family_dir: Callable[[str], Path]) -> AsyncIterator[Engine]:
    async with with_engine(tmp_path, family_dir("qwen3")) as started:
        yield started


async def ask(engine: Engine, **params: Any) -> tuple[Awaitable[httpx.Response], Sample]:
    """The reply to come, and the sample that was started."""
    reply = asyncio.ensure_future(engine.server.client.post(CHAT, json=ASKED | params))
    return reply, await engine.sample()


def error_of(reply: httpx.Response, status: int, kind: str, **headers: str) -> str:
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind), reply.text
    assert {name: reply.headers.get(name) for name in headers} == headers
    return str(reply.json()["error"]["message"])


def events_of(reply: httpx.Response) -> list[Any]:
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_an_answer_is_what_the_engine_says_and_is_forgotten_when_it_was_sent(engine: Engine) -> None:
    hub = engine.server.hub
    coming, sample = await ask(engine)
    engine.done(sample, [40, 41])
    reply = (await coming).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    coming, sample = await ask(engine, stream=True)
    engine.sampled(sample, [40])
    engine.sampled(sample, [41])
    engine.done(sample, [40, 41])
    *parts, end = events_of(await coming)
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert (text, end) == (reply["choices"][0]["message"]["content"], "[DONE]")
    assert hub.samples.unfinished == (0, None)
    assert hub.samples.find(sample.request_id) is None
    assert engine.told.empty()
    assert hub.sample_reports._boxes == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_sample_that_fails_has_its_status(engine: Engine, stream: bool) -> None:
    for category, gone, status, kind in (
        ("user", False, 400, "invalid_request_error"),
        ("user", True, 404, "not_found_error"),
        ("server", False, 500, "server_error"),
    ):
        coming, sample = await ask(engine, stream=stream)
        engine.failed(sample, "it is broken", category, gone)
        assert error_of(await coming, status, kind) == "it is broken"
    coming, sample = await ask(engine, stream=stream)
    engine.server.hub.take(Recovering("a worker has ended"))
    assert "lost with its engine" in error_of(await coming, 503, "server_error")
    assert engine.server.hub.samples.unfinished == (0, None)


async def test_a_stream_that_breaks_off_ends_in_an_error(engine: Engine) -> None:
    endings: list[tuple[Callable[[Sample], None], str]] = [
        (lambda sample: engine.failed(sample, "it is broken"), "it is broken"),
        (lambda sample: engine.server.hub.take(Recovering("")), "lost with its engine"),
        (lambda _: engine.server.hub.samples.end_streams(), "the server stops"),
    ]
    for break_off, reason in endings:
        coming, sample = await ask(engine, stream=True)
        engine.sampled(sample, [40])
        await asyncio.sleep(0.1)
        break_off(sample)
        *_, last = events_of(await coming)
        assert reason in last["error"]["message"]


async def test_a_request_that_is_given_up_cancels_its_sample(engine: Engine) -> None:
    for stream in (True, False):
        coming, sample = await ask(engine, stream=stream)
        if stream:
            engine.sampled(sample, [40])
            await asyncio.sleep(0.1)
        assert isinstance(coming, asyncio.Future)
        coming.cancel()
        async with asyncio.timeout(60):
            assert await engine.told.get() == CancelSample(sample.request_id, sample.run)
        assert engine.server.hub.samples.find(sample.request_id) is None
        assert engine.server.hub.samples.unfinished == (0, None)


async def test_what_a_client_was_told_before_it_went_away_is_metered(engine: Engine) -> None:
    coming, sample = await ask(engine, stream=True)
    engine.sampled(sample, [40, 41])
    engine.sampled(sample, [42])
    await asyncio.sleep(0.1)
    assert isinstance(coming, asyncio.Future)
    coming.cancel()
    async with asyncio.timeout(60):
        await engine.told.get()
    await engine.server.hub.budgets.flush()
    found = used_between(engine.server.store, 0, int(time.time()) + DAY_S)
    (used,) = (each.used for each in found)
    prompt = (await engine.server.client.post(CHAT, json=ASKED | {"max_tokens": 60})).json()["error"]["message"]
    assert f"{used.prefilled_tokens} + 60 > 64" in prompt
    assert used.sampled_tokens == 3


async def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenized(engine: Engine) -> None:
    for content in ("a" * 200_000, "<|im_end|>" * 65):
        asked = ASKED | {"messages": [{"role": "user", "content": content}]}
        reply = await engine.server.client.post(CHAT, json=asked)
        assert "are more than the 64 tokens" in error_of(reply, 400, "invalid_request_error")
    reply = await engine.server.client.post(CHAT, json=ASKED | {"messages": ASKED["messages"] * 65})
    assert "messages: these are 65" in error_of(reply, 400, "invalid_request_error")
    reply = await engine.server.client.post("/v1/completions", json={"model": "tiny", "prompt": "a" * 200_000})
    assert "prompt: 200000 characters" in error_of(reply, 400, "invalid_request_error")


async def test_refusals_have_the_form_and_the_status_that_clients_know(
    tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    async with with_engine(tmp_path, family_dir("qwen3"), max_pending_samples=1) as engine:
        client = engine.server.client
        assert "request has 2 sequences" in error_of(
            await client.post(CHAT, json=ASKED | {"n": 2}), 400, "invalid_request_error"
        )
        coming, sample = await ask(engine)
        reply = await client.post(CHAT, json=ASKED)
        limited = error_of(reply, 429, "rate_limit_error", **{"retry-after": "1"})
        assert "max_pending_samples" in limited
        engine.done(sample, [40])
        assert (await coming).status_code == 200
        for path in ("/v1/embeddings", "/oai/api/v1/responses"):
            assert "is not built in this version" in error_of(await client.post(path), 404, "not_found_error")
        too_long = ASKED | {"max_tokens": 60}
        assert "exceeds the context window" in error_of(
            await client.post(CHAT, json=too_long), 400, "invalid_request_error"
        )
        malformed = await client.post(CHAT, content=b"{", headers={"Content-Type": "application/json"})
        assert error_of(malformed, 400, "invalid_request_error").startswith("body: ")


async def test_keys_and_what_they_allow(server: Served) -> None:
    text = add_key(server.store, key("alice", models=["other"]))
    server.save("tinker://a/sampler_weights/mine", tenant="alice")
    server.save("tinker://a/weights/mine", tenant="alice")
    server.save("tinker://b/sampler_weights/foreign", tenant="bob")
    async with speaking(server, text) as alice:
        for headers in ({"X-API-Key": text}, {"Authorization": f"Bearer {text}"}):
            found = (await server.client.get("/v1/models", headers=headers)).json()["data"]
            assert [model["id"] for model in found] == ["tinker://a/sampler_weights/mine"]
        assert "allows the base models other" in error_of(
            await alice.client.post(CHAT, json=ASKED), 403, "permission_error"
        )
        for headers in ({}, {"Authorization": "Bearer tml-other"}):
            reply = await server.client.post(CHAT, json=ASKED, headers=headers)
            assert "needs an API key" in error_of(reply, 401, "authentication_error")


async def test_the_newest_weights_are_those_that_were_saved_last(server: Served) -> None:
    """In the order of the operations, not that of the clock: a slow save under a name may end behind a later one."""
    model_id = await server.new_run()

    async def save(seq_id: int, **fields: Any) -> str:
        body = {"model_id": model_id, "seq_id": seq_id} | fields
        request_id: str = (await server.answer("save_weights_for_sampler", body))["request_id"]
        return request_id

    def newest() -> str | None:
        return newest_weights(server.store, model_id)

    assert newest() is None
    path, later = (f"tinker://{model_id}/sampler_weights/{name}" for name in ("a", "b"))
    sampler = f"{model_id.partition(':')[0]}:sample:3"
    named, snapshot = await save(1, path="a"), await save(2, sampling_session_seq_id=3)
    assert newest() is None
    server.end(snapshot, json.dumps({"sampling_session_id": sampler}).encode())
    assert newest() == sampler
    server.save(path)
    server.end(named, json.dumps({"path": path}).encode())
    assert newest() == sampler
    failed = await save(3, path="c")
    server.finish(Outcome(failed, None, None, "no room", "user"))
    assert newest() == sampler
    place = {"directory": server.save(later).directory}
    saved = await save(4, path="b")
    server.finish(Outcome(saved, json.dumps({"path": later}).encode(), "json", None, None, place))
    assert newest() == later
    server.store.drop_results(time.time() + 1, 0.0)
    assert newest() == later
    catalog.delete_checkpoint(server.store, later)
    assert newest() == later, "older weights take the place of deleted ones"
