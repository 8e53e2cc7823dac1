"""A request and its samples, as the local sampler keeps them while they run."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from tinsmith.kernels.device import Fetched
from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import WeightsRef
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.choose import Choice
from tinsmith.sampling.prefix import first_key, prompt_keys
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampledRoutes, SampleResult, TokensSampled
from tinsmith.sampling.shaping import Shape
from tinsmith.sampling.stopping import StopIds, StopStrings
from tinsmith.store.records import LOCAL
from tinsmith.wire.prompt_scores import PromptAnswers, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SamplingParams, VersionSpan


@dataclass(eq=False)
class SampleJob:
    """A sampling request: a prompt, whose weights, and how many samples of it."""

    request_id: str
    session: str
    rendered: RenderedInput
    weights: Weights | None
    """The snapshot to sample from; None is the base."""
    ref: WeightsRef
    stream: bool
    params: SamplingParams
    num_samples: int
    seed: int
    """Shared by all samples, which draw by their index too."""
    max_new: int
    """Longest answer in tokens."""
    scores: PromptScores | None
    """Questions about the prompt; None if there are none."""
    topk: int
    """Likeliest tokens to report at each sampled position."""
    wants_routes: bool = False
    """Whether the experts that compute its tokens are wanted."""
    tenant: str = LOCAL
    """Finds only what it has computed itself."""
    unfinished: int = 0
    failed: bool = False
    """It has failed: tokens of its other sequences are dropped."""
    cached_tokens: int = 0
    """Prompt tokens that were computed before."""
    sequences: list["SequenceState"] = field(default_factory=list)

    @property
    def cost_of_prompt_token(self) -> int:
        """Time of a prompt token, relative to one of which nothing is asked."""
        return 1 if self.scores is None or self.scores.complete else self.scores.cost

    def result(self) -> SampleResult:
        """Return the reply, once every sequence has ended."""
        answers = self.scores.answers if self.scores else PromptAnswers()
        return SampleResult(
            self.request_id,
            [s.sampled() for s in self.sequences],
            answers,
            len(self.rendered),
            self.cached_tokens,
            [s.sampled_routes() for s in self.sequences] if self.wants_routes else (),
        )


@dataclass(eq=False)
class Seat:
    """A row of the batch on the device (`device_batch.py`), as long as one running sequence has it."""

    sequence: "SequenceState"
    row: int
    blocks: int = 0
    """Blocks of the sequence that the row knows."""

    @property
    def taken(self) -> bool:
        """Whether the sequence has not left it. What was computed for one that has left is dropped."""
        return self.sequence.seat is self


@dataclass(eq=False)
class SequenceState:
    """One sample of a job."""

    job: SampleJob
    index: int
    stop: StopIds | StopStrings
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    """Labels of the weights that its tokens come from, and the first token of each."""
    tops: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """The likeliest tokens at each position and their log-probabilities."""
    blocks: list[int] = field(default_factory=list)
    """Its cache blocks, in order; empty while it waits."""
    slot: int = -1
    """Slot of its state, in a model with gated delta nets; -1 while it waits."""
    stored: int = 0
    """Number of its tokens computed or launched: keys and values lie in `blocks`, the state after them in `slot`."""
    seat: Seat | None = None
    """Its row on the device, while it runs."""
    saves: set[int] = field(default_factory=set)
    """Numbers of blocks behind which its state is to be saved for others, beside the last full one (`PrefixCache`)."""
    newest_save: bytes | None = None
    """Key of the state that was saved at its last full block."""
    admitted: int = 0
    """Its number in the order of admission: the youngest is preempted first."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of its first full blocks, as far as they were needed."""
    reason: Literal["stop", "length"] | None = None
    routes: list[Fetched] = field(default_factory=list)
    """The experts that computed its first tokens: as far as their successors were known when it was preempted, and all
    but those of the last token once it has ended."""
    routed: int = 0
    """Number of these tokens."""
    shape: Shape | None = None
    """Changes its logits; None changes nothing."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.job.rendered) + len(self.tokens)

    @property
    def starts_job(self) -> bool:
        """Whether it is the first sample of its job and has not begun, so that the others can share its prompt."""
        return self.index == 0 and not self.tokens

    @property
    def forks(self) -> int:
        """Number of other samples that start with it, once their prompt is computed."""
        return self.job.num_samples - 1 if self.starts_job else 0

    @property
    def ends_next(self) -> bool:
        return self.stored == self.length and len(self.tokens) + 1 >= self.job.max_new

    @property
    def needed_from(self) -> int:
        """First position that must be computed even if it is cached: at least the last, which gives the next token."""
        scores = self.job.scores
        return self.length - 1 if scores is None or scores.complete else scores.needed_from

    def keys_of(self, blocks: int) -> list[bytes]:
        """Return the keys of its first full blocks, that many."""
        if blocks > len(self.keys):
            first = first_key(self.job.ref, self.job.tenant)
            self.keys = prompt_keys(first, self.job.rendered, self.tokens, self.keys, blocks)
        return self.keys[:blocks]

    def part(self, start: int, end: int) -> RenderedInput:
        """Return tokens [start, end) of prompt and answer together."""
        rendered = self.job.rendered
        prompt = len(rendered)
        if end <= prompt:
            return rendered.part(start, end)
        answer = slice(max(0, start - prompt), end - prompt)
        where = torch.arange(answer.start, answer.stop) + rendered.next_position
        tail = RenderedInput(
            np.array(self.tokens[answer], dtype=np.int32), (), (), where.expand(rendered.positions.shape[0], -1)
        )
        return tail if start >= prompt else rendered.part(start, prompt).followed_by(tail)

    def append(self, token: int, logprob: float, top: tuple[list[int], list[float]] | None) -> None:
        """Take the next token, its logprob and, if asked for, the likeliest tokens there; it may end the sequence."""
        job = self.job
        if not self.starts or self.starts[-1][0] != job.ref.label:
            self.starts.append((job.ref.label, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.tops.append(top)
        if self.stop.stops(token):
            self.reason = "stop"
        elif len(self.tokens) >= job.max_new:
            self.reason = "length"

    def choice(self) -> Choice:
        """Return how its next token is chosen. Raises UserError if its grammar has been left."""
        shape = self.shape and self.shape.follow(self.tokens)
        return Choice(self.job.params, self.job.seed, self.index, len(self.tokens), self.job.topk, shape)

    def newest(self) -> TokensSampled:
        return TokensSampled(self.job.request_id, self.index, self.tokens[-1:], self.logprobs[-1:], self.starts[-1][0])

    def sampled_routes(self) -> SampledRoutes | None:
        """Return the experts that computed it, if one version of the weights gave all of its tokens."""
        if len(self.starts) != 1:
            return None
        return SampledRoutes(
            np.concatenate([self.job.rendered.identity, np.array(self.tokens, dtype=np.int64)]), self.routes
        )

    def sampled(self) -> SampledSequence:
        """Return its part of the reply."""
        top = None
        if self.job.topk:
            ids, logprobs = zip(*self.tops, strict=True)
            top = TopLogprobs(np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32))
        ends = [start for _, start in self.starts[1:]] + [len(self.tokens)]
        versions = tuple(
            VersionSpan(version, start, end) for (version, start), end in zip(self.starts, ends, strict=True)
        )
        return SampledSequence(self.tokens, self.logprobs, self.reason or "length", top, versions)
