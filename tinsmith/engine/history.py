"""What a model can be restored from: states that outlive its workers, and what has happened since.

    kept      [seed, copy 1]    the two newest states; a damaged one is passed over
    events         P P S P S P  passes that added gradients, steps, snapshots and unfinished saves since the older one

The log keeps the requests of the events until a newer state makes them needless. What changes is in the database with
the outcome that it belongs to (`journal.py`), so a history outlives its engine too.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import CreateModel, LoadModel
from tinsmith.store.records import Command

MOST_KEPT = 2
"""States that are kept: the newest, and one to go back to if that is damaged."""

# States, from which a model is made on new workers.


@dataclass(frozen=True)
class Fresh:
    """A model that was created and never stepped: its seed says it all, and no files."""

    shape: LoraShape
    fingerprint: str = ""
    """The fingerprint of the base model's weights then; empty if it was not known."""

    directory = ""

    def call(self, number: int, base_model: str, model_id: str) -> CreateModel:
        """Return the call that restores the model on a new worker."""
        return CreateModel(number, base_model, model_id, asdict(self.shape), self.fingerprint)


@dataclass(frozen=True)
class Saved:
    """Files: of a checkpoint, or of a kept copy."""

    name: str
    """The checkpoint's path, or what messages call the copy."""
    directory: str
    optimizer: bool
    """Whether it has the optimizer's state; if not, the optimizer starts anew, as it did when the model was loaded."""
    is_copy: bool = False
    """Whether it is a kept copy, which no client can delete or replace."""

    def call(self, number: int, base_model: str, model_id: str) -> LoadModel:
        """Return the call that restores the model on a new worker."""
        return LoadModel(number, base_model, model_id, self.name, self.directory, self.optimizer)


@dataclass(frozen=True)
class Mark:
    """A place in the history of a model."""

    state: int = 0
    """`History.state` there."""
    seq_id: int = 0
    """The last step before it, or what made the model: no operation up to that one is needed behind the place."""
    seconds: float = 0.0
    """`History.seconds` there."""


@dataclass(frozen=True)
class Kept:
    """A state that outlives the workers."""

    source: Fresh | Saved
    mark: Mark


# What happens to a model. Each event names the state that it began from.


@dataclass(frozen=True)
class Passed:
    """A pass that has added gradients: the model's own datums in it, and what `RunPass` said of them."""

    state: int
    pieces: list[tuple[Command, int]]
    """Operation and index of each datum."""
    lengths: list[int]
    pixels: list[dict[str, int]]
    together: bool
    routed: list[int] = field(default_factory=list)
    """Tokens of each datum whose experts were given; empty if there were none."""


@dataclass(frozen=True)
class Stepped:
    """An optim_step that was applied."""

    state: int
    settings: dict[str, Any]
    grad_norm: float


@dataclass(frozen=True)
class Published:
    """A snapshot that clients may sample."""

    state: int
    request_id: str
    inflight: bool


@dataclass(frozen=True)
class CopiedForSave:
    """A save that has copied the model, and is being written while it goes on."""

    mark: Mark
    command: Command

    @property
    def state(self) -> int:
        return self.mark.state


Event = Passed | Stepped | Published | CopiedForSave


@dataclass(eq=False)
class History:
    """The history of one model since it was made."""

    kept: list[Kept]
    """States, oldest first; empty if the model would be lost with its workers."""
    numbered: dict[int, Event] = field(default_factory=dict)
    """What has happened since the first of `kept`, in order, each under a number of its own."""
    state: int = 0
    """The number of the state that the last step, or load, has left: each leaves another."""
    stepped_seq: int = 0
    """The operation that has left it."""
    seconds: float = 0.0
    """Time of the workers for all passes and steps of the model."""
    open_datums: int = 0
    """Datums in passes of the open step."""
    open_is_given_up: bool = False
    """Whether passes of the open step are missing, so that it is refused if workers end before it."""
    copying: Kept | None = None
    """The copy that a worker was asked for, until it is told whether it is complete."""
    copy_failed: bool = False
    """Whether the last copy that was asked for could not be kept."""
    wanted_s: float = 0.0
    """Least `seconds` at which the next copy is asked for: the last has paid off then, or is tried again."""
    replayed_s: float = 0.0
    """Seconds that the last replay took; 0 once a copy of what it led to was asked for."""
    released_seq: int = -1
    """The operation up to which the log has dropped the requests, or is going to."""
    whole_from: int = 0
    """The first state since which all events are there."""
    given_up: tuple[int, int] | None = None
    """The open step's operations when it was given up, behind the first of these seq_ids, up to the second.

    None once the journal has it: the log drops their requests then.
    """
    added: set[int] = field(default_factory=set)
    """Numbers of the events that are not in the journal."""
    removed: set[int] = field(default_factory=set)
    """Numbers of those that the journal still has, though they are gone."""
    _next: int = 0

    @property
    def events(self) -> list[Event]:
        """What has happened since the first of `kept`, in order."""
        return list(self.numbered.values())

    @property
    def needed_from(self) -> Mark:
        """The place behind which the requests of operations are needed."""
        needed = [*self.kept, *([self.copying] if self.copying else [])]
        return needed[0].mark if needed else self.mark()

    @property
    def keeps_open_step(self) -> bool:
        """Whether all passes of the open step are there."""
        return self.state >= self.whole_from and not self.open_is_given_up

    def add(self, event: Event) -> None:
        if event.state >= self.whole_from:
            self.numbered[self._next] = event
            self.added.add(self._next)
            self._next += 1

    def restored(self, events: dict[int, Event]) -> None:
        """Take in the events that the journal has."""
        self.numbered, self._next = events, max(events, default=-1) + 1

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.numbered[number]
            if number in self.added:
                self.added.remove(number)
            else:
                self.removed.add(number)

    def add_pass(self, event: Passed) -> None:
        """Add a pass of the open step, unless that is given up."""
        if self.keeps_open_step:
            self.add(event)
            self.open_datums += len(event.pieces)

    def step(self, seq_id: int, event: Stepped) -> None:
        """Add a step that was applied, which leaves another state."""
        self.add(event)
        self.state, self.stepped_seq, self.open_datums = self.state + 1, seq_id, 0
        if self.open_is_given_up:  # no state before it leads to this one
            self._drop(list(self.numbered))
            self.kept, self.whole_from, self.open_is_given_up = [], self.state, False
        if not self.kept and self.copying is None:
            self._drop(list(self.numbered))
            self.whole_from = self.state

    def mark(self) -> Mark:
        """Return the place where the history is now."""
        return Mark(self.state, self.stepped_seq, self.seconds)

    @property
    def replay_s(self) -> float:
        """Seconds that a replay would take, once a copy that is being written is complete."""
        newest = self.copying or (self.kept[-1] if self.kept else None)
        return self.seconds - (newest.mark.seconds if newest else 0.0)

    def loaded(self, source: Saved, seq_id: int) -> None:
        """Begin anew: the model was replaced by a checkpoint."""
        self.state, self.stepped_seq = self.state + 1, seq_id
        self.kept, self.copying = [Kept(source, self.mark())], None
        self.open_datums, self.open_is_given_up = 0, False
        self._drop(list(self.numbered))

    def forget_gradients(self) -> None:
        """Forget the passes of the open step: their gradients are cleared, or will be."""
        self._drop(
            [number for number, each in self.numbered.items() if isinstance(each, Passed) and each.state == self.state]
        )
        self.open_datums, self.open_is_given_up = 0, False

    def give_up_open_step(self, added_seq: int) -> None:
        """Keep no passes of the open step, of which `added_seq` ended last: their requests would fill the disk."""
        self.forget_gradients()
        self.open_is_given_up, self.given_up = True, (self.stepped_seq, added_seq)

    def forget_save(self, command: Command) -> None:
        """Forget a save: it has ended."""
        self._drop(
            [
                number
                for number, each in self.numbered.items()
                if isinstance(each, CopiedForSave) and each.command == command
            ]
        )

    def keep(self, kept: Kept) -> None:
        """Take in that a state was kept, unless it is older than the newest, or events behind it are gone.

        Files of the same state take the place of those before, which may have been overwritten.
        """
        newest = self.kept[-1] if self.kept else None
        if kept.mark.state < self.whole_from or (newest is not None and kept.mark.state < newest.mark.state):
            return
        if newest is not None and kept.mark.state == newest.mark.state and isinstance(newest.source, Saved):
            self.kept.pop()
        self.kept = [*self.kept, kept][-MOST_KEPT:]
        first = self.kept[0].mark.state
        self._drop([number for number, each in self.numbered.items() if each.state < first])

    def give_up(self) -> None:
        """Keep nothing of it: a replay would take too long, and there is no place for a copy."""
        self.kept, self.copying = [], None
        self._drop(list(self.numbered))
        self.whole_from = self.state + 1  # passes of the open step are forgotten too

    def since(self, kept: Kept) -> list[Event]:
        return [each for each in self.events if each.state >= kept.mark.state]
