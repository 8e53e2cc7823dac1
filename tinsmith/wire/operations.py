"""Which model reads the body of a training operation.

An operation is stored as the client sent it and parsed by the engine: what is wrong with it then comes through its future and leaves no
hole in the sequence.
"""

from pydantic import BaseModel

from tinsmith.wire.checkpoint_requests import (
    CreateFromCheckpointRequest,
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.wire.training_requests import CreateModelRequest, OptimStepRequest

OPERATIONS: dict[str, type[BaseModel]] = {
    "create_model": CreateModelRequest,
    "optim_step": OptimStepRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_external": SaveWeightsExternalRequest,
    "load_weights": LoadWeightsRequest,
    "create_from_checkpoint": CreateFromCheckpointRequest,
}
"""The model of every JSON operation by its kind in the command log. Kind "forward_backward" is protobuf."""
