"""The queue of a model's commands: strictly by seq_id, whatever order they arrive in.

A command whose predecessor is missing is held; after a time it fails, naming what is missing, and the sequence goes on
behind it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith.store.records import Command


@dataclass
class CommandQueue:
    """Commands of one model that have not been taken yet. `create_model` is seq_id 0."""

    next_seq: int = 0
    held: dict[int, Command] = field(default_factory=dict)
    """All of them by seq_id; the one at `next_seq`, if there, is ready."""
    filed_at: dict[int, float] = field(default_factory=dict)
    """Monotonic time at which each of `held` was filed: clocks may be set meanwhile."""
    ended: set[int] = field(default_factory=set)
    """seq_ids that have ended while ones before them were put back."""

    def add(self, command: Command) -> bool:
        """File a command; False if its place in the sequence was given up before it came."""
        if command.seq_id < self.next_seq or command.seq_id in self.ended:
            return False
        self._hold(command)
        return True

    def _hold(self, command: Command) -> None:
        self.held[command.seq_id] = command
        self.filed_at[command.seq_id] = time.monotonic()

    def head(self) -> Command | None:
        return self.held.get(self.next_seq)

    def take(self) -> Command:
        command = self.held.pop(self.next_seq)
        del self.filed_at[self.next_seq]
        self.next_seq += 1
        self._pass_ended()
        return command

    def put_back(self, command: Command) -> None:
        """Undo the last `take`, which returned this command."""
        self.next_seq = command.seq_id
        self._hold(command)

    def rewind(self, commands: Sequence[Command]) -> None:
        """Undo the `take` of these commands, in order; others taken since the first of them have ended."""
        first = commands[0].seq_id
        self.ended |= set(range(first, self.next_seq)) - {command.seq_id for command in commands}
        self.next_seq = first
        for command in commands:
            self._hold(command)

    def _pass_ended(self) -> None:
        while self.next_seq in self.ended:
            self.next_seq += 1

    def cancel(self) -> list[Command]:
        """Remove and return all commands, in order."""
        cancelled = [self.held[seq] for seq in sorted(self.held)]
        self.held, self.filed_at, self.ended = {}, {}, set()
        return cancelled

    def waiting_since(self) -> float | None:
        """Monotonic time at which the earliest command behind a gap was filed; None if none is held."""
        return self.filed_at[min(self.held)] if self.held and self.head() is None else None

    def overdue(self, before: float) -> list[tuple[Command, int]]:
        """Remove and return commands held behind a gap since monotonic `before`, each with the first missing seq_id."""
        found = []
        while (since := self.waiting_since()) is not None and since < before:
            seq = min(self.held)
            found.append((self.held.pop(seq), self.next_seq))
            del self.filed_at[seq]
            self.next_seq = seq + 1
            self._pass_ended()
        return found
