"""The vLLM sampler in this process, at the server of another engine, with a proxy in between that sees what vLLM is asked.

These tests run before full weights are transferred to that server.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from PIL.Image import Image

from tests.bases import image, load, new_ref, random_adapter, random_tokens, renderer
from tests.running import Server
from tests.sampling.local.test_sampler import forward_logprobs
from tests.with_vllm.proxy import Proxy, in_front_of
from tests.with_vllm.serving import engine_of, generated, vllm_pids
from tinsmith.config import load as load_config
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter, LoraPair
from tinsmith.models.pictures import PictureInput
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Processor, Renderer
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, ref_of
from tinsmith.sampling.vllm.canary import Expectation
from tinsmith.sampling.vllm.sampler import VLLMSampler, start_vllm_sampler
from tinsmith.sampling.vllm.servers import Servers
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
    proxies: list[Proxy]
    """The way to each of its servers: the same real one, but it does not know."""
    awake: threading.Event
    came: dict[str, SampleEvent] = field(default_factory=dict)
    """The requests that have ended and were not asked for yet."""

    @property
    def proxy(self) -> Proxy:
        """The only way."""
        (proxy,) = self.proxies
        return proxy

    def add(self, name: str, rendered: RenderedInput, n: int = 1, weights: Any = None, stream: bool = False, **params: Any) -> None:
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
            self.came |= {event.request_id: event for event in self.sampler.step()}

    def results(self, count: int) -> dict[str, SampleEvent]:
        """The next requests that end."""
        deadline = time.monotonic() + WAIT_S
        while len(self.came) < count and time.monotonic() < deadline:
            self.awake.wait(0.05)
            self.awake.clear()
            self.step()
        ended, self.came = self.came, {}
        assert len(ended) == count
        return ended


@contextmanager
def bench_of(count: int, socket: str, vision_dir: Path, tmp_path: Path, **more: Any) -> Iterator[Bench]:
    """A bench of the tiny vision model, with so many ways to the real server."""
    with ExitStack() as stack:
        for index in range(count):
            (tmp_path / str(index)).mkdir()
        ways = [stack.enter_context(in_front_of(socket, tmp_path / str(index))) for index in range(count)]
        base, awake = load(vision_dir, max_context=1024), threading.Event()
        (tmp_path / "weights").mkdir()
        options = {"vllm_urls": [address for _, address in ways], "vllm_dir": str(tmp_path / "weights"), "max_running": SLOTS}
        config, own = load_config(options={"base_models": ["tiny"], **options, **more}), renderer(base)
        sampler = start_vllm_sampler(base, own, config, awake.set)
        sampler.client.run(all_ready(sampler.client.servers)).result()
        yield Bench(base, own, sampler, [proxy for proxy, _ in ways], awake)


async def all_ready(servers: Servers) -> None:
    """Wait until all servers are tried out: what they compute for that is not to be counted."""
    async with servers.changed:
        await servers.changed.wait_for(lambda: all(server.state == "ready" for server in servers.all))


@pytest.fixture
def bench(socket: str, vision_dir: Path, tmp_path: Path) -> Iterator[Bench]:
    """With one way."""
    with bench_of(1, socket, vision_dir, tmp_path) as made:
        yield made


class CountingProcessor:
    """Counts what it lets the real one do."""

    def __init__(self, inner: Processor) -> None:
        self.inner = inner
        self.seen: Counter[bytes] = Counter()

    def __call__(self, sha256: bytes, picture: Image) -> PictureInput:
        self.seen[sha256] += 1
        return self.inner(sha256, picture)


def test_each_picture_is_processed_once_and_sent_once(bench: Bench) -> None:
    """Eight requests at once of eight samples with each of four pictures, two of them in one prompt: 256 samples."""
    assert bench.renderer.processor is not None
    bench.renderer.processor = counting = CountingProcessor(bench.renderer.processor)
    pictures = [image(10 + i) for i in range(4)]
    prompts: list[list[Chunk]] = [[picture, random_tokens(i, 9)] for i, picture in enumerate(pictures)]
    prompts[0] = [pictures[0], random_tokens(0, 4), pictures[3], random_tokens(1, 5)]
    for i in range(32):
        bench.add(str(i), bench.renderer.render(prompts[i % 4]), n=8, seed=i)
    ended = bench.results(32)
    assert all(isinstance(result, SampleResult) and len(result.sequences) == 8 for result in ended.values())
    hashes = {picture.sha256 for picture in pictures}
    assert dict(counting.seen) == dict.fromkeys(hashes, 1)
    assert {key: sent for key, sent in bench.proxy.pictures.items() if bytes.fromhex(key) in hashes} == {h.hex(): 1 for h in hashes}


def test_a_failure_is_one_samples_own(bench: Bench) -> None:
    """One is refused, one makes the server fail: each ends in the server's words, and all others are answered."""
    prompts = [bench.renderer.render([random_tokens(seed, 12)]) for seed in range(20)]
    marks = {name: prompts[int(name)].token_ids.tolist() for name in ("3", "7")}

    def refuse(asked: dict[str, Any]) -> web.Response | None:
        if asked["token_ids"] == marks["3"]:
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        return web.Response(status=500, text="out of luck") if asked["token_ids"] == marks["7"] else None

    bench.proxy.refusal = refuse
    for i, prompt in enumerate(prompts):
        bench.add(str(i), prompt)
    ended = bench.results(20)
    failed = {name: str(result.error) for name, result in ended.items() if isinstance(result, SampleFailure)}
    assert failed == {
        "3": "vLLM answered 400 to /inference/v1/generate: no such thing",
        "7": "vLLM answered 500 to /inference/v1/generate: out of luck",
    }


def test_sequences_under_way_are_bounded(bench: Bench) -> None:
    """However many samples come at once, of whatever kind. One more sequence compares weights."""
    for i in range(40):
        chunks: list[Chunk] = [random_tokens(i, 9), *([image(i)] if i % 2 else [])]
        follows = f"m{i}" if i % 8 == 0 else None
        adapter = random_adapter(bench.base, seed=1, ref=new_ref(inflight_of=follows)) if i % 4 == 0 else None
        top_k = 20 if i % 5 == 0 else -1
        bench.add(str(i), bench.renderer.render(chunks), n=3, weights=adapter, top_k=top_k)
    assert all(isinstance(result, SampleResult) for result in bench.results(40).values())
    assert SLOTS <= bench.proxy.most_at_once <= SLOTS + 1


def test_wrong_weights_end_the_samples_that_were_to_go_on_with_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that vLLM computes differently fails what follows it: no token of it leaves, and others go on."""
    first, second = (random_adapter(bench.base, seed=seed, ref=new_ref(inflight_of="m")) for seed in (1, 2))
    rendered = bench.renderer.render([random_tokens(1, 12)])
    bench.add("follows", rendered, weights=first, max_tokens=LONG)
    bench.add("stays", rendered, weights=first.snapshot(new_ref()), max_tokens=LONG)
    bench.add("other", rendered, weights=first.snapshot(new_ref(inflight_of="n")), max_tokens=LONG)
    time.sleep(0.5)
    expected = bench.sampler.canary.expected

    def wrong(weights: Any) -> Expectation:
        right = expected(weights)
        return Expectation(right.logprobs - (0.01 if weights is second else 0.0), right.limit)

    monkeypatch.setattr(bench.sampler.canary, "expected", wrong)
    bench.publish(second)
    ended = bench.results(3)
    failure = ended["follows"]
    assert isinstance(failure, SampleFailure)
    assert f"other log-probabilities than the trainer with adapter {ref_of(second, '').label}" in str(failure.error)
    assert all(isinstance(ended[name], SampleResult) for name in ("stays", "other"))


@pytest.mark.parametrize("what", ["one value", "one module"])
def test_an_adapter_of_other_weights_is_never_sampled(bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The canary could not tell: the log-probabilities are the same to 1e-4."""
    given = random_adapter(bench.base, seed=1)
    small = {name: LoraPair(pair.a, 1e-6 * pair.b) for name, pair in given.masters.items()}
    right, wrong = (Adapter(given.shape, small, given.dtype, new_ref()) for _ in range(2))
    if what == "one value":
        next(iter(wrong.masters.values())).b[3, 2] += 1e-6
        assert not torch.equal(wrong.flat, right.flat)
    else:
        fewer = {name: pair for name, pair in small.items() if name != LM_HEAD}
        wrong = Adapter(given.shape, fewer, given.dtype, new_ref())
    rendered, files = bench.renderer.render([random_tokens(1, 12)]), bench.sampler.client.publisher.files
    wrong_ones, right_ones = (bench.sampler.canary.expected(weights).logprobs for weights in (wrong, right))
    np.testing.assert_allclose(wrong_ones, right_ones, atol=1e-4)
    write = files.write
    monkeypatch.setattr(files, "write", lambda adapter: write(wrong if adapter is right else adapter))
    bench.add("other", rendered, weights=right)
    failure = bench.results(1)["other"]
    assert isinstance(failure, SampleFailure)
    assert "vLLM holds other weights than the trainer's under" in str(failure.error)
    bench.add("same", rendered, weights=wrong)
    assert isinstance(bench.results(1)["same"], SampleResult)


def test_samples_of_a_lost_server_go_on_at_another(socket: str, vision_dir: Path, tmp_path: Path) -> None:
    """Turns of a conversation stay at one server, others are spread; when one is lost, the other gets its samples.

    One that follows its model's weights was given a new version before, and keeps the tokens that the former version gave.
    """
    with bench_of(2, socket, vision_dir, tmp_path) as bench:
        first, second = (random_adapter(bench.base, seed=seed, ref=new_ref(f"m/{seed}", "m")) for seed in (1, 2))
        conversation = [random_tokens(7, 40)]
        rendered = bench.renderer.render([random_tokens(1, 12)])
        before = generated(socket)
        bench.add("follows", rendered, weights=first, max_tokens=LONG)
        wait_until(lambda: generated(socket) > before + 5)
        for turn in range(4):
            bench.add(f"turn{turn}", bench.renderer.render([*conversation]))
            assert isinstance(bench.results(1)[f"turn{turn}"], SampleResult)
            conversation.append(random_tokens(20 + turn, 20))
        begins = conversation[0].tokens.tolist()
        assert sorted(sum(asked["token_ids"][:40] == begins for asked in proxy.generates) for proxy in bench.proxies) == [0, 4]
        bench.publish(second)
        (lost,) = [proxy for proxy in bench.proxies if any(asked["max_tokens"] == LONG for asked in params_of(proxy))]
        wait_until(lambda: any(0 < LONG - asked["max_tokens"] < LONG for asked in params_of(lost)))
        for i in range(12):
            bench.add(str(i), bench.renderer.render([random_tokens(100 + i, 12)]), max_tokens=200)
        wait_until(lambda: min(sum(asked["max_tokens"] == 200 for asked in params_of(proxy)) for proxy in bench.proxies) >= 3)
        lost.break_down()
        ended = bench.results(13)
        assert all(isinstance(result, SampleResult) for result in ended.values())
        follows = ended["follows"]
        assert isinstance(follows, SampleResult)
        (sequence,) = follows.sequences
        assert (len(sequence.tokens), [span.version for span in sequence.versions]) == (LONG, ["m/1", "m/2"])
        for span, weights in zip(sequence.versions, (first, second), strict=True):
            _, expected = forward_logprobs(bench.base, weights, rendered, sequence.tokens)
            np.testing.assert_allclose(sequence.logprobs[span.start : span.end], expected[span.start : span.end], atol=1e-4)


def params_of(proxy: Proxy) -> list[dict[str, Any]]:
    """The parameters of all that was asked there, but of canaries and pictures."""
    return [asked["sampling_params"] for asked in proxy.generates if asked["sampling_params"]["max_tokens"] > 1]


def wait_until(holds: Callable[[], bool]) -> None:
    """Return when it does."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_real_server_that_hangs_is_left_and_taken_back(
    server: Server, socket: str, vision_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine is stopped while the process that takes requests goes on; later it runs again."""
    (group,) = vllm_pids(server)
    engine = engine_of(group)
    with bench_of(1, socket, vision_dir, tmp_path, vllm_hung_s=3.0) as bench:
        rendered = bench.renderer.render([random_tokens(1, 12)])
        bench.add("first", rendered, max_tokens=20)
        expected = bench.results(1)["first"]
        bench.add("again", rendered, max_tokens=20)
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_until(lambda: "hangs: it answered nothing for 3 s" in caplog.text)
        finally:
            os.kill(engine, signal.SIGCONT)
        again = bench.results(1)["again"]
        assert isinstance(expected, SampleResult)
        assert isinstance(again, SampleResult)
        assert again.sequences[0].tokens == expected.sequences[0].tokens
