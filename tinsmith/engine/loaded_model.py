"""A model that workers hold: what has happened to it, and from where new workers can restore it."""

from dataclasses import asdict, dataclass

from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import CreateModel, LoadModel


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
