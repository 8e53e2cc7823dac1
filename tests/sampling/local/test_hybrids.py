"""The local sampler of a model with gated delta nets: its states are those of the tokens so far, whatever happens.

Invariant: The state of a gated delta net is that of its sequence's tokens, whatever is preempted, forked, cancelled,
published or fails; no slot is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.bases import DEVICE, image_chunks, load, new_ref, random_adapter, random_tokens, renderer
from tests.extent import amount
from tests.sampling.local import test_sampler as local
from tests.sampling.local.test_sampler import Bench, ask, count_tokens, full_weights, of_session, prompt_of
from tinsmith.models.base import BaseModel
from tinsmith.models.delta_rule import gated_delta_rule
from tinsmith.models.full import Weights
from tinsmith.models.tiny import write_tiny_model
from tinsmith.sampling.local import decode_step, prompt_pass
from tinsmith.sampling.local import states as states_module
from tinsmith.sampling.local.cached_attention import CachedPlan
from tinsmith.sampling.local.decode_step import DecodePlan, DecodeStep
from tinsmith.sampling.local.device_batch import DeviceBatch
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.sampler import SampleResult
from tinsmith.wire.prompt_scores import PromptQuestions

ANY_ROUNDING = 1e-3
"""How far logprobs may be apart for arbitrary tokens; a wrong state shows in tenths and more.

The trainer's own in float32 are up to 2.5e-4 from float64, at single tokens of this tiny model with random adapters.
"""

# What begins alike


def test_prompts_that_share_a_beginning_compute_it_once(
    hybrid_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that come together the first saves the state where they part."""
    bench = Bench(hybrid_base)
    passes = count_tokens(bench.sampler, monkeypatch)
    for number in range(5):
        bench.add(str(number), prompt_of(hybrid_base, (0, 100), (1 + number, 20)))
    assert {name: result.cached_tokens for name, result in bench.run().items()} == {
        "0": 0,
        "1": 96,
        "2": 96,
        "3": 96,
        "4": 96,
    }
    assert passes == [96, 16 + 4 * 24, 8]  # the first saves its own last block too


def test_images_adapters_and_full_weights_find_their_own(hybrid_base: BaseModel) -> None:
    """Full weights have rows of their own beside those of the others."""
    bench = Bench(hybrid_base, prefill_tokens=50)
    owners: list[Weights | None] = [None, random_adapter(hybrid_base, 4, 1), full_weights(hybrid_base)]
    images = [image_chunks(hybrid_base, seed, 20, width=160, height=160) for seed in (0, 1)]
    asked = [renderer(hybrid_base).render([*image, random_tokens(5, 60)]) for image in images]
    for expected in (0, 96):
        for number in range(6):
            bench.add(str(number), asked[number % 2], ask(num_samples=2), owners[number // 2])
        assert [result.cached_tokens for result in bench.run().values()] == [expected] * 6


def test_a_model_without_attention_keeps_states_alone(tmp_path: Path) -> None:
    write_tiny_model("qwen3-5", tmp_path, layers=2)
    bench = Bench(load(tmp_path), prefill_tokens=40)
    rendered = prompt_of(bench.base, (0, 90))
    assert [bench.answer(rendered, ask(num_samples=2)).cached_tokens for _ in range(2)] == [0, 80]


# Passes that fail


class Failing:
    """Calls a function; at call number `at`, from 0, it raises `error` instead, or after the call with `after`."""

    def __init__(
        self, inner: Callable[..., Any], at: Sequence[int], error: Callable[[], Exception], after: bool = False
    ) -> None:
        self.inner, self.at, self.error, self.after, self.calls = inner, at, error, after, 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls += 1
        if self.calls - 1 in self.at and not self.after:
            raise self.error()
        result = self.inner(*arguments, **keywords)
        if self.calls - 1 in self.at:
            raise self.error()
        return result


ERRORS: dict[str, Callable[[], Exception]] = {
    "out of memory": lambda: torch.OutOfMemoryError("injected"),
    "another": lambda: RuntimeError("injected"),
}

Place = tuple[Callable[[LocalSampler], tuple[Any, str]], list[int]]

PLACES: dict[str, Place] = {
    # Twice, so that the smaller pass that follows fails too.
    "the first layer": (lambda _: (states_module, "gated_delta_rule"), [0, 2]),
    "a later layer of a prompt": (lambda _: (states_module, "gated_delta_rule"), [8, 10]),
    "a layer while answers grow": (lambda _: (states_module, "gated_delta_rule"), [28, 30]),
    "logits": (lambda sampler: (sampler.prompts, "_logits"), [1, 4]),
    "choice": (lambda _: (prompt_pass, "choose"), [1, 4]),
    "copies": (lambda sampler: (sampler.cache, "copy"), [1, 4]),
    "attention": (lambda _: (CachedPlan, "attend"), [1, 4]),
    "logits of a step": (lambda _: (DecodeStep, "_logits"), [1, 4]),
    "choice of a step": (lambda _: (decode_step, "choose_next"), [1, 4]),
    "attention of a step": (lambda _: (DecodePlan, "attend"), [1, 4]),
    "changed rows": (lambda _: (DeviceBatch, "_send"), [1, 4]),
}
"""What may fail: who has it and its name, and in which of its calls."""


BOTH = ["a later layer of a prompt", "copies", "logits of a step", "changed rows"]


@pytest.mark.parametrize(
    ("error", "place"), [*(("out of memory", place) for place in PLACES), *(("another", place) for place in BOTH)]
)
def test_what_fails_steps_no_state(
    hybrid_base: BaseModel, monkeypatch: pytest.MonkeyPatch, error: str, place: str
) -> None:
    """All is answered rightly.

    Of what is tried alone an error that is no lack of memory may hit one. Steps run ahead, or not.
    """
    bench = Bench(hybrid_base, runs_ahead=error == "out of memory", prefill_tokens=60 if "layer" in place else 30)
    found, at = PLACES[place]
    holder, name = found(bench.sampler)
    # A copy that is made is given back by whom it is given, and a layer that has failed has computed nothing.
    failing = Failing(getattr(holder, name), at, ERRORS[error], after=place != "copies" and "layer" not in place)
    monkeypatch.setattr(holder, name, partialmethod(failing) if isinstance(holder, type) else failing)
    for number in range(4):
        bench.add(str(number), prompt_of(bench.base, (number, 10 + 25 * number)), ask(num_samples=2))
    ended = local.outcomes(bench.sampler)
    # On a GPU only prompts call the delta rule: a kernel steps what runs
    assert failing.calls > max(at) or DEVICE != "cpu"
    assert len(bench.check(ended)) >= (3 if error == "another" else 4)


# Anything at any time


REQUESTS = st.tuples(
    st.integers(0, 2),  # which beginning
    st.integers(0, 3),  # its length, in pieces of 40 tokens
    st.integers(1, 50),  # tokens of its own
    st.integers(1, 4),  # samples
    st.booleans(),  # prompt log-probabilities
    st.integers(0, 2),  # whose weights: the base's, an adapter's, a model's that is published again
    st.sampled_from("ab"),  # session
)


class Play:
    """A sampler to which things happen, in order, and what has come of it."""

    def __init__(self, bench: Bench, requests: list[tuple[int, int, int, int, bool, int, str]]) -> None:
        self.bench, self.to_come = bench, list(enumerate(requests))
        self.fixed, self.versions = random_adapter(bench.base, 4, 1), list[Weights]()
        self.cancelled, self.done = set[str](), dict[str, SampleResult]()
        self.publish()

    def add(self) -> None:
        if self.to_come:
            number, (beginning, pieces, own, samples, scores, whose, session) = self.to_come.pop(0)
            request = replace(
                of_session(session, 5 + 4 * samples, samples, seed=number), questions=PromptQuestions(logprobs=scores)
            )
            weights = (None, self.fixed, self.versions[-1])[whose]
            self.bench.add(
                str(number), prompt_of(self.bench.base, (beginning, 40 * pieces), (10 + number, own)), request, weights
            )

    def step(self) -> None:
        for event in self.bench.sampler.step():
            assert isinstance(event, SampleResult)
            self.done[event.request_id] = event

    def fail(self, error: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                states_module, "gated_delta_rule", Failing(gated_delta_rule, [1 + len(self.done) % 3], ERRORS[error])
            )
            self.step()

    def publish(self) -> None:
        number = len(self.versions)
        self.versions.append(random_adapter(self.bench.base, 4, 2 + number, ref=new_ref(f"v{number}", "m")))
        self.bench.sampler.publish(self.versions[-1])

    def cancel(self) -> None:
        for name in [name for name in self.bench.asked if name not in self.done][:1]:
            self.cancelled.add(name)
            self.bench.sampler.cancel(name)

    def check(self) -> None:
        """What was sampled has the trainer's log-probabilities, each token those of its version."""
        assert self.done.keys() | self.cancelled == self.bench.asked.keys()
        for name, result in self.done.items():
            rendered, weights = self.bench.asked[name]
            if any(weights is version for version in self.versions):
                local.check_versions(self.bench.base, rendered, self.versions, result, ANY_ROUNDING)
            else:
                local.check(self.bench.base, rendered, weights, result, ANY_ROUNDING)


HAPPENS = [Play.add, Play.publish, Play.cancel, *(partial(Play.fail, error=error) for error in ERRORS)]
EVENTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(HAPPENS)), max_size=15)
"""What happens after so many steps."""


@settings(
    max_examples=amount(4, 15),
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    events=EVENTS,
    cache=st.sampled_from([(400, 40), (30, 6), (24, 1), (400, 3), (20, 12)]),
    settings=st.fixed_dictionaries({"prefill_tokens": st.sampled_from([40, 64, 4096]), "runs_ahead": st.booleans()}),
)
def test_states_are_right_whatever_happens(
    hybrid_base: BaseModel, requests: Any, events: Any, cache: Any, settings: Any
) -> None:
    """Requests come, are cancelled, get newer weights, and passes fail, in any order, in large and in tiny caches."""
    play = Play(Bench(hybrid_base, *cache, **settings), requests)
    play.add()
    for steps, event in events:
        for _ in range(steps):
            play.step()
        event(play)
    while play.to_come:
        play.add()
    play.done |= local.run(play.bench.sampler)
    play.check()
