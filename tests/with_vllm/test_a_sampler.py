"""The vLLM sampler in this process, at the server of another engine, with a proxy in between that sees what vLLM is
asked.

These tests run before full weights are transferred to that server.

Invariant: Each image is processed once and sent to a vLLM server once; one sample fails alone; sequences under way are
bounded.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from tests.bases import image, load, new_ref, random_adapter, random_tokens, renderer
from tests.running import Server
from tests.sampling.local.test_sampler import forward_logprobs
from tests.with_vllm.proxy import Proxy, in_front_of
from tests.with_vllm.serving import process_of, vllm_pids, wait_for_vllm
from tinsmith.config import load as load_config
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import LoraPair, adapter_of
from tinsmith.models.tiny import write_tiny_model
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled, ref_of
from tinsmith.sampling.vllm.sampler import VLLMSampler, start_vllm_sampler
from tinsmith.sampling.vllm.servers import Servers
from tinsmith.sampling.vllm.verify import Expectation
from tinsmith.wire.chunks import Chunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule

NO_STOP = StopRule(eos=False, strings=(), token_ids=())
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, top_p=1.0, top_k=-1, seed=5, stop=NO_STOP)
SLOTS = 6
WAIT_S = 240.0
"""Longest wait on a busy machine."""
LONG = 900
"""Tokens of a sample that something happens to meanwhile."""


@dataclass
class Bench:
    """A sampler, what it samples from, and what passes between it and vLLM."""

    base: BaseModel
    renderer: Renderer
    sampler: VLLMSampler
    proxy: Proxy
    """The way to its server."""
    awake: threading.Event
    came: dict[str, SampleEvent] = field(default_factory=dict)
    """The requests that have ended and were not asked for yet."""
    tokens: dict[str, list[TokensSampled]] = field(default_factory=dict)
    """What came before of the requests that are streamed."""

    def add(
        self, name: str, rendered: RenderedInput, n: int = 1, weights: Any = None, stream: bool = False, **params: Any
    ) -> None:
        """One request."""
        asked = SampleRequest("s:sample:0", 0, n, [], replace(PARAMS, **params), PromptQuestions())
        self.sampler.add(name, asked, rendered, weights, stream)
        self.step()

    def publish(self, weights: Any) -> None:
        """Let inflight samples go on with new weights."""
        self.sampler.publish(weights)
        self.step()

    def step(self) -> None:
        """All work that needs the trainer's model: then the client has every request."""
        while self.sampler.has_work:
            for event in self.sampler.step():
                assert event.request_id not in self.came, "nothing follows the result"
                if isinstance(event, TokensSampled):
                    self.tokens.setdefault(event.request_id, []).append(event)
                else:
                    self.came[event.request_id] = event

    def work_until(self, holds: Callable[[], bool]) -> None:
        """Go on until it does."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline
            self.awake.wait(0.05)
            self.awake.clear()
            self.step()

    def answer(self, name: str) -> SampleResult:
        """The result of a request, once it has ended."""
        self.work_until(lambda: name in self.came)
        result = self.came.pop(name)
        assert isinstance(result, SampleResult), result
        return result

    def failure(self, name: str) -> str:
        """Why a request failed, once it has."""
        self.work_until(lambda: name in self.came)
        failure = self.came.pop(name)
        assert isinstance(failure, SampleFailure), failure
        return str(failure.error)


@contextmanager
def bench_of(socket: str, model: Path, tmp_path: Path, **more: Any) -> Iterator[Bench]:
    """A bench of a tiny vision model at the real server."""
    with in_front_of(socket, tmp_path) as (proxy, address):
        base, awake = load(model, max_context=1024), threading.Event()
        (tmp_path / "weights").mkdir()
        options = {"vllm_urls": [address], "vllm_dir": str(tmp_path / "weights"), "max_running": SLOTS}
        config, own = load_config(options={"base_models": ["tiny"], **options, **more}), renderer(base)
        sampler = start_vllm_sampler(base, own, config, awake.set)
        sampler.client.run(all_ready(sampler.client.servers)).result()
        try:
            yield Bench(base, own, sampler, proxy, awake)
        finally:
            # It would go on to give the server, which other tests share, the weights of its own base
            sampler.client.close()


async def all_ready(servers: Servers) -> None:
    """Wait until all servers are tried out: what they compute for that is not to be counted."""
    async with servers.changed:
        await servers.changed.wait_for(lambda: all(server.state == "ready" for server in servers.all))


@pytest.fixture(scope="module")
def bench(server: Server, vision_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A bench of the server's own model, for all tests here that do not say how it is set up."""
    with bench_of(wait_for_vllm(server), vision_dir, tmp_path_factory.mktemp("bench")) as made:
        yield made


def test_a_server_with_other_weights_is_never_sampled(socket: str, tmp_path: Path) -> None:
    write_tiny_model("qwen3-vl", tmp_path / "other", seed=1)
    with bench_of(socket, tmp_path / "other", tmp_path) as bench:
        bench.add("base", bench.renderer.render([random_tokens(1, 6)]))
        assert "vLLM computes other log-probabilities than the trainer with the base weights" in bench.failure("base")


def test_many_samples_at_once_are_bounded_and_send_each_image_once(bench: Bench) -> None:
    """Samples of whatever kind, of prompts with four images, two of them in one prompt.

    One more sequence compares weights.
    """
    images = [image(10 + i) for i in range(4)]
    prompts: list[list[Chunk]] = [[image, random_tokens(i, 9)] for i, image in enumerate(images)]
    prompts[0] = [images[0], random_tokens(0, 4), images[3], random_tokens(1, 5)]
    for i in range(40):
        chunks = prompts[i // 2 % 4] if i % 2 else [random_tokens(i, 9)]
        follows = f"m{i}" if i % 8 == 0 else None
        adapter = random_adapter(bench.base, seed=1, ref=new_ref(inflight_of=follows)) if i % 4 == 0 else None
        top_k = 20 if i % 5 == 0 else -1
        bench.add(str(i), bench.renderer.render(chunks), n=8 if i % 2 else 3, weights=adapter, top_k=top_k, seed=i)
    assert [len(bench.answer(str(i)).sequences) for i in range(40)] == [3, 8] * 20
    assert SLOTS <= bench.proxy.most_at_once <= SLOTS + 1
    hashes = {image.sha256.hex() for image in images}
    assert {key: sent for key, sent in bench.proxy.images.items() if key in hashes} == dict.fromkeys(hashes, 1)


def test_a_failure_is_one_samples_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is refused, one makes the server fail: each ends in the server's words, and all others are answered."""
    prompts = [bench.renderer.render([random_tokens(seed, 12)]) for seed in range(20)]
    marks = {name: prompts[name].token_ids.tolist() for name in (3, 7)}

    def refuse(asked: dict[str, Any]) -> web.Response | None:
        if asked["token_ids"] == marks[3]:
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        return web.Response(status=500, text="out of luck") if asked["token_ids"] == marks[7] else None

    monkeypatch.setattr(bench.proxy, "refusal", refuse)
    for i, prompt in enumerate(prompts):
        bench.add(str(i), prompt)
    assert bench.failure("3") == "vLLM answered 400 to /inference/v1/generate: no such thing"
    assert bench.failure("7") == "vLLM answered 500 to /inference/v1/generate: out of luck"
    assert all(bench.answer(str(i)) for i in range(20) if i not in marks)


def test_wrong_weights_end_the_samples_that_were_to_go_on_with_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that vLLM computes differently fails what follows it: no token of it leaves, and others go on."""
    first, second = (random_adapter(bench.base, seed=seed, ref=new_ref(inflight_of="m")) for seed in (1, 2))
    rendered = bench.renderer.render([random_tokens(1, 12)])
    bench.add("follows", rendered, weights=first, stream=True, max_tokens=LONG)
    bench.add("stays", rendered, weights=first.snapshot(new_ref()), max_tokens=LONG)
    bench.add("other", rendered, weights=first.snapshot(new_ref(inflight_of="n")), max_tokens=LONG)
    bench.work_until(lambda: "follows" in bench.tokens)
    expected = bench.sampler.trainer.canary.expected

    def wrong(weights: Any) -> Expectation:
        right = expected(weights)
        return Expectation(right.logprobs - (0.01 if weights is second else 0.0), right.limit)

    monkeypatch.setattr(bench.sampler.trainer.canary, "expected", wrong)
    bench.publish(second)
    assert f"other log-probabilities than the trainer with adapter {ref_of(second, '').label}" in bench.failure(
        "follows"
    )
    assert bench.answer("stays")
    assert bench.answer("other")


@pytest.mark.parametrize("what", ["one value", "one module"])
def test_an_adapter_of_other_weights_is_never_sampled(bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The canary could not tell: the log-probabilities are the same to 1e-4."""
    given = random_adapter(bench.base, seed=1)
    small = {name: LoraPair(pair.a, 1e-6 * pair.b) for name, pair in given.masters.items()}
    fewer = {name: pair for name, pair in small.items() if name != LM_HEAD or what == "one value"}
    right, wrong = (
        adapter_of(given.shape, small, given.dtype, new_ref()),
        adapter_of(given.shape, fewer, given.dtype, new_ref()),
    )
    if what == "one value":
        next(iter(wrong.masters.values())).b[3, 2] += 1e-6
        assert not torch.equal(wrong.flat, right.flat)
    rendered, files = bench.renderer.render([random_tokens(1, 12)]), bench.sampler.client.publisher.loader.files
    wrong_ones, right_ones = (bench.sampler.trainer.canary.expected(weights).logprobs for weights in (wrong, right))
    np.testing.assert_allclose(wrong_ones, right_ones, atol=1e-4)
    write = files.write
    monkeypatch.setattr(files, "write", lambda adapter: write(wrong if adapter is right else adapter))
    bench.add("other", rendered, weights=right)
    assert "vLLM holds other weights than the trainer's under" in bench.failure("other")
    bench.add("same", rendered, weights=wrong)
    assert bench.answer("same")


def check(bench: Bench, name: str) -> SampleResult:
    """The result of a request. The tokens that were read before must be those of the result."""
    result = bench.answer(name)
    for index, sequence in enumerate(result.sequences):
        own = [event for event in bench.tokens[name] if event.index == index]
        assert [token for event in own for token in event.tokens] == sequence.tokens
        assert [logprob for event in own for logprob in event.logprobs] == sequence.logprobs
        spans = [span.version for span in sequence.versions for _ in range(span.start, span.end)]
        assert [event.version for event in own for _ in event.tokens] == spans
    return result


def test_tokens_that_are_read_while_they_come_are_those_of_the_result(bench: Bench) -> None:
    """They are those of a request that nobody reads along, and each is of the version that it names."""
    rendered = bench.renderer.render([random_tokens(1, 12), image(1)])
    old, new = (random_adapter(bench.base, seed=seed, ref=new_ref(f"m/{seed}", "m")) for seed in (1, 2))
    bench.add("goes on", rendered, weights=old, stream=True, max_tokens=LONG)
    bench.work_until(lambda: len(bench.tokens.get("goes on", [])) >= 5)
    bench.publish(new)
    (sequence,) = check(bench, "goes on").sequences
    assert [span.version for span in sequence.versions] == ["m/1", "m/2"]
    for span, weights in zip(sequence.versions, (old, new), strict=True):
        _, expected = forward_logprobs(bench.base, weights, rendered, sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs[span.start : span.end], expected[span.start : span.end], atol=1e-4)
    bench.add("read", rendered, 2, new, stream=True, max_tokens=40)
    bench.add("silent", rendered, 2, new, max_tokens=40)
    bench.add("truncated", rendered, 2, new, stream=True, max_tokens=40, top_k=20)
    read, silent = check(bench, "read"), bench.answer("silent")
    check(bench, "truncated")
    assert "silent" not in bench.tokens
    assert len(bench.tokens["read"]) > 20
    assert len(bench.tokens["truncated"]) == 2  # log-probabilities over the whole vocabulary come at the end
    for ours, theirs in zip(read.sequences, silent.sequences, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_a_real_server_that_hangs_is_left_and_taken_back(
    server: Server, socket: str, vision_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine is stopped while the process that takes requests goes on; later it runs again."""
    engine = process_of(vllm_pids(server)[0], "EngineCore")
    with bench_of(socket, vision_dir, tmp_path, vllm_hung_s=3.0) as bench:
        rendered = bench.renderer.render([random_tokens(1, 12)])
        bench.add("first", rendered, max_tokens=20)
        expected = bench.answer("first")
        bench.add("again", rendered, max_tokens=20)
        os.kill(engine, signal.SIGSTOP)
        try:
            bench.work_until(lambda: "hangs: it answered nothing for 3 s" in caplog.text)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert bench.answer("again").sequences[0].tokens == expected.sequences[0].tokens
