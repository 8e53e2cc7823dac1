"""What goes wrong with one sample is its failure alone: the others get the tokens that they would have got without it.

Invariant: A sample that cannot be computed, scored, decoded or written fails alone; out of memory changes no other's
tokens. Also: `tests/worker/test_samples.py`.
"""

import gc
import logging
import resource
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bases import load, random_adapter
from tests.sampling.local.test_sampler import (
    PARAMS,
    ask,
    of_session,
    outcomes,
    prompt_of,
    run,
    sampled,
    sampler_of,
    tokens_of,
)
from tinsmith.chat.grammar import GrammarState, json_grammar
from tinsmith.errors import UserError
from tinsmith.kernels.device import upload
from tinsmith.models.attention import PassPlan
from tinsmith.models.base import BaseModel, PackedRow
from tinsmith.models.lora import LoraPair
from tinsmith.sampling.local import kv_cache
from tinsmith.sampling.local.decode_step import DecodeStep, StepRows
from tinsmith.sampling.local.device_batch import DeviceBatch
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.local.sequence import SequenceState
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampleFailure, SampleResult
from tinsmith.wire.sample import Shaping


def neighbours(base: BaseModel, **settings: Any) -> LocalSampler:
    """A sampler with five requests of two samples each."""
    sampler = sampler_of(base, **settings)
    for number in range(5):
        request = ask(replace(PARAMS, seed=number), num_samples=2)
        sampler.add(str(number), request, prompt_of(base, (number, 5 + 9 * number)), None)
    return sampler


def undisturbed(base: BaseModel) -> dict[str, Any]:
    """The tokens that they get where nothing fails."""
    return {name: tokens_of(result) for name, result in run(neighbours(base)).items()}


def split(sampler: LocalSampler) -> tuple[dict[str, Any], dict[str, str]]:
    """Step until nothing is left: the tokens of what succeeded, and the errors of what failed."""
    ended = outcomes(sampler)
    tokens = {name: tokens_of(event) for name, event in ended.items() if isinstance(event, SampleResult)}
    return tokens, {name: str(event.error) for name, event in ended.items() if isinstance(event, SampleFailure)}


def without(expected: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tokens for name, tokens in expected.items() if name not in names}


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError, RuntimeError])
def test_a_pass_that_failed_holds_no_tensors(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    """Its errors are not kept in a circle with their tracebacks, until garbage is collected: the next attempt needs the
    memory."""
    sampler, held = neighbours(text_base), []

    def full(*arguments: Any, **options: Any) -> None:
        activations = torch.zeros(1000)
        held.append(weakref.ref(activations))
        raise fault("injected")

    logging.disable()  # pytest would keep what is logged
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(text_base, "hidden_states", full)
            while not sampler.step():
                pass
        assert len(held) > 1
        assert [memory for memory in held if memory() is not None] == []
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def test_a_stop_rule_that_raises_fails_its_request_alone(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, append = undisturbed(text_base), SequenceState.append

    def failing(sequence: SequenceState, *arguments: Any) -> None:
        if sequence.job.request_id == "3" and sequence.index == 1 and len(sequence.tokens) == 5:
            raise ValueError("what number 3 says")
        append(sequence, *arguments)

    monkeypatch.setattr(SequenceState, "append", failing)
    ended, failed = split(neighbours(text_base))
    assert failed == {"3": "internal error: ValueError('what number 3 says')"}
    assert ended == without(expected, "3")


def test_scores_and_weights_that_cannot_be_computed_fail_their_requests_alone(
    any_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the others are under way. When scores are computed, all layers have stepped."""
    expected = undisturbed(any_base)

    def failing(scores: PromptScores, *_: Any) -> None:
        raise UserError("cannot be scored")

    monkeypatch.setattr(PromptScores, "add", failing)
    misshapen = random_adapter(any_base)
    misshapen.working["lm_head"] = LoraPair(*(tensor[:, :1] for tensor in misshapen.working["lm_head"]))
    sampler = neighbours(any_base)
    sampler.step()
    sampler.add("scored", ask(num_samples=3, prompt_logprobs=True), prompt_of(any_base, (9, 70)), None)
    sampler.add("broken", ask(num_samples=3), prompt_of(any_base, (9, 30)), misshapen)
    ended, failed = split(sampler)
    assert failed.pop("scored") == "cannot be scored"
    assert failed.pop("broken").startswith("internal error: RuntimeError(")
    assert (ended, failed) == (expected, {})


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_always_fails_for_a_job_fails_it_alone(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    expected, inner = undisturbed(text_base), DecodeStep.__call__

    def failing(step: DecodeStep, batch: DeviceBatch, rows: StepRows) -> torch.Tensor:
        logits = inner(step, batch, rows)
        if any(seat.sequence.job.request_id == "2" and len(seat.sequence.tokens) > 4 for seat in batch.seats):
            raise RuntimeError("injected")  # when the rows have been advanced
        return logits

    monkeypatch.setattr(DecodeStep, "__call__", failing)
    ended, failed = split(neighbours(text_base, runs_ahead=runs_ahead))
    assert (ended, list(failed)) == (without(expected, "2"), ["2"])


# Memory


def test_blocks_that_cannot_be_cleared_for_want_of_memory_are_cleared_later(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, sampler = undisturbed(text_base), neighbours(text_base)
    sampler.cache.keys.fill_(float("nan"))
    failures = list[Any]()

    def failing(values: Any, device: torch.device) -> torch.Tensor:
        if len(failures) < 2:
            failures.append(values)
            raise torch.OutOfMemoryError("injected")
        return upload(values, device)

    monkeypatch.setattr(kv_cache, "upload", failing)
    assert split(sampler) == (expected, {})
    assert len(failures) == 2


def test_memory_that_never_suffices_fails_one_request_after_the_other(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, sampler = undisturbed(text_base), neighbours(text_base)

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(text_base, "hidden_states", full)
        while not (ended := sampler.step()):
            pass
    (failure,) = ended
    assert isinstance(failure, SampleFailure)
    assert "OutOfMemoryError('injected')" in str(failure.error)
    assert split(sampler) == (without(expected, failure.request_id), {})


@pytest.mark.parametrize("prompts", [1, 3])
def test_memory_for_one_sequence_alone_serves_all_of_them(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    """Neither two sequences fit, nor a token of a prompt beside one that runs: then the prompt waits until nothing
    runs."""
    asked = [(of_session(str(number), 12), prompt_of(text_base, (number, 20))) for number in range(1 + prompts)]
    expected = {
        str(number): tokens_of(sampled(sampler_of(text_base), *each[::-1])) for number, each in enumerate(asked)
    }
    sampler, inner, compute, refused = sampler_of(text_base), text_base.hidden_states, DecodeStep.__call__, list[str]()

    def alone_only(row: PackedRow, plan: PassPlan, **others: Any) -> torch.Tensor:
        if len(row.lengths) > 1 or sampler.queues.running:
            refused.append("prompt")
            raise torch.OutOfMemoryError("injected")
        return inner(row, plan, **others)

    def one_row_only(step: DecodeStep, batch: DeviceBatch, rows: StepRows) -> torch.Tensor:
        if rows.count > 1:
            refused.append("step")
            raise torch.OutOfMemoryError("injected")
        return compute(step, batch, rows)

    monkeypatch.setattr(text_base, "hidden_states", alone_only)
    monkeypatch.setattr(DecodeStep, "__call__", one_row_only)
    for number, (request, rendered) in enumerate(asked):
        sampler.add(str(number), request, rendered, None)
        if number == 0:
            sampler.step()
    assert split(sampler) == (expected, {})
    assert refused


@pytest.mark.alone
def test_a_step_that_really_runs_out_of_memory_is_taken_back_and_changes_nothing(
    family_dir: Callable[[str], Path],
) -> None:
    """The address space is limited to so little more that not even one prompt is computed at first, and then to more
    and more."""
    base = load(family_dir("qwen3"), device="cpu")
    asked = [
        (prompt_of(base, (i, 2000)), ask(replace(PARAMS, max_tokens=5, seed=i), prompt_logprobs=True))
        for i in range(12)
    ]
    expected = {str(i): tokens_of(sampled(sampler_of(base, 200), *each)) for i, each in enumerate(asked)}
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    for spare_mib in (1, 2, 4, 8, 16):  # what a pass once had is not given back to the system
        sampler = sampler_of(base, 2000, prefill_tokens=40_000)
        for i, (rendered, request) in enumerate(asked):
            sampler.add(str(i), request, rendered, None)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare_mib * 2**20, unlimited[1]))
        try:
            done = run(sampler)
        except (AssertionError, RuntimeError, MemoryError):  # one failed, even alone
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
        assert {name: tokens_of(result) for name, result in done.items()} == expected
        if sampler.schedule.prefill_tokens < 40_000:
            return
    pytest.fail("it never had to compute less at a time")


def test_a_grammar_that_fails_amid_an_answer_fails_alone(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with a grammar or penalties beside it get the tokens that they get without it."""
    shapings = {
        "object": Shaping(grammar=json_grammar({"type": "object"})),
        "array": Shaping(grammar=json_grammar({"type": "array", "minItems": 9})),
        "penalties": Shaping(presence_penalty=1.0),
    }

    def together(names: Iterable[str]) -> LocalSampler:
        sampler = neighbours(text_base)
        for name in names:
            request = replace(ask(PARAMS), shaping=shapings[name])
            sampler.prepare(request)
            sampler.add(name, request, prompt_of(text_base, (20, 9)), None)
        return sampler

    expected, _ = split(together(["object", "penalties"]))
    inner = GrammarState.mask

    def mask(state: GrammarState, *arguments: Any) -> Any:
        """Fail as a grammar that takes more time than a step has."""
        running = [each for each in sampler.queues.running if each.shape is not None and each.shape.grammar is state]
        if any(each.job.request_id == "array" and len(each.tokens) == 3 for each in running):
            raise UserError("too large")
        return inner(state, *arguments)

    monkeypatch.setattr(GrammarState, "mask", mask)
    sampler = neighbours(text_base)
    sampler = together(shapings)
    tokens, failures = split(sampler)
    assert tokens == expected
    assert failures.keys() == {"array"}
    assert "too large" in failures["array"]


def test_a_row_with_a_shape_is_preempted_and_goes_on_as_if_it_had_not_been(text_base: BaseModel) -> None:
    """Its tokens are counted once, and its grammar goes on where it was."""
    params = replace(PARAMS, max_tokens=60)
    requests = {
        "penalties": Shaping(frequency_penalty=-1.5, repetition_penalty=1.2),
        "grammar": Shaping(grammar=json_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 30})),
    }

    def tokens_in(blocks: int) -> tuple[dict[str, Any], int]:
        sampler = sampler_of(text_base, blocks=blocks)
        for name, shaping in requests.items():
            request = replace(ask(params, num_samples=3), shaping=shaping)
            sampler.add(name, request, prompt_of(text_base, (20, 9)), None)
        preempted = 0
        inner = sampler.queues.preempt

        def preempt(*arguments: Any) -> Any:
            nonlocal preempted
            preempted += 1
            return inner(*arguments)

        sampler.queues.preempt = preempt  # type: ignore[assignment, method-assign]
        return {name: tokens_of(result) for name, result in run(sampler).items()}, preempted

    roomy, none = tokens_in(400)
    tight, some = tokens_in(8)
    assert not none
    assert some
    assert tight == roomy
