"""The sequences of one sampler: which wait, whose prompts are computed, which run, and the memory that they hold.

    waiting -> filling (has its blocks; the prompt is computed, perhaps in several passes) -> running (one token a step)
    -> ended

When blocks run out, a sequence is preempted: it gives its blocks back and waits to be computed again, which is little
work if nobody needed them meanwhile.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter

from tinsmith.memory.budget import BLOCK, blocks_for
from tinsmith.memory.retries import is_out_of_memory
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.sequence import SampleJob, SequenceState
from tinsmith.sampling.local.states import StateSlots
from tinsmith.sampling.turns import Turns

_AGE = attrgetter("admitted")


class Queues:
    """The sequences of one sampler, their cache blocks, and the slots of their states."""

    def __init__(self, cache: KVCache, states: StateSlots | None) -> None:
        self.cache = cache
        self.states = states
        """None without gated delta nets."""
        self.waiting: Turns[SequenceState] = Turns()
        """The first sequence of each job that has not started, and preempted ones."""
        self.filling: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.admissions = 0

    def fill(self, sequence: SequenceState, found: list[int]) -> None:
        """Let a sequence that waits be computed, behind the blocks that were `found` of its beginning.

        If it fails, nothing has changed.
        """
        blocks = [self.cache.share(block) for block in found]
        with ExitStack() as undo:
            undo.callback(self.cache.give_back, blocks)
            blocks += self.cache.take(blocks_for(sequence.length) - len(found))
            slot = self.states.take(sequence.keys[len(found) - 1] if found else None) if self.states else -1
            undo.pop_all()
        self.waiting.take(sequence.job.session, sequence)
        sequence.blocks, sequence.slot = blocks, slot
        sequence.stored = len(found) * BLOCK
        if sequence.starts_job and not sequence.admitted:  # what it finds after it was preempted may be its own
            sequence.job.cached_tokens = sequence.stored
        self.admissions += 1
        sequence.admitted = self.admissions
        self.filling.append(sequence)

    def run(self, sequence: SequenceState) -> None:
        """Let a sequence run whose prompt is computed. One that never waited runs beside the first of its job."""
        if sequence in self.filling:
            self.filling.remove(sequence)
        insort(self.running, sequence, key=_AGE)

    def preempt(self, sequence: SequenceState) -> None:
        (self.filling if sequence in self.filling else self.running).remove(sequence)
        if sequence.job.wants_routes and sequence.tokens:
            self._keep_routes(sequence)
        self._release(sequence)
        self.waiting.put_back(sequence.job.session, sequence)

    def _keep_routes(self, sequence: SequenceState) -> None:
        """Keep the experts that gave its tokens: rounding may send what is computed again to others.

        These are recorded where memory has run out, which may be why it is preempted.
        """
        try:
            self.cache.fetch_routes(sequence, min(sequence.stored, sequence.length - 1), sequence.blocks)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def drop(self, gone: Callable[[SequenceState], bool]) -> None:
        """Forget sequences, wherever they are; their freed blocks stay in the cache for others that begin alike."""
        for sequence in (*self.running, *self.filling):
            if gone(sequence):
                self._release(sequence)
        self.running = [s for s in self.running if not gone(s)]
        self.filling = [s for s in self.filling if not gone(s)]
        self.waiting.drop(gone)

    def restart(self, chosen: Callable[[SequenceState], bool]) -> list[SampleJob]:
        """Preempt sequences whose weights are about to be replaced, to compute them from their first token.

        Returns their jobs.
        """
        for group in (self.filling, self.running):
            for sequence in [s for s in reversed(group) if chosen(s)]:
                self.preempt(sequence)
        restarted = [sequence for sequence in self.waiting if chosen(sequence)]
        for sequence in restarted:
            sequence.keys = []
            sequence.admitted = 0
        return list({id(sequence.job): sequence.job for sequence in restarted}.values())

    def clear(self) -> None:
        """Forget every sequence, what the cache holds, and every state."""
        self.waiting.clear()
        self.filling.clear()
        self.running.clear()
        self.cache.clear()
        if self.states:
            self.states.clear()

    def youngest_of_largest(self) -> SequenceState:
        """Return the youngest sequence of the session that holds most; on a tie, the youngest of these sessions."""
        held = self.held()
        most = max(held.values())
        return next(s for s in (*reversed(self.filling), *reversed(self.running)) if held[s.job.session] == most)

    def held(self) -> Counter[str]:
        return Counter(s.job.session for s in (*self.running, *self.filling))

    def remember(self, sequence: SequenceState) -> None:
        full = min(sequence.stored, sequence.length) // BLOCK
        self.cache.remember(sequence.keys_of(full), sequence.blocks[:full])

    def _release(self, sequence: SequenceState) -> None:
        self.remember(sequence)
        self.give_back(sequence.blocks, sequence.slot)
        sequence.blocks, sequence.slot, sequence.stored = [], -1, 0
        sequence.saves, sequence.newest_save = set(), None  # what it saved stays
        sequence.seat = None

    def give_back(self, blocks: list[int], slot: int) -> None:
        self.cache.give_back(blocks)
        if self.states:
            self.states.give_back(slot)
