"""What goes wrong with one sample is its failure alone: the others get the tokens that they would have got without it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from tests.bases import random_adapter, random_tokens, renderer
from tests.sampling.local.byte_fallback import WORDS, byte_fallback_tokenizer
from tests.sampling.local.test_sampler import PARAMS, ask, run, sampler_of
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel, PackedRow
from tinsmith.models.device import upload
from tinsmith.models.lora import LoraPair
from tinsmith.models.pass_plan import PassPlan
from tinsmith.sampling.local import kv_cache
from tinsmith.sampling.local.decode_step import DecodeStep, StepRows
from tinsmith.sampling.local.device_batch import DeviceBatch
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.local.sequence import Sequence
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult
from tinsmith.wire.sample import SampleRequest, StopRule


def outcomes(sampler: LocalSampler) -> dict[str, Any]:
    """By request: the tokens of each sample, or the error. The cache must be whole again."""
    ended: dict[str, Any] = {}
    while sampler.has_work:
        for outcome in sampler.step():
            assert outcome.request_id not in ended
            if isinstance(outcome, SampleFailure):
                ended[outcome.request_id] = outcome.error
            else:
                assert isinstance(outcome, SampleResult)
                ended[outcome.request_id] = [s.tokens for s in outcome.sequences]
    assert not any(sampler.cache.users)
    return ended


def add_neighbours(sampler: LocalSampler, base: BaseModel, request: Callable[[int], SampleRequest] | None = None) -> None:
    """Five requests of two samples each."""
    for number in range(5):
        rendered = renderer(base).render([random_tokens(number, 5 + 9 * number)])
        asked = request(number) if request else ask(replace(PARAMS, seed=number), num_samples=2)
        sampler.add(str(number), asked, rendered, None)


def undisturbed(base: BaseModel) -> dict[str, Any]:
    sampler = sampler_of(base)
    add_neighbours(sampler, base)
    return outcomes(sampler)


def decode_all(tokenizer: PreTrainedTokenizerFast, sequences: list[list[int]]) -> None:
    """Token by token, as the tokenizers library does it."""
    for tokens in sequences:
        stream = DecodeStream(skip_special_tokens=False)
        for token in tokens:
            stream.step(tokenizer.backend_tokenizer, token)


def test_texts_that_are_no_utf8_fail_nobody(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hot model with a byte-fallback tokenizer, whose random bytes make the tokenizers library raise."""
    words = [*WORDS, *(f"▁w{number}" for number in range(text_base.vocab_size - 257 - len(WORDS)))]
    tokenizer = byte_fallback_tokenizer(words)
    monkeypatch.setattr(text_base, "tokenizer", tokenizer)
    stop = StopRule(eos=False, strings=("never written",), token_ids=())
    sampler = sampler_of(text_base)
    params = replace(PARAMS, stop=stop, temperature=9.0, max_tokens=250)
    add_neighbours(sampler, text_base, lambda number: ask(replace(params, seed=number), num_samples=2))
    ended = outcomes(sampler)
    assert [len(tokens) for samples in ended.values() for tokens in samples] == [250] * 10
    with pytest.raises(Exception, match="Invalid prefix encountered"):
        decode_all(tokenizer, [tokens for samples in ended.values() for tokens in samples])


def test_a_stop_rule_that_raises_fails_its_request_alone(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(text_base)
    append = Sequence.append

    def failing(sequence: Sequence, *arguments: Any) -> None:
        if sequence.job.request_id == "3" and sequence.index == 1 and len(sequence.tokens) == 5:
            raise ValueError("what number 3 says")
        append(sequence, *arguments)

    monkeypatch.setattr(Sequence, "append", failing)
    sampler = sampler_of(text_base)
    add_neighbours(sampler, text_base)
    ended = outcomes(sampler)
    assert str(ended.pop("3")) == "internal error: ValueError('what number 3 says')"
    assert ended == {key: tokens for key, tokens in expected.items() if key != "3"}


def test_scoring_that_raises_fails_its_request_alone(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(text_base)

    def failing(scores: PromptScores, *_: Any) -> None:
        raise UserError("cannot be scored")

    monkeypatch.setattr(PromptScores, "add", failing)
    sampler = sampler_of(text_base)
    add_neighbours(sampler, text_base)
    sampler.step()
    sampler.add("scored", ask(prompt_logprobs=True), renderer(text_base).render([random_tokens(9, 30)]), None)
    ended = outcomes(sampler)
    assert str(ended.pop("scored")) == "cannot be scored"
    assert ended == expected


def test_weights_that_cannot_be_computed_fail_their_requests_alone(text_base: BaseModel) -> None:
    expected = undisturbed(text_base)
    misshapen = random_adapter(text_base)
    misshapen.working["lm_head"] = LoraPair(*(tensor[:, :1] for tensor in misshapen.working["lm_head"]))
    sampler = sampler_of(text_base)
    add_neighbours(sampler, text_base)
    sampler.step()
    sampler.add("broken", ask(num_samples=3), renderer(text_base).render([random_tokens(9, 30)]), misshapen)
    ended = outcomes(sampler)
    assert str(ended.pop("broken")).startswith("internal error: RuntimeError(")
    assert ended == expected


@pytest.mark.parametrize("fails_at", range(4))
def test_out_of_memory_behind_a_pass_touches_no_row(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """The samples of one prompt need copies of its last block. Without memory for one of them, the pass is taken back as a whole."""
    expected = undisturbed(text_base)
    sampler = sampler_of(text_base)
    copy, calls = sampler.cache.copy, []

    def failing(block: int) -> int:
        calls.append(block)
        if len(calls) == fails_at + 1:
            raise torch.OutOfMemoryError("injected")
        return copy(block)

    monkeypatch.setattr(sampler.cache, "copy", failing)
    add_neighbours(sampler, text_base)
    assert outcomes(sampler) == expected
    assert len(calls) > fails_at + 1


def test_blocks_that_cannot_be_cleared_for_want_of_memory_are_cleared_later(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(text_base)
    sampler = sampler_of(text_base)
    sampler.cache.keys.fill_(float("nan"))
    inner, failures = upload, list[Any]()

    def failing(values: Any, device: torch.device) -> torch.Tensor:
        if len(failures) < 2:
            failures.append(values)
            raise torch.OutOfMemoryError("injected")
        return inner(values, device)

    monkeypatch.setattr(kv_cache, "upload", failing)
    add_neighbours(sampler, text_base)
    assert outcomes(sampler) == expected
    assert len(failures) == 2


def test_memory_that_never_suffices_fails_one_request_after_the_other(text_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(text_base)
    add_neighbours(sampler, text_base)

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(text_base, "hidden_states", full)
        ended: list[SampleEvent] = []
        while not ended:
            ended += sampler.step()
    (failure,) = ended
    assert isinstance(failure, SampleFailure)
    assert "OutOfMemoryError('injected')" in str(failure.error)
    rest = outcomes(sampler)
    assert sorted([failure.request_id, *rest]) == list("01234")
    expected = undisturbed(text_base)
    assert rest == {key: expected[key] for key in rest}


@pytest.mark.parametrize("prompts", [1, 3])
def test_memory_for_one_sequence_alone_serves_all_of_them_one_after_the_other(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    """Neither two sequences fit, nor a token of a prompt beside one that runs: then the prompt waits until nothing runs."""
    asked = [renderer(text_base).render([random_tokens(number, 20)]) for number in range(1 + prompts)]
    expected: dict[str, list[int]] = {}
    for number, rendered in enumerate(asked):
        alone = sampler_of(text_base)
        alone.add(str(number), ask(), rendered, None)
        expected |= {name: result.sequences[0].tokens for name, result in run(alone).items()}
    sampler, inner, compute, refused = sampler_of(text_base), text_base.hidden_states, DecodeStep.__call__, list[str]()

    def alone_only(row: PackedRow, plan: PassPlan, **others: Any) -> torch.Tensor:
        if len(row.lengths) > 1 or sampler.schedule.running:
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
    sampler.add("0", ask(), asked[0], None)
    sampler.step()
    for number in range(1, 1 + prompts):
        sampler.add(str(number), replace(ask(), sampling_session_id=f"{number}:sample:0"), asked[number], None)
    done: dict[str, Any] = {}
    for _ in range(500):
        done |= {event.request_id: event for event in sampler.step()}
    assert refused
    assert {name: event.sequences[0].tokens for name, event in done.items() if isinstance(event, SampleResult)} == expected
