"""The pydantic model that parses the body of each kind of training operation.

The server stores the body as the client sent it, and the engine parses it. So an error in it ends the operation's future and does not leave
a hole in the sequence.
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
