"""The state of one model: what its workers hold, from where new ones can restore it, and what is under way for it.

Its commands wait in `CommandQueue`, and what is computed of its forward work in `ForwardWork`.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from tinsmith.engine.running import Running
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import CreateModel, LoadModel
from tinsmith.store.records import Command


@dataclass(frozen=True)
class Fresh:
    """A model that was created and never stepped: its seed says it all."""

    shape: LoraShape
    lasts: bool = True

    def call(self, number: int, base_model: str, model_id: str) -> CreateModel:
        """Return the call that restores the model on a new worker."""
        return CreateModel(number, base_model, model_id, asdict(self.shape))


@dataclass(frozen=True)
class Saved:
    """Files: of a checkpoint, or of a kept copy."""

    name: str
    """The checkpoint's path, or what messages call the copy."""
    directory: str
    optimizer: bool
    """Whether the optimizer's state is part of it. Without it the optimizer starts anew, as it did when the model was loaded from there."""
    lasts: bool = False
    """Whether no client can delete or replace it, as with a kept copy."""

    def call(self, number: int, base_model: str, model_id: str) -> LoadModel:
        """Return the call that restores the model on a new worker."""
        return LoadModel(number, base_model, model_id, self.name, self.directory, self.optimizer)


@dataclass
class LoadedModel:
    """A model between create_model and the end of its session."""

    model_id: str
    base_model: str
    shape: LoraShape
    spoiled: str | None = None
    """The reason why the gradients since the last optim_step are not what the client asked for."""
    origin: Fresh | Saved | None = None
    """Place of the state that the last finished step left; None if there is none, and the model ends with its workers."""
    added_seq: int = -1
    """seq_id of the newest operation that is finished and has added gradients."""
    stepped_seq: int = -1
    """seq_id of the newest optim_step that is finished, whether it was applied or has failed."""
    told_of_empty_step: bool = False
    """The log has been told that it took a step without gradients."""
    state: int = 0
    """The number of the state that the last finished step, or load, has left: each leaves another."""

    @property
    def has_gradients(self) -> bool:
        """Whether finished operations have added gradients since the last step."""
        return self.added_seq > self.stepped_seq


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
