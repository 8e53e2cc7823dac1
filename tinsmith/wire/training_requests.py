"""JSON bodies about models: creation, steps, saving and loading.

The server stores an operation's body as it came, and the engine parses it: an error ends the operation's future and
leaves no hole in the sequence.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from tinsmith.errors import NotBuiltError
from tinsmith.wire.json_body import CountFromZero, FiniteFloat, Id, Metadata, Names, SeqId, StrictModel, TolerantModel
from tinsmith.wire.paths import check_name

SessionId = Annotated[Id, Names("session")]
ModelId = Annotated[Id, Names("model")]
CheckpointName = Annotated[str, AfterValidator(check_name)]
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
"""One hour to ten years."""


class LoraConfig(StrictModel):
    """Rank, seed and targets of a LoRA adapter. Rank 0 trains all parameters, and its seed has no effect."""

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
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _check_built(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("type", "adamw") != "adamw":
            raise NotBuiltError(f"optimizer_config.type={values['type']!r} is not built yet; use 'adamw'")
        return values


class CreateModelRequest(StrictModel):
    """POST create_model. No LoRA configuration means rank 0."""

    session_id: SessionId
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

    model_id: ModelId
    type: Literal["get_info"] = "get_info"


class OperationKey(TolerantModel):
    """Fields of every training operation. They suffice to append it to the log, even if the rest is wrong."""

    model_id: ModelId
    seq_id: SeqId


class Operation(StrictModel):
    """An operation at its place in the sequence of a model."""

    model_id: ModelId
    seq_id: SeqId


class AdamParams(StrictModel):
    """Hyper-parameters of one AdamW step."""

    learning_rate: Annotated[FiniteFloat, Field(ge=0)] = 1e-4
    beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[FiniteFloat, Field(ge=0)] = 1e-12
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Decoupled from the gradient, times the learning rate."""
    grad_clip_norm: FiniteFloat = 0.0
    """Largest global norm of the gradient; 0 or less clips nothing."""


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
    """POST save_weights: a checkpoint to train further."""

    path: CheckpointName
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(Operation):
    """POST save_weights_for_sampler: a checkpoint named `path`, or a snapshot for a sampling session."""

    sampling_session_seq_id: CountFromZero | None = None
    path: CheckpointName | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Weights to sample: those of now, or always the newest published (inflight)."""
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
    """POST save_weights_external: files to download."""

    path: CheckpointName
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: Annotated[list[str], Field(min_length=1, max_length=10)] | None = None
    """Keys that decrypt the files: age1... and SSH public keys. None leaves them plain."""
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(Operation):
    """POST load_weights into a model just created."""

    path: Annotated[str, Names("readable checkpoint")]
    optimizer: bool
    """Whether to load the optimizer's state too."""
    optimizer_config: None = None
    weights_access_token: None = None
    """Refused: no account of another server is asked."""
    type: Literal["load_weights"] = "load_weights"


class CreateFromCheckpointRequest(StrictModel):
    """POST load_weights as the first request of a new model, with the checkpoint's LoRA configuration."""

    session_id: SessionId
    model_seq_id: CountFromZero
    path: Annotated[str, Names("readable checkpoint")]
    optimizer: bool
    base_model: str | None = None
    """A base of the same architecture and sizes; None for the checkpoint's."""
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: None = None
    type: Literal["load_weights"] = "load_weights"

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer and self.optimizer_config is not None:
            raise ValueError(
                "optimizer_config cannot replace the optimizer of the checkpoint; leave it out or send optimizer=false"
            )
        return self


class LoadWeightsAddress(TolerantModel):
    """The target of load_weights: a model that exists, or, without `model_id`, a new one."""

    model_id: Annotated[Id | None, Names("model")] = None


OPERATIONS: dict[str, type[BaseModel]] = {
    "create_model": CreateModelRequest,
    "optim_step": OptimStepRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_external": SaveWeightsExternalRequest,
    "load_weights": LoadWeightsRequest,
    "create_from_checkpoint": CreateFromCheckpointRequest,
}
"""The body of each JSON operation, by kind in the command log. "forward_backward" is protobuf."""
