"""The state of one model: commands that wait, what its workers hold, and what is under way but for `ForwardWork`."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.history import History, Mark, Saved
from tinsmith.errors import NotFoundError, StoreUnavailableError, TinsmithError
from tinsmith.protocol.messages import Message
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import Call, ClearGradients, DeleteModel
from tinsmith.store.records import REJECTED, Command


@dataclass
class LoadedModel:
    """A model between create_model and the end of its session."""

    model_id: str
    base_model: str
    shape: LoraShape
    history: History
    """What it can be restored from."""
    spoiled: str | None = None
    """The reason why the gradients since the last optim_step are not what the client asked for."""
    added_seq: int = -1
    """seq_id of the newest operation that is finished and has added gradients."""
    stepped_seq: int = -1
    """seq_id of the newest optim_step that is finished, whether it was applied or has failed."""
    told_of_empty_step: bool = False
    """The log has been told that it took a step without gradients."""
    journaled: dict[str, Any] | None = None
    """What the journal says of it beside the events; None if it is not there."""

    @property
    def has_gradients(self) -> bool:
        """Whether finished operations have added gradients since the last step."""
        return self.added_seq > self.stepped_seq

    def spoil(self, reason: str) -> None:
        """Let the next optim_step be refused: the gradients are not what the client asked for."""
        self.spoiled = reason
        self.history.forget_gradients()


# Operations that have begun. Each is a generator: each `yield` is a call to a worker and returns its reply.
#
#     steps = operations.start(command, ...)  # nothing has happened yet
#     next(steps)  -> a call                  # the engine sends it to the worker, and goes on with other work
#     steps.send({"metrics": ...})            # the answer; or steps.throw(error)
#     StopIteration(Ended(...))               # what the operation came to
#
# Where the database takes nothing, a step yields the reason, and is sent None when it is time to try again. So an
# operation that needs its worker twice and the database in between is one function, and no thread waits.

T = TypeVar("T")


Steps = Generator[Call | StoreUnavailableError, Any, T]


def until_stored(write: Callable[[], T]) -> Steps[T]:
    """Try a write again until the database takes it, since what it belongs to has already had its effect."""
    while True:
        try:
            return write()
        except StoreUnavailableError as error:
            reason = error
        yield reason


@dataclass(frozen=True)
class Ended:
    """Result of an operation."""

    result: dict[str, Any]
    resolved: dict[str, Any] | None = None
    """Values that it read or wrote outside of its payload (`Outcome.resolved`)."""
    saved: Saved | None = None
    """Files from which the model can be restored as it was when they were copied."""


@dataclass(eq=False)
class Running:
    """An operation that waits for its worker, or for the database."""

    model_id: str
    steps: Steps[Ended]
    command: Command | None
    """None if the server saves a model that it is going to unload."""
    started_at: float = field(default_factory=time.monotonic)
    in_call: int | None = None
    """The number of the call that it waits for; None if it waits for the database."""
    has_begun: bool = False
    """Whether it has come to its first call: before that nothing of it has happened."""
    copied: Mark | None = None
    """The place in the model's history of what a save has copied. The model goes on meanwhile."""

    def step(self, answer: dict[str, Any] | TinsmithError | None) -> Call | StoreUnavailableError | Ended:
        """Go on with the answer to the last call, to the next call, to a wait for the database, or to the end.

        Raises TinsmithError.
        """
        try:
            return self.steps.throw(answer) if isinstance(answer, TinsmithError) else self.steps.send(answer)
        except StopIteration as end:
            ended: Ended = end.value
            return ended


# All that is known of a model.


@dataclass(eq=False)
class ModelState:
    """A model, from its first command until it is unloaded or lost.

    create_model -> `loaded` -> `ending`: it is saved, if its client did not end the session, and unloaded
                    workers end: it waits in `CrashRecovery` to be loaded again, or is lost
    """

    model_id: str
    queue: CommandQueue = field(default_factory=CommandQueue)
    loaded: LoadedModel | None = None
    """What the workers hold, from the end of create_model until it is unloaded or lost."""
    running: Running | None = None
    """The operation that runs and is no forward work."""
    saving: Running | None = None
    """The save that is written and recorded while the model goes on, because its state is already copied:

    Copied -> the worker writes the files -> Answer -> the row, once the database takes it -> the save has ended

    There is one at most, because a copy takes as much memory as the model. So two saves of one path come one after the
    other too.
    """
    next_is_save: bool = False
    """Whether the next command is a save too, and waits for the end of this one."""
    put_aside: list[Command] = field(default_factory=list)
    """Operations that return to the queue, while the end of the workers is taken in."""
    is_put_off: bool = False
    """Whether its next command, or its saving at the end, waits for the database."""
    ending: Literal["save", "drop"] | None = None
    """What happens to the model when what it has begun has ended: it is saved and unloaded, or unloaded as it is."""
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
    """Those of all models, by id. `send` tells the workers."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = send

    @property
    def loaded(self) -> dict[str, LoadedModel]:
        return {model_id: state.loaded for model_id, state in self.items() if state.loaded is not None}

    def find(self, model_id: str) -> LoadedModel | None:
        return self[model_id].loaded if model_id in self else None

    def require(self, model_id: str) -> LoadedModel:
        """Return the loaded model; raises `NotFoundError` if there is none."""
        model = self.find(model_id)
        if model is None:
            raise NotFoundError(
                f"model {model_id} is not loaded: its create_model failed, or its session is over; create a model"
            )
        return model

    def spoil_step(self, model_id: str, reason: str) -> None:
        """Let the next optim_step be refused: the gradients are not what the client asked for."""
        if (model := self.find(model_id)) is not None:
            model.spoil(reason)

    def after_failure(self, command: Command, reason: str) -> None:
        """Leave the model in a known state.

        A failed optim_step ends its step and drops the gradients; a failed contribution spoils the step.
        """
        model = self.find(command.model_id)
        if model is None:
            return
        if command.kind == "optim_step":
            model.spoiled = None
            model.stepped_seq = command.seq_id
            model.history.forget_gradients()
            self._send(ClearGradients(model.base_model, command.model_id))
        elif command.kind in ("forward_backward", REJECTED):
            model.spoil(f"seq_id {command.seq_id}: {reason}")

    def unload(self, state: ModelState) -> None:
        """Free a model, if it was ever created, and its snapshots."""
        model, state.loaded = state.loaded, None
        if model is not None:
            self._send(DeleteModel(model.base_model, state.model_id))

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
        own = [
            model_id for model_id, state in self.items() if state.running is not None and state.running.command is None
        ]
        asked = [model_id for model_id, state in self.items() if state.saving is not None and not state.waits_for_row]
        return next(iter(own + asked), None)

    def in_call(self, number: int) -> Running | None:
        """Return the operation that waits for a call."""
        begun = (each for state in self.values() for each in state.begun)
        return next((each for each in begun if each.in_call == number), None)
