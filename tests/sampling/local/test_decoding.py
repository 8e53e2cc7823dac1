"""Decoding steps: what lies in the rows on the device, what a step reads, and steps that are launched before the last one is read.

Invariant: Rows on the device are what the host knows; a decoding step waits for nothing; dead rows, steps launched ahead and weights in
batches of their own change no token.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bases import picture_chunks, random_adapter, renderer
from tests.extent import slow
from tests.sampling.local.test_sampler import (
    PARAMS,
    ask,
    check,
    full_weights,
    of_session,
    outcomes,
    prompt_of,
    prompts,
    run,
    sampled,
    sampler_of,
    sick_adapter,
    tokens_of,
)
from tinsmith.models.base import BaseModel
from tinsmith.sampling.choose import likeliest
from tinsmith.sampling.local import decode_step, decoding
from tinsmith.sampling.local.decode_graph import rung_of
from tinsmith.sampling.local.decode_step import DecodeStep, StepRows
from tinsmith.sampling.local.device_batch import FIELDS, DeviceBatch
from tinsmith.sampling.local.paged_attention import paged_reference
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.local.sequence import Sequence
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled
from tinsmith.wire.sample import StopRule


def before_each_step(sampler: LocalSampler, before: Callable[[DeviceBatch, StepRows], StepRows]) -> None:
    """Give every step of the sampler what `before` makes of its rows."""
    inner = sampler.decoding.run

    def around(batch: DeviceBatch, rows: StepRows) -> Tensor | None:
        return inner(batch, before(batch, rows))

    sampler.decoding.run = around  # type: ignore[assignment]


def add_mixed(sampler: LocalSampler, base: BaseModel, number: int = 12) -> None:
    """Requests that come and go at different times, of several adapters, with all ways to choose a token; eight have them all."""
    adapters = [None, random_adapter(base, 4, 1), random_adapter(base, 8, 2, train_unembed=False), None]
    chunks = prompts(base)
    for index in range(number):
        params = replace(
            PARAMS,
            max_tokens=3 + 7 * index % 30,
            temperature=(1.0, 0.0, 0.7)[index % 3],
            top_k=(-1, 5, -1, 40)[index % 4],
            top_p=(1.0, 1.0, 0.6)[index % 3],
            seed=2**64 - 1 - index,
        )
        request = replace(ask(params, num_samples=1 + index % 3), topk_sample_logprobs=3 * (index % 2))
        sampler.add(str(index), request, renderer(base).render(chunks[index % len(chunks)]), adapters[index % 4])


def check_equal(sampler: LocalSampler, other: LocalSampler) -> None:
    """Both answer their requests alike."""
    done, expected = run(sampler), run(other)
    assert done.keys() == expected.keys()
    for name, result in done.items():
        for sequence, same in zip(result.sequences, expected[name].sequences, strict=True):
            assert sequence.tokens == same.tokens
            np.testing.assert_allclose(sequence.logprobs, same.logprobs, atol=1e-3)
            if same.topk is not None:
                assert sequence.topk is not None
                np.testing.assert_allclose(sequence.topk.logprobs, same.topk.logprobs, atol=1e-3)


# The rows


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_5"])
def test_rows_are_what_the_host_knows_whoever_comes_and_goes(family_base: Callable[[str], BaseModel], family: str) -> None:
    """In every step of a play with joins, ends and preemptions: as if all sequences had just joined an empty batch."""
    base = family_base(family)
    sampler = sampler_of(base, blocks=40, runs_ahead=False, prefill_tokens=24, max_running=6)
    counts = []

    def compare(batch: DeviceBatch, rows: StepRows) -> StepRows:
        anew = sampler.decoding._batch(len(batch.state))
        seats = [seat.sequence.seat for seat in batch.seats]
        for seat in batch.seats:
            seat.sequence.seat = None
        anew.follow([seat.sequence for seat in batch.seats])
        for seat, own in zip(batch.seats, seats, strict=True):
            seat.sequence.seat = own
        assert torch.equal(batch.state, anew.state)
        for row, seat in enumerate(batch.seats):
            assert seat.row == row
            known = len(seat.sequence.blocks) + 1  # with the scratch block behind them
            assert torch.equal(batch.table[row, :known], anew.table[row, :known])
        assert not batch.table[len(batch.seats) :].any()
        counts.append(rows.count)
        return rows

    add_mixed(sampler, base)
    before_each_step(sampler, compare)
    run(sampler)
    assert {2, 3, 6} <= set(counts)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_5"])
def test_dead_rows_change_nothing(family_base: Callable[[str], BaseModel], family: str) -> None:
    """A graph computes rows that nobody has behind those of the batch. Here they are full of NaN in the scratch block and slot."""
    base = family_base(family)
    alone, padded = (sampler_of(base, runs_ahead=True, max_running=16) for _ in range(2))

    def pad(batch: DeviceBatch, rows: StepRows) -> StepRows:
        padded.cache.keys[:, 0] = padded.cache.values[:, 0] = float("nan")
        if padded.states:
            padded.states.memory[:, padded.states.scratch] = float("nan")
        assert torch.equal(batch.state[rows.count :], torch.from_numpy(batch.dead_row()).expand(len(batch.state) - rows.count, FIELDS))
        count = rung_of(rows.count, len(batch.state))
        return replace(rows, count=count, groups=[decode_step.AttendTogether(None, batch.table.shape[1])])

    add_mixed(alone, base, 8)
    add_mixed(padded, base, 8)
    before_each_step(padded, pad)
    check_equal(padded, alone)


def test_rungs_hold_the_rows_and_no_more_than_there_are_places() -> None:
    assert [rung_of(rows, 300) for rows in (1, 2, 3, 33, 64, 65, 200, 257)] == [1, 2, 4, 48, 64, 96, 256, 300]
    assert [rung_of(rows, 40) for rows in (8, 9, 33, 40)] == [8, 16, 40, 40]
    assert rung_of(257, 1000) == 512


class NoWaiting(TorchDispatchMode):
    """Refuses operations for which a host waits for a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.name()
        masks = name.startswith(("aten::index.", "aten::index_put")) and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masks or name.startswith(("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::masked_select", "aten::equal")):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


# Steps of the slow ones have the same parts as those of the first two.
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", *slow("llama", "qwen2_5_vl", "qwen3")])
def test_a_step_waits_for_nothing(family_base: Callable[[str], BaseModel], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters and all ways to choose tokens. Attention is the one that reads its lengths on the device, as the kernel does."""
    base = family_base(family)
    monkeypatch.setattr(decode_step, "paged_attention", paged_reference)
    sampler = sampler_of(base, runs_ahead=True)
    inner, steps = sampler.decoding.run, []

    def watched(batch: DeviceBatch, rows: StepRows) -> Tensor | None:
        steps.append(rows)
        with NoWaiting():
            return inner(batch, rows)

    monkeypatch.setattr(sampler.decoding, "run", watched)
    add_mixed(sampler, base, 8)
    run(sampler)
    assert any(rows.truncates and rows.has_adapters and rows.needs_logits for rows in steps)


def test_what_waits_is_noticed() -> None:
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(3)[torch.tensor([True, False, True])]
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(3).max().item()


# Steps that are launched ahead


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("blocks", [16, *slow(400)])  # in a cache that is too small everything else happens too
def test_launching_ahead_changes_no_answer(family_base: Callable[[str], BaseModel], family: str, blocks: int) -> None:
    base = family_base(family)
    each, ahead = (sampler_of(base, blocks, runs_ahead=runs_ahead, prefill_tokens=24, max_running=6) for runs_ahead in (False, True))
    add_mixed(each, base)
    add_mixed(ahead, base)
    check_equal(ahead, each)


def test_a_step_is_under_way_while_the_tokens_of_the_last_are_read(text_base: BaseModel) -> None:
    """Also when a sequence has ended, when one joins, and when one needs a block; not when there is none."""
    sampler = sampler_of(text_base, blocks=8, runs_ahead=True)
    sampler.add("long", ask(replace(PARAMS, max_tokens=40)), prompt_of(text_base, (0, 20)), None)
    sampler.add("short", ask(replace(PARAMS, max_tokens=6)), prompt_of(text_base, (1, 20)), None)
    sampler.step()
    under_way = []
    while sampler.schedule.running:
        sampler.step()
        under_way.append(len(sampler.flights))
        if len(under_way) == 10:
            sampler.add("joins", ask(replace(PARAMS, max_tokens=50)), prompt_of(text_base, (2, 20)), None)
    assert under_way[:10] == [1] * 10
    assert under_way.count(0) <= 16 + 1  # the cache is full for the last tokens of "long", until it ends
    run(sampler)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("when", [2, 3, *slow(4, 5)])  # later steps are as these
def test_what_happens_between_steps_finds_one_under_way(family_base: Callable[[str], BaseModel], family: str, when: int) -> None:
    """A sample is cancelled, another stops at a token that nobody foresaw: the rest get their tokens."""
    base = family_base(family)
    asked = {str(number): prompt_of(base, (number, 14 + number)) for number in range(4)}
    alone, sampler = (sampler_of(base, runs_ahead=runs_ahead) for runs_ahead in (False, True))
    for name, rendered in asked.items():
        alone.add(name, ask(num_samples=2), rendered, None)
    expected = {name: tokens_of(result) for name, result in run(alone).items()}
    stop = expected["1"][0][when]
    for name, rendered in asked.items():
        rule = StopRule(eos=False, strings=(), token_ids=(stop,) if name == "1" else ())
        sampler.add(name, ask(replace(PARAMS, stop=rule), num_samples=2), rendered, None)
    for _ in range(when):
        sampler.step()
    assert sampler.flights
    sampler.cancel("2")
    done = run(sampler)
    expected["1"] = [tokens[: tokens.index(stop) + 1 if stop in tokens else None] for tokens in expected["1"]]
    assert {name: tokens_of(result) for name, result in done.items()} == {name: expected[name] for name in "013"}
    for name, result in done.items():
        check(base, asked[name], None, result)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_likeliest_tokens_that_cannot_be_had_fail_their_job_alone(
    any_base: BaseModel, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    """The step is done by then, and is not computed again."""
    sampler, calls = sampler_of(any_base, runs_ahead=runs_ahead), []

    def failing(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("injected")
        return likeliest(*arguments)

    monkeypatch.setattr(decoding, "likeliest", failing)
    asked = {name: prompt_of(any_base, (index, 20)) for index, name in enumerate(["asks", "other", "third"])}
    for name, rendered in asked.items():
        sampler.add(name, replace(ask(num_samples=2), topk_sample_logprobs=3 * (name == "asks")), rendered, None)
    ended = outcomes(sampler)
    failure = ended.pop("asks")
    assert isinstance(failure, SampleFailure)
    assert "OutOfMemoryError('injected')" in str(failure.error)
    for name, result in ended.items():
        assert isinstance(result, SampleResult)
        check(any_base, asked[name], None, result)


# Weights that share a step, and such that do not


def test_adapters_without_room_or_with_nan_run_apart(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three adapters find 32 columns, two large ones do not, and one has no finite weights; full rows of the base are beside them."""
    monkeypatch.setattr(decoding, "MOST_COLUMNS", 32)
    sick = sick_adapter(text_base)
    owners = [None, sick, *(random_adapter(text_base, rank, rank) for rank in (4, 8, 16, 24, 30))]
    sampler, rendered = sampler_of(text_base), prompt_of(text_base, (0, 20))
    for number, owner in enumerate(owners):
        sampler.add(str(number), of_session("ab"[number % 2], 20), rendered, owner)
    sampler.step()
    sampler.step()
    assert sorted(adapter.shape.rank for adapter in sampler.decoding.placed.values()) == [4, 8, 16]
    assert len(sampler.decoding.batches) == 4
    for name, result in run(sampler).items():
        assert len(result.sequences[0].tokens) == 20
        if owners[int(name)] is not sick:
            check(text_base, rendered, owners[int(name)], result)
    sampler.add("later", ask(), rendered, owners[-1])
    sampler.step()
    sampler.step()
    assert [adapter.shape.rank for adapter in sampler.decoding.placed.values()] == [30]
    assert list(sampler.decoding.batches) == [0]
    run(sampler)


def test_rows_take_the_columns_of_newer_weights(vision_base: BaseModel) -> None:
    """What lies in the columns of an adapter that nobody samples any more is written over."""
    sampler = sampler_of(vision_base, runs_ahead=True)
    rendered = renderer(vision_base).render(picture_chunks(vision_base, 0, 5))
    for seed in range(4):
        adapter = random_adapter(vision_base, 16, seed)
        check(vision_base, rendered, adapter, sampled(sampler, rendered, ask(num_samples=2), adapter))
    assert sampler.decoding.adapters.columns == 32


@pytest.mark.parametrize("error", [None, RuntimeError("injected")])
def test_running_sequences_go_on_in_the_middle_of_a_pass_over_prompts(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """With `error` one of them fails there, while another sample of its job is being computed again."""
    sampler = sampler_of(text_base, runs_ahead=True, prefill_tokens_beside=20)
    asked = {"first": prompt_of(text_base, (0, 9)), "second": prompt_of(text_base, (1, 90))}
    sampler.add("first", ask(num_samples=2), asked["first"], None)
    for _ in range(3):
        assert sampler.step() == []
    sampler.add("second", ask(num_samples=2), asked["second"], None)
    if error:
        sampler.schedule._preempt(sampler.schedule.running[1])
        append = Sequence.append

        def failing(sequence: Sequence, *arguments: Any) -> None:
            if error and sampler.failed_meanwhile is not None and sequence.job.request_id == "first":
                raise error
            append(sequence, *arguments)

        monkeypatch.setattr(Sequence, "append", failing)
    inside, between = sampler._decode_between, list[bool]()

    def counted() -> None:
        between.append(bool(sampler.flights))
        inside()

    monkeypatch.setattr(sampler, "_decode_between", counted)
    ended = outcomes(sampler)
    assert any(between)
    assert not sampler.meanwhile
    assert isinstance(ended["first"], SampleFailure) == (error is not None)
    for name, event in ended.items():
        if isinstance(event, SampleResult):
            check(text_base, asked[name], None, event)


def test_a_step_with_full_weights_waits_for_nothing(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it can be captured too."""
    monkeypatch.setattr(decode_step, "paged_attention", paged_reference)
    full = full_weights(text_base)
    inner, owners = DecodeStep.__call__, []

    def watched(step: DecodeStep, batch: DeviceBatch, rows: StepRows, in_place: bool = False) -> Tensor:
        assert step.can_be_captured(batch, rows)
        with monkeypatch.context() as patch:  # here each row copies what it attends to
            patch.setattr(decode_step, "MOST_GATHERED", rows.count * batch.table.shape[1] * 2 * step.cache.keys[0, 0].nbytes - 1)
            assert not step.can_be_captured(batch, rows)
        owners.append(rows.owner)
        with NoWaiting():
            return inner(step, batch, rows, in_place)

    monkeypatch.setattr(DecodeStep, "__call__", watched)
    sampler, rendered = sampler_of(text_base, runs_ahead=True), prompt_of(text_base, (0, 9))
    sampler.add("full", ask(num_samples=2), rendered, full)
    sampler.add("base", ask(num_samples=2), rendered, None)
    for name, result in run(sampler).items():
        check(text_base, rendered, full if name == "full" else None, result)
    assert {id(owner) for owner in owners} == {id(full), id(None)}


def test_what_a_lack_of_memory_preempts_is_not_launched_with_the_next_group(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base and an adapter that decodes apart, one of which finds no memory once."""
    sampler, adapter = sampler_of(text_base), random_adapter(text_base, 4, 1)
    monkeypatch.setattr(sampler.decoding, "_find_room", lambda _: False)
    asked = {str(number): prompt_of(text_base, (number, 9 + number)) for number in range(4)}
    owners = {name: None if int(name) < 2 else adapter for name in asked}
    for name, rendered in asked.items():
        sampler.add(name, ask(), rendered, owners[name])
    inner, calls = sampler.decoding.launch, 0

    def launch(sequences: Any) -> Any:
        nonlocal calls
        calls += 1
        assert all(sequence.blocks for sequence in sequences)
        if calls == 5:
            raise torch.OutOfMemoryError("injected")
        return inner(sequences)

    monkeypatch.setattr(sampler.decoding, "launch", launch)
    for name, result in run(sampler).items():
        check(text_base, asked[name], owners[name], result)
    assert calls > 5
    assert sampler.decoding.apart == {}
    assert all(not batch.seats for batch in sampler.decoding.batches.values())


def test_tokens_are_delivered_while_a_prompt_is_being_computed(text_base: BaseModel) -> None:
    """Before the first of the two layers and behind it; nothing comes twice, and all in order."""
    sampler = sampler_of(text_base, runs_ahead=True, prefill_tokens_beside=90)
    sampler.add("runs", ask(replace(PARAMS, max_tokens=30)), prompt_of(text_base, (0, 9)), None, stream=True)
    events = [event for _ in range(3) for event in sampler.step()]
    sampler.add("comes", ask(replace(PARAMS, max_tokens=1)), prompt_of(text_base, (1, 90)), None)
    delivered: list[list[SampleEvent]] = []
    returned = sampler.step(lambda those: delivered.append(list(those)))
    assert [[event.request_id for event in those] for those in delivered] == [["runs"], ["runs"]]
    assert [event.request_id for event in returned] == ["comes"]
    events += [event for those in delivered for event in those]
    while sampler.has_work:
        events += sampler.step()
    streamed = [token for event in events if isinstance(event, TokensSampled) for token in event.tokens]
    (ended,) = [event for event in events if isinstance(event, SampleResult)]
    assert streamed == list(ended.sequences[0].tokens)
