"""Decoding steps, each of one token per running sequence, launched before the former's tokens are read."""

import logging
from collections.abc import Sequence
from functools import partial

import torch

from tinsmith.sampling.local.decoding import Decoding, Flight
from tinsmith.sampling.local.outcomes import SequenceOutcomes, by_job, caught
from tinsmith.sampling.local.schedule import Schedule
from tinsmith.sampling.local.sequence import SequenceState
from tinsmith.sampling.sampler import SampleEvent

log = logging.getLogger(__name__)


class Lookahead:
    """The steps of one sampler that are under way."""

    def __init__(self, schedule: Schedule, decoding: Decoding, outcomes: SequenceOutcomes, runs_ahead: bool) -> None:
        """`runs_ahead` says whether a step is launched before the tokens of the one before are read.

        It saves nothing on a CPU.
        """
        self.schedule = schedule
        self.decoding = decoding
        self.outcomes = outcomes
        self.runs_ahead = runs_ahead
        self.flights: list[Flight] = []
        self.must_settle = False
        """A step launched ahead has failed: what is under way is read before it is tried again."""

    def advance(self) -> list[SampleEvent]:
        """Take the tokens of the step that is under way; if none is, of one that is launched now."""
        events: list[SampleEvent] = []
        flights = self.flights or self._launch(events)
        return events + self._read(flights)

    def read(self) -> list[SampleEvent]:
        """Take the tokens of the step that is under way, if one is."""
        return self._read(self.flights) if self.flights else []

    def rest(self) -> None:
        """Hold nothing if no sequence runs."""
        if not self.schedule.queues.running:
            self.flights = []
            self.decoding.rest()

    def clear(self) -> None:
        self.flights = []
        self.decoding.clear()

    def _read(self, flights: list[Flight]) -> list[SampleEvent]:
        """Take the tokens of these steps. The next step is launched before they are read, where that helps."""
        events: list[SampleEvent] = []
        self.flights = []
        ahead = self._launch_ahead() if flights and self.runs_ahead and not self.must_settle else []
        for flight in flights:
            events += self.outcomes.append(self.decoding.collect(flight))
        self.flights = ahead if self.schedule.queues.running else []
        self._stored(ahead)
        return events

    def _launch(self, events: list[SampleEvent]) -> list[Flight]:
        """Start the next step of all running sequences.

        If that fails they are tried one by one, whose events are added.
        """
        flights: list[Flight] = []
        failed: list[list[SequenceState]] = []
        self.must_settle = False
        for group in self.decoding.groups(self.schedule.queues.running):
            if there := _there(group):
                with caught(partial(self.outcomes.retreat, "a decoding step", [], [there], failed)):
                    flights.append(self.decoding.launch(there))
        self._stored(flights)
        for group in failed:
            torch.cuda.empty_cache()
            self._one_by_one(_there(group), events)
        return flights

    def _launch_ahead(self) -> list[Flight]:
        """Start the step after the one that is being computed; none if it needs more than the host knows now.

        A shape needs the newest token.
        """
        if any(s.shape is not None for s in self.schedule.queues.running) or not self.schedule.grow_ahead():
            return []
        flights: list[Flight] = []
        for group in self.decoding.groups([s for s in self.schedule.queues.running if not s.job.failed]):
            with caught(self._settle):
                flights.append(self.decoding.launch(group))
        return flights

    def _settle(self, error: Exception) -> None:
        log.warning("a decoding step failed and is tried again: %s", error)
        self.must_settle = True

    def _one_by_one(self, group: Sequence[SequenceState], events: list[SampleEvent]) -> None:
        """Compute the next token of each job in a step of its own, so that only jobs fail that cannot be computed."""
        for own in by_job((sequence, sequence) for sequence in group):
            flights: list[Flight] = []
            with caught(partial(self.outcomes.fail, own[0].job, events)):
                flights.append(self.decoding.launch_alone(own))
            self._stored(flights)
            for flight in flights:
                events += self.outcomes.append(self.decoding.collect(flight))
                for sequence in own:
                    sequence.seat = None

    def _stored(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            self.schedule.decoded([seat.sequence for seat in flight.seats if seat.taken])


def _there(group: Sequence[SequenceState]) -> list[SequenceState]:
    """Return those that still have their blocks: what ran out of memory before may have preempted some."""
    return [sequence for sequence in group if sequence.blocks]
