"""The trainer's own model, where vLLM's samples need it: for canaries, and for answers about a prompt that vLLM cannot give."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.choose import Choice, choose
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampleResult, ref_of
from tinsmith.sampling.stopping import stop_rule
from tinsmith.sampling.vllm.verify import Canary, Expectation, PublishedWeights, score_prompt
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SampleRequest, VersionSpan


def local_questions(request: SampleRequest) -> PromptQuestions:
    """Return the questions that vLLM cannot answer: log-probabilities of ids of the client's choice, alternative tokens."""
    return replace(request.questions, logprobs=False, topk=0, last_n=None)


class TrainerModel:
    """Computes with the trainer's model, in the trainer's thread."""

    def __init__(self, base: BaseModel, canary: Canary, logits_chunk: int, forget: Callable[[str], None]) -> None:
        """`forget` is given the key of weights that no object in memory holds any more. Those that come back have another object."""
        self.base = base
        self.canary = canary
        self.logits_chunk = logits_chunk
        self.forget = forget
        self.canaries: dict[str, Expectation] = {}
        """Key of the weights -> the trainer's results for the canary, as long as the weights are in memory."""
        self.holders: dict[str, WeakValueDictionary[int, Weights]] = {}
        """Key of the weights -> all objects in memory that hold them, by `id`."""

    def knows(self, weights: Weights | None) -> bool:
        """Return whether the canary was computed with these weights."""
        return ref_of(weights, self.base.name).key in self.canaries

    def published(self, weights: Weights | None) -> PublishedWeights:
        """Return the weights with their canary, computed now if it is not known."""
        self.forget_unused()
        ref = ref_of(weights, self.base.name)
        if ref.key not in self.canaries:
            self.canaries[ref.key] = self.canary.expected(weights)
        if weights is not None:
            self.holders.setdefault(ref.key, WeakValueDictionary())[id(weights)] = weights
        return PublishedWeights(weights, self.canaries[ref.key], ref)

    @property
    def unused(self) -> list[str]:
        return [key for key, holders in self.holders.items() if not holders]

    def forget_unused(self) -> None:
        for key in self.unused:
            del self.holders[key], self.canaries[key]
            self.forget(key)

    def answers(self, request: SampleRequest, rendered: RenderedInput, weights: Weights | None) -> PromptAnswers:
        """Answer the `local_questions`."""
        asked = local_questions(request)
        return self._scored(request, rendered, weights, asked, _seed_of(request))[0] if asked else PromptAnswers()

    def sampled(self, request_id: str, request: SampleRequest, rendered: RenderedInput, weights: Weights | None) -> SampleResult:
        """Answer about a prompt that fills the context, with the one token that comes with that."""
        count, seed = request.num_samples, _seed_of(request)
        answers, logits = self._scored(request, rendered, weights, request.questions, seed)
        params, topk = request.params, request.topk_sample_logprobs
        how = [Choice(params, seed, sample, 0, topk) for sample in range(count)]
        rule = stop_rule(params.stop, self.base.eos_token_ids(), self.base.tokenizer)
        version = (VersionSpan(ref_of(weights, self.base.name).label, 0, 1),)
        sequences = []
        for chosen in choose(logits.expand(count, -1), how):
            tokens, logprobs = chosen.top
            top = TopLogprobs(np.array([tokens], dtype=np.int32), np.array([logprobs], dtype=np.float32)) if topk else None
            stops = rule.for_another().stops(chosen.token)
            sequences.append(SampledSequence([chosen.token], [chosen.logprob], "stop" if stops else "length", top, version))
        return SampleResult(request_id, sequences, answers, len(rendered), 0)

    def _scored(
        self, request: SampleRequest, rendered: RenderedInput, weights: Weights | None, asked: PromptQuestions, seed: int
    ) -> tuple[PromptAnswers, Tensor]:
        """Score a prompt: answers, and the logits [1, vocabulary] behind it."""
        scores = PromptScores(rendered, asked, request.params, seed)
        logits = score_prompt(self.base, rendered, weights, scores, self.logits_chunk)
        return scores.answers, logits


def _seed_of(request: SampleRequest) -> int:
    return secrets.randbits(64) if request.params.seed is None else request.params.seed
