"""The models that workers hold: what has happened to each, and from where new workers can restore it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from tinsmith.errors import NotFoundError
from tinsmith.protocol.messages import Message
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import ClearGradients, CreateModel, DeleteModel, LoadModel
from tinsmith.store.records import REJECTED, Command


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


class LoadedModels(dict[str, LoadedModel]):
    """All of them, by id. `send` tells the workers."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = send

    def require(self, model_id: str) -> LoadedModel:
        if model_id not in self:
            raise NotFoundError(f"model {model_id} is not loaded: its create_model failed, or its session is over; create a model")
        return self[model_id]

    def added(self, command: Command) -> None:
        """Note that a finished operation has added gradients."""
        if command.model_id in self:
            self[command.model_id].added_seq = command.seq_id

    def spoil_step(self, model_id: str, reason: str) -> None:
        """Let the next optim_step be refused: the gradients are not what the client asked for."""
        if model_id in self:
            self[model_id].spoiled = reason

    def after_failure(self, command: Command, reason: str) -> None:
        """Leave the model in a known state: a failed optim_step ends its step and drops the gradients, a failed contribution spoils it."""
        model = self.get(command.model_id)
        if model is None:
            return
        if command.kind == "optim_step":
            model.spoiled = None
            model.stepped_seq = command.seq_id
            self._send(ClearGradients(model.base_model, command.model_id))
        elif command.kind in ("forward_backward", REJECTED):
            self.spoil_step(command.model_id, f"seq_id {command.seq_id}: {reason}")

    def unload(self, model_id: str) -> None:
        """Free a model, if it was ever created, and its snapshots."""
        model = self.pop(model_id, None)
        if model is not None:
            self._send(DeleteModel(model.base_model, model_id))
