"""Decides what a sequence need not compute, because another with the same beginning has computed it or is about to.

Keys and values can be shared up to any full block. A state of gated delta nets cannot be cut, so a sequence can only go on behind a block
at whose end one was saved:

- at the last full block of a prompt, for other requests with this prompt;
- where two prompts that begin alike part, for all that follow with the same beginning, such as a system prompt;
- at the last full block of a sequence that grows, for the next turn of a conversation, and for itself if it is preempted.

The first two cut a prompt once more, so they must spare others at least `WORTH_SAVING` blocks.
"""

from collections.abc import Iterable

from tinsmith.memory.cache_sizes import BLOCK
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.sequence import SequenceState
from tinsmith.sampling.local.states import StateSlots

WORTH_SAVING = 64 // BLOCK


class PrefixCache:
    """Known beginnings of sequences, and states that are to be saved of them."""

    def __init__(self, cache: KVCache, states: StateSlots | None) -> None:
        self.cache = cache
        self.states = states

    def coming(self, filling: Iterable[SequenceState]) -> dict[bytes, SequenceState]:
        """Return the prompts that are being computed, by the keys of their blocks."""
        return {key: sequence for sequence in filling for key in sequence.keys_of(sequence.length // BLOCK)}

    def known(self, sequence: SequenceState) -> list[int]:
        """Return the blocks of its beginning that it need not compute."""
        keys = sequence.keys_of(sequence.needed_from // BLOCK)
        found = self.cache.find(keys)
        return found[: self.states.longest(keys[: len(found)])] if self.states else found

    def found(self, sequence: SequenceState, coming: dict[bytes, SequenceState]) -> list[int] | None:
        """Find a known beginning; None if a prompt in `coming` will provide a longer one, so that this one should wait.

        With states that prompt is told to save the state where the two part, if it has not got past there.
        """
        keys = sequence.keys_of(sequence.needed_from // BLOCK)
        known = self.known(sequence)
        if self.states is None:
            return None if len(known) < len(keys) and keys[len(known)] in coming else known
        alike = len(known)
        while alike < len(keys) and keys[alike] in coming:
            alike += 1
        if alike - len(known) >= WORTH_SAVING:
            ahead = coming[keys[alike - 1]]
            if ahead.stored < alike * BLOCK:
                ahead.saves.add(alike)
                return None
        return known

    def worth_saving(self, sequence: SequenceState, found: int) -> set[int]:
        """Return after how many blocks the state of a sequence is to be saved that is computed from behind its first `found` blocks.

        If more blocks than these are known, an earlier prompt began with them and went on in another way, or its state is lost.
        """
        saves: set[int] = set()
        if self.states:
            known = len(self.cache.find(sequence.keys_of(sequence.needed_from // BLOCK)))
            for blocks in (known, (sequence.length - 1) // BLOCK):
                if blocks - max(found, *saves, 0) >= WORTH_SAVING:
                    saves.add(blocks)
        return saves

    def end_of_piece(self, sequence: SequenceState, most: int) -> int:
        """Return where a chunk of at most so many prompt tokens ends: at a state to save, or at least at a full block."""
        end = min(sequence.length, sequence.stored + most)
        if self.states:
            saved = [blocks * BLOCK for blocks in sequence.saves if sequence.stored < blocks * BLOCK <= end]
            if saved:
                return min(saved)
            if end < sequence.length and end // BLOCK * BLOCK > sequence.stored:
                return end // BLOCK * BLOCK
        return end

    def save_state(self, sequence: SequenceState, may_evict: bool) -> None:
        """Save the state of a sequence that a pass has computed to the end of a block.

        What `SequenceState.saves` does not name replaces what the sequence saved so before; if there is none, a saved state gives up its
        slot only if it `may_evict` one.
        """
        if self.states is None or sequence.stored % BLOCK:
            return
        full = sequence.stored // BLOCK
        named = full in sequence.saves
        if not (named or may_evict or self.states.free or sequence.newest_save in self.states.saved):
            return
        if sequence.newest_save:
            self.states.forget(sequence.newest_save)
            sequence.newest_save = None
        key = sequence.keys_of(full)[-1]
        if self.states.save(key, sequence.slot) and not named:
            sequence.newest_save = key
