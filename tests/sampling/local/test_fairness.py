"""One session's samples beside many of another: how many steps they take.

`test_sampler.py` shows that turns change no token.

Invariant: A short sample beside 2,000 long ones takes as many steps as it has tokens; turns and preemption change no
token. Also: `tests/sampling/local/test_sampler.py`, `tests/worker/test_samples.py`,
`tests/acceptance/test_fair_samples.py`.
"""

import itertools
from dataclasses import replace

import pytest

from tests.sampling.local.test_sampler import count_tokens, of_session, prompt_of, run, sampler_of
from tinsmith.models.base import BaseModel
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.wire.prompt_scores import PromptQuestions


def steps_until(sampler: LocalSampler, request_id: str) -> int:
    """How many steps it takes until that request has ended."""
    return next(
        count for count in itertools.count(1) if any(event.request_id == request_id for event in sampler.step())
    )


@pytest.mark.parametrize("num_samples", [1, 50])
def test_a_short_sample_does_not_wait_behind_two_thousand_long_ones(text_base: BaseModel, num_samples: int) -> None:
    """Nor for the end of a long one, though all places are taken, nor for a job that is larger than all places
    together."""
    sampler = sampler_of(text_base, runs_ahead=False, max_running=8)
    for number in range(2000 // num_samples):
        sampler.add(
            f"long{number}", of_session("many", 100, num_samples, seed=number), prompt_of(text_base, (number, 12)), None
        )
    for _ in range(3):
        sampler.step()
    assert len(sampler.queues.running) == 8
    sampler.add("short", of_session("few", 4), prompt_of(text_base, (5, 30)), None)
    assert steps_until(sampler, "short") == 4
    sampler.step()
    assert len(sampler.queues.running) == 8


def test_a_prompt_that_takes_most_of_the_cache_is_not_overtaken_for_ever(text_base: BaseModel) -> None:
    """Two sessions send one short sample after the other, so that one always runs.

    32 get in before it, then those two end that run.
    """
    sampler = sampler_of(text_base, blocks=20, runs_ahead=False)

    def add(session: str, number: int) -> None:
        sampler.add(f"{session}{number}", of_session(session, 5), prompt_of(text_base, (number, 20)), None)

    for session in "ab":
        add(session, 0)
        sampler.step()
    sampler.add("big", of_session("big", 2), prompt_of(text_base, (1000, 18 * 16)), None)
    ended: list[str] = []
    while "big" not in ended:
        for event in sampler.step():
            ended.append(event.request_id)
            if event.request_id != "big":
                add(event.request_id[0], len(ended))
    assert ended.index("big") == 34
    run(sampler)


def test_a_long_prompt_with_costly_questions_leaves_room_in_each_pass(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 alternatives for each token of a prompt are drawn in many passes, in which others get their tokens."""
    sampler = sampler_of(text_base, runs_ahead=False, prefill_tokens=1024)
    passes = count_tokens(sampler, monkeypatch)
    costly = replace(of_session("costly", 1), questions=PromptQuestions(alternatives=1024))
    sampler.add("costly", costly, prompt_of(text_base, (0, 300)), None)
    sampler.step()
    sampler.add("short", of_session("short", 4), prompt_of(text_base, (1, 200)), None)
    assert steps_until(sampler, "short") == 4
    cost = 1 + 1024 // 16
    piece, beside = 1024 // cost, (1024 - 200) // cost
    assert passes == [piece, 200 + beside, piece, piece, piece]
    assert run(sampler)["costly"].answers.alternatives is not None
