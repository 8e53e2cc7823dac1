"""Decides what is computed next: who is admitted, which pieces of prompts, and less of both after memory ran out."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tinsmith.memory.budget import BLOCK, blocks_for
from tinsmith.sampling.local.cached_attention import Window
from tinsmith.sampling.local.kv_cache import PrefixCache
from tinsmith.sampling.local.queues import Queues
from tinsmith.sampling.local.sequence import SequenceState

log = logging.getLogger(__name__)

# Decides which of the sequences that wait are computed.
#
# Sessions take turns. A session of which nothing is computed is admitted at once, for which the session with most
# sequences gives up its youngest; otherwise a short sample would wait for a long one of another client. A session whose
# prompt finds no room is overtaken by some sequences of others; then nothing else is admitted until it fits.

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
        """Admit waiting sequences in turn while there are prompt tokens for the next pass, places, and cache blocks.

        A job that is larger than all places or the cache waits until it is alone, and starts what fits. A sequence that
        begins like a prompt that is being computed waits for its blocks.
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
        """Admit one sequence of each waiting session of which nothing is computed, preempting others if need be."""
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
        while (
            len(self.queues.running) + len(self.queues.filling) >= max_running
            or self._needed(sequence, found) > self.cache.available
        ):
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


# Decides about those that are admitted: whose prompts are computed next, who grows, and who makes room.

PromptWindows = list[tuple[SequenceState, Window]]
"""Pieces of prompts, each with its sequence."""


@dataclass(frozen=True, eq=False)
class Fork:
    """A sequence that is about to run beside the first of its job.

    Its blocks are those of the prompt, the last one copied.
    """

    first: SequenceState
    sequence: SequenceState
    blocks: list[int]
    slot: int
    """Slot for its state; -1 without gated delta nets."""


class Schedule:
    """The decisions of one sampler."""

    def __init__(self, queues: Queues, max_running: int, prefill_tokens: int, beside: int) -> None:
        self.queues = queues
        self.cache = queues.cache
        self.states = queues.states
        self.prefix_cache = PrefixCache(self.cache, self.states)
        self.admission = Admission(queues, self.prefix_cache)
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        """Most prompt tokens in one pass. It falls when memory runs out, as does `max_running`."""
        self.beside = beside
        """Most prompt tokens in a pass while sequences run: their next tokens wait for it."""

    def admit(self) -> None:
        self.admission.admit(self.max_running, self.prefill_tokens)

    def grow(self) -> None:
        """Give every running sequence a block for the next token that is computed; if none is left, preempt one."""
        for sequence in list(self.queues.running):
            while sequence.blocks and len(sequence.blocks) * BLOCK <= sequence.stored:
                if self.cache.available:
                    sequence.blocks += self.cache.take(1)
                else:
                    self.queues.preempt(self.queues.youngest_of_largest())

    def grow_ahead(self) -> bool:
        """Give every running sequence a block for the token after the one that the device computes now.

        Returns False if that needs preempting. A sequence whose last token is being computed needs none.
        """
        needing = [s for s in self.queues.running if len(s.blocks) * BLOCK <= s.stored and not s.ends_next]
        if len(needing) > self.cache.available:
            return False
        for sequence in needing:
            sequence.blocks += self.cache.take(1)
        return True

    def prompt_windows(self) -> PromptWindows:
        """Choose pieces of the prompts for one pass.

        Sessions share it equally; what one does not need goes to the others.
        """
        windows = []
        sessions: dict[str, list[SequenceState]] = {}
        for sequence in self.queues.filling:
            sessions.setdefault(sequence.job.session, []).append(sequence)
        budget = min(self.prefill_tokens, self.beside) if self.queues.running else self.prefill_tokens
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
        """Note that the device was told to compute these sequences' newest token; all their tokens are known."""
        if self.states:
            # Saved states of sequences that run are not evicted for those of others: copies for nothing, a tenth of the
            # time of 256 rows.
            kept = sum(sequence.newest_save in self.states.saved for sequence in self.queues.running)
            for sequence in sequences:
                before = sequence.newest_save in self.states.saved
                self.prefix_cache.save_state(
                    sequence, may_evict=kept < self.states.available and not self.queues.waiting
                )
                kept += (sequence.newest_save in self.states.saved) - before

    def forks(self, windows: PromptWindows) -> list[Fork]:
        """Return as many other samples as fit, with their blocks, of jobs whose prompt the pass completed.

        The rest will wait. This is the only step after a pass that can fail, and it leaves no trace if it does.
        """
        for sequence, window in windows:
            sequence.keys_of(window.end // BLOCK)
        starting = [s for s, window in windows if s.starts_job and window.end == s.length]
        # Those that start now are among the latter
        places = self.max_running - len(self.queues.running) - len(self.queues.filling)
        forks: list[Fork] = []
        with ExitStack() as undo:
            for first in starting:
                full, rest = divmod(first.length, BLOCK)
                for other in first.job.sequences[1:]:
                    if (
                        places <= 0
                        or (rest and not self.cache.available)
                        or (self.states and not self.states.available)
                    ):
                        break
                    fork = Fork(first, other, [], self.states.take(None) if self.states else -1)
                    undo.callback(self.queues.give_back, fork.blocks, fork.slot)
                    forks.append(fork)
                    copied = [self.cache.copy(first.blocks[full])] if rest else []
                    fork.blocks.extend([self.cache.share(block) for block in first.blocks[:full]] + copied)
                    places -= 1
            undo.pop_all()
        return forks

    def computed(self, windows: PromptWindows, forks: Sequence[Fork]) -> None:
        """Note the pieces that a pass computed, now that its states are committed; prompts that begin alike find them.

        A prompt that is complete runs, with its forks.
        """
        forked = {id(fork.sequence) for fork in forks}
        for sequence, window in windows:
            sequence.stored = window.end
            self.prefix_cache.save_state(sequence, may_evict=not self.queues.waiting)
            self.queues.remember(sequence)
            if window.end == sequence.length:
                self.queues.run(sequence)
                if sequence.starts_job:
                    for other in reversed(sequence.job.sequences[1:]):
                        if id(other) not in forked:
                            self.queues.waiting.put_back(other.job.session, other)
        for fork in forks:
            if self.states:
                self.states.copy(fork.first.slot, fork.slot)
            fork.sequence.blocks, fork.sequence.slot, fork.sequence.stored = fork.blocks, fork.slot, fork.first.stored
            fork.sequence.admitted = fork.first.admitted
            self.queues.run(fork.sequence)

    def retreat(self, windows: PromptWindows) -> bool:
        """Take half as much from now on: a pass of these pieces, or a step of the running sequences, ran out of memory.

        Returns False if it cannot be smaller.
        """
        tokens = sum(len(window) for _, window in windows)
        if tokens + len(self.queues.running) < 2:
            return False
        if tokens >= 2:
            self.prefill_tokens = max(1, sum(_cost(sequence, window.end) for sequence, window in windows) // 2)
        else:
            # And one token of a prompt, which then waits until the running sequence has ended
            if len(self.queues.running) == 1:
                for sequence in list(reversed(self.queues.filling)):
                    self.queues.preempt(sequence)
            self.max_running = max(1, len(self.queues.running) // 2)
            while len(self.queues.running) > self.max_running:
                self.queues.preempt(self.queues.running[-1])
        log.warning(
            "out of memory: passes take %d prompt tokens and %d sequences now", self.prefill_tokens, self.max_running
        )
        return True


def _cost(sequence: SequenceState, end: int) -> int:
    """Return the cost of computing the sequence up to `end`, in prompt tokens of which nothing is asked."""
    return (end - sequence.stored) * sequence.job.cost_of_prompt_token


def _window(sequence: SequenceState, end: int) -> Window:
    if sequence.stored >= end:
        # The logits would be taken from the row before its first, which belongs to another sequence.
        raise AssertionError(
            f"sample={sequence.job.request_id}: all {end} tokens are computed already, nothing follows from them"
        )
    return Window(sequence.blocks[: blocks_for(end)], sequence.stored, end, sequence.slot)
