"""What becomes of the sequences of a sampler: they get their tokens and end, or what they belong to fails alone."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tinsmith.errors import DeviceLostError, Reported, TinsmithError
from tinsmith.memory.retries import is_out_of_memory
from tinsmith.sampling.local.decoding import Drawn
from tinsmith.sampling.local.schedule import PromptWindows, Schedule
from tinsmith.sampling.local.sequence import SampleJob, SequenceState
from tinsmith.sampling.sampler import SampleEvent, SampleFailure

log = logging.getLogger(__name__)

T = TypeVar("T")


class SequenceOutcomes:
    """Gives sequences their tokens, and ends jobs."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.failed_meanwhile: list[SampleJob] | None = None
        """Jobs that failed during a pass over prompts, which computes theirs too: they are dropped after it."""

    def append(self, drawn: Iterable[Drawn]) -> list[SampleEvent]:
        """Give each sequence its next token, and end complete ones. An error of one fails its job only."""
        events: list[SampleEvent] = []
        some_ended = False
        for sequence, token, logprob, top in drawn:
            job = sequence.job
            if job.failed:
                continue
            if isinstance(top, Exception):
                self.fail(job, events, top)
                continue
            try:  # `caught` would take as long as all the rest of it
                sequence.append(token, logprob, top)
                if job.stream:
                    events.append(sequence.newest())
                if sequence.reason is not None:
                    some_ended = True
                    self._fetch_routes(sequence)
                    job.unfinished -= 1
                    if job.unfinished == 0:
                        events.append(job.result())
            except Exception as error:
                if isinstance(error, DeviceLostError):
                    raise
                self.fail(job, events, error)
        if some_ended:
            self.schedule.queues.drop(lambda sequence: sequence.reason is not None)
        return events

    def _fetch_routes(self, sequence: SequenceState) -> None:
        """Fetch the experts of an ended sequence, before its blocks are given back.

        One that ends with its first token may have had no place of its own: it has the prompt of the first of its job.
        """
        job = sequence.job
        if job.wants_routes and len(sequence.starts) == 1:
            blocks = sequence.blocks or job.sequences[0].blocks
            self.schedule.cache.fetch_routes(sequence, sequence.length - 1, blocks)

    def fail(self, job: SampleJob, events: list[SampleEvent], error: Exception) -> None:
        """End a job with the error that it raised; raising it again would keep the tensors of the failed pass."""
        if job.failed:
            return
        if not isinstance(error, TinsmithError):
            log.error("unexpected error in sample=%s", job.request_id, exc_info=error)
            error = TinsmithError(f"internal error: {error!r}")
        job.failed = True
        if self.failed_meanwhile is None:
            self.schedule.queues.drop(lambda sequence: sequence.job is job)
        else:
            self.failed_meanwhile.append(job)
        events.append(SampleFailure(job.request_id, error))

    @contextmanager
    def failures_kept(self) -> Iterator[None]:
        """Let no sequence lose its blocks while the body runs because its job fails."""
        failed: list[SampleJob] = []
        self.failed_meanwhile = failed
        try:
            yield
        finally:
            self.failed_meanwhile = None
            self.schedule.queues.drop(lambda sequence: sequence.job in failed)

    def retreat(self, what: str, windows: PromptWindows, work: list[T], alone: list[T], error: Exception) -> None:
        """Take less from now on if memory ran out; otherwise `work` is to be tried alone."""
        if not (is_out_of_memory(error) and self.schedule.retreat(windows)):
            log.warning("%s failed; each sample of it is tried alone: %s", what, error)
            alone += work


def caught(handle: Callable[[Exception], None]) -> Reported:
    """Give `handle` the error that the body raises, but for a lost device, which is lost to all requests.

    What is tried again comes behind the body: in `handle` the error still holds the tensors of the failed pass.
    """
    return Reported(Exception, handle, (DeviceLostError,))


def by_job(items: Iterable[tuple[SequenceState, T]]) -> list[list[T]]:
    """Group items by the job of their sequences."""
    jobs: dict[int, list[T]] = {}
    for sequence, item in items:
        jobs.setdefault(id(sequence.job), []).append(item)
    return list(jobs.values())
