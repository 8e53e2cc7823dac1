"""Decides which of the sequences that wait are computed.

Sessions take turns. A session of which nothing is computed is admitted at once, for which the session with most sequences gives up its
youngest; otherwise a short sample would wait for a long one of another client. A session whose prompt finds no room is overtaken by some
sequences of others; then nothing else is admitted until it fits.
"""

from collections import Counter

from tinsmith.memory.cache_sizes import blocks_for
from tinsmith.sampling.local.prefix_cache import PrefixCache
from tinsmith.sampling.local.queues import Queues
from tinsmith.sampling.local.sequence import SequenceState

_OVERTAKES = 32
"""Sequences of other sessions that are admitted before a session that was first but finds no room."""


class Admission:
    """Admits the sequences of one sampler."""

    def __init__(self, queues: Queues, prefix_cache: PrefixCache) -> None:
        self.queues = queues
        self.cache = queues.cache
        self.prefix_cache = prefix_cache
        self.blocked: SequenceState | None = None
        """The next sequence of the first session of which nothing is computed and which found no room."""
        self.overtaken = 0
        """Sequences that were admitted before it."""

    def admit(self, max_running: int, prefill_tokens: int) -> None:
        """Admit what waits and fits. Running sequences may be preempted for sessions of which nothing is computed."""
        if self.queues.waiting:
            self._admit(max_running, prefill_tokens)
            self._admit_absent_sessions(max_running)

    def _admit(self, max_running: int, prefill_tokens: int) -> None:
        """Admit waiting sequences, in turn, as long as there are prompt tokens for the next pass, places to run, and cache blocks.

        A job that is larger than all places or the cache waits until it is alone, and starts what fits. A sequence that begins like a
        prompt that is being computed waits for its blocks.
        """
        tokens = sum(s.length - s.stored for s in self.queues.filling)
        places = len(self.queues.running) + sum(1 + s.forks for s in self.queues.filling)
        promised = sum(_later_blocks(s) for s in self.queues.filling)
        coming = self.prefix_cache.coming(self.queues.filling)
        for sequence in self.queues.waiting:
            if tokens >= prefill_tokens:
                return
            found = self.prefix_cache.found(sequence, coming)
            if found is None:
                continue
            places += 1 + sequence.forks
            promised += _later_blocks(sequence)
            if (places > max_running or self._taken(sequence, found) + promised > self.cache.available) and (
                self.queues.running or self.queues.filling
            ):
                return
            self._fill(sequence, found)
            tokens += sequence.length - sequence.stored
            coming.update(self.prefix_cache.coming([sequence]))

    def _admit_absent_sessions(self, max_running: int) -> None:
        """Admit one sequence of each session that waits and of which nothing is computed, and preempt others for it if need be."""
        held = self.queues.held()
        absent = [session for session in self.queues.waiting.sessions if not held[session]]
        coming = self.prefix_cache.coming(self.queues.filling) if absent else {}
        blocked: SequenceState | None = None
        for session in absent:
            sequence = self.queues.waiting.first(session)
            found = self.prefix_cache.found(sequence, coming)
            if found is None:
                continue
            if self._make_room(sequence, found, held, max_running):
                self._fill(sequence, self.prefix_cache.known(sequence))
                held[session] = 1
                self.overtaken += blocked is not None
            elif blocked is None:
                blocked = sequence
                self.overtaken = self.overtaken if blocked is self.blocked else 0
            if blocked is not None and self.overtaken >= _OVERTAKES:
                break
        self.blocked = blocked

    def _make_room(self, sequence: SequenceState, found: list[int], held: Counter[str], max_running: int) -> bool:
        """Preempt others until the sequence fits, but none that is the last of its session; returns whether it fits."""
        spare = sum(len(s.blocks) for s in (*self.queues.running, *self.queues.filling) if held[s.job.session] > 1)
        if self._needed(sequence, found) > self.cache.available + spare:
            return False
        while len(self.queues.running) + len(self.queues.filling) >= max_running or self._needed(sequence, found) > self.cache.available:
            if held.total() == 0 or max(held.values()) < 2:
                return False
            youngest = self.queues.youngest_of_largest()
            held[youngest.job.session] -= 1
            self.queues.preempt(youngest)
            found = self.prefix_cache.known(sequence)
        return True

    def _taken(self, sequence: SequenceState, found: list[int]) -> int:
        """Count the available blocks that its tokens so far take."""
        return blocks_for(sequence.length) - sum(1 for block in found if self.cache.users[block])

    def _needed(self, sequence: SequenceState, found: list[int]) -> int:
        """Count the available blocks that it needs, with its next token and those of the prompts being computed."""
        return self._taken(sequence, found) + sum(_next_block(s) for s in (sequence, *self.queues.filling))

    def _fill(self, sequence: SequenceState, found: list[int]) -> None:
        saves = self.prefix_cache.worth_saving(sequence, len(found))
        self.queues.fill(sequence, found)
        sequence.saves = saves


def _later_blocks(sequence: SequenceState) -> int:
    """Count the blocks that the sequence and its forks take as soon as they start."""
    return _next_block(sequence) + sequence.forks


def _next_block(sequence: SequenceState) -> int:
    """Return 1 if its next token takes a new block."""
    return blocks_for(sequence.length + 1) - blocks_for(sequence.length)
