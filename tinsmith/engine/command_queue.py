"""The order of commands: per model strictly by seq_id, whatever order they arrive in.

`create_model` is seq_id 0. A command whose predecessor is missing is held; after `held_s` it fails, naming what is missing, and the
sequence goes on behind it.
"""

from dataclasses import dataclass, field

from tinsmith.store.records import Command


@dataclass(frozen=True)
class Overdue:
    """A command that waited too long for its predecessor."""

    command: Command
    missing: int
    """The first seq_id that never came."""


@dataclass
class ModelQueue:
    """Commands of one model that have not been taken yet."""

    next_seq: int = 0
    held: dict[int, Command] = field(default_factory=dict)
    """All of them by seq_id; the one at `next_seq`, if there, is ready."""

    def head(self) -> Command | None:
        """The command whose turn it is."""
        return self.held.get(self.next_seq)

    def take(self) -> Command:
        """Remove and return the head. Raises KeyError if it is not there."""
        command = self.held.pop(self.next_seq)
        self.next_seq += 1
        return command

    def skip_gap(self) -> Overdue:
        """Give up waiting: the earliest held command is overdue, and the sequence goes on behind it."""
        seq = min(self.held)
        overdue = Overdue(self.held.pop(seq), self.next_seq)
        self.next_seq = seq + 1
        return overdue

    def is_late(self, seq_id: int) -> bool:
        """Whether that place in the sequence was given up already."""
        return seq_id < self.next_seq


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
        queue.held[command.seq_id] = command
        return True

    def ready(self) -> list[str]:
        """Models with a command whose turn it is."""
        return [model_id for model_id, queue in self.models.items() if queue.head() is not None]

    def drop(self, model_id: str) -> list[Command]:
        """Forget a model; returns what it still had."""
        queue = self.models.pop(model_id, None)
        return [queue.held[seq] for seq in sorted(queue.held)] if queue else []

    def overdue(self, now: float) -> list[Overdue]:
        """Commands to fail now: held behind a gap since before `now - held_s` (Unix time)."""
        found = []
        for queue in self.models.values():
            while queue.held and queue.head() is None and now - queue.held[min(queue.held)].created_at > self.held_s:
                found.append(queue.skip_gap())
        return found

    def next_deadline(self) -> float | None:
        """Unix time at which the next held command becomes overdue; None if nothing is held behind a gap."""
        times = [queue.held[min(queue.held)].created_at for queue in self.models.values() if queue.held and queue.head() is None]
        return min(times) + self.held_s if times else None
