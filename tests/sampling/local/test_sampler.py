"""The local sampler against the trainer's forward, alone and in company."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.bases import datum, new_ref, picture_chunks, random_adapter, random_tokens, renderer, text
from tinsmith.config import SamplingConfig, TrainingConfig
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.local.cache_shape import CacheSizes
from tinsmith.sampling.local.cached_attention import Window
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.local.sequence import Sequence
from tinsmith.sampling.prefix import BLOCK
from tinsmith.sampling.sampler import SampleResult, TokensSampled
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


def run(sampler: LocalSampler) -> dict[str, SampleResult]:
    """Step until nothing is left; the cache must be whole again."""
    done = {}
    while sampler.has_work:
        for result in sampler.step():
            assert isinstance(result, SampleResult)
            done[result.request_id] = result
    assert sorted([*sampler.cache.free, *sampler.cache.idle]) == list(range(1, sampler.cache.total + 1))
    assert not any(sampler.cache.users)
    if sampler.states:
        assert sorted([*sampler.states.free, *sampler.states.saved.values()]) == list(range(sampler.states.total))
    return done


def forward_logprobs(base: BaseModel, weights: Weights | None, rendered: RenderedInput, answer: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The trainer's log-probabilities of the prompt after its first token, and of the answer."""
    backend = LocalBackend(base, TrainingConfig())
    blank = random_adapter(base, b_scale=0.0)
    backend.optimizers["a"] = ModelOptimizer(weights or blank)
    where = torch.arange(len(answer)) + rendered.next_position
    whole = RenderedInput(
        np.concatenate([rendered.token_ids, np.array(answer, np.int32)]),
        rendered.spans,
        rendered.pictures,
        torch.cat([rendered.positions, where.expand(len(rendered.positions), -1)], dim=1),
    )
    (result,) = backend.run_pass([datum("a", whole)], backward=False).results
    assert result is not None
    return result.logprobs[: len(rendered) - 1], result.logprobs[len(rendered) - 1 : -1]


def prompts(base: BaseModel) -> list[list[Chunk]]:
    """Prompts of mixed lengths; where the model takes images, some with them."""
    plain: list[list[Chunk]] = [[random_tokens(i, n)] for i, n in enumerate([5, BLOCK, 40, 1, 2 * BLOCK - 1])]
    if not base.family.takes_images:
        return plain
    return [*plain, picture_chunks(base, 20, 6), [*picture_chunks(base, 22, 4, width=64, height=160), *picture_chunks(base, 24, 5)]]


@pytest.mark.parametrize("prefill_tokens", [4096, 7])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_logprobs_equal_the_trainers_for_many_weights_in_one_batch(
    family_base: Callable[[str], BaseModel], family: str, prefill_tokens: int
) -> None:
    base = family_base(family)
    sampler, render = sampler_of(base, prefill_tokens=prefill_tokens), renderer(base)
    weights = [
        None,
        random_adapter(base, 4, 1),
        random_adapter(base, 8, 2, train_unembed=False),
        random_adapter(base, 2, 3, train_mlp=False),
    ]
    jobs = {}
    for i, chunks in enumerate(prompts(base)):
        jobs[str(i)] = (render.render(chunks), weights[i % 4])
        sampler.add(str(i), ask(replace(PARAMS, max_tokens=20), prompt_logprobs=True), *jobs[str(i)])
    for name, result in run(sampler).items():
        rendered, adapter = jobs[name]
        (sequence,) = result.sequences
        assert len(sequence.tokens) == 20
        prompt, answer = forward_logprobs(base, adapter, rendered, sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs, answer, atol=1e-4)
        assert result.answers.logprobs is not None
        assert np.isnan(result.answers.logprobs[0])
        pictures = np.zeros(len(rendered), dtype=bool)
        for span in rendered.spans:
            pictures[span.offset : span.offset + span.length] = True
        assert (result.answers.logprobs[pictures] == 0.0).all()
        np.testing.assert_allclose(result.answers.logprobs[1:][~pictures[1:]], prompt[~pictures[1:]], atol=1e-4)


def test_long_and_short_sequences_in_one_step_equal_the_trainers(text_base: BaseModel) -> None:
    sampler, adapter = sampler_of(text_base), random_adapter(text_base)
    asked = {str(n): renderer(text_base).render([random_tokens(n, n)]) for n in (5, 300, 20, 600)}
    for name, rendered in asked.items():
        sampler.add(name, ask(), rendered, adapter)
    for name, result in run(sampler).items():
        (sequence,) = result.sequences
        _, expected = forward_logprobs(text_base, adapter, asked[name], sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_a_seed_gives_the_same_tokens_whatever_runs_beside(vision_base: BaseModel) -> None:
    render = renderer(vision_base)
    adapter = random_adapter(vision_base, 4, 1)
    rendered = render.render(picture_chunks(vision_base, 1, 6))
    alone = sampler_of(vision_base)
    alone.add("x", ask(num_samples=3), rendered, adapter)
    expected = [s.tokens for s in run(alone)["x"].sequences]
    assert len({tuple(tokens) for tokens in expected}) == 3

    crowded = sampler_of(vision_base)
    for i in range(6):
        crowded.add(f"before{i}", ask(replace(PARAMS, seed=i, max_tokens=3 + 5 * i)), render.render([random_tokens(i, 4 + i)]), None)
    crowded.step()
    crowded.step()
    crowded.add("ahead", ask(replace(PARAMS, max_tokens=2)), render.render([random_tokens(8, 2)]), adapter)  # of one pass with "x"
    crowded.add("x", ask(num_samples=3), rendered, adapter)
    crowded.add("after", ask(replace(PARAMS, temperature=0.3, top_k=3), 4), render.render([random_tokens(9, 30)]), adapter)
    assert [s.tokens for s in run(crowded)["x"].sequences] == expected


def test_without_a_seed_two_requests_differ(text_base: BaseModel) -> None:
    sampler, rendered = sampler_of(text_base), renderer(text_base).render([random_tokens(0, 4)])
    for name in "ab":
        sampler.add(name, ask(replace(PARAMS, seed=None, temperature=2.0)), rendered, None)
    done = run(sampler)
    assert done["a"].sequences[0].tokens != done["b"].sequences[0].tokens


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(("blocks", "max_running"), [(14, 256), (400, 3), (6, 2)])
def test_a_small_cache_preempts_and_changes_nothing(text_base: BaseModel, blocks: int, max_running: int, runs_ahead: bool) -> None:
    def add_all(sampler: LocalSampler) -> None:
        for i in range(5):
            rendered = renderer(text_base).render([random_tokens(i, 10 + 3 * i)])
            sampler.add(str(i), ask(replace(PARAMS, max_tokens=40, seed=i), num_samples=1 + i % 3, prompt_logprobs=True), rendered, None)

    large, small = sampler_of(text_base, runs_ahead=False), sampler_of(text_base, blocks, runs_ahead=runs_ahead, max_running=max_running)
    add_all(large)
    add_all(small)
    expected, got = run(large), run(small)
    for name, result in expected.items():
        assert [s.tokens for s in got[name].sequences] == [s.tokens for s in result.sequences]
        for mine, other in zip(got[name].sequences, result.sequences, strict=True):
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
        scored, again = result.answers.logprobs, got[name].answers.logprobs
        assert scored is not None
        assert again is not None
        np.testing.assert_allclose(again, scored, atol=1e-4)


def test_a_long_prompt_is_computed_in_pieces_while_others_run(text_base: BaseModel) -> None:
    sampler, render = sampler_of(text_base, runs_ahead=False, prefill_tokens=16), renderer(text_base)
    sampler.add("short", ask(), render.render([random_tokens(0, 10)]), None)
    sampler.step()
    (short,) = sampler.schedule.running
    sampler.add("long", ask(), render.render([random_tokens(1, 40)]), None)
    for tokens in (2, 3):
        sampler.step()
        assert len(short.tokens) == tokens
        assert [s.job.request_id for s in sampler.schedule.running] == ["short"]
    sampler.step()
    assert [s.job.request_id for s in sampler.schedule.running] == ["short", "long"]


def test_what_can_never_fit_is_refused_with_both_numbers(text_base: BaseModel) -> None:
    sampler, rendered = sampler_of(text_base, blocks=4), renderer(text_base).render([random_tokens(0, 30)])
    with pytest.raises(UserError, match=f"is 70 tokens, but the key/value cache holds {4 * BLOCK}"):
        sampler.add("x", ask(replace(PARAMS, max_tokens=40)), rendered, None)
    with pytest.raises(UserError, match=r"exceeds the context window: 30 \+ 40000 > 32768"):
        sampler.add("x", ask(replace(PARAMS, max_tokens=40000)), rendered, None)


def test_without_max_tokens_it_goes_on_to_the_end_of_the_room(text_base: BaseModel) -> None:
    sampler, rendered = sampler_of(text_base, blocks=4), renderer(text_base).render([random_tokens(0, 30)])
    sampler.add("x", ask(replace(PARAMS, max_tokens=None)), rendered, None)
    (sequence,) = run(sampler)["x"].sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (4 * BLOCK - 30, "length")


def test_stop_rules(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = renderer(text_base).render([random_tokens(0, 4)])
    greedy = replace(PARAMS, temperature=0.0, max_tokens=30)
    free = sampler_of(text_base)
    free.add("free", ask(greedy), rendered, None)
    path = run(free)["free"].sequences[0].tokens
    third, seventh = path[2], path[6]
    word = text_base.tokenizer.decode(path[:2])
    monkeypatch.setattr(text_base.network.generation_config, "eos_token_id", [seventh])

    sampler = sampler_of(text_base)
    for name, rule in {
        "absent": StopRule(True, (), ()),
        "empty": NO_STOP,
        "id": StopRule(True, (), (third,)),
        "other id": StopRule(True, (), (-5,)),
        "string": StopRule(True, (word,), ()),
    }.items():
        sampler.add(name, ask(replace(greedy, stop=rule)), rendered, None)
    ended = {name: result.sequences[0] for name, result in run(sampler).items()}
    at_third, at_seventh = path[: path.index(third) + 1], path[: path.index(seventh) + 1]
    assert (ended["absent"].tokens, ended["absent"].stop_reason) == (at_seventh, "stop")
    assert (ended["empty"].tokens, ended["empty"].stop_reason) == (path, "length")
    assert (ended["id"].tokens, ended["id"].stop_reason) == (min(at_third, at_seventh, key=len), "stop")
    assert (ended["other id"].tokens, ended["other id"].stop_reason) == (at_seventh, "stop")
    assert (ended["string"].tokens, ended["string"].stop_reason) == (path[:2], "stop")


def test_a_broken_model_does_not_reach_another_through_the_cache(text_base: BaseModel) -> None:
    render = renderer(text_base)
    rendered = render.render([random_tokens(0, 3)])
    sick = random_adapter(text_base, 4, 1)
    for pair in sick.masters.values():
        pair.b.fill_(float("nan"))
    sick.refresh()
    expected_sampler = sampler_of(text_base, blocks=8)
    expected_sampler.add("well", ask(), rendered, None)
    expected = run(expected_sampler)["well"].sequences[0]
    sampler = sampler_of(text_base, blocks=8)
    sampler.add("sick", ask(replace(PARAMS, max_tokens=100)), rendered, sick)
    run(sampler)
    sampler.add("well", ask(), rendered, None)
    well = run(sampler)["well"].sequences[0]
    assert well.tokens == expected.tokens
    assert np.isfinite(well.logprobs).all()


def test_a_prompt_of_one_token_has_one_missing_logprob(text_base: BaseModel) -> None:
    sampler = sampler_of(text_base)
    sampler.add("x", ask(prompt_logprobs=True), renderer(text_base).render([text(3)]), None)
    logprobs = run(sampler)["x"].answers.logprobs
    assert logprobs is not None
    assert logprobs.shape == (1,)
    assert np.isnan(logprobs[0])


def test_a_cancelled_request_is_forgotten_wherever_it_is(text_base: BaseModel) -> None:
    sampler, render = sampler_of(text_base, blocks=30, prefill_tokens=20, max_running=3), renderer(text_base)
    for i in range(4):
        sampler.add(str(i), ask(replace(PARAMS, seed=i), num_samples=2), render.render([random_tokens(i, 30)]), None)
    for _ in range(3):
        sampler.step()
    alone = sampler_of(text_base)
    alone.add("1", ask(replace(PARAMS, seed=1), num_samples=2), render.render([random_tokens(1, 30)]), None)
    expected = run(alone)["1"]
    for request_id in ("0", "2", "3", "unknown"):
        sampler.cancel(request_id)
    done = run(sampler)
    assert [s.tokens for s in done["1"].sequences] == [s.tokens for s in expected.sequences]
    assert list(done) == ["1"]
    sampler.cancel("1")


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
        sampler.add("x", ask(replace(PARAMS, seed=turn, max_tokens=20)), rendered, adapter)
        result = run(sampler)["x"]
        # A step that was launched ahead has computed the last token too.
        assert result.cached_tokens in {before // BLOCK * BLOCK, (before + 1) // BLOCK * BLOCK}
        assert passes[0] == len(rendered) - result.cached_tokens
        passes.clear()
        (sequence,) = result.sequences
        _, expected = forward_logprobs(base, adapter, rendered, sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)
        passes.clear()
        before = len(rendered) + len(sequence.tokens) - 1  # the last token need not be computed
        chunks += [text(*sequence.tokens), random_tokens(turn + 1, 9)]


def test_equal_prompts_that_come_at_once_are_computed_once(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, rendered = sampler_of(text_base), renderer(text_base).render([random_tokens(0, 70)])
    passes = count_tokens(sampler, monkeypatch)
    for i in range(8):
        sampler.add(str(i), ask(replace(PARAMS, seed=i)), rendered, None)
    done = run(sampler)
    assert passes == [70, 7 * 6]
    assert [done[str(i)].cached_tokens for i in range(8)] == [0] + [64] * 7
    for result in done.values():
        _, expected = forward_logprobs(text_base, None, rendered, result.sequences[0].tokens)
        np.testing.assert_allclose(result.sequences[0].logprobs, expected, atol=1e-4)


def test_prompt_logprobs_are_computed_whatever_is_cached(text_base: BaseModel) -> None:
    sampler, rendered = sampler_of(text_base), renderer(text_base).render([random_tokens(0, 70)])
    for name in "ab":
        sampler.add(name, ask(prompt_logprobs=True), rendered, None)
        scored = run(sampler)[name]
        prompt, _ = forward_logprobs(text_base, None, rendered, scored.sequences[0].tokens)
        assert scored.cached_tokens == 0
        assert scored.answers.logprobs is not None
        np.testing.assert_allclose(scored.answers.logprobs[1:], prompt, atol=1e-4)


def test_nothing_is_shared_between_weights(text_base: BaseModel) -> None:
    """Not even between a snapshot and the next of the same model, nor with one that takes the place of a freed one in memory."""
    sampler, rendered = sampler_of(text_base), renderer(text_base).render([random_tokens(0, 70)])
    for seed in range(4):
        adapter = random_adapter(text_base, 4, seed)
        sampler.add("x", ask(), rendered, adapter)
        result = run(sampler)["x"]
        assert result.cached_tokens == 0
        _, expected = forward_logprobs(text_base, adapter, rendered, result.sequences[0].tokens)
        np.testing.assert_allclose(result.sequences[0].logprobs, expected, atol=1e-4)
        del adapter


def test_pictures_are_told_apart_by_content_and_from_text_of_the_same_ids(vision_base: BaseModel) -> None:
    sampler, render = sampler_of(vision_base), renderer(vision_base)
    before = random_tokens(0, 2)
    pictures = [picture_chunks(vision_base, seed, 5, width=160, height=160)[1:4] for seed in (0, 1)]
    asked = [render.render([before, *picture, random_tokens(1, 20)]) for picture in pictures]
    assert (asked[0].token_ids == asked[1].token_ids).all()
    asked.append(render.render([text(*asked[0].token_ids.tolist())]))
    for rendered in asked:
        sampler.add("x", ask(), rendered, None)
        result = run(sampler)["x"]
        assert result.cached_tokens == 0
        _, expected = forward_logprobs(vision_base, None, rendered, result.sequences[0].tokens)
        np.testing.assert_allclose(result.sequences[0].logprobs, expected, atol=1e-4)
    sampler.add("x", ask(), asked[0], None)
    assert run(sampler)["x"].cached_tokens > 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("blocks", [400, 12])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_samples_go_on_with_the_weights_that_replace_theirs(
    family_base: Callable[[str], BaseModel], family: str, blocks: int, runs_ahead: bool
) -> None:
    """Twice, with other samples beside them: each token is what its version gives after all tokens before it."""
    base = family_base(family)
    sampler, render = sampler_of(base, blocks, runs_ahead=runs_ahead), renderer(base)
    rendered = render.render(prompts(base)[-1])
    versions = [random_adapter(base, 4, seed, ref=new_ref(f"v{seed}", "m")) for seed in range(3)]
    sampler.add("follows", ask(num_samples=2), rendered, versions[0])
    sampler.add("fixed", ask(), rendered, versions[0].snapshot(new_ref("v0")))
    sampler.add("other", ask(), rendered, versions[0].snapshot(new_ref("v0", "n")))
    for number in (1, 2):
        for _ in range(3):
            assert sampler.step() == []
        sampler.publish(versions[number])
        sampler.publish(versions[number].snapshot(new_ref()))
    done = run(sampler)
    for name, result in done.items():
        for sequence in result.sequences:
            assert [span.version for span in sequence.versions] == (["v0", "v1", "v2"] if name == "follows" else ["v0"])
            assert [0, *(span.end for span in sequence.versions)] == [*(span.start for span in sequence.versions), 12]
            for span in sequence.versions:
                _, expected = forward_logprobs(base, versions[int(span.version[1])], rendered, sequence.tokens)
                np.testing.assert_allclose(sequence.logprobs[span.start : span.end], expected[span.start : span.end], atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_sequence_that_is_computed_again_token_by_token_is_the_same(family_base: Callable[[str], BaseModel], family: str) -> None:
    """A piece of one token may lie anywhere in a sequence that has an answer already."""
    base = family_base(family)
    sampler, rendered = sampler_of(base, prefill_tokens=1), renderer(base).render([random_tokens(0, 20)])
    old, new = (random_adapter(base, 4, seed, ref=new_ref(inflight_of="m")) for seed in range(2))
    sampler.add("x", ask(), rendered, old)
    while not sampler.schedule.running:
        sampler.step()
    sampler.publish(new)
    (sequence,) = run(sampler)["x"].sequences
    _, expected = forward_logprobs(base, new, rendered, sequence.tokens)
    np.testing.assert_allclose(sequence.logprobs[1:], expected[1:], atol=1e-4)


def test_a_prompt_is_answered_about_by_one_version(text_base: BaseModel) -> None:
    """Weights that are replaced while the prompt is being computed: its scores are all of the new ones."""
    sampler, rendered = sampler_of(text_base, prefill_tokens=7), renderer(text_base).render([random_tokens(0, 40)])
    old, new = (random_adapter(text_base, 4, seed, ref=new_ref(inflight_of="m")) for seed in range(2))
    sampler.add("x", ask(prompt_logprobs=True), rendered, old)
    for _ in range(3):
        sampler.step()
    sampler.publish(new)
    result = run(sampler)["x"]
    prompt, answer = forward_logprobs(text_base, new, rendered, result.sequences[0].tokens)
    assert result.answers.logprobs is not None
    np.testing.assert_allclose(result.answers.logprobs[1:], prompt, atol=1e-4)
    np.testing.assert_allclose(result.sequences[0].logprobs, answer, atol=1e-4)


@pytest.mark.parametrize("blocks", [400, 12])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_tokens_of_a_streamed_sample_come_step_by_step(text_base: BaseModel, blocks: int, runs_ahead: bool) -> None:
    """Each once, also when the cache is so small that sequences are computed again, and when new weights take over."""
    sampler, rendered = sampler_of(text_base, blocks, runs_ahead=runs_ahead), renderer(text_base).render([random_tokens(0, 40)])
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
        sampler.add("x", ask(), renderer(text_base).render([random_tokens(0, 4)]), adapter)
