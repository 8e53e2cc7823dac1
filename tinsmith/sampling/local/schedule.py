"""Decides which sequences wait, which prompts are being computed, and which sequences run.

    waiting -> filling (has its blocks; the prompt is computed, perhaps in several passes) -> running (one token a step) -> ended

When blocks run out, a sequence is preempted: it gives its blocks back and waits to be computed again, which is little work if nobody needed
them meanwhile. In a model with gated delta nets a sequence that is not waiting has a slot for its state too; both are taken and given back
together.

Sessions take turns. A session of which nothing is computed is admitted at once, for which the session with most sequences gives up its
youngest; otherwise a short sample would wait for a long one of another client. A session whose prompt finds no room is overtaken by some
sequences of others; then nothing else is admitted until it fits.
"""

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter

from tinsmith.memory.cache_sizes import BLOCK, blocks_for
from tinsmith.sampling.local.cached_attention import Window
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.prefix_cache import PrefixCache
from tinsmith.sampling.local.sequence import SampleJob, SequenceState
from tinsmith.sampling.local.states import StateSlots
from tinsmith.sampling.turns import Turns

log = logging.getLogger(__name__)


_AGE = attrgetter("admitted")
PromptWindows = list[tuple[SequenceState, Window]]
"""Pieces of prompts, each with its sequence."""
_OVERTAKES = 32
"""Sequences of other sessions that are admitted before a session that was first but finds no room."""


@dataclass(frozen=True, eq=False)
class Fork:
    """A sequence that is about to run beside the first of its job. Its blocks are those of the prompt, the last one copied."""

    first: SequenceState
    sequence: SequenceState
    blocks: list[int]
    slot: int
    """Slot for its state; -1 without gated delta nets."""


class Schedule:
    """The sequences of one sampler, their cache blocks, and the slots of their states."""

    def __init__(self, cache: KVCache, states: StateSlots | None, max_running: int, prefill_tokens: int, beside: int) -> None:
        self.cache = cache
        self.states = states
        """None without gated delta nets."""
        self.prefix_cache = PrefixCache(cache, states)
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        """Most prompt tokens in one pass. It falls when memory runs out, as does `max_running`."""
        self.beside = beside
        """Most prompt tokens in a pass while sequences run: their next tokens wait for it."""
        self.waiting: Turns[SequenceState] = Turns()
        """The first sequence of each job that has not started, and preempted ones."""
        self.filling: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.admissions = 0
        self.blocked: SequenceState | None = None
        """The next sequence of the first session of which nothing is computed and which found no room."""
        self.overtaken = 0
        """Sequences that were admitted before it."""

    def admit(self) -> None:
        """Admit what waits and fits. Running sequences may be preempted for sessions of which nothing is computed."""
        if self.waiting:
            self._admit()
            self._admit_absent_sessions()

    def grow(self) -> None:
        """Give every running sequence a block for the next token that is computed; if none is left, preempt one."""
        for sequence in list(self.running):
            while sequence.blocks and len(sequence.blocks) * BLOCK <= sequence.stored:
                if self.cache.available:
                    sequence.blocks += self.cache.take(1)
                else:
                    self._preempt(self._youngest_of_largest())

    def grow_ahead(self) -> bool:
        """Give every running sequence a block for the token after the one that the device computes now.

        Returns False if that needs preempting. A sequence whose last token is being computed needs none.
        """
        needing = [s for s in self.running if len(s.blocks) * BLOCK <= s.stored and not s.ends_next]
        if len(needing) > self.cache.available:
            return False
        for sequence in needing:
            sequence.blocks += self.cache.take(1)
        return True

    def prompt_windows(self) -> PromptWindows:
        """Choose pieces of the prompts for one pass. Sessions share it equally; what one does not need goes to the others."""
        windows = []
        sessions: dict[str, list[SequenceState]] = {}
        for sequence in self.filling:
            sessions.setdefault(sequence.job.session, []).append(sequence)
        budget = min(self.prefill_tokens, self.beside) if self.running else self.prefill_tokens
        modest_first = sorted(sessions.values(), key=lambda group: sum(_cost(s, s.length) for s in group))
        for behind, group in zip(range(len(modest_first), 0, -1), modest_first, strict=True):
            share = -(-budget // behind)
            for sequence in group:
                if share > 0:
                    end = self.prefix_cache.end_of_piece(sequence, max(1, share // sequence.job.cost_of_prompt_token))
                    share -= _cost(sequence, end)
                    budget -= _cost(sequence, end)
                    windows.append((sequence, _window(sequence, end)))
        return windows

    def decoded(self, sequences: Sequence[SequenceState]) -> None:
        """Note that the device has been told to compute the newest token of these sequences, all of whose tokens are known."""
        if self.states:
            # Saved states of sequences that run are not evicted for those of others: copies for nothing, a tenth of the time of 256 rows.
            kept = sum(sequence.newest_save in self.states.saved for sequence in self.running)
            for sequence in sequences:
                before = sequence.newest_save in self.states.saved
                self.prefix_cache.save_state(sequence, may_evict=kept < self.states.available and not self.waiting)
                kept += (sequence.newest_save in self.states.saved) - before

    def forks(self, windows: PromptWindows) -> list[Fork]:
        """Return the other samples of jobs whose prompt the pass completed, with their blocks, as many as fit; the rest will wait.

        This is the only step after a pass that can fail, and it leaves no trace if it does.
        """
        for sequence, window in windows:
            sequence.keys_of(window.end // BLOCK)
        starting = [s for s, window in windows if s.starts_job and window.end == s.length]
        places = self.max_running - len(self.running) - len(self.filling)  # those that start now are among the latter
        forks: list[Fork] = []
        with ExitStack() as undo:
            for first in starting:
                full, rest = divmod(first.length, BLOCK)
                for other in first.job.sequences[1:]:
                    if places <= 0 or (rest and not self.cache.available) or (self.states and not self.states.available):
                        break
                    fork = Fork(first, other, [], self.states.take(None) if self.states else -1)
                    undo.callback(self._give_back, fork.blocks, fork.slot)
                    forks.append(fork)
                    copied = [self.cache.copy(first.blocks[full])] if rest else []
                    fork.blocks.extend([self.cache.share(block) for block in first.blocks[:full]] + copied)
                    places -= 1
            undo.pop_all()
        return forks

    def computed(self, windows: PromptWindows, forks: Sequence[Fork]) -> None:
        """Note that a pass has computed pieces of prompts and its states are committed: prompts that begin alike find them now.

        A prompt that is complete runs, with its forks.
        """
        forked = {id(fork.sequence) for fork in forks}
        for sequence, window in windows:
            sequence.stored = window.end
            self.prefix_cache.save_state(sequence, may_evict=not self.waiting)
            self._remember(sequence)
            if window.end == sequence.length:
                self.filling.remove(sequence)
                insort(self.running, sequence, key=_AGE)
                if sequence.starts_job:
                    for other in reversed(sequence.job.sequences[1:]):
                        if id(other) not in forked:
                            self.waiting.put_back(other.job.session, other)
        for fork in forks:
            if self.states:
                self.states.copy(fork.first.slot, fork.slot)
            fork.sequence.blocks, fork.sequence.slot, fork.sequence.stored = fork.blocks, fork.slot, fork.first.stored
            fork.sequence.admitted = fork.first.admitted
            insort(self.running, fork.sequence, key=_AGE)

    def drop(self, gone: Callable[[SequenceState], bool]) -> None:
        """Forget sequences, wherever they are, and free their blocks, which stay in the cache for others that begin alike."""
        for sequence in (*self.running, *self.filling):
            if gone(sequence):
                self._release(sequence)
        self.running = [s for s in self.running if not gone(s)]
        self.filling = [s for s in self.filling if not gone(s)]
        self.waiting.drop(gone)

    def restart(self, chosen: Callable[[SequenceState], bool]) -> list[SampleJob]:
        """Preempt sequences whose weights are about to be replaced, to compute them from their first token. Returns their jobs."""
        for group in (self.filling, self.running):
            for sequence in [s for s in reversed(group) if chosen(s)]:
                self._preempt(sequence)
        restarted = [sequence for sequence in self.waiting if chosen(sequence)]
        for sequence in restarted:
            sequence.keys = []
            sequence.admitted = 0
        return list({id(sequence.job): sequence.job for sequence in restarted}.values())

    def retreat(self, windows: PromptWindows) -> bool:
        """Take half as much from now on: a pass of these pieces, or a step of the running sequences, ran out of memory.

        Returns False if it cannot be smaller.
        """
        tokens = sum(len(window) for _, window in windows)
        if tokens + len(self.running) < 2:
            return False
        if tokens >= 2:
            self.prefill_tokens = max(1, sum(_cost(sequence, window.end) for sequence, window in windows) // 2)
        else:
            if len(self.running) == 1:  # and one token of a prompt, which then waits until the running sequence has ended
                for sequence in list(reversed(self.filling)):
                    self._preempt(sequence)
            self.max_running = max(1, len(self.running) // 2)
            while len(self.running) > self.max_running:
                self._preempt(self.running[-1])
        log.warning("out of memory: passes take %d prompt tokens and %d sequences now", self.prefill_tokens, self.max_running)
        return True

    def clear(self) -> None:
        """Forget every sequence, what the cache holds, and every state."""
        self.waiting.clear()
        self.filling.clear()
        self.running.clear()
        self.cache.clear()
        if self.states:
            self.states.clear()

    def _youngest_of_largest(self) -> SequenceState:
        """Return the youngest sequence of the session that holds most; of several such sessions, the youngest of all."""
        held = self._held()
        most = max(held.values())
        return next(s for s in (*reversed(self.filling), *reversed(self.running)) if held[s.job.session] == most)

    def _held(self) -> Counter[str]:
        return Counter(s.job.session for s in (*self.running, *self.filling))

    def _preempt(self, sequence: SequenceState) -> None:
        (self.filling if sequence in self.filling else self.running).remove(sequence)
        self._release(sequence)
        self.waiting.put_back(sequence.job.session, sequence)

    def _remember(self, sequence: SequenceState) -> None:
        full = min(sequence.stored, sequence.length) // BLOCK
        self.cache.remember(sequence.keys_of(full), sequence.blocks[:full])

    def _release(self, sequence: SequenceState) -> None:
        self._remember(sequence)
        self._give_back(sequence.blocks, sequence.slot)
        sequence.blocks, sequence.slot, sequence.stored = [], -1, 0
        sequence.saves, sequence.newest_save = set(), None  # what it saved stays
        sequence.seat = None

    def _give_back(self, blocks: list[int], slot: int) -> None:
        self.cache.give_back(blocks)
        if self.states:
            self.states.give_back(slot)

    def _admit(self) -> None:
        """Admit waiting sequences, in turn, as long as there are prompt tokens for the next pass, places to run, and cache blocks.

        A job that is larger than all places or the cache waits until it is alone, and starts what fits. A sequence that begins like a
        prompt that is being computed waits for its blocks.
        """
        tokens = sum(s.length - s.stored for s in self.filling)
        places = len(self.running) + sum(1 + s.forks for s in self.filling)
        promised = sum(_later_blocks(s) for s in self.filling)
        coming = self.prefix_cache.coming(self.filling)
        for sequence in self.waiting:
            if tokens >= self.prefill_tokens:
                return
            found = self.prefix_cache.found(sequence, coming)
            if found is None:
                continue
            places += 1 + sequence.forks
            promised += _later_blocks(sequence)
            if (places > self.max_running or self._taken(sequence, found) + promised > self.cache.available) and (
                self.running or self.filling
            ):
                return
            self._fill(sequence, found)
            tokens += sequence.length - sequence.stored
            coming.update(self.prefix_cache.coming([sequence]))

    def _admit_absent_sessions(self) -> None:
        """Admit one sequence of each session that waits and of which nothing is computed, and preempt others for it if need be."""
        held = self._held()
        absent = [session for session in self.waiting.sessions if not held[session]]
        coming = self.prefix_cache.coming(self.filling) if absent else {}
        blocked: SequenceState | None = None
        for session in absent:
            sequence = self.waiting.first(session)
            found = self.prefix_cache.found(sequence, coming)
            if found is None:
                continue
            if self._make_room(sequence, found, held):
                self._fill(sequence, self.prefix_cache.known(sequence))
                held[session] = 1
                self.overtaken += blocked is not None
            elif blocked is None:
                blocked = sequence
                self.overtaken = self.overtaken if blocked is self.blocked else 0
            if blocked is not None and self.overtaken >= _OVERTAKES:
                break
        self.blocked = blocked

    def _make_room(self, sequence: SequenceState, found: list[int], held: Counter[str]) -> bool:
        """Preempt others until the sequence fits, but none that is the last of its session; returns whether it fits."""
        spare = sum(len(s.blocks) for s in (*self.running, *self.filling) if held[s.job.session] > 1)
        if self._needed(sequence, found) > self.cache.available + spare:
            return False
        while len(self.running) + len(self.filling) >= self.max_running or self._needed(sequence, found) > self.cache.available:
            if held.total() == 0 or max(held.values()) < 2:
                return False
            youngest = self._youngest_of_largest()
            held[youngest.job.session] -= 1
            self._preempt(youngest)
            found = self.prefix_cache.known(sequence)
        return True

    def _taken(self, sequence: SequenceState, found: list[int]) -> int:
        """Count the available blocks that its tokens so far take."""
        return blocks_for(sequence.length) - sum(1 for block in found if self.cache.users[block])

    def _needed(self, sequence: SequenceState, found: list[int]) -> int:
        """Count the available blocks that it needs, with its next token and those of the prompts being computed."""
        return self._taken(sequence, found) + sum(_next_block(s) for s in (sequence, *self.filling))

    def _fill(self, sequence: SequenceState, found: list[int]) -> None:
        saves = self.prefix_cache.worth_saving(sequence, len(found))
        blocks = [self.cache.share(block) for block in found]
        with ExitStack() as undo:
            undo.callback(self.cache.give_back, blocks)
            blocks += self.cache.take(blocks_for(sequence.length) - len(found))
            slot = self.states.take(sequence.keys[len(found) - 1] if found else None) if self.states else -1
            undo.pop_all()
        self.waiting.take(sequence.job.session, sequence)
        sequence.blocks, sequence.slot, sequence.saves = blocks, slot, saves
        sequence.stored = len(found) * BLOCK
        if sequence.starts_job and not sequence.admitted:  # what it finds after it was preempted may be its own
            sequence.job.cached_tokens = sequence.stored
        self.admissions += 1
        sequence.admitted = self.admissions
        self.filling.append(sequence)


def _cost(sequence: SequenceState, end: int) -> int:
    """Return the cost of computing the sequence up to `end`, in prompt tokens of which nothing is asked."""
    return (end - sequence.stored) * sequence.job.cost_of_prompt_token


def _window(sequence: SequenceState, end: int) -> Window:
    if sequence.stored >= end:
        # The logits would be taken from the row before its first, which belongs to another sequence.
        raise AssertionError(f"sample={sequence.job.request_id}: all {end} tokens are computed already, nothing follows from them")
    return Window(sequence.blocks[: blocks_for(end)], sequence.stored, end, sequence.slot)


def _later_blocks(sequence: SequenceState) -> int:
    """Count the blocks that the sequence and its forks take as soon as they start."""
    return _next_block(sequence) + sequence.forks


def _next_block(sequence: SequenceState) -> int:
    """Return 1 if its next token takes a new block."""
    return blocks_for(sequence.length + 1) - blocks_for(sequence.length)
