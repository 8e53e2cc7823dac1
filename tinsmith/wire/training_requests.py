"""JSON bodies about models and their steps."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tinsmith.errors import NotBuiltError
from tinsmith.wire.json_body import CountFromZero, FiniteFloat, Id, Metadata, SeqId, StrictModel, TolerantModel


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


class OptimStepRequest(StrictModel):
    """POST optim_step."""

    model_id: Id
    seq_id: SeqId
    adam_params: AdamParams
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="before")
    @classmethod
    def _check_built(cls, values: Any) -> Any:
        if isinstance(values, dict) and "optimizer_params" in values:
            raise NotBuiltError("optimizer_params (an optimizer other than Adam) is not built yet; send adam_params")
        return values
