"""What a request asks about its own prompt, against the logits of one full forward pass."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.bases import picture_chunks, random_adapter, renderer
from tests.sampling.local.test_sampler import PARAMS, ask, forward_logprobs, prompt_of, run, sampled, sampler_of
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
from tinsmith.models.pass_plan import PackedPlan
from tinsmith.rendering.packing import pack
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.logprobs import head_logits, head_lora
from tinsmith.wire.prompt_scores import NO_LOGPROB, PromptQuestions, TargetIds


def all_logprobs(base: BaseModel, rendered: RenderedInput, adapter: Adapter | None) -> torch.Tensor:
    """[n, vocabulary]: row p is what the model predicts at position p; row 0 is nothing."""
    with torch.no_grad():
        row = pack([rendered], [adapter], base.device)
        hidden = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype))
        logprobs = head_logits(hidden, base.lm_head, *head_lora(adapter)).log_softmax(-1)
    return logprobs.roll(1, 0).cpu()


@pytest.mark.parametrize("prefill_tokens", [4096, 10])
def test_everything_at_once(text_base: BaseModel, prefill_tokens: int) -> None:
    base, adapter = text_base, random_adapter(text_base)
    rendered = prompt_of(base, (0, 45))
    expected = all_logprobs(base, rendered, adapter)
    ids = np.random.default_rng(0).integers(-1, 50, (44, 3))
    targets = TargetIds((44, 3), np.repeat(np.arange(44), 3), ids.flatten())
    questions = PromptQuestions(logprobs=True, topk=5, last_n=20, targets=targets, alternatives=4)
    answers = sampled(sampler_of(base, prefill_tokens=prefill_tokens), rendered, replace(ask(), questions=questions), adapter).answers

    assert answers.logprobs is not None
    assert np.isnan(answers.logprobs[:25]).all()
    own = expected.gather(1, torch.from_numpy(rendered.token_ids).long().unsqueeze(1)).squeeze(1).numpy()
    np.testing.assert_allclose(answers.logprobs[25:], own[25:], atol=1e-4)

    assert answers.topk is not None
    values, likeliest = expected.topk(5)
    assert (answers.topk.logprobs[:25] == NO_LOGPROB).all()
    np.testing.assert_array_equal(answers.topk.token_ids[25:], likeliest[25:].numpy())
    np.testing.assert_allclose(answers.topk.logprobs[25:], values[25:].numpy(), atol=1e-4)

    assert answers.targets is not None
    wanted = expected[1:].gather(1, torch.from_numpy(ids).clamp(min=0)).numpy()
    np.testing.assert_allclose(answers.targets.values.reshape(44, 3), np.where(ids < 0, 0.0, wanted), atol=1e-4)

    assert answers.alternatives is not None
    drawn = answers.alternatives.token_ids
    assert drawn.shape == (44, 4)
    of_drawn = expected[1:].gather(1, torch.from_numpy(drawn).long()).numpy()
    np.testing.assert_allclose(answers.alternatives.logprobs, of_drawn, atol=1e-4)


def test_alternatives_are_drawn_at_the_temperature_and_reproducibly(text_base: BaseModel) -> None:
    """At the lowest temperatures they are the likeliest tokens: dividing by 1e-38 would make every logit infinite."""
    rendered = prompt_of(text_base, (0, 4))
    expected = all_logprobs(text_base, rendered, None)[1:]

    def drawn(temperature: float, seed: int) -> np.ndarray:
        request = replace(ask(replace(PARAMS, temperature=temperature, seed=seed)), questions=PromptQuestions(alternatives=1000))
        alternatives = sampled(sampler_of(text_base), rendered, request).answers.alternatives
        assert alternatives is not None
        return alternatives.token_ids

    for temperature in (1.0, 0.25):
        probabilities = (expected / temperature).softmax(-1)
        token = int(probabilities[0].argmax())
        share = (drawn(temperature, 1)[0] == token).mean()
        assert abs(share - float(probabilities[0, token])) < 0.05
    np.testing.assert_array_equal(drawn(1.0, 1), drawn(1.0, 1))
    assert (drawn(1.0, 1) != drawn(1.0, 2)).any()
    for temperature in (1e-50, 1e-38, 0.0):
        assert (drawn(temperature, 1) == expected.argmax(-1, keepdim=True).numpy()).all()


def test_image_positions_have_no_scores_of_their_own(vision_base: BaseModel) -> None:
    rendered = renderer(vision_base).render(picture_chunks(vision_base, 1, 8))
    expected = all_logprobs(vision_base, rendered, None)
    (span,) = rendered.spans
    images = np.arange(span.offset, span.offset + span.length)
    behind = span.offset + span.length  # predicted by the last image position
    rows = len(rendered) - 1
    targets = TargetIds((rows, 1), np.arange(rows), np.full(rows, 7))
    questions = PromptQuestions(logprobs=True, topk=2, targets=targets, alternatives=3)
    answers = sampled(sampler_of(vision_base, prefill_tokens=7), rendered, replace(ask(), questions=questions)).answers
    assert answers.logprobs is not None
    assert answers.topk is not None
    assert answers.targets is not None
    assert answers.alternatives is not None
    assert (answers.logprobs[images] == 0.0).all()
    assert (answers.topk.logprobs[images] == NO_LOGPROB).all()
    assert (answers.targets.values[images - 1] == 0.0).all()
    assert (answers.alternatives.token_ids[images - 1] == rendered.token_ids[span.offset]).all()
    assert answers.topk.token_ids[behind].tolist() == expected[behind].topk(2).indices.tolist()
    np.testing.assert_allclose(answers.targets.values[behind - 1], expected[behind, 7], atol=1e-4)


def test_the_likeliest_sampled_tokens_are_those_of_the_temperature(text_base: BaseModel) -> None:
    sampler, rendered = sampler_of(text_base), prompt_of(text_base, (0, 10))
    sampler.add("x", replace(ask(replace(PARAMS, temperature=0.5, top_k=1)), topk_sample_logprobs=3), rendered, None)
    sampler.add("y", ask(), rendered, None)
    done = run(sampler)
    (sequence,) = done["x"].sequences
    assert done["y"].sequences[0].topk is None
    assert sequence.topk is not None
    assert sequence.topk.token_ids[:, 0].tolist() == sequence.tokens
    np.testing.assert_allclose(sequence.topk.logprobs[:, 0], sequence.logprobs, rtol=1e-6)  # two kernels on a GPU
    whole = rendered.followed_by(_answer(rendered, sequence.tokens))
    values, ids = (all_logprobs(text_base, whole, None)[10:] / 0.5).log_softmax(-1).topk(3)
    np.testing.assert_array_equal(sequence.topk.token_ids, ids.numpy())
    np.testing.assert_allclose(sequence.topk.logprobs, values.numpy(), atol=1e-4)


def test_a_short_suffix_is_scored_from_the_cache(text_base: BaseModel) -> None:
    sampler, rendered = sampler_of(text_base), prompt_of(text_base, (0, 100))
    expected = forward_logprobs(text_base, None, rendered, [0])[0]
    for last_n, cached in ((None, 0), (10, 80)):
        result = sampled(sampler, rendered, replace(ask(), questions=PromptQuestions(logprobs=True, last_n=last_n)))
        assert result.cached_tokens == cached
        assert result.answers.logprobs is not None
        np.testing.assert_allclose(result.answers.logprobs[90:], expected[89:], atol=1e-4)


def _answer(prompt: RenderedInput, tokens: list[int]) -> RenderedInput:
    where = (torch.arange(len(tokens)) + prompt.next_position).expand(prompt.positions.shape[0], -1)
    return RenderedInput(np.array(tokens, dtype=np.int32), (), (), where)


def test_the_questions_are_checked_against_the_rendered_prompt(family_base: Callable[[str], BaseModel]) -> None:
    base = family_base("qwen3_vl")
    rendered = renderer(base).render(picture_chunks(base, 1, 8))
    with pytest.raises(UserError, match=f"must be between 1 and {len(rendered) - 1}"):
        sampler_of(base).add("x", replace(ask(), questions=PromptQuestions(logprobs=True, last_n=len(rendered))), rendered, None)
