"""Tokens that are read while vLLM samples them: they are those of the result, which are those of a request that nobody reads along.

As in `test_a_sampler.py`, samplers here share the vLLM server of the tests, which must still hold
the base's weights: these files come first.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.bases import image, load, new_ref, random_adapter, random_tokens, renderer
from tests.sampling.local.test_sampler import forward_logprobs
from tests.with_vllm.test_a_sampler import PARAMS, WAIT_S
from tinsmith.config import load as load_config
from tinsmith.sampling.sampler import SampleResult, TokensSampled
from tinsmith.sampling.vllm.sampler import VLLMSampler, start_vllm_sampler
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest


class Reader:
    """A sampler, and what has come out of it by request."""

    def __init__(self, sampler: VLLMSampler, awake: threading.Event) -> None:
        self.sampler = sampler
        self.awake = awake
        self.tokens: dict[str, list[TokensSampled]] = {}
        self.results: dict[str, SampleResult] = {}

    def add(self, name: str, rendered: Any, n: int = 1, weights: Any = None, stream: bool = True, **params: Any) -> None:
        asked = SampleRequest("s:sample:0", 0, n, [], replace(PARAMS, **params), PromptQuestions())
        self.sampler.add(name, asked, rendered, weights, stream)

    def step(self) -> None:
        if not self.sampler.has_work:
            self.awake.wait(0.05)
        self.awake.clear()
        for event in self.sampler.step():
            assert event.request_id not in self.results, "nothing follows the result"
            if isinstance(event, TokensSampled):
                self.tokens.setdefault(event.request_id, []).append(event)
            else:
                assert isinstance(event, SampleResult), event
                self.results[event.request_id] = event

    def read_all(self, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.results) < count:
            assert time.monotonic() < deadline
            self.step()

    def check(self, name: str) -> int:
        """The events must hold what the result holds; returns how many there were."""
        events = self.tokens[name]
        for index, sequence in enumerate(self.results[name].sequences):
            own = [event for event in events if event.index == index]
            assert [token for event in own for token in event.tokens] == sequence.tokens
            assert [logprob for event in own for logprob in event.logprobs] == sequence.logprobs
            spans = [span.version for span in sequence.versions for _ in range(span.start, span.end)]
            assert [event.version for event in own for _ in event.tokens] == spans
        return len(events)


@contextmanager
def reading(socket: str, vision_dir: Path, tmp_path: Path) -> Iterator[Reader]:
    base, awake = load(vision_dir, max_context=1024), threading.Event()
    options = {"base_models": ["tiny"], "vllm_urls": [socket], "vllm_dir": str(tmp_path), "max_running": 16}
    sampler = start_vllm_sampler(base, renderer(base), load_config(options=options), awake.set)
    try:
        yield Reader(sampler, awake)
    finally:
        sampler.client.close()  # it would go on to give the server, which other tests share, the weights of its own base


def test_tokens_come_while_vllm_samples_and_are_the_same(socket: str, vision_dir: Path, tmp_path: Path) -> None:
    with reading(socket, vision_dir, tmp_path) as reader:
        base = reader.sampler.base
        rendered = renderer(base).render([random_tokens(1, 12), image(1)])
        adapter = random_adapter(base, seed=1)
        reader.add("read", rendered, 2, adapter, max_tokens=40)
        reader.add("silent", rendered, 2, adapter, stream=False, max_tokens=40)
        reader.add("truncated", rendered, 2, adapter, max_tokens=40, top_k=20)
        reader.read_all(3)
        assert "silent" not in reader.tokens
        assert reader.check("read") > 20
        assert reader.check("truncated") == 2  # log-probabilities over the whole vocabulary come at the end
        for ours, theirs in zip(reader.results["read"].sequences, reader.results["silent"].sequences, strict=True):
            assert ours.tokens == theirs.tokens
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_tokens_of_newer_weights_follow_in_the_same_stream(socket: str, vision_dir: Path, tmp_path: Path) -> None:
    with reading(socket, vision_dir, tmp_path) as reader:
        base = reader.sampler.base
        rendered = renderer(base).render([random_tokens(1, 12)])
        old, new = (random_adapter(base, seed=seed, ref=new_ref(f"m/{seed}", "m")) for seed in (1, 2))
        reader.add("x", rendered, weights=old, max_tokens=900)
        while len(reader.tokens.get("x", [])) < 5:
            reader.step()
        reader.sampler.publish(new)
        reader.read_all(1)
        reader.check("x")
        (sequence,) = reader.results["x"].sequences
        assert [span.version for span in sequence.versions] == ["m/1", "m/2"]
        for span, weights in zip(sequence.versions, (old, new), strict=True):
            _, expected = forward_logprobs(base, weights, rendered, sequence.tokens)
            np.testing.assert_allclose(sequence.logprobs[span.start : span.end], expected[span.start : span.end], atol=1e-4)
