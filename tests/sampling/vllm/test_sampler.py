"""The vLLM sampler where no vLLM server is: what it refuses, and that it does not wait for ever."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.bases import new_ref, random_adapter, renderer
from tinsmith.config import load
from tinsmith.errors import ConfigError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.sampling.sampler import SampleFailure
from tinsmith.sampling.vllm import sampler as room
from tinsmith.sampling.vllm import servers
from tinsmith.sampling.vllm.canary import score_prompt
from tinsmith.sampling.vllm.sampler import VLLMSampler, start_vllm_sampler
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, parse_sample_request

NOBODY = "http://127.0.0.1:9"


def request(**params: Any) -> SampleRequest:
    body = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4} | params,
    }
    return parse_sample_request(orjson.dumps(body))


@pytest.fixture
def awake() -> threading.Event:
    """Set when the sampler has something to return."""
    return threading.Event()


@pytest.fixture
def sampler(text_base: BaseModel, tmp_path: Path, awake: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMSampler]:
    monkeypatch.setattr(servers, "_ANSWERS_WITHIN_S", 0.3)
    config = load(options={"base_models": ["tiny"], "vllm_urls": [NOBODY], "vllm_dir": str(tmp_path)})
    made = start_vllm_sampler(text_base, renderer(text_base), config, awake.set)
    yield made
    made.client.close()


def test_without_a_server_each_sample_fails_and_says_why(sampler: VLLMSampler, text_base: BaseModel, awake: threading.Event) -> None:
    rendered = renderer(text_base).render(request().prompt)
    for name in ("a", "b"):
        sampler.add(name, request(), rendered, None)
    assert sampler.load == (0, 2)
    assert sampler.step() == []
    assert sampler.load == (2, 0)
    failures: list[Any] = []
    while len(failures) < 2:
        assert awake.wait(600)
        awake.clear()
        failures += sampler.step()
    assert all(isinstance(failure, SampleFailure) for failure in failures)
    assert {str(failure.error) for failure in failures} == {f"there is no vLLM server to sample with: no vLLM server answers at {NOBODY}"}
    assert sampler.load == (0, 0)


def test_a_cancelled_sample_is_forgotten(sampler: VLLMSampler, text_base: BaseModel, awake: threading.Event) -> None:
    sampler.add("a", request(), renderer(text_base).render(request().prompt), None)
    sampler.step()
    sampler.cancel("a")
    sampler.cancel("a")
    assert awake.wait(600)
    assert sampler.step() == []
    assert not sampler.has_work


def test_what_can_never_run_is_refused_at_once(sampler: VLLMSampler, text_base: BaseModel) -> None:
    rendered = renderer(text_base).render(request().prompt)
    with pytest.raises(UserError, match=r"temperature is 0\.001"):
        sampler.add("a", request(temperature=0.001), rendered, None)
    with pytest.raises(UserError, match=f"3 \\+ 99999 > {text_base.max_context}"):
        sampler.add("a", request(max_tokens=99999), rendered, None)
    assert sampler.load == (0, 0)


def test_urls_belong_to_one_base_model(text_base: BaseModel) -> None:
    config = load(options={"base_models": ["a", "b"], "vllm_urls": [NOBODY]})
    with pytest.raises(ConfigError, match="serve one"):
        start_vllm_sampler(text_base, renderer(text_base), config, lambda: None)


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:8000/v1", "http:///"])
def test_a_malformed_url_is_refused(text_base: BaseModel, url: str) -> None:
    config = load(options={"base_models": ["a"], "vllm_urls": [url]})
    with pytest.raises(ConfigError, match=f"--vllm-url {url}: give scheme, host and port"):
        start_vllm_sampler(text_base, renderer(text_base), config, lambda: None)


def test_the_trainers_model_works_for_one_request_in_each_step(
    sampler: VLLMSampler, text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in `add`: training waits for a step, and would wait for a whole queue."""
    scored: list[int] = []

    def note(*arguments: Any) -> None:
        scored.append(len(scored))
        score_prompt(*arguments)

    monkeypatch.setattr(room, "score_prompt", note)
    rendered = renderer(text_base).render(request().prompt)
    for name in ("a", "b"):
        sampler.add(name, replace(request(), questions=PromptQuestions(alternatives=2)), rendered, None)
    sampler.add("c", request(), rendered, None)
    assert (scored, sampler.load) == ([], (0, 3))
    sampler.step()
    assert (scored, sampler.load[1]) == ([0], 2)
    sampler.step()
    assert (scored, sampler.load[1]) == ([0, 1], 0)  # nothing has to be computed for the last
    assert not sampler.new


def test_a_prompt_that_cannot_be_scored_fails_alone(sampler: VLLMSampler, text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(room, "score_prompt", fail)
    rendered = renderer(text_base).render(request().prompt)
    sampler.add("a", replace(request(), questions=PromptQuestions(alternatives=2)), rendered, None)
    sampler.add("b", request(), rendered, None)
    (failure,) = sampler.step()
    assert isinstance(failure, SampleFailure)
    assert (failure.request_id, str(failure.error)) == ("a", "internal error: RuntimeError('no memory')")
    assert list(sampler.pending) == ["b"]


def test_a_request_that_waits_begins_with_the_weights_that_replace_its_own(sampler: VLLMSampler, text_base: BaseModel) -> None:
    old, new = (random_adapter(text_base, seed=seed, ref=new_ref(inflight_of="m")) for seed in range(2))
    rendered = renderer(text_base).render(request().prompt)
    fixed = old.snapshot(new_ref())
    sampler.add("follows", request(), rendered, old)
    sampler.add("stays", request(), rendered, fixed)
    sampler.publish(new)
    assert sampler.pending["follows"].weights is new
    assert sampler.pending["stays"].weights is fixed


def test_weights_are_forgotten_with_the_last_object_that_holds_them(sampler: VLLMSampler, text_base: BaseModel) -> None:
    """Weights that left the memory and came back are another object with the same identity."""
    first = random_adapter(text_base)
    assert first.ref is not None
    ref, again = first.ref, first.snapshot(first.ref)
    for weights in (first, again):
        sampler.client.publish(sampler._served(weights))
    del weights, first
    settle(sampler)
    assert ref.key in sampler.canaries
    del again
    settle(sampler)
    assert sampler.canaries == {}


def settle(sampler: VLLMSampler) -> None:
    """Let the client's thread finish what it was given, and the sampler note which weights are gone."""
    for _ in range(3):
        sampler.client.run(asyncio.sleep(0)).result(60)
    sampler.canary.expected(None)  # the base model may hold the weights of its last pass
    gc.collect()
    sampler.step()
