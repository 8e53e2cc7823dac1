"""Tokens that are read while vLLM samples them, with servers on real sockets that stream made-up tokens.

`tests/with_vllm/test_streaming.py` does it with vLLM itself.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.bases import new_ref, random_adapter, random_tokens, renderer
from tinsmith.config import load
from tinsmith.models.base import BaseModel
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled
from tinsmith.sampling.vllm.canary import Canary, Expectation
from tinsmith.sampling.vllm.sampler import VLLMSampler, start_vllm_sampler
from tinsmith.wire.sample import SampleRequest, parse_sample_request

TOKENS = [11, 12, 13, 14, 15, 16]
"""What every sample consists of."""


class Stub:
    """A server that samples `TOKENS`, one after the other, and knows the trainer's canary."""

    def __init__(self) -> None:
        self.canary: dict[int, float] = {}
        """Log-probability by position; nothing is agreed on without it."""
        self.length = 0
        """Tokens of the canary."""
        self.breaks_after: int | None = None
        """How many tokens of its next stream come before the connection breaks."""
        self.pauses_after: int | None = None
        """How many tokens of its next stream come before it waits to be told to abort."""
        self.aborted = asyncio.Event()
        self.asked: list[dict[str, Any]] = []
        """The bodies of all requests for tokens but canaries."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/abort_requests":
            self.aborted.set()
        if request.path == "/collective_rpc":
            return web.json_response({"results": [{"checked": True}]})
        if request.path != "/inference/v1/generate":
            return web.json_response({"weight_version": "default"})
        body = await request.json()
        if len(body["token_ids"]) == self.length and "prompt_logprobs" in body["sampling_params"]:
            scores = [None, *({str(body["token_ids"][at]): {"logprob": self.canary.get(at, 0.0)}} for at in range(1, self.length))]
            return web.json_response({"choices": [], "prompt_logprobs": scores, "model": body["model"]})
        self.asked.append(body)
        done = len(body["token_ids"]) - 5
        count = body["sampling_params"]["max_tokens"]
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": "length", "token_ids": TOKENS[done : done + count], "weight_versions": versions(count)}
            choice["logprobs"] = {"content": [scored(token) for token in TOKENS[done : done + count]]}
            scores = [None, *({str(token): {"logprob": -1.0}} for token in body["token_ids"][1:])]
            return web.json_response({"choices": [choice], "model": body["model"], "usage": {}, "prompt_logprobs": scores})
        return await self._stream(request, TOKENS[done : done + count])

    async def _stream(self, request: web.Request, tokens: list[int]) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        breaks_after, self.breaks_after = self.breaks_after, None
        pauses_after, self.pauses_after = self.pauses_after, None
        for at, token in enumerate(tokens):
            if at == breaks_after:
                assert request.transport is not None
                request.transport.abort()
                return reply
            if at == pauses_after:
                await self.aborted.wait()
                await self._send(reply, [], "abort", versions(at))
                break
            last = at == len(tokens) - 1
            await self._send(reply, [token], "length" if last else None, versions(len(tokens)) if last else None)
        await reply.write(b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 4}}}\n\ndata: [DONE]\n\n')
        return reply

    async def _send(self, reply: web.StreamResponse, tokens: list[int], reason: str | None, spans: Any) -> None:
        choice = {"index": 0, "token_ids": tokens, "finish_reason": reason, "weight_versions": spans}
        choice["logprobs"] = {"content": [scored(token) for token in tokens]}
        await reply.write(b"data: " + orjson.dumps({"choices": [choice], "usage": None}) + b"\n\n")


def scored(token: int) -> dict[str, Any]:
    return {"token_id": token, "logprob": -float(token), "top_logprobs": [{"token_id": token, "logprob": -float(token)}]}


def versions(count: int) -> list[dict[str, Any]]:
    return [{"version": "default", "start": 0, "end": count}] if count else []


class Bench:
    """A sampler, the server that it is connected to, and what has come out of it."""

    def __init__(self, base: BaseModel, stub: Stub, directory: Path) -> None:
        self.awake = threading.Event()
        config = load(options={"base_models": ["tiny"], "vllm_urls": [f"unix:{directory / 'socket'}"], "vllm_dir": str(directory)})
        self.base = base
        stub.length = len(Canary(base, renderer(base)).rendered)
        self.sampler: VLLMSampler = start_vllm_sampler(base, renderer(base), config, self.awake.set)
        self.sampler.client.run(self.sampler.client.servers.pick([], 0)).result()
        self.sampler.client.publisher.probes = ()  # it did not agree on the canary then, and is not asked again what of adapters it applies
        self.prompt = renderer(base).render([random_tokens(0, 5)])

    def add(self, weights: Any = None, stream: bool = True, **params: Any) -> None:
        self.sampler.add("x", request(**params), self.prompt, weights, stream)

    def events(self, until: Callable[[SampleEvent], bool]) -> list[SampleEvent]:
        """All events up to one of a kind."""
        found: list[SampleEvent] = []
        while not any(until(event) for event in found):
            if not self.sampler.has_work:
                assert self.awake.wait(600)
            self.awake.clear()
            found += self.sampler.step()
        return found


def request(num_samples: int = 1, top_k: int = -1, prompt_logprobs: bool = False, **params: Any) -> SampleRequest:
    body = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "num_samples": num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4, 5]}]},
        "sampling_params": {"max_tokens": len(TOKENS), "top_k": top_k, "stop": []} | params,
        "prompt_logprobs": prompt_logprobs,
    }
    return parse_sample_request(orjson.dumps(body))


def is_end(event: SampleEvent) -> bool:
    return isinstance(event, SampleResult | SampleFailure)


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    """A running server."""
    loop = asyncio.new_event_loop()
    stub = Stub()

    async def open_up() -> web.AppRunner:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", stub.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        return runner

    runner = loop.run_until_complete(open_up())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield stub
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def bench(text_base: BaseModel, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A sampler with that server, which agrees with the trainer on every canary."""
    made = Bench(text_base, stub, tmp_path)
    expected = made.sampler.canary.expected

    def note(weights: Any) -> Any:
        values = expected(weights)
        stub.canary = dict(zip(range(1, stub.length), values.logprobs.tolist(), strict=True))
        return values

    monkeypatch.setattr(made.sampler.canary, "expected", note)
    yield made
    made.sampler.client.close()


def check(events: list[SampleEvent], labels: list[str]) -> list[TokensSampled]:
    """The events must hold the tokens of the result, from weights with these labels; returns all but the result."""
    *told, result = events
    assert isinstance(result, SampleResult)
    tokens = [event for event in told if isinstance(event, TokensSampled)]
    assert len(tokens) == len(told)
    for index, sequence in enumerate(result.sequences):
        own = [event for event in tokens if event.index == index]
        assert [token for event in own for token in event.tokens] == sequence.tokens == TOKENS
        assert [logprob for event in own for logprob in event.logprobs] == sequence.logprobs
        assert [event.version for event in own for _ in event.tokens] == labels
    return tokens


def test_tokens_come_one_by_one(bench: Bench) -> None:
    bench.add(num_samples=2)
    events = check(bench.events(is_end), [bench.base.name] * 6)
    assert len(events) == 12


def test_tokens_come_at_the_end_where_vllm_cannot_stream_them(bench: Bench, stub: Stub) -> None:
    """A stream brings neither the prompt's scores nor log-probabilities over the whole vocabulary."""
    bench.add(prompt_logprobs=True)
    assert len(check(bench.events(is_end), [bench.base.name] * 6)) == 1
    assert not any(asked.get("stream") for asked in stub.asked)


def test_who_does_not_read_along_gets_the_result_only(bench: Bench, stub: Stub) -> None:
    bench.add(stream=False)
    (result,) = bench.events(is_end)
    assert isinstance(result, SampleResult)
    assert not any(asked.get("stream") for asked in stub.asked)


@pytest.mark.parametrize("after", [0, 3, 5])
def test_a_sample_goes_on_behind_the_tokens_that_were_given_out(bench: Bench, stub: Stub, after: int) -> None:
    """The connection breaks in the middle of its answer: another request has these tokens behind the prompt."""
    stub.breaks_after = after
    bench.add()
    check(bench.events(is_end), [bench.base.name] * 6)
    first, second = stub.asked
    assert second["token_ids"] == [*first["token_ids"], *TOKENS[:after]]
    assert second["sampling_params"]["max_tokens"] == 6 - after


def test_newer_weights_give_the_tokens_that_follow(bench: Bench, stub: Stub) -> None:
    old, new = (random_adapter(bench.base, seed=seed, ref=new_ref(f"m/{seed}", "m")) for seed in range(2))
    stub.pauses_after = 4
    bench.add(old)
    events: list[SampleEvent] = []
    while len(events) < 4:
        events += bench.events(lambda event: isinstance(event, TokensSampled))
    bench.sampler.publish(new)
    events += bench.events(is_end)
    check(events, ["m/0"] * 4 + ["m/1"] * 2)


def test_no_token_of_wrong_weights_is_given_out(bench: Bench, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bench.sampler.canary.expected

    def shifted(weights: Any) -> Expectation:
        right = expected(weights)
        return replace(right, logprobs=right.logprobs - 0.01)

    monkeypatch.setattr(bench.sampler.canary, "expected", shifted)
    bench.add()
    (failure,) = bench.events(is_end)
    assert isinstance(failure, SampleFailure)
    assert "other log-probabilities than the trainer" in str(failure.error)
    assert stub.asked == []
