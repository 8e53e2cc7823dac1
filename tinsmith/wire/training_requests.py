"""JSON bodies about models: their steps, and saving and loading their weights.

The server stores the body of an operation as it came, and the engine parses it. So an error in it ends the operation's future and leaves
no hole in the sequence.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from tinsmith.errors import NotBuiltError
from tinsmith.wire.json_body import CountFromZero, FiniteFloat, Id, Metadata, SeqId, StrictModel, TolerantModel
from tinsmith.wire.paths import check_name

CheckpointName = Annotated[str, AfterValidator(check_name)]
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
"""Limits of a lifetime: one hour to ten years."""


class LoraConfig(StrictModel):
    """Rank, seed and targets of a LoRA adapter. Rank 0 asks for full-parameter training, where the seed has no effect."""

    rank: Annotated[int, Field(ge=0)]
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("one of train_unembed, train_mlp and train_attn must be true")
        return self


class OptimizerConfig(StrictModel):
    """The optimizer that a model keeps as long as it exists."""

    type: Literal["adamw"] = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _check_built(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("type", "adamw") != "adamw":
            raise NotBuiltError(f"optimizer_config.type={values['type']!r} is not built yet; use 'adamw'")
        return values


class CreateModelRequest(StrictModel):
    """POST create_model. Without a LoRA configuration the request asks for full-parameter training, as with a rank of 0."""

    session_id: Id
    model_seq_id: CountFromZero
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraConfig = LoraConfig(rank=0)
    optimizer_config: OptimizerConfig = OptimizerConfig()
    type: Literal["create_model"] = "create_model"

    @field_validator("lora_config", mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return LoraConfig(rank=0) if value is None else value


class GetInfoRequest(StrictModel):
    """POST get_info."""

    model_id: Id
    type: Literal["get_info"] = "get_info"


class OperationKey(TolerantModel):
    """The fields that every training operation has. They suffice to append it to the log, even if the rest is wrong."""

    model_id: Id
    seq_id: SeqId


class Operation(StrictModel):
    """An operation on a model that exists, at its place in the model's sequence."""

    model_id: Id
    seq_id: SeqId


class AdamParams(StrictModel):
    """Hyper-parameters of one AdamW step."""

    learning_rate: Annotated[FiniteFloat, Field(ge=0)] = 1e-4
    beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[FiniteFloat, Field(ge=0)] = 1e-12
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Decoupled from the gradient, and multiplied by the learning rate."""
    grad_clip_norm: FiniteFloat = 0.0
    """Largest global norm of the gradient; 0 or less disables clipping."""


class OptimStepRequest(Operation):
    """POST optim_step."""

    adam_params: AdamParams
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="before")
    @classmethod
    def _check_built(cls, values: Any) -> Any:
        if isinstance(values, dict) and "optimizer_params" in values:
            raise NotBuiltError("optimizer_params (an optimizer other than Adam) is not built yet; send adam_params")
        return values


class SaveWeightsRequest(Operation):
    """POST save_weights: a checkpoint that training can continue from."""

    path: CheckpointName
    """Name of the checkpoint."""
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(Operation):
    """POST save_weights_for_sampler: a checkpoint named `path`, or a snapshot for the sampling session `sampling_session_seq_id`."""

    sampling_session_seq_id: CountFromZero | None = None
    path: CheckpointName | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Weights to sample: those of now, or always the newest that the model has published (inflight)."""
    ttl_seconds: TtlSeconds | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.kind == "inflight" and self.path is not None:
            raise ValueError("a checkpoint never changes: leave kind='inflight' out, or path")
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("send either path (a checkpoint) or sampling_session_seq_id (an ephemeral snapshot)")
        if self.path is None and (self.ttl_seconds is not None or self.user_metadata is not None):
            raise ValueError("ttl_seconds and user_metadata belong to a checkpoint: send path, or leave them out")
        return self


class SaveWeightsExternalRequest(Operation):
    """POST save_weights_external: files that other tools load, to be downloaded."""

    path: CheckpointName
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: Annotated[list[str], Field(min_length=1, max_length=10)] | None = None
    """The keys that can decrypt the files: age1... keys and SSH public keys. None leaves them as they are."""
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(Operation):
    """POST load_weights into a model that was just created."""

    path: str
    """tinker:// path of a checkpoint for training."""
    optimizer: bool
    """Whether to continue with the saved state of the optimizer."""
    optimizer_config: None = None
    weights_access_token: None = None
    """Refused: it belongs to another account, and this server has no accounts."""
    type: Literal["load_weights"] = "load_weights"


class CreateFromCheckpointRequest(StrictModel):
    """POST load_weights as the first request of a new model, which takes its LoRA configuration from the checkpoint."""

    session_id: Id
    model_seq_id: CountFromZero
    path: str
    optimizer: bool
    base_model: str | None = None
    """A base model of the same architecture and sizes; None for the one that the checkpoint names."""
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: None = None
    type: Literal["load_weights"] = "load_weights"

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer and self.optimizer_config is not None:
            raise ValueError("optimizer_config cannot replace the optimizer of the checkpoint; leave it out or send optimizer=false")
        return self


class LoadWeightsAddress(TolerantModel):
    """The part of load_weights that says where to: into a model that exists, or, without `model_id`, into a new one."""

    model_id: Id | None = None


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
