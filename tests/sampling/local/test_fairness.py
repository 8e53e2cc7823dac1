"""One session's samples beside many of another: how many steps they take, and that turns change no token."""

from dataclasses import replace

import pytest

from tests.bases import random_tokens, renderer
from tests.sampling.local.test_sampler import PARAMS, ask, count_tokens, run, sampler_of
from tinsmith.models.base import BaseModel
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest


def of_session(name: str, max_tokens: int, num_samples: int = 1, seed: int = 0) -> SampleRequest:
    request = ask(replace(PARAMS, max_tokens=max_tokens, seed=seed), num_samples)
    return replace(request, sampling_session_id=f"{name}:sample:0")


def steps_until(sampler: LocalSampler, request_id: str, limit: int) -> int | None:
    """How many steps it takes until that request has ended; None if it has not after `limit` steps."""
    for count in range(1, limit + 1):
        if any(result.request_id == request_id for result in sampler.step()):
            return count
    return None


@pytest.mark.parametrize("num_samples", [1, 4, 50])
def test_a_short_sample_does_not_wait_behind_two_thousand_long_ones(text_base: BaseModel, num_samples: int) -> None:
    """Nor for the end of a long one, though all places are taken, nor for a job that is larger than all places together."""
    sampler, render = sampler_of(text_base, runs_ahead=False, max_running=8), renderer(text_base)
    for number in range(2000 // num_samples):
        prompt = render.render([random_tokens(number, 12)])
        sampler.add(f"long{number}", of_session("many", 100, num_samples, seed=number), prompt, None)
    for _ in range(3):
        sampler.step()
    assert len(sampler.schedule.running) == 8
    sampler.add("short", of_session("few", 4), render.render([random_tokens(5, 30)]), None)
    assert steps_until(sampler, "short", limit=10) == 4
    assert len(sampler.schedule.running) == 7
    sampler.step()
    assert len(sampler.schedule.running) == 8


def test_a_prompt_that_takes_most_of_the_cache_is_not_overtaken_for_ever(text_base: BaseModel) -> None:
    """Two sessions send one short sample after the other, so that one always runs. 32 get in before it, then those two end that run."""
    sampler, render = sampler_of(text_base, blocks=20, runs_ahead=False), renderer(text_base)

    def add(session: str, number: int) -> None:
        sampler.add(f"{session}{number}", of_session(session, 5), render.render([random_tokens(number, 20)]), None)

    add("a", 0)
    sampler.step()
    add("b", 0)
    sampler.step()
    sampler.add("big", of_session("big", 2), render.render([random_tokens(1000, 18 * 16)]), None)
    ended: list[str] = []
    while "big" not in ended and len(ended) < 100:
        for result in sampler.step():
            ended.append(result.request_id)
            if result.request_id != "big":
                add(result.request_id[0], len(ended))
    assert ended.index("big") == 34
    run(sampler)


def test_sessions_share_the_running_set(text_base: BaseModel) -> None:
    sampler, render = sampler_of(text_base, max_running=6), renderer(text_base)
    for session in ("a", "b", "c"):
        for number in range(30):
            sampler.add(f"{session}{number}", of_session(session, 5 + number % 7), render.render([random_tokens(number, 9)]), None)
    ended: list[str] = []
    while len(ended) < 45:
        ended += [result.request_id for result in sampler.step()]
    share = [sum(name.startswith(session) for name in ended) for session in ("a", "b", "c")]
    assert max(share) - min(share) <= 3
    run(sampler)


def test_a_long_prompt_with_costly_questions_leaves_room_in_each_pass(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 alternatives for each token of a prompt are drawn in many passes, in which others get their tokens."""
    sampler, render = sampler_of(text_base, runs_ahead=False, prefill_tokens=1024), renderer(text_base)
    passes = count_tokens(sampler, monkeypatch)
    costly = replace(of_session("costly", 1), questions=PromptQuestions(alternatives=1024))
    sampler.add("costly", costly, render.render([random_tokens(0, 300)]), None)
    sampler.step()
    sampler.add("short", of_session("short", 4), render.render([random_tokens(1, 200)]), None)
    assert steps_until(sampler, "short", limit=10) == 4
    cost = 1 + 1024 // 16
    piece, beside = 1024 // cost, (1024 - 200) // cost
    assert passes == [piece, 200 + beside, piece, piece, piece]
    assert run(sampler)["costly"].answers.alternatives is not None


@pytest.mark.parametrize(("blocks", "max_running"), [(14, 256), (400, 3), (8, 2)])
def test_turns_and_preemption_change_no_token(text_base: BaseModel, blocks: int, max_running: int) -> None:
    def add_all(sampler: LocalSampler) -> None:
        for number in range(9):
            rendered = renderer(text_base).render([random_tokens(number, 10 + 3 * number)])
            sampler.add(str(number), of_session("abc"[number % 3], 40, 1 + number % 2, seed=number), rendered, None)

    large, small = sampler_of(text_base), sampler_of(text_base, blocks, max_running=max_running)
    add_all(large)
    add_all(small)
    expected, got = run(large), run(small)
    assert {name: [s.tokens for s in r.sequences] for name, r in got.items()} == {
        name: [s.tokens for s in r.sequences] for name, r in expected.items()
    }
