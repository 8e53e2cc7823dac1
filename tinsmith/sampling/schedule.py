"""Which sequences wait, which prompts are being computed, which sequences run, and what the next pass computes of each.

    waiting -> filling (has its blocks; the prompt is computed, perhaps in several passes) -> running (one token a pass) -> ended

A pass takes one token of every running sequence and as many prompt tokens as its budget allows. When blocks run out, the youngest sequence
gives its own back and waits to be computed again, of which little is left to do if nobody needed its blocks meanwhile.
"""

import logging
from collections import deque
from collections.abc import Callable

from tinsmith.sampling.cached_attention import Window
from tinsmith.sampling.kv_cache import KVCache, blocks_for
from tinsmith.sampling.prefix import BLOCK
from tinsmith.sampling.sequence import SampleJob, Sequence

log = logging.getLogger(__name__)


class Schedule:
    """The sequences of one sampler and their cache blocks."""

    def __init__(self, cache: KVCache, max_running: int, prefill_tokens: int) -> None:
        self.cache = cache
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        """Most prompt tokens in one pass. It falls when memory runs out, and so does `max_running`."""
        self.waiting: deque[Sequence] = deque()
        """The first sequence of each job that has not started, and sequences that gave their blocks back."""
        self.filling: list[Sequence] = []
        self.running: list[Sequence] = []
        """Oldest first, as `filling`."""

    def next_pass(self) -> list[tuple[Sequence, Window]]:
        """What to compute now. A sequence whose window ends with it gets its next token."""
        self._grow()
        self._admit()
        windows = [(s, _window(s, s.length)) for s in self.running]
        budget = self.prefill_tokens
        for sequence in self.filling:
            if budget > 0:
                end = min(sequence.length, sequence.stored + budget)
                budget -= end - sequence.stored
                windows.append((sequence, _window(sequence, end)))
        return windows

    def computed(self, sequence: Sequence, end: int) -> None:
        """A pass has computed the sequence up to `end`. A prompt is found from now on by what begins alike; if it is complete, it runs."""
        sequence.stored = end
        if sequence in self.filling:
            self._remember(sequence)
            if end == sequence.length:
                self._start(sequence)

    def drop(self, gone: Callable[[Sequence], bool]) -> None:
        """Forget sequences, wherever they are, and free their blocks: what they computed stays in the cache for who begins alike."""
        for sequence in (*self.running, *self.filling):
            if gone(sequence):
                self._release(sequence)
        self.running = [s for s in self.running if not gone(s)]
        self.filling = [s for s in self.filling if not gone(s)]
        if any(gone(s) for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if not gone(s))

    def restart(self, chosen: Callable[[Sequence], bool]) -> list[SampleJob]:
        """Let sequences wait whose weights are about to be replaced, to be computed from their first token on; returns their jobs."""
        for group in (self.filling, self.running):
            for sequence in [s for s in reversed(group) if chosen(s)]:
                group.remove(sequence)
                self._release(sequence)
                self.waiting.appendleft(sequence)
        restarted = [sequence for sequence in self.waiting if chosen(sequence)]
        for sequence in restarted:
            sequence.keys = []
        return list({id(sequence.job): sequence.job for sequence in restarted}.values())

    def retreat(self, windows: list[tuple[Sequence, Window]]) -> bool:
        """The pass ran out of memory: take half as much from now on. False if it was as small as can be."""
        prompts = sum(len(window) for sequence, window in windows if sequence in self.filling)
        if prompts + len(self.running) < 2:
            return False
        if prompts >= len(self.running):
            self.prefill_tokens = max(1, prompts // 2)
        else:
            self.max_running = len(self.running) // 2
            while len(self.running) > self.max_running:
                self._preempt(self.running)
        log.warning("out of memory: passes take %d prompt tokens and %d sequences now", self.prefill_tokens, self.max_running)
        return True

    def clear(self) -> None:
        """Forget every sequence, and what the cache holds."""
        self.waiting.clear()
        self.filling.clear()
        self.running.clear()
        self.cache.clear()

    def _start(self, sequence: Sequence) -> None:
        """It runs, and with it the other samples of a new job, of which those that find no room wait."""
        self.filling.remove(sequence)
        self.running.append(sequence)
        others = sequence.job.sequences[1:] if sequence.starts_job else []
        full, rest = divmod(sequence.stored, BLOCK)
        for position, other in enumerate(others):
            if len(self.running) >= self.max_running or (rest and not self.cache.available):
                self.waiting.extendleft(reversed(others[position:]))
                return
            other.blocks = [self.cache.share(block) for block in sequence.blocks[:full]]
            if rest:
                other.blocks.append(self.cache.copy(sequence.blocks[full]))
            other.stored = sequence.stored
            self.running.append(other)

    def _grow(self) -> None:
        """Give every running sequence a block for its newest token; when there is none, preempt the youngest."""
        for sequence in list(self.running):
            while sequence.blocks and len(sequence.blocks) < blocks_for(sequence.length):
                if self.cache.available:
                    sequence.blocks += self.cache.take(1)
                else:
                    self._preempt(self.filling or self.running)

    def _preempt(self, group: list[Sequence]) -> None:
        sequence = group.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _remember(self, sequence: Sequence) -> None:
        full = sequence.stored // BLOCK
        self.cache.remember(sequence.keys_of(full), sequence.blocks[:full])

    def _release(self, sequence: Sequence) -> None:
        self._remember(sequence)
        self.cache.give_back(sequence.blocks)
        sequence.blocks, sequence.stored = [], 0

    def _admit(self) -> None:
        """Let waiting sequences in, in order, as long as the next pass has prompt tokens, the running set places and the cache blocks left.

        A job that is larger than the running set or the cache waits until it is alone, and starts what fits. One that begins like a prompt
        which is being computed waits for its blocks.
        """
        tokens = sum(s.length - s.stored for s in self.filling)
        places = len(self.running) + sum(1 + s.forks for s in self.filling)
        promised = sum(_later_blocks(s) for s in self.filling)
        coming = {key for s in self.filling for key in s.keys_of(s.length // BLOCK)}
        behind: list[Sequence] = []
        while self.waiting and tokens < self.prefill_tokens:
            sequence = self.waiting[0]
            keys = sequence.keys_of(sequence.needed_from // BLOCK)
            found = self.cache.find(keys)
            if len(found) < len(keys) and keys[len(found)] in coming:
                behind.append(self.waiting.popleft())
                continue
            places += 1 + sequence.forks
            promised += _later_blocks(sequence)
            taken = blocks_for(sequence.length) - sum(1 for block in found if self.cache.users[block])
            if (places > self.max_running or taken + promised > self.cache.available) and (self.running or self.filling):
                break
            self._fill(self.waiting.popleft(), found)
            tokens += sequence.length - sequence.stored
            coming |= set(sequence.keys_of(sequence.length // BLOCK))
        self.waiting.extendleft(reversed(behind))

    def _fill(self, sequence: Sequence, found: list[int]) -> None:
        shared = [self.cache.share(block) for block in found]
        sequence.blocks = shared + self.cache.take(blocks_for(sequence.length) - len(shared))
        sequence.stored = len(shared) * BLOCK
        if sequence.starts_job:
            sequence.job.cached_tokens = sequence.stored
        self.filling.append(sequence)


def _window(sequence: Sequence, end: int) -> Window:
    return Window(sequence.blocks[: blocks_for(end)], sequence.stored, end)


def _later_blocks(sequence: Sequence) -> int:
    """Blocks that the sequence and its forks take as soon as they start."""
    return blocks_for(sequence.length + 1) - blocks_for(sequence.length) + sequence.forks
