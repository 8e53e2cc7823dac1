"""JSON bodies about saving and loading weights."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tinsmith.wire.json_body import CountFromZero, Id, Metadata, SeqId, StrictModel, TolerantModel
from tinsmith.wire.paths import check_name
from tinsmith.wire.training_requests import OptimizerConfig

CheckpointName = Annotated[str, AfterValidator(check_name)]
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
"""Limits of a lifetime: one hour to ten years."""


class SaveWeightsRequest(StrictModel):
    """POST save_weights: a checkpoint that training can continue from."""

    model_id: Id
    seq_id: SeqId
    path: CheckpointName
    """Name of the checkpoint."""
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(StrictModel):
    """POST save_weights_for_sampler: a checkpoint named `path`, or a snapshot for the sampling session `sampling_session_seq_id`."""

    model_id: Id
    seq_id: SeqId
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


class SaveWeightsExternalRequest(StrictModel):
    """POST save_weights_external: files that other tools load, to be downloaded."""

    model_id: Id
    seq_id: SeqId
    path: CheckpointName
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: Annotated[list[str], Field(min_length=1, max_length=10)] | None = None
    """The keys that can decrypt the files: age1... keys and SSH public keys. None leaves them as they are."""
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(StrictModel):
    """POST load_weights into a model that was just created."""

    model_id: Id
    seq_id: SeqId
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
