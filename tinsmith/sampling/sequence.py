"""What the sampler keeps of a request and of each of its samples while they run, and what it hands back."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tinsmith.models.lora import Adapter
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.choose import Choice
from tinsmith.wire.sample import SampledSequence, SamplingParams


class StopRuleState(Protocol):
    """Decides token by token whether one sequence has ended."""

    def stops(self, token: int) -> bool:
        """Whether generation ends with this token."""
        ...


@dataclass(eq=False)
class SampleJob:
    """One asample request: a prompt, whose weights, and how many samples of it."""

    request_id: str
    rendered: RenderedInput
    adapter: Adapter | None
    """The snapshot to sample from; None is the bare base."""
    params: SamplingParams
    num_samples: int
    wants_prompt_logprobs: bool
    seed: int
    """Of all samples together; each sample differs by its index."""
    max_new: int
    """Longest answer, in tokens."""
    prompt_logprobs: NDArray[np.float32] | None = None
    """[prompt tokens]: NaN first, 0.0 at image positions."""
    unfinished: int = 0
    sequences: list["Sequence"] = field(default_factory=list)

    def result(self) -> "SampleResult":
        """What the client gets, once every sequence has ended."""
        sequences = [SampledSequence(s.tokens, s.logprobs, s.reason or "length") for s in self.sequences]
        return SampleResult(self.request_id, sequences, self.prompt_logprobs, len(self.rendered))


@dataclass(eq=False)
class Sequence:
    """One sample of a job."""

    job: SampleJob
    index: int
    stop: StopRuleState
    tokens: list[int] = field(default_factory=list)
    """What it generated so far."""
    logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Its cache blocks, in order; empty while it waits."""
    reason: Literal["stop", "length"] | None = None
    """Why it ended; None while it has not."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together."""
        return len(self.job.rendered) + len(self.tokens)

    @property
    def starts_job(self) -> bool:
        """Whether it is the first sample of its job and has not begun, so that the others can share its prompt."""
        return self.index == 0 and not self.tokens

    def so_far(self) -> RenderedInput:
        """The prompt with what was generated after it: what a preempted sequence is computed from again."""
        rendered = self.job.rendered
        if not self.tokens:
            return rendered
        where = torch.arange(len(self.tokens)) + rendered.next_position
        return RenderedInput(
            token_ids=np.concatenate([rendered.token_ids, np.array(self.tokens, dtype=np.int32)]),
            spans=rendered.spans,
            pictures=rendered.pictures,
            positions=torch.cat([rendered.positions, where.expand(rendered.positions.shape[0], -1)], dim=1),
        )

    def finished_as(self, token: int) -> Literal["stop", "length"] | None:
        """The stop reason if `token`, just appended, ends the sequence."""
        if self.stop.stops(token):
            return "stop"
        return "length" if len(self.tokens) >= self.job.max_new else None


@dataclass(frozen=True, eq=False)
class SampleResult:
    """A finished request."""

    request_id: str
    sequences: list[SampledSequence]
    prompt_logprobs: NDArray[np.float32] | None
    prompt_tokens: int


def choice_of(sequences: list[Sequence]) -> Choice:
    """How each of them wants its next token chosen."""
    params = [s.job.params for s in sequences]
    return Choice(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        seed=np.array([s.job.seed for s in sequences], dtype=np.uint64),
        sample=np.array([s.index for s in sequences], dtype=np.uint64),
        position=np.array([len(s.tokens) for s in sequences], dtype=np.uint64),
    )
