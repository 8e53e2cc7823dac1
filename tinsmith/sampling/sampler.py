"""The `Sampler` interface: requests go in with `add`, and `step` yields events while the answers grow.

There are two implementations: the local sampler, which computes with the training weights, and the client of vLLM servers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions
from tinsmith.wire.sample import SampledSequence, SampleRequest


@dataclass(frozen=True, eq=False)
class TokensSampled:
    """New tokens of one sample of a request that was added with `stream`.

    The events of a sample, one after the other, hold exactly the tokens of its result, which comes after all of them. A request that
    fails may have yielded tokens before.
    """

    request_id: str
    index: int
    """The number of the sample among the request's."""
    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token, at the temperature of the request."""
    version: str
    """The label of the weights that gave these tokens."""


@dataclass(frozen=True, eq=False)
class SampleResult:
    """A finished request: the last event of it."""

    request_id: str
    sequences: list[SampledSequence]
    answers: PromptAnswers
    """Answers to the questions about the prompt."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that did not have to be computed."""

    def tokens_of(self, index: int) -> TokensSampled:
        """The event of all tokens of a sample that has one version of the weights."""
        sequence = self.sequences[index]
        return TokensSampled(self.request_id, index, sequence.tokens, sequence.logprobs, sequence.versions[0].version)

    def check_finite(self, asked: PromptQuestions) -> None:
        """Raise UserError if a log-probability is no number, of a sample or of what was asked about the prompt."""
        for index, sequence in enumerate(self.sequences):
            given = np.array(sequence.logprobs, dtype=np.float32)  # None, which vLLM writes for NaN, becomes NaN
            if not np.isfinite(given).all():
                raise not_finite(f"sample {index}")
            if sequence.topk is not None and np.isnan(sequence.topk.logprobs).any():
                raise not_finite(f"topk_sampled_logprobs of sample {index}")
        answers = self.answers
        scored = None if answers.logprobs is None else answers.logprobs[asked.scored_from(self.prompt_tokens) :]
        others = [answer.logprobs for answer in (answers.topk, answers.alternatives) if answer is not None]
        others += [] if answers.targets is None else [answers.targets.values]
        if any(np.isnan(numbers).any() for numbers in (scored, *others) if numbers is not None):
            raise not_finite("the prompt")


def not_finite(what: str) -> UserError:
    """The error of a request whose log-probabilities are no numbers."""
    return UserError(
        f"{what}: a log-probability is NaN or infinite, so the weights that are sampled are, or what they compute; "
        "sample from a checkpoint of before that"
    )


@dataclass(frozen=True, eq=False)
class SampleFailure:
    """A request that ended in an error: the last event of it."""

    request_id: str
    error: TinsmithError


SampleEvent = TokensSampled | SampleResult | SampleFailure


class Sampler(Protocol):
    """Samples from one base model, with whatever weights each request names. For one thread."""

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do something."""
        ...

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of sequences that are being decoded, and that wait."""
        ...

    @property
    def room(self) -> int:
        """Number of further sequences that would not have to wait. It accepts more."""
        ...

    def add(self, request_id: str, request: SampleRequest, rendered: RenderedInput, weights: Weights | None, stream: bool = False) -> None:
        """Accept a request. No other that is unfinished may have this `request_id`.

        `weights` are the snapshot to sample from, None the base's own. With `stream`, tokens are yielded as they come. Raises UserError if
        the request can never run.
        """
        ...

    def check_model(self, shape: LoraShape) -> None:
        """Raise UserError if a model of this shape can be trained, but not sampled."""
        ...

    def publish(self, weights: Weights) -> None:
        """There are new weights to sample from.

        If their ref has an `inflight_of`, unfinished requests whose weights have the same go on with the new ones from their next token.
        """
        ...

    def step(self, deliver: Callable[[Sequence[SampleEvent]], None] | None = None) -> Sequence[SampleEvent]:
        """Do one small piece of work; returns what came of it. What goes wrong with one request is the failure of that request only.

        `deliver` is given what has come before the rest of the piece is done, if there is such; it is not returned then. It must not raise.
        An error that is raised concerns all requests: call `abandon` then.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request that nobody waits for any more. One that has ended, or was never added, is no error."""
        ...

    def abandon(self) -> None:
        """Forget every request, after a `step` that raised."""
        ...


def ref_of(weights: Weights | None, base_model: str) -> WeightsRef:
    """The identity of weights to sample from; None are those of the base. Raises ValueError for weights that train."""
    if weights is None:
        return WeightsRef.of_base(base_model)
    if weights.ref is None:
        raise ValueError("weights that train cannot be sampled from, because they change; take a snapshot")
    return weights.ref
