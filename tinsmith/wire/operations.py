"""Which model reads the body of a training operation.

An operation is stored as the client sent it and parsed by the engine: what is wrong with it then comes through its future and leaves no
hole in the sequence.
"""

from pydantic import BaseModel, model_validator

from tinsmith.errors import NotBuiltError
from tinsmith.wire.checkpoint_requests import (
    CreateFromCheckpointRequest,
    LoadWeightsRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.wire.json_body import TolerantModel
from tinsmith.wire.training_requests import CreateModelRequest, OptimStepRequest


class UnbuiltOperation(TolerantModel):
    """A training operation that takes its place in the sequence and then fails: parsing it raises NotBuiltError."""

    type: str = "operation"

    @model_validator(mode="after")
    def _refuse(self) -> "UnbuiltOperation":
        raise NotBuiltError(f"{self.type} is not built yet in this version")


OPERATIONS: dict[str, type[BaseModel]] = {
    "create_model": CreateModelRequest,
    "optim_step": OptimStepRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_external": UnbuiltOperation,
    "load_weights": LoadWeightsRequest,
    "create_from_checkpoint": CreateFromCheckpointRequest,
}
"""The model of every JSON operation by its kind in the command log. Kind "forward_backward" is protobuf."""
