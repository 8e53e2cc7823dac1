"""The local sampler against the trainer's forward, alone and in company.

Invariant: Sampler logprobs equal the trainer's; seeds ignore batch mates; a small cache changes nothing.
Also: `tests/sampling/local/test_decoding.py`, `tests/acceptance/test_sampling.py`.

Invariant: A prompt in pieces, a prefix from the cache, a cut image change nothing; nothing is shared between weights or
images. Also: `tests/sampling/local/test_kernels.py`.

Invariant: Tokens that are read while they come are those of the result, each once, whatever weights replace others and
whatever server is lost. Also: `tests/sampling/vllm/test_sampler.py`, `tests/with_vllm/test_a_sampler.py`.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.bases import EXACT, datum, image_chunks, new_ref, random_adapter, random_tokens, renderer, text
from tests.extent import slow
from tinsmith.config import SamplingConfig, TrainingConfig
from tinsmith.errors import UserError
from tinsmith.memory.budget import BLOCK, CacheSizes
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.local.cached_attention import Window
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.local.sequence import SequenceState
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled
from tinsmith.sampling.stopping import StringMatcher
from tinsmith.training.backend import LocalBackend
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.wire.chunks import Chunk
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule

NO_STOP = StopRule(eos=False, strings=(), token_ids=())
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, top_p=1.0, top_k=-1, seed=5, stop=NO_STOP)


def ask(params: SamplingParams = PARAMS, num_samples: int = 1, prompt_logprobs: bool = False) -> SampleRequest:
    return SampleRequest("s:sample:0", 0, num_samples, [], params, PromptQuestions(logprobs=prompt_logprobs))


def sampler_of(
    base: BaseModel, blocks: int = 400, slots: int = 40, runs_ahead: bool | None = None, **settings: Any
) -> LocalSampler:
    """A sampler with that many cache blocks, and that many slots for states if the model has any.

    It launches steps ahead as is best for the device, unless `runs_ahead` says otherwise.
    """
    sampler = LocalSampler(base, SamplingConfig(**settings), logits_chunk=16, sizes=CacheSizes(blocks, slots))
    if runs_ahead is not None:
        sampler.steps.runs_ahead = runs_ahead
    return sampler


def outcomes(sampler: LocalSampler) -> dict[str, SampleResult | SampleFailure]:
    """Step until nothing is left; each request ends once, and cache and states must be whole again."""
    ended: dict[str, SampleResult | SampleFailure] = {}
    while sampler.has_work:
        for event in sampler.step():
            assert isinstance(event, SampleResult | SampleFailure)
            assert event.request_id not in ended
            ended[event.request_id] = event
    assert sorted([*sampler.cache.free, *sampler.cache.idle]) == list(range(1, sampler.cache.total + 1))
    assert not any(sampler.cache.users)
    if sampler.states:
        assert sorted([*sampler.states.free, *sampler.states.saved.values()]) == list(range(sampler.states.total))
    return ended


def run(sampler: LocalSampler) -> dict[str, SampleResult]:
    """Step until nothing is left; nothing may fail."""
    ended = outcomes(sampler)
    done = {name: event for name, event in ended.items() if isinstance(event, SampleResult)}
    assert done.keys() == ended.keys()
    return done


Scores = tuple[np.ndarray, np.ndarray]


def forward_logprobs(base: BaseModel, weights: Weights | None, rendered: RenderedInput, answer: list[int]) -> Scores:
    """The trainer's log-probabilities of the prompt after its first token, and of the answer."""
    return forward_of_answers(base, weights, rendered, [answer])[0]


def forward_of_answers(
    base: BaseModel, weights: Weights | None, rendered: RenderedInput, answers: list[list[int]]
) -> list[Scores]:
    """`forward_logprobs` of each of several answers to a prompt, in one pass."""
    backend = LocalBackend(base, TrainingConfig())
    backend.optimizers["a"] = ModelOptimizer(weights or random_adapter(base, b_scale=0.0))
    results = backend.run_pass(
        [datum("a", followed_by(rendered, answer)) for answer in answers], backward=False
    ).results
    found = [result.logprobs for result in results if result is not None]
    return [(logprobs[: len(rendered) - 1], logprobs[len(rendered) - 1 : -1]) for logprobs in found]


def followed_by(rendered: RenderedInput, answer: list[int]) -> RenderedInput:
    """A prompt and its answer."""
    where = (torch.arange(len(answer)) + rendered.next_position).expand(len(rendered.positions), -1)
    return rendered.followed_by(RenderedInput(np.array(answer, np.int32), (), (), where))


def prompts(base: BaseModel) -> list[list[Chunk]]:
    """Prompts of mixed lengths; where the model takes images, some with them."""
    plain: list[list[Chunk]] = [[random_tokens(i, n)] for i, n in enumerate([5, BLOCK, 40, 1, 2 * BLOCK - 1])]
    if not base.family.takes_images:
        return plain
    return [
        *plain,
        image_chunks(base, 20, 6),
        [*image_chunks(base, 22, 4, width=64, height=160), *image_chunks(base, 24, 5)],
    ]


def prompt_of(base: BaseModel, *parts: tuple[int, int]) -> RenderedInput:
    """Random text: (seed, length) of each part."""
    return renderer(base).render([random_tokens(seed, length) for seed, length in parts])


def of_session(name: str, max_tokens: int, num_samples: int = 1, seed: int = 0) -> SampleRequest:
    request = ask(replace(PARAMS, max_tokens=max_tokens, seed=seed), num_samples)
    return replace(request, sampling_session_id=f"{name}:sample:0")


def sampled(
    sampler: LocalSampler, rendered: RenderedInput, asked: SampleRequest | None = None, weights: Any = None
) -> SampleResult:
    """What comes of a single request."""
    sampler.add("x", asked or ask(), rendered, weights)
    return run(sampler)["x"]


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [sequence.tokens for sequence in result.sequences]


def check(
    base: BaseModel, rendered: RenderedInput, weights: Weights | None, result: SampleResult, allowed: float = EXACT
) -> None:
    """All that was sampled, and asked about the prompt, has the trainer's log-probabilities."""
    expected = forward_of_answers(base, weights, rendered, tokens_of(result))
    for sequence, (prompt, answer) in zip(result.sequences, expected, strict=True):
        np.testing.assert_allclose(sequence.logprobs, answer, atol=allowed)
        if (scored := result.answers.logprobs) is not None:
            assert (len(scored), np.isnan(scored[0])) == (len(rendered), True)
            text = rendered.is_text[1:]
            assert (scored[1:][~text] == 0.0).all()
            np.testing.assert_allclose(scored[1:][text], prompt[text], atol=allowed)


def check_versions(
    base: BaseModel, rendered: RenderedInput, versions: list[Weights], result: SampleResult, allowed: float = 1e-4
) -> None:
    """Each token has the log-probability of the version that its span names: v0, v1 and so on."""
    for sequence in result.sequences:
        assert [0, *(span.end for span in sequence.versions)] == [
            *(span.start for span in sequence.versions),
            len(sequence.tokens),
        ]
        for span in sequence.versions:
            _, expected = forward_logprobs(base, versions[int(span.version[1:])], rendered, sequence.tokens)
            where = slice(span.start, span.end)
            np.testing.assert_allclose(sequence.logprobs[where], expected[where], atol=allowed)


def full_weights(base: BaseModel, change: float = 0.01) -> Weights:
    """All weights of a base, each a little larger."""
    backend = LocalBackend(base, TrainingConfig(logits_chunk=16))
    backend.create_model("full", LoraShape(0, 0))
    weights = backend.optimizers["full"].weights
    for tensor in weights.tensors():
        tensor.data += change
    weights.refresh()
    return backend.snapshot("full", new_ref())


def versions_of(base: BaseModel, count: int) -> list[Adapter]:
    """Adapters v0, v1 and so on that replace each other."""
    return [random_adapter(base, 4, seed, ref=new_ref(f"v{seed}", "m")) for seed in range(count)]


def sick_adapter(base: BaseModel) -> Adapter:
    """An adapter that computes NaN."""
    sick = random_adapter(base, 4, 9)
    for pair in sick.masters.values():
        pair.b.fill_(float("nan"))
    sick.refresh()
    return sick


class Bench:
    """A sampler and its requests: what it samples at temperature 1 must have the trainer's log-probabilities."""

    def __init__(
        self, base: BaseModel, blocks: int = 400, slots: int = 40, runs_ahead: bool | None = None, **settings: Any
    ) -> None:
        self.base, self.sampler = base, sampler_of(base, blocks, slots, runs_ahead, **settings)
        self.asked: dict[str, tuple[RenderedInput, Weights | None]] = {}

    def add(
        self, name: str, rendered: RenderedInput, asked: SampleRequest | None = None, weights: Weights | None = None
    ) -> None:
        self.asked[name] = rendered, weights
        self.sampler.add(name, asked or ask(), rendered, weights)

    def step(self, count: int = 1) -> None:
        """Steps in which nothing ends."""
        for _ in range(count):
            assert self.sampler.step() == []

    def check(self, ended: dict[str, SampleResult | SampleFailure]) -> dict[str, SampleResult]:
        """What has succeeded, which must be right."""
        done = {name: event for name, event in ended.items() if isinstance(event, SampleResult)}
        for name, result in done.items():
            check(self.base, *self.asked[name], result)
        return done

    def run(self) -> dict[str, SampleResult]:
        """Step until nothing is left; nothing may fail."""
        return self.check({**run(self.sampler)})

    def answer(
        self, rendered: RenderedInput, asked: SampleRequest | None = None, weights: Weights | None = None
    ) -> SampleResult:
        """What comes of a single request."""
        self.add("x", rendered, asked, weights)
        return self.run()["x"]


# A family with windows, one that takes images, one that keeps states, and mixtures of experts; the others have the
# layers of these.
@pytest.mark.parametrize("prefill_tokens", [4096, 7])
@pytest.mark.parametrize(
    "any_base",
    [
        *("mistral", "qwen3_vl", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "gpt_oss"),
        *slow("llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl_moe", "mixtral", "qwen2_moe"),
    ],
    indirect=True,
)
def test_logprobs_equal_the_trainers_for_many_weights_in_one_batch(any_base: BaseModel, prefill_tokens: int) -> None:
    bench, render = Bench(any_base, prefill_tokens=prefill_tokens), renderer(any_base)
    without_unembed, without_mlp = (
        random_adapter(any_base, 8, 2, train_unembed=False),
        random_adapter(any_base, 2, 3, train_mlp=False),
    )
    weights = [None, random_adapter(any_base, 4, 1), without_unembed, without_mlp]
    for number, chunks in enumerate(prompts(any_base)):
        bench.add(
            str(number),
            render.render(chunks),
            ask(replace(PARAMS, max_tokens=20), prompt_logprobs=True),
            weights[number % 4],
        )
    assert {len(tokens) for result in bench.run().values() for tokens in tokens_of(result)} == {20}


def test_long_and_short_sequences_in_one_step_equal_the_trainers(text_base: BaseModel) -> None:
    bench, adapter = Bench(text_base), random_adapter(text_base)
    for length in (5, 300, 20, 600):
        bench.add(str(length), prompt_of(text_base, (length, length)), weights=adapter)
    bench.run()


def test_without_a_seed_two_requests_differ(text_base: BaseModel) -> None:
    sampler, request = sampler_of(text_base), ask(replace(PARAMS, seed=None, temperature=2.0))
    first, second = (tokens_of(sampled(sampler, prompt_of(text_base, (0, 4)), request)) for _ in range(2))
    assert first != second


def test_a_sample_takes_the_room_that_there_is_and_what_can_never_fit_is_refused_with_both_numbers(
    text_base: BaseModel,
) -> None:
    sampler, rendered = sampler_of(text_base, blocks=4), prompt_of(text_base, (0, 30))
    with pytest.raises(UserError, match=f"is 70 tokens, but the key/value cache holds {4 * BLOCK}"):
        sampler.add("x", ask(replace(PARAMS, max_tokens=40)), rendered, None)
    with pytest.raises(UserError, match=r"exceeds the context window of tiny: 30 \+ 40000 > 32768"):
        sampler.add("x", ask(replace(PARAMS, max_tokens=40000)), rendered, None)
    (sequence,) = sampled(sampler, rendered, ask(replace(PARAMS, max_tokens=None))).sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (4 * BLOCK - 30, "length")


@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_that_fills_the_context_and_the_cache_is_scored(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As compute_logprobs asks for it: with one token, which is drawn and not computed."""
    monkeypatch.setattr(text_base, "max_context", 2 * BLOCK)
    bench, full = Bench(text_base, blocks=2 * count), prompt_of(text_base, (0, 2 * BLOCK))
    one = replace(PARAMS, max_tokens=1)
    scored = ask(one, count, prompt_logprobs=True)
    assert [len(tokens) for tokens in tokens_of(bench.answer(full, scored))] == [1] * count
    for asked in (ask(one), replace(scored, params=replace(PARAMS, max_tokens=2))):
        with pytest.raises(UserError, match="exceeds the context window of tiny: 32 "):
            bench.add("x", full, asked)


def test_stop_rules(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered, greedy = prompt_of(text_base, (0, 4)), replace(PARAMS, temperature=0.0, max_tokens=30)
    (path,) = tokens_of(sampled(sampler_of(text_base), rendered, ask(greedy)))
    third, seventh = path[2], path[6]
    word = text_base.tokenizer.decode(path[:2])
    monkeypatch.setattr(text_base.network.generation_config, "eos_token_id", [seventh])
    at_third, at_seventh = path[: path.index(third) + 1], path[: path.index(seventh) + 1]
    sampler = sampler_of(text_base)
    built: list[tuple[str, ...]] = []
    build = StringMatcher._build

    def counted(matcher: StringMatcher) -> None:
        built.append(matcher.strings)
        build(matcher)

    monkeypatch.setattr(StringMatcher, "_build", counted)
    for rule, tokens, reason in (
        (StopRule(True, (), ()), at_seventh, "stop"),
        (NO_STOP, path, "length"),
        (StopRule(True, (), (third,)), min(at_third, at_seventh, key=len), "stop"),
        (StopRule(True, (), (-5,)), at_seventh, "stop"),
        (StopRule(True, (word,), ()), path[:2], "stop"),
    ):
        result = sampled(sampler, rendered, ask(replace(greedy, stop=rule), num_samples=2))
        assert [(sequence.tokens, sequence.stop_reason) for sequence in result.sequences] == [(tokens, reason)] * 2
    assert built == [(word,)]  # once for both sequences


def test_a_broken_model_does_not_reach_another_through_the_cache(text_base: BaseModel) -> None:
    bench, rendered = Bench(text_base, blocks=8), prompt_of(text_base, (0, 3))
    sampled(bench.sampler, rendered, ask(replace(PARAMS, max_tokens=100)), sick_adapter(text_base))
    assert tokens_of(bench.answer(rendered)) == tokens_of(sampled(sampler_of(text_base, blocks=8), rendered))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_cancelled_or_abandoned_request_is_forgotten_wherever_it_is(any_base: BaseModel, runs_ahead: bool) -> None:
    bench = Bench(any_base, 30, 8, runs_ahead=runs_ahead, prefill_tokens=20, max_running=3)
    asked = [
        (prompt_of(any_base, (number, 30)), ask(replace(PARAMS, seed=number), num_samples=2)) for number in range(4)
    ]
    for number, each in enumerate(asked):
        bench.add(str(number), *each)
    bench.step(3)
    for request_id in ("0", "2", "3", "unknown"):
        bench.sampler.cancel(request_id)
    done = bench.run()
    assert list(done) == ["1"]
    assert tokens_of(done["1"]) == tokens_of(sampled(sampler_of(any_base), *asked[1]))
    for steps in (1, 4):
        bench.add("x", asked[0][0], ask(num_samples=3), random_adapter(any_base))
        bench.step(steps)
        bench.sampler.abandon()
        assert not bench.sampler.has_work
        assert bench.sampler.step() == []
    assert bench.answer(asked[0][0]).cached_tokens == 0


# What begins alike is computed once


def count_tokens(sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list of how many tokens of prompts each pass of the sampler computes from now on."""
    passes: list[int] = []
    inner = sampler.schedule.prompt_windows

    def prompt_windows() -> list[tuple[SequenceState, Window]]:
        windows = inner()
        if windows:
            passes.append(sum(len(window) for _, window in windows))
        return windows

    monkeypatch.setattr(sampler.schedule, "prompt_windows", prompt_windows)
    return passes


@pytest.mark.parametrize(
    "any_base", ["qwen3_vl", "qwen3_5", "qwen3_5_moe", *slow("mistral", "qwen2_5_vl", "qwen3_vl_moe")], indirect=True
)
def test_a_conversation_that_grows_computes_only_its_tail(any_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, render, adapter = Bench(any_base), renderer(any_base), random_adapter(any_base, 4, 1)
    chunks: list[Chunk] = [random_tokens(0, 27)]
    passes = count_tokens(bench.sampler, monkeypatch)
    before = 0
    for turn in range(3):
        if any_base.family.takes_images:
            chunks += image_chunks(any_base, turn, 3, width=96, height=128)
        rendered = render.render(chunks)
        result = bench.answer(rendered, ask(replace(PARAMS, seed=turn, max_tokens=20)), adapter)
        # A step that was launched ahead has computed the last token too.
        assert result.cached_tokens in {before // BLOCK * BLOCK, (before + 1) // BLOCK * BLOCK}
        assert passes[0] == len(rendered) - result.cached_tokens
        passes.clear()
        (tokens,) = tokens_of(result)
        before = len(rendered) + len(tokens) - 1  # the last token need not be computed
        chunks += [text(*tokens), random_tokens(turn + 1, 9)]


@pytest.mark.parametrize(
    ("any_base", "computed"),
    [("qwen3", [70, 7 * 6]), ("qwen3_5", [64, 8 * 6]), ("qwen3_moe", [70, 7 * 6]), ("gpt_oss", [70, 7 * 6])],
    indirect=["any_base"],
)
def test_equal_prompts_are_computed_once(
    any_base: BaseModel, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By requests that come together, and by one that comes later: all but its last tokens."""
    bench, rendered = Bench(any_base), prompt_of(any_base, (0, 70))
    passes = count_tokens(bench.sampler, monkeypatch)
    for seed in range(8):
        bench.add(str(seed), rendered, ask(replace(PARAMS, seed=seed)))
    done = bench.run()
    assert passes == computed
    done["later"] = bench.answer(rendered, ask(num_samples=3))
    assert [result.cached_tokens for result in done.values()] == [0] + [64] * 8


def test_a_tenant_finds_nothing_of_what_others_have_computed(any_base: BaseModel) -> None:
    """Or it could guess their prompts, block by block, and see which are there."""
    sampler, rendered = sampler_of(any_base), prompt_of(any_base, (0, 70))
    for tenant, cached in (("alice", 0), ("bob", 0), ("alice", 64), ("bob", 64)):
        sampler.add("x", ask(), rendered, None, tenant=tenant)
        assert run(sampler)["x"].cached_tokens == cached


def test_what_is_asked_about_a_prompt_is_computed_whatever_is_cached_and_spares_the_next(any_base: BaseModel) -> None:
    """What is asked about its last tokens alone goes on from the cache."""
    sampler, rendered = sampler_of(any_base), prompt_of(any_base, (0, 90))
    (expected, _), scores = forward_logprobs(any_base, None, rendered, [0]), PromptQuestions(logprobs=True)
    for questions, cached in ((scores, 0), (scores, 0), (PromptQuestions(), 80), (replace(scores, last_n=5), 80)):
        result = sampled(sampler, rendered, replace(ask(), questions=questions))
        assert (result.cached_tokens, result.answers.logprobs is not None) == (cached, questions.logprobs)
        check(any_base, rendered, None, replace(result, answers=PromptAnswers()))
        if result.answers.logprobs is not None:
            first = 1 if questions.last_n is None else 85
            np.testing.assert_allclose(result.answers.logprobs[first:], expected[first - 1 :], atol=1e-4)


def test_nothing_is_shared_between_weights(text_base: BaseModel) -> None:
    """Not even between two snapshots of a model, or with one that takes a freed one's place in memory."""
    bench, rendered = Bench(text_base), prompt_of(text_base, (0, 70))
    for seed in range(4):
        assert bench.answer(rendered, weights=random_adapter(text_base, 4, seed)).cached_tokens == 0
        bench.asked.clear()


def test_images_are_told_apart_by_content_and_from_text_of_the_same_ids(vision_base: BaseModel) -> None:
    bench, render = Bench(vision_base), renderer(vision_base)
    images = [image_chunks(vision_base, seed, 5, width=160, height=160)[1:4] for seed in (0, 1)]
    asked = [render.render([random_tokens(0, 2), *image, random_tokens(1, 20)]) for image in images]
    assert (asked[0].token_ids == asked[1].token_ids).all()
    asked.append(render.render([text(*asked[0].token_ids.tolist())]))
    assert [bench.answer(rendered).cached_tokens > 0 for rendered in (*asked, asked[0])] == [False, False, False, True]


# Weights that replace others


CACHES = [("qwen3_vl", 400, False), ("qwen3_vl", 12, True), ("qwen3_5", 12, False), ("qwen3_5", 400, True)]


@pytest.mark.parametrize(("any_base", "blocks", "runs_ahead"), CACHES, indirect=["any_base"])
def test_samples_go_on_with_the_weights_that_replace_theirs(any_base: BaseModel, blocks: int, runs_ahead: bool) -> None:
    """Twice, with other samples beside them: each token is what its version gives after all tokens before it."""
    sampler, rendered = (
        sampler_of(any_base, blocks, runs_ahead=runs_ahead),
        renderer(any_base).render(prompts(any_base)[-1]),
    )
    versions = versions_of(any_base, 3)
    sampler.add("follows", ask(num_samples=2), rendered, versions[0])
    sampler.add("fixed", ask(), rendered, versions[0].snapshot(new_ref("v0")))
    sampler.add("other", ask(), rendered, versions[0].snapshot(new_ref("v0", "n")))
    for number in (1, 2):
        for _ in range(3):
            assert sampler.step() == []
        sampler.publish(versions[number])
        sampler.publish(versions[number].snapshot(new_ref()))
    for name, result in run(sampler).items():
        for sequence in result.sequences:
            assert [span.version for span in sequence.versions] == (["v0", "v1", "v2"] if name == "follows" else ["v0"])
        check_versions(any_base, rendered, [*versions], result)


def test_a_sequence_that_is_computed_again_token_by_token_is_the_same(any_base: BaseModel) -> None:
    """A piece of one token may lie anywhere in a sequence that has an answer already."""
    sampler, rendered = sampler_of(any_base, prefill_tokens=1), prompt_of(any_base, (0, 20))
    old, new = versions_of(any_base, 2)
    sampler.add("x", ask(), rendered, old)
    while not sampler.queues.running:
        sampler.step()
    sampler.publish(new)
    check_versions(any_base, rendered, [old, new], run(sampler)["x"])


def test_a_prompt_is_answered_about_by_one_version(text_base: BaseModel) -> None:
    """Weights that are replaced while the prompt is being computed: its scores are all of the new ones."""
    sampler, rendered = sampler_of(text_base, prefill_tokens=7), prompt_of(text_base, (0, 40))
    old, new = versions_of(text_base, 2)
    sampler.add("x", ask(prompt_logprobs=True), rendered, old)
    for _ in range(3):
        sampler.step()
    sampler.publish(new)
    check(text_base, rendered, new, run(sampler)["x"])


@pytest.mark.parametrize(("blocks", "runs_ahead"), [(400, False), (12, True)])
def test_tokens_of_a_streamed_sample_come_step_by_step(text_base: BaseModel, blocks: int, runs_ahead: bool) -> None:
    """Each once, also when the cache is so small that sequences are computed again, and when new weights take over."""
    sampler, rendered = sampler_of(text_base, blocks, runs_ahead=runs_ahead), prompt_of(text_base, (0, 40))
    old, new = versions_of(text_base, 2)
    sampler.add("read", ask(num_samples=3), rendered, old, stream=True)
    sampler.add("silent", ask(num_samples=3), rendered, old)
    events: list[SampleEvent] = []
    for step in itertools.count():
        if not sampler.has_work:
            break
        if step == 6:
            sampler.publish(new)
        events += sampler.step()
    told = [event for event in events if isinstance(event, TokensSampled)]
    (read,) = [event for event in events if isinstance(event, SampleResult) and event.request_id == "read"]
    assert {event.request_id for event in told} == {"read"}
    assert events.index(read) > events.index(told[-1]), "nothing follows the result"
    assert len(events) == len(told) + 2
    for index, sequence in enumerate(read.sequences):
        versions = [span.version for span in sequence.versions for _ in range(span.start, span.end)]
        expected = [
            ([token], [logprob], version)
            for token, logprob, version in zip(sequence.tokens, sequence.logprobs, versions, strict=True)
        ]
        assert [
            ([*event.tokens], [*event.logprobs], event.version) for event in told if event.index == index
        ] == expected
    assert {event.version for event in told} == {"v0", "v1"}


def test_weights_that_train_are_not_sampled(text_base: BaseModel) -> None:
    """They have no identity, because they change, and what the prefix cache keeps of them would be wrong."""
    sampler, adapter = sampler_of(text_base), random_adapter(text_base)
    adapter.ref = None
    with pytest.raises(ValueError, match="take a snapshot"):
        sampler.add("x", ask(), prompt_of(text_base, (0, 4)), adapter)
