"""Places from which a new worker can restore a model's weights and optimizer as its last finished step left them."""

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


Origin = Fresh | Saved
