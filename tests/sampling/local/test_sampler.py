"""The local sampler against the trainer's forward, alone and in company.

Invariant: Sampler logprobs equal the trainer's; seeds ignore batch mates; a small cache changes nothing.
Also: `tests/acceptance/test_sampling.py`.

Invariant: A prompt in pieces, a prefix from the cache, a cut image change nothing; nothing is shared between weights or images.
Also: `tests/sampling/local/test_cached_attention.py`.

Invariant: Tokens that are read while they come are those of the result, each once, whatever weights replace others and whatever server is
lost.
Also: `tests/sampling/vllm/test_sampler.py`, `tests/with_vllm/test_a_sampler.py`.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.bases import datum, new_ref, picture_chunks, random_adapter, random_tokens, renderer, text
from tests.extent import slow
from tinsmith.config import SamplingConfig, TrainingConfig
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.local.cache_shape import CacheSizes
from tinsmith.sampling.local.cached_attention import Window
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.local.sequence import Sequence
from tinsmith.sampling.prefix import BLOCK
from tinsmith.sampling.sampler import SampleFailure, SampleResult, TokensSampled
from tinsmith.training.backend import LocalBackend
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.wire.chunks import Chunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule

NO_STOP = StopRule(eos=False, strings=(), token_ids=())
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, top_p=1.0, top_k=-1, seed=5, stop=NO_STOP)


def ask(params: SamplingParams = PARAMS, num_samples: int = 1, prompt_logprobs: bool = False) -> SampleRequest:
    return SampleRequest("s:sample:0", 0, num_samples, [], params, PromptQuestions(logprobs=prompt_logprobs))


def sampler_of(base: BaseModel, blocks: int = 400, slots: int = 40, runs_ahead: bool | None = None, **settings: Any) -> LocalSampler:
    """A sampler with that many cache blocks, and that many slots for states if the model has any.

    It launches steps ahead as is best for the device, unless `runs_ahead` says otherwise.
    """
    sampler = LocalSampler(base, SamplingConfig(**settings), logits_chunk=16, sizes=CacheSizes(blocks, slots))
    if runs_ahead is not None:
        sampler.runs_ahead = runs_ahead
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


def forward_logprobs(base: BaseModel, weights: Weights | None, rendered: RenderedInput, answer: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The trainer's log-probabilities of the prompt after its first token, and of the answer."""
    (found,) = forward_of_answers(base, weights, rendered, [answer])
    return found


def forward_of_answers(
    base: BaseModel, weights: Weights | None, rendered: RenderedInput, answers: list[list[int]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """`forward_logprobs` of each of several answers to a prompt, in one pass."""
    backend = LocalBackend(base, TrainingConfig())
    blank = random_adapter(base, b_scale=0.0)
    backend.optimizers["a"] = ModelOptimizer(weights or blank)
    work = []
    for answer in answers:
        where = torch.arange(len(answer)) + rendered.next_position
        whole = RenderedInput(
            np.concatenate([rendered.token_ids, np.array(answer, np.int32)]),
            rendered.spans,
            rendered.pictures,
            torch.cat([rendered.positions, where.expand(len(rendered.positions), -1)], dim=1),
        )
        work.append(datum("a", whole))
    found = [result.logprobs for result in backend.run_pass(work, backward=False).results if result is not None]
    assert len(found) == len(answers)
    return [(logprobs[: len(rendered) - 1], logprobs[len(rendered) - 1 : -1]) for logprobs in found]


def prompts(base: BaseModel) -> list[list[Chunk]]:
    """Prompts of mixed lengths; where the model takes images, some with them."""
    plain: list[list[Chunk]] = [[random_tokens(i, n)] for i, n in enumerate([5, BLOCK, 40, 1, 2 * BLOCK - 1])]
    if not base.family.takes_images:
        return plain
    return [*plain, picture_chunks(base, 20, 6), [*picture_chunks(base, 22, 4, width=64, height=160), *picture_chunks(base, 24, 5)]]


def prompt_of(base: BaseModel, *parts: tuple[int, int]) -> RenderedInput:
    """Random text: (seed, length) of each part."""
    return renderer(base).render([random_tokens(seed, length) for seed, length in parts])


def of_session(name: str, max_tokens: int, num_samples: int = 1, seed: int = 0) -> SampleRequest:
    request = ask(replace(PARAMS, max_tokens=max_tokens, seed=seed), num_samples)
    return replace(request, sampling_session_id=f"{name}:sample:0")


def sampled(
    sampler: LocalSampler, rendered: RenderedInput, request: SampleRequest | None = None, weights: Weights | None = None
) -> SampleResult:
    """What comes of a single request."""
    sampler.add("x", request or ask(), rendered, weights)
    return run(sampler)["x"]


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [sequence.tokens for sequence in result.sequences]


def check(base: BaseModel, rendered: RenderedInput, weights: Weights | None, result: SampleResult, allowed: float = 1e-4) -> None:
    """All that was sampled, and asked about the prompt, has the trainer's log-probabilities."""
    expected = forward_of_answers(base, weights, rendered, tokens_of(result))
    for sequence, (prompt, answer) in zip(result.sequences, expected, strict=True):
        np.testing.assert_allclose(sequence.logprobs, answer, atol=allowed)
        if (scored := result.answers.logprobs) is not None:
            assert (len(scored), np.isnan(scored[0])) == (len(rendered), True)
            text = rendered.is_text[1:]
            assert (scored[1:][~text] == 0.0).all()
            np.testing.assert_allclose(scored[1:][text], prompt[text], atol=allowed)


def check_versions(base: BaseModel, rendered: RenderedInput, versions: list[Weights], result: SampleResult, allowed: float = 1e-4) -> None:
    """Each token has the log-probability of the version that its span names: v0, v1 and so on."""
    for sequence in result.sequences:
        assert [0, *(span.end for span in sequence.versions)] == [*(span.start for span in sequence.versions), len(sequence.tokens)]
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


def sick_adapter(base: BaseModel) -> Adapter:
    """An adapter that computes NaN."""
    sick = random_adapter(base, 4, 9)
    for pair in sick.masters.values():
        pair.b.fill_(float("nan"))
    sick.refresh()
    return sick


@pytest.mark.parametrize("prefill_tokens", [4096, 7])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_logprobs_equal_the_trainers_for_many_weights_in_one_batch(
    family_base: Callable[[str], BaseModel], family: str, prefill_tokens: int
) -> None:
    base = family_base(family)
    sampler, render = sampler_of(base, prefill_tokens=prefill_tokens), renderer(base)
    without_unembed, without_mlp = random_adapter(base, 8, 2, train_unembed=False), random_adapter(base, 2, 3, train_mlp=False)
    weights = [None, random_adapter(base, 4, 1), without_unembed, without_mlp]
    jobs = {str(i): (render.render(chunks), weights[i % 4]) for i, chunks in enumerate(prompts(base))}
    for name, job in jobs.items():
        sampler.add(name, ask(replace(PARAMS, max_tokens=20), prompt_logprobs=True), *job)
    for name, result in run(sampler).items():
        assert [len(tokens) for tokens in tokens_of(result)] == [20]
        check(base, *jobs[name], result)


def test_long_and_short_sequences_in_one_step_equal_the_trainers(text_base: BaseModel) -> None:
    sampler, adapter = sampler_of(text_base), random_adapter(text_base)
    asked = {str(n): prompt_of(text_base, (n, n)) for n in (5, 300, 20, 600)}
    for name, rendered in asked.items():
        sampler.add(name, ask(), rendered, adapter)
    for name, result in run(sampler).items():
        check(text_base, asked[name], adapter, result)


def test_a_seed_gives_the_same_tokens_whatever_runs_beside(vision_base: BaseModel) -> None:
    render, adapter = renderer(vision_base), random_adapter(vision_base, 4, 1)
    rendered = render.render(picture_chunks(vision_base, 1, 6))
    expected = tokens_of(sampled(sampler_of(vision_base), rendered, ask(num_samples=3), adapter))
    assert len({tuple(tokens) for tokens in expected}) == 3

    crowded = sampler_of(vision_base)
    for i in range(6):
        crowded.add(f"before{i}", ask(replace(PARAMS, seed=i, max_tokens=3 + 5 * i)), prompt_of(vision_base, (i, 4 + i)), None)
    crowded.step()
    crowded.step()
    crowded.add("ahead", ask(replace(PARAMS, max_tokens=2)), prompt_of(vision_base, (8, 2)), adapter)  # of one pass with "x"
    crowded.add("x", ask(num_samples=3), rendered, adapter)
    crowded.add("after", ask(replace(PARAMS, temperature=0.3, top_k=3), 4), prompt_of(vision_base, (9, 30)), adapter)
    assert tokens_of(run(crowded)["x"]) == expected


def test_without_a_seed_two_requests_differ(text_base: BaseModel) -> None:
    sampler, request = sampler_of(text_base), ask(replace(PARAMS, seed=None, temperature=2.0))
    first, second = (tokens_of(sampled(sampler, prompt_of(text_base, (0, 4)), request)) for _ in range(2))
    assert first != second


PREEMPTED = {
    str(i): (replace(of_session("ab"[i % 2], 40, 1 + i % 3, seed=i), questions=PromptQuestions(logprobs=True)), i) for i in range(5)
}
"""Requests of two sessions, and the number of the prompt of each."""


def lengthening(base: BaseModel, number: int) -> RenderedInput:
    """A prompt, longer than those before."""
    return prompt_of(base, (number, 10 + 3 * number))


@pytest.fixture(scope="module")
def undisturbed(family_base: Callable[[str], BaseModel]) -> Callable[[str], dict[str, list[list[int]]]]:
    """What a family answers to PREEMPTED where all have room; it has the trainer's log-probabilities."""

    @cache
    def answers(family: str) -> dict[str, list[list[int]]]:
        base = family_base(family)
        sampler = sampler_of(base, runs_ahead=False)
        for name, (request, number) in PREEMPTED.items():
            sampler.add(name, request, lengthening(base, number), None)
        return {name: tokens_of(result) for name, result in run(sampler).items()}

    return answers


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    ("family", "blocks", "slots", "max_running"),
    [
        ("qwen3", 14, 40, 256),
        ("qwen3", 400, 40, 3),
        ("qwen3", 6, 40, 2),
        ("qwen3_5", 400, 1, 256),
        ("qwen3_5", 10, 3, 256),
        # Between those above.
        *slow(("qwen3_5", 14, 40, 256), ("qwen3_5", 400, 2, 256)),
    ],
)
def test_a_small_cache_preempts_and_changes_nothing(
    family_base: Callable[[str], BaseModel],
    undisturbed: Callable[[str], dict[str, list[list[int]]]],
    family: str,
    blocks: int,
    slots: int,
    max_running: int,
    runs_ahead: bool,
) -> None:
    """Nor do the turns of sessions."""
    base = family_base(family)
    small = sampler_of(base, blocks, slots, runs_ahead=runs_ahead, max_running=max_running, prefill_tokens=32)
    for name, (request, number) in PREEMPTED.items():
        small.add(name, request, lengthening(base, number), None)
    done = run(small)
    for name, (_, number) in PREEMPTED.items():
        check(base, lengthening(base, number), None, done[name])
    assert {name: tokens_of(result) for name, result in done.items()} == undisturbed(family)


def test_a_long_prompt_is_computed_in_pieces_while_others_run(text_base: BaseModel) -> None:
    sampler = sampler_of(text_base, runs_ahead=False, prefill_tokens=16)
    sampler.add("short", ask(), prompt_of(text_base, (0, 10)), None)
    sampler.step()
    (short,) = sampler.schedule.running
    sampler.add("long", ask(), prompt_of(text_base, (1, 40)), None)
    for tokens in (2, 3):
        sampler.step()
        assert len(short.tokens) == tokens
        assert [s.job.request_id for s in sampler.schedule.running] == ["short"]
    sampler.step()
    assert [s.job.request_id for s in sampler.schedule.running] == ["short", "long"]


def test_a_sample_takes_the_room_that_there_is_and_what_can_never_fit_is_refused_with_both_numbers(text_base: BaseModel) -> None:
    sampler, rendered = sampler_of(text_base, blocks=4), prompt_of(text_base, (0, 30))
    with pytest.raises(UserError, match=f"is 70 tokens, but the key/value cache holds {4 * BLOCK}"):
        sampler.add("x", ask(replace(PARAMS, max_tokens=40)), rendered, None)
    with pytest.raises(UserError, match=r"exceeds the context window of tiny: 30 \+ 40000 > 32768"):
        sampler.add("x", ask(replace(PARAMS, max_tokens=40000)), rendered, None)
    (sequence,) = sampled(sampler, rendered, ask(replace(PARAMS, max_tokens=None))).sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (4 * BLOCK - 30, "length")


@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_that_fills_the_context_and_the_cache_is_scored(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As compute_logprobs asks for it: with one token, which is drawn and not computed."""
    monkeypatch.setattr(text_base, "max_context", 2 * BLOCK)
    sampler, full = sampler_of(text_base, blocks=2 * count), prompt_of(text_base, (0, 2 * BLOCK))
    one = replace(PARAMS, max_tokens=1)
    scored = replace(ask(one, count), questions=PromptQuestions(logprobs=True))
    result = sampled(sampler, full, scored)
    assert [len(sequence.tokens) for sequence in result.sequences] == [1] * count
    check(text_base, full, None, result)
    for asked in (ask(one), replace(scored, params=replace(PARAMS, max_tokens=2))):
        with pytest.raises(UserError, match="exceeds the context window of tiny: 32 "):
            sampler.add("x", asked, full, None)


def test_stop_rules(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered, greedy = prompt_of(text_base, (0, 4)), replace(PARAMS, temperature=0.0, max_tokens=30)
    (path,) = tokens_of(sampled(sampler_of(text_base), rendered, ask(greedy)))
    third, seventh = path[2], path[6]
    word = text_base.tokenizer.decode(path[:2])
    monkeypatch.setattr(text_base.network.generation_config, "eos_token_id", [seventh])
    at_third, at_seventh = path[: path.index(third) + 1], path[: path.index(seventh) + 1]
    sampler = sampler_of(text_base)
    for rule, tokens, reason in (
        (StopRule(True, (), ()), at_seventh, "stop"),
        (NO_STOP, path, "length"),
        (StopRule(True, (), (third,)), min(at_third, at_seventh, key=len), "stop"),
        (StopRule(True, (), (-5,)), at_seventh, "stop"),
        (StopRule(True, (word,), ()), path[:2], "stop"),
    ):
        (sequence,) = sampled(sampler, rendered, ask(replace(greedy, stop=rule))).sequences
        assert (sequence.tokens, sequence.stop_reason) == (tokens, reason)


def test_a_broken_model_does_not_reach_another_through_the_cache(text_base: BaseModel) -> None:
    rendered = prompt_of(text_base, (0, 3))
    expected = tokens_of(sampled(sampler_of(text_base, blocks=8), rendered))
    sampler = sampler_of(text_base, blocks=8)
    sampled(sampler, rendered, ask(replace(PARAMS, max_tokens=100)), sick_adapter(text_base))
    well = sampled(sampler, rendered)
    assert tokens_of(well) == expected
    assert np.isfinite(well.sequences[0].logprobs).all()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_cancelled_or_abandoned_request_is_forgotten_wherever_it_is(any_base: BaseModel, runs_ahead: bool) -> None:
    sampler = sampler_of(any_base, 30, 8, runs_ahead=runs_ahead, prefill_tokens=20, max_running=3)
    asked = [(ask(replace(PARAMS, seed=i), num_samples=2), prompt_of(any_base, (i, 30))) for i in range(4)]
    for i, (request, rendered) in enumerate(asked):
        sampler.add(str(i), request, rendered, None)
    for _ in range(3):
        sampler.step()
    for request_id in ("0", "2", "3", "unknown"):
        sampler.cancel(request_id)
    done = run(sampler)
    assert list(done) == ["1"]
    assert tokens_of(done["1"]) == tokens_of(sampled(sampler_of(any_base), asked[1][1], asked[1][0]))
    sampler.cancel("1")
    for steps in (1, 4):
        sampler.add("x", ask(num_samples=3), prompt_of(any_base, (0, 30)), random_adapter(any_base))
        for _ in range(steps):
            assert sampler.step() == []
        sampler.abandon()
        assert not sampler.has_work
        assert sampler.step() == []
    result = sampled(sampler, asked[0][1])
    assert result.cached_tokens == 0
    check(any_base, asked[0][1], None, result)


# What begins alike is computed once


def count_tokens(sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list of how many tokens of prompts each pass of the sampler computes from now on."""
    passes: list[int] = []
    inner = sampler.schedule.prompt_windows

    def prompt_windows() -> list[tuple[Sequence, Window]]:
        windows = inner()
        if windows:
            passes.append(sum(len(window) for _, window in windows))
        return windows

    monkeypatch.setattr(sampler.schedule, "prompt_windows", prompt_windows)
    return passes


@pytest.mark.parametrize("family", ["mistral", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_conversation_that_grows_computes_only_its_tail(
    family_base: Callable[[str], BaseModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = family_base(family)
    sampler, render, adapter = sampler_of(base), renderer(base), random_adapter(base, 4, 1)
    chunks: list[Chunk] = [random_tokens(0, 27)]
    passes = count_tokens(sampler, monkeypatch)
    before = 0
    for turn in range(3):
        if base.family.takes_images:
            chunks += picture_chunks(base, turn, 3, width=96, height=128)
        rendered = render.render(chunks)
        result = sampled(sampler, rendered, ask(replace(PARAMS, seed=turn, max_tokens=20)), adapter)
        # A step that was launched ahead has computed the last token too.
        assert result.cached_tokens in {before // BLOCK * BLOCK, (before + 1) // BLOCK * BLOCK}
        assert passes[0] == len(rendered) - result.cached_tokens
        passes.clear()
        check(base, rendered, adapter, result)
        (sequence,) = result.sequences
        before = len(rendered) + len(sequence.tokens) - 1  # the last token need not be computed
        chunks += [text(*sequence.tokens), random_tokens(turn + 1, 9)]


@pytest.mark.parametrize(("family", "computed"), [("qwen3", [70, 7 * 6]), ("qwen3_5", [64, 8 * 6])])
def test_equal_prompts_are_computed_once(
    family_base: Callable[[str], BaseModel], family: str, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By requests that come together, and by one that comes later: all but its last tokens."""
    base = family_base(family)
    sampler, rendered = sampler_of(base), prompt_of(base, (0, 70))
    passes = count_tokens(sampler, monkeypatch)
    for i in range(8):
        sampler.add(str(i), ask(replace(PARAMS, seed=i)), rendered, None)
    done = run(sampler)
    assert passes == computed
    done["later"] = sampled(sampler, rendered, ask(num_samples=3))
    assert [result.cached_tokens for result in done.values()] == [0] + [64] * 8
    for result in done.values():
        check(base, rendered, None, result)


def test_a_prompt_that_asks_for_scores_is_computed_whatever_is_cached_and_spares_the_next(any_base: BaseModel) -> None:
    sampler, rendered = sampler_of(any_base), prompt_of(any_base, (0, 90))
    for scores, cached in ((True, 0), (True, 0), (False, 80)):
        result = sampled(sampler, rendered, ask(prompt_logprobs=scores))
        assert (result.cached_tokens, result.answers.logprobs is not None) == (cached, scores)
        check(any_base, rendered, None, result)


def test_nothing_is_shared_between_weights(text_base: BaseModel) -> None:
    """Not even between a snapshot and the next of the same model, nor with one that takes the place of a freed one in memory."""
    sampler, rendered = sampler_of(text_base), prompt_of(text_base, (0, 70))
    for seed in range(4):
        adapter = random_adapter(text_base, 4, seed)
        result = sampled(sampler, rendered, ask(), adapter)
        assert result.cached_tokens == 0
        check(text_base, rendered, adapter, result)
        del adapter


def test_pictures_are_told_apart_by_content_and_from_text_of_the_same_ids(vision_base: BaseModel) -> None:
    sampler, render = sampler_of(vision_base), renderer(vision_base)
    pictures = [picture_chunks(vision_base, seed, 5, width=160, height=160)[1:4] for seed in (0, 1)]
    asked = [render.render([random_tokens(0, 2), *picture, random_tokens(1, 20)]) for picture in pictures]
    assert (asked[0].token_ids == asked[1].token_ids).all()
    asked.append(render.render([text(*asked[0].token_ids.tolist())]))
    for rendered in asked:
        result = sampled(sampler, rendered)
        assert result.cached_tokens == 0
        check(vision_base, rendered, None, result)
    assert sampled(sampler, asked[0]).cached_tokens > 0


# Weights that replace others


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("blocks", [400, 12])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_samples_go_on_with_the_weights_that_replace_theirs(
    family_base: Callable[[str], BaseModel], family: str, blocks: int, runs_ahead: bool
) -> None:
    """Twice, with other samples beside them: each token is what its version gives after all tokens before it."""
    base = family_base(family)
    sampler, rendered = sampler_of(base, blocks, runs_ahead=runs_ahead), renderer(base).render(prompts(base)[-1])
    versions = [random_adapter(base, 4, seed, ref=new_ref(f"v{seed}", "m")) for seed in range(3)]
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
        check_versions(base, rendered, [*versions], result)


def test_a_sequence_that_is_computed_again_token_by_token_is_the_same(any_base: BaseModel) -> None:
    """A piece of one token may lie anywhere in a sequence that has an answer already."""
    sampler, rendered = sampler_of(any_base, prefill_tokens=1), prompt_of(any_base, (0, 20))
    old, new = (random_adapter(any_base, 4, seed, ref=new_ref(f"v{seed}", "m")) for seed in range(2))
    sampler.add("x", ask(), rendered, old)
    while not sampler.schedule.running:
        sampler.step()
    sampler.publish(new)
    check_versions(any_base, rendered, [old, new], run(sampler)["x"])


def test_a_prompt_is_answered_about_by_one_version(text_base: BaseModel) -> None:
    """Weights that are replaced while the prompt is being computed: its scores are all of the new ones."""
    sampler, rendered = sampler_of(text_base, prefill_tokens=7), prompt_of(text_base, (0, 40))
    old, new = (random_adapter(text_base, 4, seed, ref=new_ref(inflight_of="m")) for seed in range(2))
    sampler.add("x", ask(prompt_logprobs=True), rendered, old)
    for _ in range(3):
        sampler.step()
    sampler.publish(new)
    check(text_base, rendered, new, run(sampler)["x"])


@pytest.mark.parametrize("blocks", [400, 12])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_tokens_of_a_streamed_sample_come_step_by_step(text_base: BaseModel, blocks: int, runs_ahead: bool) -> None:
    """Each once, also when the cache is so small that sequences are computed again, and when new weights take over."""
    sampler, rendered = sampler_of(text_base, blocks, runs_ahead=runs_ahead), prompt_of(text_base, (0, 40))
    old, new = (random_adapter(text_base, 4, seed, ref=new_ref(f"v{seed}", "m")) for seed in range(2))
    sampler.add("read", ask(num_samples=3), rendered, old, stream=True)
    sampler.add("silent", ask(num_samples=3), rendered, old)
    read: dict[int, list[TokensSampled]] = {index: [] for index in range(3)}
    results: dict[str, SampleResult] = {}
    for step in itertools.count():
        if not sampler.has_work:
            break
        if step == 6:
            sampler.publish(new)
        for event in sampler.step():
            assert event.request_id not in results, "nothing follows the result"
            if isinstance(event, TokensSampled):
                assert event.request_id == "read"
                assert len(event.tokens) == len(event.logprobs) == 1
                read[event.index].append(event)
            else:
                assert isinstance(event, SampleResult)
                results[event.request_id] = event
    for index, sequence in enumerate(results["read"].sequences):
        events = read[index]
        assert [event.tokens[0] for event in events] == sequence.tokens
        assert [event.logprobs[0] for event in events] == sequence.logprobs
        assert [event.version for event in events] == [span.version for span in sequence.versions for _ in range(span.start, span.end)]
    assert {event.version for events in read.values() for event in events} == {"v0", "v1"}


def test_weights_that_train_are_not_sampled(text_base: BaseModel) -> None:
    """They have no identity, because they change, and what the prefix cache keeps of them would be wrong."""
    sampler, adapter = sampler_of(text_base), random_adapter(text_base)
    adapter.ref = None
    with pytest.raises(ValueError, match="take a snapshot"):
        sampler.add("x", ask(), prompt_of(text_base, (0, 4)), adapter)
