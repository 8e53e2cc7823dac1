"""Decides what is computed next: who is admitted, which pieces of prompts, and less of both after memory has run out."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tinsmith.memory.cache_sizes import BLOCK, blocks_for
from tinsmith.sampling.local.admission import Admission
from tinsmith.sampling.local.cached_attention import Window
from tinsmith.sampling.local.prefix_cache import PrefixCache
from tinsmith.sampling.local.queues import Queues
from tinsmith.sampling.local.sequence import SequenceState

log = logging.getLogger(__name__)

PromptWindows = list[tuple[SequenceState, Window]]
"""Pieces of prompts, each with its sequence."""


@dataclass(frozen=True, eq=False)
class Fork:
    """A sequence that is about to run beside the first of its job. Its blocks are those of the prompt, the last one copied."""

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
        """Choose pieces of the prompts for one pass. Sessions share it equally; what one does not need goes to the others."""
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
        """Note that the device has been told to compute the newest token of these sequences, all of whose tokens are known."""
        if self.states:
            # Saved states of sequences that run are not evicted for those of others: copies for nothing, a tenth of the time of 256 rows.
            kept = sum(sequence.newest_save in self.states.saved for sequence in self.queues.running)
            for sequence in sequences:
                before = sequence.newest_save in self.states.saved
                self.prefix_cache.save_state(sequence, may_evict=kept < self.states.available and not self.queues.waiting)
                kept += (sequence.newest_save in self.states.saved) - before

    def forks(self, windows: PromptWindows) -> list[Fork]:
        """Return the other samples of jobs whose prompt the pass completed, with their blocks, as many as fit; the rest will wait.

        This is the only step after a pass that can fail, and it leaves no trace if it does.
        """
        for sequence, window in windows:
            sequence.keys_of(window.end // BLOCK)
        starting = [s for s, window in windows if s.starts_job and window.end == s.length]
        places = self.max_running - len(self.queues.running) - len(self.queues.filling)  # those that start now are among the latter
        forks: list[Fork] = []
        with ExitStack() as undo:
            for first in starting:
                full, rest = divmod(first.length, BLOCK)
                for other in first.job.sequences[1:]:
                    if places <= 0 or (rest and not self.cache.available) or (self.states and not self.states.available):
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
        """Note that a pass has computed pieces of prompts and its states are committed: prompts that begin alike find them now.

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
            if len(self.queues.running) == 1:  # and one token of a prompt, which then waits until the running sequence has ended
                for sequence in list(reversed(self.queues.filling)):
                    self.queues.preempt(sequence)
            self.max_running = max(1, len(self.queues.running) // 2)
            while len(self.queues.running) > self.max_running:
                self.queues.preempt(self.queues.running[-1])
        log.warning("out of memory: passes take %d prompt tokens and %d sequences now", self.prefill_tokens, self.max_running)
        return True


def _cost(sequence: SequenceState, end: int) -> int:
    """Return the cost of computing the sequence up to `end`, in prompt tokens of which nothing is asked."""
    return (end - sequence.stored) * sequence.job.cost_of_prompt_token


def _window(sequence: SequenceState, end: int) -> Window:
    if sequence.stored >= end:
        # The logits would be taken from the row before its first, which belongs to another sequence.
        raise AssertionError(f"sample={sequence.job.request_id}: all {end} tokens are computed already, nothing follows from them")
    return Window(sequence.blocks[: blocks_for(end)], sequence.stored, end, sequence.slot)
