"""The local sampler: continuous batching over the training weights, with a paged cache, and slots for the states of gated delta nets.

Each `step` gives every running sequence its next token (`decoding.py`), and computes a piece of the prompts that wait in a pass, whatever
models and snapshots they belong to. `schedule.py` decides what is computed.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from tinsmith.config import SamplingConfig
from tinsmith.errors import DeviceLostError, TinsmithError, UserError
from tinsmith.memory.budget import CPU_CACHE
from tinsmith.memory.cache_sizes import BLOCK, CacheShape, CacheSizes
from tinsmith.memory.retries import is_out_of_memory
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.local.decoding import Decoding, Drawn, Flight
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.prompt_pass import PromptPasses
from tinsmith.sampling.local.schedule import PromptWindows, Schedule
from tinsmith.sampling.local.sequence import SampleJob, SequenceState
from tinsmith.sampling.local.states import StateSlots
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, ref_of
from tinsmith.sampling.stopping import stop_rule
from tinsmith.store import ids
from tinsmith.wire.sample import SampleRequest

log = logging.getLogger(__name__)

T = TypeVar("T")


class LocalSampler:
    """The `Sampler` of one base model in this process."""

    def __init__(self, base: BaseModel, config: SamplingConfig, logits_chunk: int, sizes: CacheSizes | None = None) -> None:
        """`sizes` are the cache's; None divides `config.kv_cache_gib`. Raises ConfigError if that does not hold one sequence."""
        self.base = base
        shape = CacheShape(base.layout.layers, base.dtype, base.device)
        sizes = sizes or shape.divide(int(config.kv_cache_gib * 2**30) or CPU_CACHE, config.max_running)
        self.cache = KVCache(shape, sizes.blocks)
        self.states = StateSlots(shape, sizes.slots) if shape.state_bytes else None
        places = min(config.max_running, sizes.places) if self.states else config.max_running
        self.schedule = Schedule(self.cache, self.states, places, config.prefill_tokens, config.prefill_tokens_beside)
        self.prompts = PromptPasses(base, self.schedule, logits_chunk)
        self.decoding = Decoding(base, self.cache, self.states, places, config.eager)
        self.runs_ahead = base.device.type == "cuda"
        """Whether a step is launched before the tokens of the one before are read. It saves nothing on a CPU."""
        self.flights: list[Flight] = []
        self.meanwhile: list[SampleEvent] = []
        """Events of steps in the middle of a pass over prompts, if `deliver` does not take them."""
        self.deliver: Callable[[Sequence[SampleEvent]], None] | None = None
        """Takes such events at once. It is that of the last `step`."""
        self.failed_meanwhile: list[SampleJob] | None = None
        """Jobs that failed in the middle of such a pass, which computes their prompts too: they are dropped behind it."""
        self.must_settle = False
        """A step launched ahead has failed: what is under way is read before it is tried again."""

    def capacity(self) -> str:
        tokens = f"{self.cache.total * BLOCK:,} tokens"
        if self.states is None:
            return tokens
        return f"{tokens} and {self.states.total:,} states of sequences, of which {self.schedule.max_running:,} run at once"

    @property
    def longest(self) -> int:
        return min(self.base.max_context, self.cache.total * BLOCK)

    @property
    def has_work(self) -> bool:
        return bool(self.schedule.waiting or self.schedule.filling or self.schedule.running)

    @property
    def load(self) -> tuple[int, int]:
        return len(self.schedule.running), sum(1 + s.forks for s in (*self.schedule.filling, *self.schedule.waiting))

    @property
    def room(self) -> int:
        return self.schedule.max_running - sum(1 + s.forks for s in self.schedule.waiting)

    def check_model(self, shape: LoraShape) -> None:
        """It samples whatever can be trained."""

    def add(self, request_id: str, request: SampleRequest, rendered: RenderedInput, weights: Weights | None, stream: bool = False) -> None:
        params = request.params
        request.questions.check(len(rendered), self.base.vocab_size)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        job = SampleJob(
            request_id=request_id,
            session=ids.session_of(request.sampling_session_id),
            rendered=rendered,
            weights=weights,
            ref=ref_of(weights, self.base.name),
            stream=stream,
            params=params,
            num_samples=request.num_samples,
            scores=PromptScores(rendered, request.questions, params, seed) if request.questions else None,
            topk=request.topk_sample_logprobs,
            seed=seed,
            max_new=self._max_new(request, len(rendered)),
            unfinished=request.num_samples,
        )
        rule = stop_rule(params.stop, self.base.eos_token_ids(), self.base.tokenizer)
        job.sequences = [SequenceState(job, index, rule.for_another()) for index in range(job.num_samples)]
        self.schedule.waiting.add(job.session, job.sequences[0])

    def publish(self, weights: Weights) -> None:
        """Compute again what the former weights have computed; complete answers about a prompt stay."""
        ref = ref_of(weights, self.base.name)
        if ref.inflight_of is None:
            return
        for job in self.schedule.restart(lambda sequence: sequence.job.ref.inflight_of == ref.inflight_of):
            job.weights, job.ref = weights, ref
            if job.scores and not job.scores.complete:
                job.scores = PromptScores(job.rendered, job.scores.asked, job.params, job.seed)

    def step(self, deliver: Callable[[Sequence[SampleEvent]], None] | None = None) -> list[SampleEvent]:
        """Compute a token of every running sequence, and a piece of the prompts that wait. `deliver` is given what comes before that piece.

        What runs out of memory leaves no trace, and is smaller the next time. Raises errors of deciding what to compute.
        """
        self.deliver = deliver
        try:
            if not self.flights:
                self.schedule.grow()
            self.schedule.admit()
        except Exception as error:
            if not (is_out_of_memory(error) and self.schedule.retreat([])):
                raise
            return []
        events = self._decode()
        windows = self.schedule.prompt_windows()
        if windows:
            if deliver is not None:
                deliver(events)
                events = []
            events += self._compute_prompts(windows)
        events += self._taken_meanwhile()
        self._rest()
        return events

    def _taken_meanwhile(self) -> list[SampleEvent]:
        self.meanwhile, meanwhile = [], self.meanwhile
        return meanwhile

    def _rest(self) -> None:
        if not self.schedule.running:
            self.flights = []
            self.decoding.rest()

    def _decode(self) -> list[SampleEvent]:
        events: list[SampleEvent] = []
        flights = self.flights or self._launch(events)
        return events + self._read(flights)

    def _decode_between(self) -> None:
        """Read the steps that were launched ahead, in the middle of a pass over prompts: running sequences do not wait for all of it."""
        if self.flights:
            self.meanwhile += self._read(self.flights)
            if self.deliver is not None:
                self.deliver(self._taken_meanwhile())

    def _read(self, flights: list[Flight]) -> list[SampleEvent]:
        """Take the tokens of these steps. The next step is launched before they are read, where that helps."""
        events: list[SampleEvent] = []
        self.flights = []
        ahead = self._launch_ahead() if flights and self.runs_ahead and not self.must_settle else []
        for flight in flights:
            events += self._append(self.decoding.collect(flight))
        self.flights = ahead if self.schedule.running else []
        self._stored(ahead)
        return events

    def _launch(self, events: list[SampleEvent]) -> list[Flight]:
        """Start the next step of all running sequences. If that fails they are tried one by one, whose events are added."""
        flights: list[Flight] = []
        failed: list[list[SequenceState]] = []
        self.must_settle = False
        for group in self.decoding.groups(self.schedule.running):
            if there := _there(group):
                with _caught(partial(self._retreat, "a decoding step", [], [there], failed)):
                    flights.append(self.decoding.launch(there))
        self._stored(flights)
        # Outside of the handler, where the failed step holds no tensors any more.
        for group in failed:
            self._free_memory()
            self._decode_one_by_one(_there(group), events)
        return flights

    def _launch_ahead(self) -> list[Flight]:
        """Start the step after the one that is being computed; none if it needs more than the host knows now."""
        if not self.schedule.grow_ahead():
            return []
        flights: list[Flight] = []
        for group in self.decoding.groups([s for s in self.schedule.running if not s.job.failed]):
            with _caught(self._settle):
                flights.append(self.decoding.launch(group))
        return flights

    def _settle(self, error: Exception) -> None:
        log.warning("a decoding step failed and is tried again: %s", error)
        self.must_settle = True

    def _retreat(self, what: str, windows: PromptWindows, work: list[T], alone: list[T], error: Exception) -> None:
        """Take less from now on if memory ran out; otherwise `work` is to be tried alone."""
        if not (is_out_of_memory(error) and self.schedule.retreat(windows)):
            log.warning("%s failed; each sample of it is tried alone: %s", what, error)
            alone += work

    def _stored(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            self.schedule.decoded([seat.sequence for seat in flight.seats if seat.taken])

    def _decode_one_by_one(self, group: Sequence[SequenceState], events: list[SampleEvent]) -> None:
        """Compute the next token of each job in a step of its own, so that only jobs fail that cannot be computed."""
        for own in _by_job((sequence, sequence) for sequence in group):
            flights: list[Flight] = []
            with _caught(partial(self._fail, own[0].job, events)):
                flights.append(self.decoding.launch_alone(own))
            self._stored(flights)
            for flight in flights:
                events += self._append(self.decoding.collect(flight))
                for sequence in own:
                    sequence.seat = None

    def _compute_prompts(self, windows: PromptWindows) -> list[SampleEvent]:
        alone: PromptWindows = []
        with _caught(partial(self._retreat, "a pass", windows, windows, alone)):
            return self._pass(windows)
        # Outside of the handler, where the failed pass holds no tensors any more.
        self._free_memory()
        return self._one_by_one(alone)

    def _free_memory(self) -> None:
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()

    def _one_by_one(self, windows: PromptWindows) -> list[SampleEvent]:
        """Compute each job in a pass of its own, so that only jobs fail that cannot be computed."""
        events: list[SampleEvent] = []
        for own in _by_job((sequence, (sequence, window)) for sequence, window in windows):
            if own[0][0].job.failed:  # in the middle of the pass of all; its blocks are given back
                continue
            with _caught(partial(self._fail, own[0][0].job, events)):
                events += self._pass(own)
        return events

    def _fail(self, job: SampleJob, ended: list[SampleEvent], error: Exception) -> None:
        """End a job with the error that it raised; it is not raised again, which would keep the tensors of the failed pass."""
        if job.failed:
            return
        if not isinstance(error, TinsmithError):
            log.error("unexpected error in sample=%s", job.request_id, exc_info=error)
            error = TinsmithError(f"internal error: {error!r}")
        job.failed = True
        if self.failed_meanwhile is None:
            self.schedule.drop(lambda sequence: sequence.job is job)
        else:
            self.failed_meanwhile.append(job)
        ended.append(SampleFailure(job.request_id, error))

    def cancel(self, request_id: str) -> None:
        self.schedule.drop(lambda sequence: sequence.job.request_id == request_id)
        self._rest()

    def abandon(self) -> None:
        self.schedule.clear()
        self.decoding.clear()
        self.flights, self.meanwhile = [], []

    def _max_new(self, request: SampleRequest, prompt: int) -> int:
        longest = request.most_tokens(prompt, self.base.max_context, self.base.name)
        room = self.cache.total * BLOCK - prompt
        if request.params.max_tokens is None:
            longest = max(1, min(longest, room))
        if longest > max(room, int(longest == 1 and room == 0)):  # one token behind the prompt needs no place
            raise UserError(
                f"prompt length plus max_tokens is {prompt + longest} tokens, but the key/value cache holds {self.cache.total * BLOCK}; "
                "ask for fewer tokens or start the server with a larger --kv-cache-gib"
            )
        return longest

    def _pass(self, windows: PromptWindows) -> list[SampleEvent]:
        """Compute the windows in a pass over prompts, and append the tokens that follow."""
        with self._failures_kept():
            drawn = self.prompts.compute(windows, self._decode_between)
        return self._taken_meanwhile() + self._append(drawn)

    @contextmanager
    def _failures_kept(self) -> Iterator[None]:
        """Let no sequence lose its blocks while the body runs because its job fails."""
        failed: list[SampleJob] = []
        self.failed_meanwhile = failed
        try:
            yield
        finally:
            self.failed_meanwhile = None
            self.schedule.drop(lambda sequence: sequence.job in failed)

    def _append(self, drawn: Iterable[Drawn]) -> list[SampleEvent]:
        """Give each sequence its next token, and end complete ones. An error of one fails its job only."""
        events: list[SampleEvent] = []
        some_ended = False
        for sequence, token, logprob, top in drawn:
            job = sequence.job
            if job.failed:
                continue
            if isinstance(top, Exception):
                self._fail(job, events, top)
                continue
            try:  # `_caught` would take as long as all the rest of it
                sequence.append(token, logprob, top)
                if job.stream:
                    events.append(sequence.newest())
                if sequence.reason is not None:
                    some_ended = True
                    job.unfinished -= 1
                    if job.unfinished == 0:
                        events.append(job.result())
            except Exception as error:
                if isinstance(error, DeviceLostError):
                    raise
                self._fail(job, events, error)
        if some_ended:
            self.schedule.drop(lambda sequence: sequence.reason is not None)
        return events


@contextmanager
def _caught(handle: Callable[[Exception], None]) -> Iterator[None]:
    """Give `handle` the error that the body raises, but for a lost device, which is lost to all requests."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DeviceLostError):
            raise
        handle(error)


def _there(group: Sequence[SequenceState]) -> list[SequenceState]:
    """Return those that still have their blocks: what ran out of memory before may have preempted some."""
    return [sequence for sequence in group if sequence.blocks]


def _by_job(items: Iterable[tuple[SequenceState, T]]) -> list[list[T]]:
    """Group items by the job of their sequences."""
    jobs: dict[int, list[T]] = {}
    for sequence, item in items:
        jobs.setdefault(id(sequence.job), []).append(item)
    return list(jobs.values())
