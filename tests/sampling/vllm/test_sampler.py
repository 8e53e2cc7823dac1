"""The vLLM sampler without a vLLM server, and with one on a real socket that samples made-up tokens.

`tests/with_vllm/test_a_sampler.py` has it with vLLM itself.
"""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from tests.bases import new_ref, random_adapter, random_tokens, renderer
from tests.sampling.local.test_sampler import full_weights
from tests.sampling.vllm.answering import Agreeing, abort, answering, scores
from tinsmith.config import SamplingConfig, load
from tinsmith.errors import ConfigError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled
from tinsmith.sampling.vllm import sampler as sampler_module
from tinsmith.sampling.vllm import servers
from tinsmith.sampling.vllm.sampler import VLLMSampler, start_vllm_sampler
from tinsmith.sampling.vllm.verify import score_prompt
from tinsmith.store.records import LOCAL
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, parse_sample_request

NOBODY = "http://127.0.0.1:9"
TOKENS = [11, 12, 13, 14, 15, 16]
"""What every sample of the stub consists of."""


def request(num_samples: int = 1, prompt_logprobs: bool = False, **params: Any) -> SampleRequest:
    body = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "num_samples": num_samples,
        "prompt_logprobs": prompt_logprobs,
    }
    body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4, 5]}]}
    body["sampling_params"] = {"max_tokens": len(TOKENS), "stop": []} | params
    return parse_sample_request(orjson.dumps(body))


class Bench:
    """A sampler with the server at a URL, and what comes out of it."""

    def __init__(self, base: BaseModel, url: str, directory: Path) -> None:
        self.base = base
        self.awake = threading.Event()
        config = load(options={"base_models": ["tiny"], "vllm_urls": [url], "vllm_dir": str(directory)})
        self.sampler: VLLMSampler = start_vllm_sampler(base, renderer(base), config, self.awake.set)
        self.prompt = renderer(base).render([random_tokens(0, 5)])

    def add(
        self, name: str = "x", weights: Any = None, asked: SampleRequest | None = None, stream: bool = False
    ) -> None:
        self.sampler.add(name, asked or request(), self.prompt, weights, stream)

    def events(self, until: Callable[[list[SampleEvent]], object]) -> list[SampleEvent]:
        """All events until enough have come."""
        found: list[SampleEvent] = []
        while not until(found):
            if not self.sampler.has_work:
                assert self.awake.wait(600)
            self.awake.clear()
            found += self.sampler.step()
        return found

    def to_the_end(self) -> list[SampleEvent]:
        """All events up to one that ends a sample."""
        return self.events(lambda found: any(isinstance(event, SampleResult | SampleFailure) for event in found))

    def settle(self) -> None:
        """Let the client's thread finish what it was given, and the sampler note which weights are gone."""
        for _ in range(3):
            self.sampler.client.run(asyncio.sleep(0)).result(60)
        self.sampler.trainer.canary.expected(None)  # the base model may hold the weights of its last pass
        gc.collect()
        self.sampler.step()


@pytest.fixture
def alone(text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A sampler without a server."""
    monkeypatch.setattr(servers, "_ANSWERS_WITHIN_S", 0.3)
    made = Bench(text_base, NOBODY, tmp_path)
    yield made
    made.sampler.client.close()


def test_without_a_server_each_sample_fails_and_says_why_and_one_that_was_cancelled_is_forgotten(alone: Bench) -> None:
    for name in "abc":
        alone.add(name)
    loads = [alone.sampler.load]
    assert alone.sampler.step() == []
    loads.append(alone.sampler.load)
    for _ in range(2):
        alone.sampler.cancel("c")
    failures = [event for event in alone.events(lambda found: len(found) == 2) if isinstance(event, SampleFailure)]
    assert sorted(failure.request_id for failure in failures) == ["a", "b"]
    assert {str(each.error) for each in failures} == {
        f"there is no vLLM server to sample with: no vLLM server answers at {NOBODY}"
    }
    alone.settle()
    assert (*loads, alone.sampler.load, alone.sampler.has_work) == ((0, 3), (3, 0), (0, 0), False)


@pytest.mark.parametrize(
    ("bases", "url", "words"),
    [
        ("ab", NOBODY, "serve one"),
        *[("a", url, f"--vllm-url {url}: give scheme") for url in ("localhost:8000", "http://host/v1", "http:///")],
    ],
)
def test_urls_are_whole_and_belong_to_one_base_model(text_base: BaseModel, bases: str, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        start_vllm_sampler(
            text_base, renderer(text_base), load(options={"base_models": [*bases], "vllm_urls": [url]}), lambda: None
        )


def test_the_trainers_model_works_for_one_request_in_each_step(alone: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in `add`: training waits for a step, and would wait for a whole queue.

    One that it cannot score fails alone.
    """
    scored: list[int] = []

    def score(*arguments: Any) -> None:
        scored.append(len(scored))
        if len(scored) == 2:
            raise RuntimeError("no memory")
        score_prompt(*arguments)

    monkeypatch.setattr(sampler_module, "score_prompt", score)
    for name in "ab":
        alone.add(name, asked=replace(request(), questions=PromptQuestions(alternatives=2)))
    alone.add("c")
    assert (alone.sampler.step(), scored, alone.sampler.load[1]) == ([], [0], 2)
    (failure,) = alone.sampler.step()
    assert isinstance(failure, SampleFailure)
    assert (failure.request_id, str(failure.error)) == ("b", "internal error: RuntimeError('no memory')")
    assert list(alone.sampler.pending) == ["a", "c"]  # nothing has to be computed for the last
    assert not alone.sampler.new


def test_a_request_that_waits_begins_with_the_weights_that_replace_its_own(alone: Bench) -> None:
    old, new = (random_adapter(alone.base, seed=seed, ref=new_ref(inflight_of="m")) for seed in range(2))
    fixed = old.snapshot(new_ref())
    alone.add("follows", old)
    alone.add("stays", fixed)
    alone.sampler.publish(new)
    assert [job.weights for job in alone.sampler.pending.values()] == [new, fixed]


@pytest.mark.parametrize("create", [random_adapter, full_weights])
def test_weights_are_forgotten_with_the_last_object_that_holds_them(
    alone: Bench, create: Callable[[BaseModel], Weights]
) -> None:
    """Weights that left the memory and came back are another object with the same identity."""
    held: list[Any] = [create(alone.base)]
    held.append(held[0].snapshot(held[0].ref))
    key = held[0].ref.key
    for weights in held:
        alone.sampler.client.publish(alone.sampler.trainer.published(weights))
    del weights
    for known in ([key], []):
        held.pop()
        alone.settle()
        assert list(alone.sampler.trainer.canaries) == known


# With a server


class Stub(Agreeing):
    """A server that samples `TOKENS`, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks_after: int | None = None
        """How many tokens of its next stream come before the connection breaks."""
        self.pauses_after: int | None = None
        """How many tokens of its next stream come before it waits to be told to abort."""
        self.aborted = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        """Of all requests for tokens but canaries."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """What it says to any request."""
        if request.path == "/abort_requests":
            self.aborted.set()
        return await super().answer(request)

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """What it says to one who asks for tokens."""
        ids = body["token_ids"]
        if len(ids) == len(self.canary) + 1:
            return await super().generate(request, body)
        self.bodies.append(body)
        tokens = TOKENS[len(ids) - 5 :][: body["sampling_params"]["max_tokens"]]
        if body.get("stream"):
            return await self._stream(request, tokens)
        if body["sampling_params"]["n"] > 1 and body["sampling_params"]["temperature"] == 0:
            return web.json_response({"error": {"message": "n must be 1 when using greedy sampling"}}, status=400)
        answered = {
            "choices": [choice_of(tokens, "length", len(tokens))],
            "prompt_logprobs": scores(ids, [-1.0] * (len(ids) - 1)),
        }
        return web.json_response(answered | {"model": body["model"], "usage": {}})

    async def _stream(self, request: web.Request, tokens: list[int]) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        breaks_after, pauses_after, self.breaks_after, self.pauses_after = (
            self.breaks_after,
            self.pauses_after,
            None,
            None,
        )
        for at, token in enumerate(tokens):
            if at == breaks_after:
                abort(request)
                return reply
            choice = choice_of([token], "length", len(tokens)) if at == len(tokens) - 1 else choice_of([token])
            if at == pauses_after:
                await self.aborted.wait()
                choice = choice_of([], "abort", at)
            await reply.write(b"data: " + orjson.dumps({"choices": [choice], "usage": None}) + b"\n\n")
            if at == pauses_after:
                break
        await reply.write(
            b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 4}}}\n\ndata: [DONE]\n\n'
        )
        return reply


def choice_of(tokens: list[int], reason: str | None = None, whole: int = 0) -> dict[str, Any]:
    """A choice with these tokens, of `whole` in all."""
    scored = [{"token_id": token, "logprob": -float(token)} for token in tokens]
    logprobs = {"content": [each | {"top_logprobs": [each]} for each in scored]}
    spans = [{"version": "default", "start": 0, "end": whole}] if whole else []
    return {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": reason,
        "logprobs": logprobs,
        "weight_versions": spans if reason else None,
    }


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def bench(text_base: BaseModel, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A sampler with that server."""
    made = Bench(text_base, f"unix:{tmp_path / 'socket'}", tmp_path)
    expected, run = made.sampler.trainer.canary.expected, made.sampler.client.run
    stub.canary = [0.0] * (len(made.sampler.trainer.canary.rendered) - 1)
    server = answering(tmp_path, stub.answer)
    run(server.__aenter__()).result(60)
    run(made.sampler.client.servers.pick([], 0)).result()
    made.sampler.client.publisher.tryout.probes = ()  # it did not agree on the canary then, and is not tried out again

    def note(weights: Any) -> Any:
        values = expected(weights)
        stub.canary = values.logprobs.tolist()
        return values

    monkeypatch.setattr(made.sampler.trainer.canary, "expected", note)
    yield made
    run(server.__aexit__(None, None, None)).result(60)
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


def test_tokens_come_one_by_one_and_without_a_stream_at_the_end_to_those_who_read_along(
    bench: Bench, stub: Stub
) -> None:
    """A stream brings neither the prompt's scores nor log-probabilities over the whole vocabulary."""
    for asked, events in ((request(num_samples=2), 12), (request(prompt_logprobs=True), 1)):
        bench.add(asked=asked, stream=True)
        assert len(check(bench.to_the_end(), [bench.base.name] * 6)) == events
    bench.add()
    assert len(bench.to_the_end()) == 1
    assert [bool(body.get("stream")) for body in stub.bodies] == [True, True, False, False]


@pytest.mark.parametrize(("stream", "asked"), [(False, request()), (True, request()), (False, request(top_p=0.5))])
def test_a_tenant_finds_nothing_of_what_others_have_computed(
    bench: Bench, stub: Stub, stream: bool, asked: SampleRequest
) -> None:
    for tenant in ("alice", LOCAL):
        bench.sampler.add("x", asked, bench.prompt, None, stream, tenant)
        bench.to_the_end()
    salts = [body.get("cache_salt") for body in stub.bodies]
    assert salts == ["alice"] * (len(salts) // 2) + [None] * (len(salts) // 2)
    assert salts[0] == "alice"


def test_each_of_several_greedy_samples_is_a_request(bench: Bench, stub: Stub) -> None:
    """VLLM refuses several in one."""
    bench.add(asked=request(num_samples=3, temperature=0.0))
    (result,) = bench.to_the_end()
    assert isinstance(result, SampleResult)
    assert [sequence.tokens for sequence in result.sequences] == [TOKENS] * 3
    assert len(stub.bodies) == 3


def test_a_prompt_that_fills_the_context_is_answered_by_the_trainers_model(bench: Bench, stub: Stub) -> None:
    """VLLM takes none without room behind it.

    The same prompt with room has the same scores, and the same greedy token.
    """
    bench.sampler.longest = 5
    asked = replace(request(2, prompt_logprobs=True, max_tokens=1, temperature=0.0), topk_sample_logprobs=3)
    bench.add(asked=asked, stream=True)
    local = LocalSampler(bench.base, SamplingConfig(kv_cache_gib=0.01), logits_chunk=16)
    local.add("x", asked, bench.prompt, None)
    *told, full = bench.to_the_end()
    (roomy,) = [event for _ in range(3) for event in local.step()]
    assert stub.bodies == []
    assert isinstance(full, SampleResult)
    assert isinstance(roomy, SampleResult)
    assert full.answers.logprobs is not None
    assert roomy.answers.logprobs is not None
    full.check_finite(asked.questions)
    assert [event.tokens for event in told if isinstance(event, TokensSampled)] == [s.tokens for s in full.sequences]
    assert [sequence.tokens for sequence in full.sequences] == [sequence.tokens for sequence in roomy.sequences]
    assert all(sequence.topk is not None for sequence in full.sequences)
    np.testing.assert_allclose(full.answers.logprobs, roomy.answers.logprobs, atol=1e-4)
    with pytest.raises(UserError, match=r"exceeds the context window of tiny: 5 \+ 1 > 5"):
        bench.add(asked=request(max_tokens=1))


@pytest.mark.parametrize("after", [0, 3])
def test_a_sample_goes_on_behind_the_tokens_that_were_given_out(bench: Bench, stub: Stub, after: int) -> None:
    """The connection breaks in the middle of its answer: another request has these tokens behind the prompt."""
    stub.breaks_after = after
    bench.add(stream=True)
    check(bench.to_the_end(), [bench.base.name] * 6)
    first, second = stub.bodies
    assert second["token_ids"] == [*first["token_ids"], *TOKENS[:after]]
    assert second["sampling_params"]["max_tokens"] == 6 - after


def test_newer_weights_give_the_tokens_that_follow(bench: Bench, stub: Stub) -> None:
    old, new = (random_adapter(bench.base, seed=seed, ref=new_ref(f"m/{seed}", "m")) for seed in range(2))
    stub.pauses_after = 4
    bench.add(weights=old, stream=True)
    events = bench.events(lambda found: len(found) == 4)
    bench.sampler.publish(new)
    check([*events, *bench.to_the_end()], ["m/0"] * 4 + ["m/1"] * 2)


def test_no_token_of_wrong_weights_is_given_out(bench: Bench, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they followed by the next sample of their model, whoever still has the error."""
    expected = bench.sampler.trainer.canary.expected

    def shifted(weights: Any) -> Any:
        right = expected(weights)
        return replace(right, logprobs=right.logprobs - 0.01)

    monkeypatch.setattr(bench.sampler.trainer.canary, "expected", shifted)
    bench.add(weights=random_adapter(bench.base, ref=new_ref("m/0", "m")), stream=True)
    (failure,) = bench.to_the_end()
    assert isinstance(failure, SampleFailure)
    assert "other log-probabilities than the trainer" in str(failure.error)
    assert stub.bodies == []
    assert bench.sampler.client.newest == {}
