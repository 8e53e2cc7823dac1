"""The `Sampler` interface: requests go in with `add`, and `step` yields events while the answers grow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError, UserError
from tinsmith.kernels.device import Fetched
from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.store.records import LOCAL, SequenceRoutes
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions
from tinsmith.wire.sample import SampledSequence, SampleRequest


@dataclass(frozen=True, eq=False)
class TokensSampled:
    """New tokens of one sample of a request that was added with `stream`.

    The events of a sample hold exactly the tokens of its result, which comes last. A request that fails may have
    yielded tokens before.
    """

    request_id: str
    index: int
    tokens: list[int]
    logprobs: list[float]
    version: str
    """The label of the weights that gave these tokens."""


@dataclass(frozen=True, eq=False)
class SampledRoutes:
    """The experts that computed one sampled sequence, on their way to the host."""

    tokens: NDArray[np.int64]
    experts: Sequence[Fetched]
    """Those of its tokens in pieces."""

    def arrived(self) -> SequenceRoutes:
        """Wait until the device has got so far. For any thread."""
        pieces = [piece for fetched in self.experts for piece in fetched.arrived()]
        return SequenceRoutes(self.tokens, np.concatenate(pieces, axis=1))


@dataclass(frozen=True, eq=False)
class SampleResult:
    """A finished request: its last event."""

    request_id: str
    sequences: list[SampledSequence]
    answers: PromptAnswers
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed."""
    routes: Sequence["SampledRoutes | None"] = ()
    """Of each sequence if they were wanted; None where several versions of the weights gave its tokens."""

    def tokens_of(self, index: int) -> TokensSampled:
        sequence = self.sequences[index]
        return TokensSampled(self.request_id, index, sequence.tokens, sequence.logprobs, sequence.versions[0].version)

    def check_finite(self, asked: PromptQuestions) -> None:
        """Raise UserError if a log-probability of a sample, or of an answer about the prompt, is not finite."""
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
    """Make the error of a request whose log-probabilities are not finite."""
    return UserError(
        f"{what}: a log-probability is NaN or infinite, so the weights that are sampled are, or what they compute; "
        "sample from a checkpoint of before that"
    )


@dataclass(frozen=True, eq=False)
class SampleFailure:
    """A request that failed: its last event."""

    request_id: str
    error: TinsmithError


SampleEvent = TokensSampled | SampleResult | SampleFailure


class Sampler(Protocol):
    """Samples from one base model, with the weights that each request names. For one thread."""

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
        """Numbers of sequences that run, and that wait."""
        ...

    @property
    def places(self) -> int:
        """Most sequences that run at once."""
        ...

    @property
    def room(self) -> int:
        """Number of further sequences that need not wait. More are accepted."""
        ...

    def add(
        self,
        request_id: str,
        request: SampleRequest,
        rendered: RenderedInput,
        weights: Weights | None,
        stream: bool = False,
        tenant: str = LOCAL,
    ) -> None:
        """Accept a request. No unfinished one may have this `request_id`.

        `weights` are the snapshot to sample from, None the base's own. With `stream`, tokens are yielded as they come.
        What prompts have in common is computed once for a `tenant`.
        Raises UserError if the request can never run.
        """
        ...

    def prepare(self, request: SampleRequest) -> None:
        """Do what takes long before `add`, in any thread. Raises UserError if the request can never run."""
        ...

    def check_model(self, shape: LoraShape) -> None:
        """Raise UserError if a model of this shape can be trained, but not sampled."""
        ...

    def publish(self, weights: Weights) -> None:
        """Take new weights to sample from.

        If their ref has an `inflight_of`, unfinished requests of the same go on with them from their next token.
        """
        ...

    def step(self, deliver: Callable[[Sequence[SampleEvent]], None] | None = None) -> Sequence[SampleEvent]:
        """Do one small piece of work and return what came of it.

        What goes wrong with one request is the failure of that request only.

        `deliver` is given, instead, what comes before the rest of the piece is done; it must not raise. An error that
        is raised concerns all requests: call `abandon` then.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it is there."""
        ...

    def abandon(self) -> None:
        """Forget every request, after a `step` that raised."""
        ...


def ref_of(weights: Weights | None, base_model: str) -> WeightsRef:
    """Return the identity of weights to sample from; None are the base's. Raises ValueError for weights that train."""
    if weights is None:
        return WeightsRef.of_base(base_model)
    if weights.ref is None:
        raise ValueError("weights that train cannot be sampled from, because they change; take a snapshot")
    return weights.ref
