"""The JSON bodies of the Tinker API, except asample, as strict models: unknown fields, wrong types and impossible values are refused.

The server parses what it answers itself. A training operation is stored as the client sent it and parsed by the engine, with
`OPERATIONS[kind]`: what is wrong with it then comes through its future and leaves no hole in the sequence.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tinsmith.errors import NotBuiltError, UserError
from tinsmith.wire.paths import check_name

MAX_SEQ_ID = 2**31 - 1
"""The protobuf requests carry seq_id as int32, so no training operation can have a larger one."""

_SHOWN_CHARACTERS = 120

ModelT = TypeVar("ModelT", bound=BaseModel)
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
CountFromZero = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StrictModel(BaseModel):
    """A JSON object of which every field is known. Numbers are not taken from texts."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TolerantModel(BaseModel):
    """A JSON object that only informs: fields that a newer SDK adds are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def parse_json(model_cls: type[ModelT], body: bytes) -> ModelT:
    """The body as `model_cls`. Raises UserError naming the first wrong field and its value, NotBuiltError for parts not built."""
    try:
        return model_cls.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        shown = repr(first["input"])
        if len(shown) > _SHOWN_CHARACTERS:
            shown = shown[:_SHOWN_CHARACTERS] + "..."
        raise UserError(f"{field}: {first['msg']}, got {shown}") from error


# ---- Service and sessions


class CreateSessionRequest(TolerantModel):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(TolerantModel):
    """POST session_heartbeat."""

    session_id: str


class FinishReason(TolerantModel):
    """How a session ended."""

    type: str


class FinishSessionRequest(TolerantModel):
    """POST sessions/{session_id}/finish."""

    reason: FinishReason
    detail: str | None = None


class GetInfoRequest(StrictModel):
    """POST get_info."""

    model_id: str
    type: Literal["get_info"] = "get_info"


class RetrieveFutureRequest(StrictModel):
    """POST retrieve_future. `allow_metadata_only` permits a reply without the payload; the whole payload is always allowed, too."""

    request_id: str
    allow_metadata_only: bool = False


# ---- Models


class LoraConfig(StrictModel):
    """Size, seed and places of a LoRA adapter."""

    rank: Annotated[int, Field(ge=1)]
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
    """The optimizer of a model for its whole life."""

    type: Literal["adamw"] = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _check_built(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("type", "adamw") != "adamw":
            raise NotBuiltError(f"optimizer_config.type={values['type']!r} is not built yet; use 'adamw'")
        return values


class CreateModelRequest(StrictModel):
    """POST create_model. Without a LoRA configuration the request asks for full-parameter training."""

    session_id: str
    model_seq_id: CountFromZero
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig
    optimizer_config: OptimizerConfig = OptimizerConfig()
    type: Literal["create_model"] = "create_model"

    @model_validator(mode="before")
    @classmethod
    def _check_built(cls, values: Any) -> Any:
        if isinstance(values, dict) and _asks_for_full_parameters(values.get("lora_config")):
            raise NotBuiltError("full-parameter training (no lora_config, or rank 0) is not built yet; send lora_config with a rank")
        return values


def _asks_for_full_parameters(lora_config: Any) -> bool:
    return lora_config is None or (isinstance(lora_config, dict) and lora_config.get("rank") == 0)


# ---- Training operations


class OperationKey(TolerantModel):
    """What every training operation carries; enough to put it into the log whatever the rest of it is."""

    model_id: str
    seq_id: SeqId


class LoadWeightsAddress(TolerantModel):
    """Which of the two forms of load_weights a request has: into a model that exists, or, without `model_id`, into a new one."""

    model_id: str | None = None


class AdamParams(StrictModel):
    """Hyper-parameters of one AdamW step."""

    learning_rate: Annotated[FiniteFloat, Field(ge=0)] = 1e-4
    beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[FiniteFloat, Field(ge=0)] = 1e-12
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Decoupled from the gradient, times the learning rate."""
    grad_clip_norm: FiniteFloat = 0.0
    """Largest global norm of the gradient; 0 or less does not clip."""


class OptimStepRequest(StrictModel):
    """POST optim_step."""

    model_id: str
    seq_id: SeqId
    adam_params: AdamParams
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="before")
    @classmethod
    def _check_built(cls, values: Any) -> Any:
        if isinstance(values, dict) and "optimizer_params" in values:
            raise NotBuiltError("optimizer_params (an optimizer other than Adam) is not built yet; send adam_params")
        return values


CheckpointName = Annotated[str, AfterValidator(check_name)]
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
"""From one hour to ten years."""


class SaveWeightsRequest(StrictModel):
    """POST save_weights: all that training goes on from."""

    model_id: str
    seq_id: SeqId
    path: CheckpointName
    """Name of the checkpoint."""
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(StrictModel):
    """POST save_weights_for_sampler: a checkpoint named `path`, or an ephemeral snapshot addressed by `sampling_session_seq_id`."""

    model_id: str
    seq_id: SeqId
    sampling_session_seq_id: CountFromZero | None = None
    path: CheckpointName | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    @model_validator(mode="before")
    @classmethod
    def _check_built(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") == "inflight":
            raise NotBuiltError("kind='inflight' is not built yet; use 'snapshot'")
        return values

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("send either path (a checkpoint) or sampling_session_seq_id (an ephemeral snapshot)")
        if self.path is None and (self.ttl_seconds is not None or self.user_metadata is not None):
            raise ValueError("ttl_seconds and user_metadata belong to a checkpoint: send path, or leave them out")
        return self


class LoadWeightsRequest(StrictModel):
    """POST load_weights into a model that was just created."""

    model_id: str
    seq_id: SeqId
    path: str
    """tinker:// path of a checkpoint for training."""
    optimizer: bool
    """Whether to go on with the saved state of the optimizer."""
    optimizer_config: None = None
    weights_access_token: None = None
    """Refused: it would name somebody else's account, and this server has none."""
    type: Literal["load_weights"] = "load_weights"


class CreateFromCheckpointRequest(StrictModel):
    """POST load_weights as the first request of a new model, which takes its LoRA configuration from the checkpoint."""

    session_id: str
    model_seq_id: CountFromZero
    path: str
    optimizer: bool
    base_model: str | None = None
    """Another name of a base model of the same architecture and sizes; None takes the one that the checkpoint names."""
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: None = None
    type: Literal["load_weights"] = "load_weights"

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer and self.optimizer_config is not None:
            raise ValueError("optimizer_config cannot replace the optimizer of the checkpoint; leave it out or send optimizer=false")
        return self


class UnbuiltOperation(TolerantModel):
    """A training operation that takes its place in the sequence and then fails: parsing it raises NotBuiltError."""

    type: str = "operation"

    @model_validator(mode="after")
    def _refuse(self) -> Self:
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


# ---- Sampling sessions


class CreateSamplingSessionRequest(StrictModel):
    """POST create_sampling_session: from a base model, or from a checkpoint, whose base `base_model` may rename."""

    session_id: str
    sampling_session_seq_id: CountFromZero
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.base_model is None and self.model_path is None:
            raise ValueError("base_model or model_path is needed")
        return self
