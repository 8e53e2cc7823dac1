"""What a request asks about its own prompt, against the logits of one full forward pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.bases import image_chunks, random_adapter, renderer
from tests.sampling.local.test_sampler import PARAMS, ask, followed_by, prompt_of, run, sampled, sampler_of
from tinsmith.errors import UserError
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
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


def answers_to(
    base: BaseModel, rendered: RenderedInput, questions: PromptQuestions, adapter: Any = None, **settings: Any
) -> Any:
    """What is answered about log-probabilities, the likeliest tokens, targets and alternatives."""
    answers = sampled(sampler_of(base, **settings), rendered, replace(ask(), questions=questions), adapter).answers
    return answers.logprobs, answers.topk, answers.targets, answers.alternatives


@pytest.mark.parametrize("prefill_tokens", [4096, 10])
def test_everything_at_once(text_base: BaseModel, prefill_tokens: int) -> None:
    rendered, adapter = prompt_of(text_base, (0, 45)), random_adapter(text_base)
    expected = all_logprobs(text_base, rendered, adapter)
    ids = np.random.default_rng(0).integers(-1, 50, (44, 3))
    asked = TargetIds((44, 3), np.repeat(np.arange(44), 3), ids.flatten())
    questions = PromptQuestions(logprobs=True, topk=5, last_n=20, targets=asked, alternatives=4)
    logprobs, topk, targets, drawn = answers_to(text_base, rendered, questions, adapter, prefill_tokens=prefill_tokens)

    assert np.isnan(logprobs[:25]).all()
    own = expected.gather(1, torch.from_numpy(rendered.token_ids).long().unsqueeze(1)).squeeze(1).numpy()
    np.testing.assert_allclose(logprobs[25:], own[25:], atol=1e-4)

    values, likeliest = expected.topk(5)
    assert (topk.logprobs[:25] == NO_LOGPROB).all()
    np.testing.assert_array_equal(topk.token_ids[25:], likeliest[25:].numpy())
    np.testing.assert_allclose(topk.logprobs[25:], values[25:].numpy(), atol=1e-4)

    wanted = expected[1:].gather(1, torch.from_numpy(ids).clamp(min=0)).numpy()
    np.testing.assert_allclose(targets.values.reshape(44, 3), np.where(ids < 0, 0.0, wanted), atol=1e-4)

    assert drawn.token_ids.shape == (44, 4)
    np.testing.assert_allclose(
        drawn.logprobs, expected[1:].gather(1, torch.from_numpy(drawn.token_ids).long()).numpy(), atol=1e-4
    )


def test_alternatives_are_drawn_at_the_temperature_and_reproducibly(text_base: BaseModel) -> None:
    """At the lowest temperatures they are the likeliest tokens: dividing by 1e-38 would make every logit infinite."""
    rendered = prompt_of(text_base, (0, 4))
    expected = all_logprobs(text_base, rendered, None)[1:]

    def drawn(temperature: float, seed: int) -> Any:
        request = replace(
            ask(replace(PARAMS, temperature=temperature, seed=seed)), questions=PromptQuestions(alternatives=1000)
        )
        alternatives: Any = sampled(sampler_of(text_base), rendered, request).answers.alternatives
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
    rendered = renderer(vision_base).render(image_chunks(vision_base, 1, 8))
    expected, rows = all_logprobs(vision_base, rendered, None), len(rendered) - 1
    (span,) = rendered.spans
    images = np.arange(span.offset, span.offset + span.length)
    behind = span.offset + span.length  # predicted by the last image position
    asked = PromptQuestions(
        logprobs=True, topk=2, targets=TargetIds((rows, 1), np.arange(rows), np.full(rows, 7)), alternatives=3
    )
    logprobs, topk, targets, drawn = answers_to(vision_base, rendered, asked, prefill_tokens=7)
    assert (logprobs[images] == 0.0).all()
    assert (topk.logprobs[images] == NO_LOGPROB).all()
    assert (targets.values[images - 1] == 0.0).all()
    assert (drawn.token_ids[images - 1] == rendered.token_ids[span.offset]).all()
    assert topk.token_ids[behind].tolist() == expected[behind].topk(2).indices.tolist()
    np.testing.assert_allclose(targets.values[behind - 1], expected[behind, 7], atol=1e-4)
    with pytest.raises(UserError, match=f"must be between 1 and {rows}"):
        answers_to(vision_base, rendered, PromptQuestions(logprobs=True, last_n=rows + 1))


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
    values, ids = (
        (all_logprobs(text_base, followed_by(rendered, sequence.tokens), None)[10:] / 0.5).log_softmax(-1).topk(3)
    )
    np.testing.assert_array_equal(sequence.topk.token_ids, ids.numpy())
    np.testing.assert_allclose(sequence.topk.logprobs, values.numpy(), atol=1e-4)
