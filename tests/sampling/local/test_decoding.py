"""Decoding steps: what lies in the rows on the device, what a step reads, and steps that are launched before the last
one is read.

Invariant: Rows on the device are what the host knows; a decoding step waits for nothing; dead rows, steps launched
ahead and weights in batches of their own change no token.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bases import random_adapter, renderer
from tests.sampling.local import test_sampler as local
from tests.sampling.local.test_sampler import (
    PARAMS,
    Bench,
    ask,
    full_weights,
    of_session,
    prompt_of,
    prompts,
    run,
    sampler_of,
    tokens_of,
)
from tinsmith.models import batched_lora, grouped_product
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.choose import likeliest
from tinsmith.sampling.local import decode_step, decoding
from tinsmith.sampling.local.cached_attention import paged_reference
from tinsmith.sampling.local.decode_graph import rung_of
from tinsmith.sampling.local.decode_step import DecodeStep, StepRows
from tinsmith.sampling.local.device_batch import FIELDS, DeviceBatch
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.local.sequence import SequenceState
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled
from tinsmith.wire.sample import SampleRequest, StopRule


def mixed(base: BaseModel, number: int = 8) -> dict[str, tuple[RenderedInput, SampleRequest, Adapter | None]]:
    """Requests of two sessions that come and go at different times, of several adapters, with all ways to choose a
    token."""
    adapters = [None, random_adapter(base, 4, 1), random_adapter(base, 8, 2, train_unembed=False), None]
    chunks = prompts(base)
    asked = {}
    for index in range(number):
        params = replace(
            PARAMS,
            max_tokens=3 + 7 * index % 30,
            temperature=(1.0, 0.0, 0.7)[index % 3],
            top_k=(-1, 5, -1, 40)[index % 4],
            top_p=(1.0, 1.0, 0.6)[index % 3],
            seed=2**64 - 1 - index,
        )
        request = ask(params, 1 + index % 3, prompt_logprobs=index % 4 == 3)
        request = replace(
            request, topk_sample_logprobs=3 * (index % 2), sampling_session_id=f"{'ab'[index % 2]}:sample:0"
        )
        asked[str(index)] = renderer(base).render(chunks[index % len(chunks)]), request, adapters[index % 4]
    return asked


def answers(sampler: LocalSampler, number: int = 8) -> dict[str, SampleResult]:
    """What a sampler answers to so many mixed requests at once."""
    for name, (rendered, request, adapter) in mixed(sampler.base, number).items():
        sampler.add(name, request, rendered, adapter)
    return run(sampler)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5", "qwen3_moe", "gpt_oss"])
def answered_alone(
    request: pytest.FixtureRequest, family_base: Callable[[str], BaseModel]
) -> tuple[BaseModel, dict[str, SampleResult]]:
    """A model, and its answers to mixed requests, each of a sampler that has nothing else to do."""
    base = family_base(request.param)
    return base, {
        name: local.sampled(sampler_of(base, runs_ahead=False), *asked) for name, asked in mixed(base).items()
    }


def check_equal(done: dict[str, SampleResult], expected: dict[str, SampleResult]) -> None:
    """All answers must be alike."""
    assert done.keys() == expected.keys()
    for name, result in done.items():
        if result.answers.logprobs is not None:
            np.testing.assert_allclose(result.answers.logprobs, np.asarray(expected[name].answers.logprobs), atol=1e-4)
        for sequence, same in zip(result.sequences, expected[name].sequences, strict=True):
            assert sequence.tokens == same.tokens
            np.testing.assert_allclose(sequence.logprobs, same.logprobs, atol=1e-3)
            if same.topk is not None:
                assert sequence.topk is not None
                np.testing.assert_allclose(sequence.topk.logprobs, same.topk.logprobs, atol=1e-3)


HOW: dict[str, dict[str, Any]] = {
    "step by step": {"blocks": 5, "slots": 8, "max_running": 6, "prefill_tokens": 24, "runs_ahead": False},
    "ahead": {"blocks": 8, "slots": 4, "max_running": 6, "prefill_tokens": 24, "runs_ahead": True},
    "in one place": {"blocks": 400, "slots": 1, "max_running": 2, "prefill_tokens": 32, "runs_ahead": True},
    "with dead rows": {"max_running": 16, "runs_ahead": True},
}
"""In the first two, from two to eleven sequences are preempted."""


@pytest.mark.parametrize("how", HOW)
def test_each_gets_what_it_would_get_alone(answered_alone: tuple[BaseModel, dict[str, SampleResult]], how: str) -> None:
    """With joins, ends and preemptions. A graph computes dead rows, which nobody has: here these read and write NaN."""
    base, expected = answered_alone
    sampler = sampler_of(base, **HOW[how])
    inner, counts = sampler.decoding.run, set()

    def padded(batch: DeviceBatch, rows: StepRows) -> Tensor | None:
        counts.add(rows.count)
        if how != "with dead rows":
            return inner(batch, rows)
        sampler.cache.keys[:, 0] = sampler.cache.values[:, 0] = float("nan")
        if sampler.states:
            sampler.states.memory[:, sampler.states.scratch] = float("nan")
        assert torch.equal(
            batch.state[rows.count :], torch.from_numpy(batch.dead_row()).expand(len(batch.state) - rows.count, FIELDS)
        )
        together = [(slice(None), batch.table.shape[1])]
        return inner(batch, replace(rows, count=rung_of(rows.count, len(batch.state)), groups=together))

    sampler.decoding.run = padded  # type: ignore[assignment]
    check_equal(answers(sampler), expected)
    assert max(counts) > (5 if how == "with dead rows" else 0)


class NoWaiting(TorchDispatchMode):
    """Refuses operations for which a host waits for a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        masks = name.startswith(("aten::index.", "aten::index_put")) and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if masks or name.startswith(
            ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::masked_select", "aten::equal")
        ):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("any_base", ["qwen3_vl", "qwen3_5", "qwen3_moe", "gpt_oss"], indirect=True)
def test_a_step_waits_for_nothing(any_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters, full weights and all ways to choose tokens, so it can be captured.

    Attention reads its lengths, and experts read their rows, on the device here.
    """
    monkeypatch.setattr(decode_step, "paged_attention", paged_reference)
    monkeypatch.setattr(grouped_product, "_rows_of", grouped_product.masks)
    sampler, full = sampler_of(any_base, runs_ahead=True), full_weights(any_base)
    inner, seen = DecodeStep.__call__, list[StepRows]()

    def watched(step: DecodeStep, batch: DeviceBatch, rows: StepRows, in_place: bool = False) -> Tensor:
        seen.append(rows)
        if rows.owner is full:
            assert step.can_be_captured(batch, rows)
            with monkeypatch.context() as patch:  # here each row copies what it attends to
                patch.setattr(
                    decode_step,
                    "MOST_GATHERED",
                    rows.count * batch.table.shape[1] * 2 * step.cache.keys[0, 0].nbytes - 1,
                )
                assert not step.can_be_captured(batch, rows)
        with NoWaiting():
            return inner(step, batch, rows, in_place)

    monkeypatch.setattr(DecodeStep, "__call__", watched)
    sampler.add("full", ask(num_samples=2), prompt_of(any_base, (0, 9)), full)
    answers(sampler)
    assert any(rows.truncates and rows.has_adapters and rows.needs_logits for rows in seen)
    assert any(rows.owner is full for rows in seen)
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(3).max().item()


# Steps that are launched ahead


@pytest.mark.parametrize(("any_base", "when"), [("qwen3", 2), ("qwen3_5", 3)], indirect=["any_base"])
def test_what_happens_between_steps_finds_one_under_way(any_base: BaseModel, when: int) -> None:
    """A sample is cancelled, another stops at a token that nobody foresaw: the rest get their tokens."""
    alone, bench = (Bench(any_base, runs_ahead=runs_ahead) for runs_ahead in (False, True))
    for number in range(4):
        alone.add(str(number), prompt_of(any_base, (number, 14 + number)), ask(num_samples=2))
    expected = {name: tokens_of(result) for name, result in run(alone.sampler).items()}
    stop = expected["1"][0][when]
    for name, (rendered, _) in alone.asked.items():
        rule = StopRule(eos=False, strings=(), token_ids=(stop,) if name == "1" else ())
        bench.add(name, rendered, ask(replace(PARAMS, stop=rule), num_samples=2))
    for _ in range(when):
        bench.sampler.step()
    assert bench.sampler.steps.flights
    bench.sampler.cancel("2")
    expected["1"] = [tokens[: tokens.index(stop) + 1 if stop in tokens else None] for tokens in expected["1"]]
    assert {name: tokens_of(result) for name, result in bench.run().items()} == {name: expected[name] for name in "013"}


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_likeliest_tokens_that_are_not_had_fail_their_job(
    any_base: BaseModel, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    """The step is done by then, and is not computed again."""
    bench, calls = Bench(any_base, runs_ahead=runs_ahead), []

    def failing(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("injected")
        return likeliest(*arguments)

    monkeypatch.setattr(decoding, "likeliest", failing)
    for index, name in enumerate(["asks", "other", "third"]):
        bench.add(
            name,
            prompt_of(any_base, (index, 20)),
            replace(ask(num_samples=2), topk_sample_logprobs=3 * (name == "asks")),
        )
    ended = local.outcomes(bench.sampler)
    assert isinstance(failure := ended["asks"], SampleFailure)
    assert "OutOfMemoryError('injected')" in str(failure.error)
    assert bench.check(ended).keys() == {"other", "third"}


# Weights that share a step, and such that do not


def test_adapters_without_room_or_with_nan_run_apart(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three adapters find 32 columns, two large ones do not, and one has no finite weights; full rows of the base are
    beside them.

    Afterwards another adapter takes the columns of those that nobody samples any more.
    """
    monkeypatch.setattr(batched_lora, "MOST_COLUMNS", 32)
    owners = [None, *(random_adapter(text_base, rank, rank) for rank in (4, 8, 16, 24, 30))]
    bench, rendered = Bench(text_base), prompt_of(text_base, (0, 20))
    for number, owner in enumerate(owners):
        bench.add(str(number), rendered, of_session("ab"[number % 2], 20), owner)
    bench.sampler.add("sick", of_session("a", 20), rendered, local.sick_adapter(text_base))
    bench.step(2)
    assert sorted(adapter.shape.rank for adapter in bench.sampler.decoding.placed.values()) == [4, 8, 16]
    assert len(bench.sampler.decoding.batches) == 4
    done = run(bench.sampler)
    assert {len(result.sequences[0].tokens) for result in done.values()} == {20}
    assert len(bench.check({name: result for name, result in done.items() if name != "sick"})) == 6
    bench.add("later", rendered, weights=owners[-1])
    bench.step(2)
    assert [adapter.shape.rank for adapter in bench.sampler.decoding.placed.values()] == [30]
    bench.run()


@pytest.mark.parametrize("error", [None, RuntimeError("injected")])
def test_running_sequences_go_on_amid_a_pass(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """A pass over prompts.

    With `error` one of them fails there, while another sample of its job is being computed again.
    """
    bench = Bench(text_base, runs_ahead=True, prefill_tokens_beside=20)
    sampler = bench.sampler
    bench.add("first", prompt_of(text_base, (0, 9)), ask(num_samples=2))
    bench.step(3)
    bench.add("second", prompt_of(text_base, (1, 90)), ask(num_samples=2))
    if error:
        sampler.queues.preempt(sampler.queues.running[1])
        append = SequenceState.append

        def failing(sequence: SequenceState, *arguments: Any) -> None:
            if error and sampler.prompts.outcomes.failed_meanwhile is not None and sequence.job.request_id == "first":
                raise error
            append(sequence, *arguments)

        monkeypatch.setattr(SequenceState, "append", failing)
    read, between = sampler.steps.read, list[bool]()

    def counted() -> list[SampleEvent]:
        between.append(bool(sampler.steps.flights))
        return read()

    monkeypatch.setattr(sampler.steps, "read", counted)
    ended = local.outcomes(sampler)
    assert any(between)
    assert ("first" in bench.check(ended)) == (error is None)


def test_what_a_lack_of_memory_preempts_is_not_launched_with_the_next_group(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base and an adapter that decodes apart, one of which finds no memory once."""
    bench, adapter = Bench(text_base), random_adapter(text_base, 4, 1)
    of_sampler = bench.sampler.decoding
    monkeypatch.setattr(of_sampler, "_find_room", lambda _: False)
    for number in range(4):
        bench.add(str(number), prompt_of(text_base, (number, 9 + number)), weights=None if number < 2 else adapter)
    inner, calls = of_sampler.launch, list[Any]()

    def launch(sequences: Any) -> Any:
        calls.append(sequences)
        assert all(sequence.blocks for sequence in sequences)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("injected")
        return inner(sequences)

    monkeypatch.setattr(of_sampler, "launch", launch)
    bench.run()
    assert len(calls) > 5
    assert of_sampler.apart == {}
    assert all(not batch.seats for batch in of_sampler.batches.values())


def test_tokens_are_delivered_while_a_prompt_is_being_computed(text_base: BaseModel) -> None:
    """Before the first of the two layers and behind it; nothing comes twice, and all in order."""
    sampler = sampler_of(text_base, runs_ahead=True, prefill_tokens_beside=90)
    sampler.add("runs", ask(replace(PARAMS, max_tokens=30)), prompt_of(text_base, (0, 9)), None, stream=True)
    events = [event for _ in range(3) for event in sampler.step()]
    sampler.add("comes", ask(replace(PARAMS, max_tokens=1)), prompt_of(text_base, (1, 90)), None)
    delivered: list[list[SampleEvent]] = []
    assert [event.request_id for event in sampler.step(lambda those: delivered.append([*those]))] == ["comes"]
    assert [[event.request_id for event in those] for those in delivered] == [["runs"], ["runs"]]
    events += [event for those in delivered for event in those]
    while sampler.has_work:
        events += sampler.step()
    streamed = [token for event in events if isinstance(event, TokensSampled) for token in event.tokens]
    assert isinstance(ended := events[-1], SampleResult)
    assert streamed == ended.sequences[0].tokens
