"""What is under way for one model.

What its workers hold is in `LoadedModels`, its commands wait in `CommandQueue`, and what is computed of its forward work in `ForwardWork`.
"""

from dataclasses import dataclass, field
from typing import Literal

from tinsmith.engine.running import Running
from tinsmith.store.records import Command


@dataclass(eq=False)
class ModelState:
    """What is under way for a model, from its first command until it is unloaded or lost."""

    model_id: str
    running: Running | None = None
    """The operation that runs and is no forward work."""
    saving: Running | None = None
    """The save that is written and recorded while the model goes on, because its state is already copied:

    Copied -> the worker writes the files -> Answer -> the row, once the database takes it -> the save has ended

    There is one at most, because a copy takes as much memory as the model. So two saves of one path come one after the other too.
    """
    next_is_save: bool = False
    """Whether the next command is a save too, and waits for the end of this one."""
    is_put_off: bool = False
    """Whether its next command, or its saving at the end, waits for the database."""
    ending: Literal["save", "drop"] | None = None
    """What is to be done with the model as soon as what it has begun has ended: it is saved and unloaded, or unloaded as it is."""
    cancelled: list[Command] = field(default_factory=list)
    """Operations that are not run any more, and fail when the model has been unloaded or cannot be saved."""
    save_again_at: float | None = None
    """When its saving at the end, which has failed, is tried again (monotonic time). Until then it stays loaded."""
    trained_tokens: int = 0

    @property
    def waits_for_row(self) -> bool:
        """Whether the files of a save are there, and the database has not taken its row yet."""
        return self.saving is not None and self.saving.in_call is None

    @property
    def begun(self) -> list[Running]:
        return [each for each in (self.running, self.saving) if each is not None]

    def forget_save(self) -> None:
        """The save has ended, or nobody waits for it any more."""
        self.saving, self.next_is_save = None, False


class ModelStates(dict[str, ModelState]):
    """Those of all models, by id."""

    @property
    def put_off(self) -> set[str]:
        """Models whose next command, or whose saving, waits for the database."""
        return {model_id for model_id, state in self.items() if state.is_put_off}

    @property
    def wait_for_database(self) -> bool:
        """Whether a model, or a checkpoint whose files are written, waits for the database."""
        return any(state.is_put_off or state.waits_for_row for state in self.values())

    @property
    def running(self) -> set[str]:
        return {model_id for model_id, state in self.items() if state.running is not None}

    @property
    def saving(self) -> str | None:
        """A model that is being saved by itself, or else one whose save is being written for its client."""
        own = [model_id for model_id, state in self.items() if state.running is not None and state.running.command is None]
        asked = [model_id for model_id, state in self.items() if state.saving is not None and not state.waits_for_row]
        return next(iter(own + asked), None)

    def in_call(self, number: int) -> Running | None:
        """Return the operation that waits for a call."""
        begun = (each for state in self.values() for each in state.begun)
        return next((each for each in begun if each.in_call == number), None)
