"""Queues of commands, one per model: strictly by seq_id, whatever order they arrive in.

A command whose predecessor is missing is held; after `held_s` it fails, naming what is missing, and the sequence goes on behind it.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tinsmith.store.records import Command


@dataclass
class ModelQueue:
    """Commands of one model that have not been taken yet. `create_model` is seq_id 0."""

    next_seq: int = 0
    held: dict[int, Command] = field(default_factory=dict)
    """All of them by seq_id; the one at `next_seq`, if there, is ready."""
    filed_at: dict[int, float] = field(default_factory=dict)
    """Monotonic time at which each of `held` was filed: clocks may be set meanwhile."""
    ended: set[int] = field(default_factory=set)
    """seq_ids that have ended while ones before them were put back."""

    def add(self, command: Command) -> None:
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
        self.add(command)

    def rewind(self, commands: Sequence[Command]) -> None:
        """Undo the `take` of these commands, in order; others taken since the first of them have ended."""
        first = commands[0].seq_id
        self.ended |= set(range(first, self.next_seq)) - {command.seq_id for command in commands}
        self.next_seq = first
        for command in commands:
            self.add(command)

    def _pass_ended(self) -> None:
        while self.next_seq in self.ended:
            self.next_seq += 1

    def skip_gap(self) -> tuple[Command, int]:
        """Remove the earliest held command, behind which the sequence goes on; returns it, and the first missing seq_id."""
        seq = min(self.held)
        overdue = self.held.pop(seq), self.next_seq
        del self.filed_at[seq]
        self.next_seq = seq + 1
        self._pass_ended()
        return overdue

    def waiting_since(self) -> float | None:
        """Monotonic time at which the earliest command behind a gap was filed; None if none is held."""
        return self.filed_at[min(self.held)] if self.held and self.head() is None else None

    def is_late(self, seq_id: int) -> bool:
        return seq_id < self.next_seq or seq_id in self.ended


@dataclass
class CommandQueue:
    """The queues of all models."""

    held_s: float
    models: dict[str, ModelQueue] = field(default_factory=dict)

    def add(self, command: Command) -> bool:
        """File a command; False if its place in the sequence was given up before it came."""
        queue = self.models.setdefault(command.model_id, ModelQueue())
        if queue.is_late(command.seq_id):
            return False
        queue.add(command)
        return True

    def ready(self) -> list[str]:
        """Models with a command whose turn it is."""
        return [model_id for model_id, queue in self.models.items() if queue.head() is not None]

    def cancel(self, model_id: str) -> list[Command]:
        """Remove and return all that a model still has in its queue, in order."""
        queue = self.models[model_id]
        cancelled = [queue.held[seq] for seq in sorted(queue.held)]
        self.models[model_id] = ModelQueue(queue.next_seq)
        return cancelled

    def drop(self, model_id: str) -> None:
        self.models.pop(model_id, None)

    def overdue(self, now: float, busy: Collection[str] = ()) -> list[tuple[Command, int]]:
        """Remove commands held behind a gap since before `now - held_s` (monotonic time); returns them, each with the first missing seq_id.

        Those of `busy` models are left: what they have begun comes before the gap, and ends first.
        """
        found = []
        for queue in self._but_for(busy):
            while (since := queue.waiting_since()) is not None and now - since > self.held_s:
                found.append(queue.skip_gap())
        return found

    def next_deadline(self, busy: Collection[str] = ()) -> float | None:
        """Monotonic time at which the next command of a model that is not busy is overdue; None if nothing is held behind a gap."""
        times = [since for queue in self._but_for(busy) if (since := queue.waiting_since()) is not None]
        return min(times) + self.held_s if times else None

    def _but_for(self, busy: Collection[str]) -> list[ModelQueue]:
        return [queue for model_id, queue in self.models.items() if model_id not in busy]
