"""Dataclasses that the store takes and returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tinsmith.store import ids
from tinsmith.wire.paths import CheckpointKind

if TYPE_CHECKING:  # commands that only ask for a checkpoint need no numpy
    import numpy as np
    from numpy.typing import NDArray

    from tinsmith.wire.tensors import ExpertIndices

CommandKind = Literal[
    "create_model",
    "create_from_checkpoint",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "rejected",
]
"""Kinds of training operations; `tinsmith/wire` reads the payload of each."""
REJECTED: Literal["rejected"] = "rejected"
"""An operation refused when it came in. It keeps its place in the sequence; its payload is its error."""

LOCAL = "local"
"""The tenant of all that came without an API key, or before there were any."""

SESSION_END = "session-end"
"""Name of the checkpoint of a model that the server unloads."""

CLIENT_REASONS = ("success", "errored", "interrupted")
"""Reasons of clients for the end of a session."""

ModelStatus = Literal["creating", "ready", "failed", "finished", "unloaded", "lost", "copied"]
"""`sessions.py` explains them. A copied model only holds copies of checkpoints."""
Category = Literal["user", "server"]


@dataclass(frozen=True)
class Session:
    """A session of a client."""

    session_id: str
    created_at: float
    """Unix time, as all times here."""
    finished_at: float | None


Role = Literal["admin", "member", "read-only"]
"""A read-only key looks and downloads; a member works; an admin works, and sees and manages what all tenants have."""


@dataclass(frozen=True)
class ApiKey:
    """A key of a tenant. Limits hold for all that its tenant uses; None is no limit."""

    name: str
    key_id: str
    """The part of the key that is no secret."""
    digest: bytes
    """SHA-256 of the whole key: it has 256 random bits, so nothing slower is needed."""
    tenant: str
    role: Role
    project_id: str | None = None
    """The project of sessions that name none."""
    models: list[str] | None = None
    """Base models that it may use."""
    max_models: int | None = None
    """Models in training at a time."""
    max_parallel: int | None = None
    """Unfinished sequences of samples, and as many unfinished training operations."""
    tokens_a_day: int | None = None
    """Trained, prefilled and sampled tokens together."""
    gpu_seconds_a_day: float | None = None
    storage_bytes: int | None = None
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    kept_checkpoints: int | None = None
    """Newest checkpoints of each run and kind that stay."""
    checkpoint_ttl_s: float | None = None
    """The longest that a checkpoint lives."""


@dataclass(frozen=True)
class Used:
    """Quantities that are metered, of anything: a sample, or a tenant's hour."""

    trained_tokens: int = 0
    """Tokens of forward and backward passes."""
    prefilled_tokens: int = 0
    """Tokens of prompts that were computed."""
    cached_tokens: int = 0
    """Tokens of prompts that were not: another one had the same beginning."""
    sampled_tokens: int = 0
    gpu_seconds: float = 0.0
    """Seconds of devices for passes and for sampling."""

    @property
    def tokens(self) -> int:
        """The tokens that count against a budget: all that were computed."""
        return self.trained_tokens + self.prefilled_tokens + self.sampled_tokens

    def plus(self, more: "Used") -> "Used":
        return Used(*(mine + yours for mine, yours in zip(vars(self).values(), vars(more).values(), strict=True)))


@dataclass(frozen=True)
class UsedBy:
    """What was used in an hour."""

    hour: int
    """Unix time of its beginning."""
    tenant: str
    base_model: str
    session_id: str
    """Empty for storage."""
    used: Used
    stored_bytes: int = 0
    """The most at a time in this hour."""


@dataclass(frozen=True)
class Model:
    """A model in training."""

    model_id: str
    session_id: str
    base_model: str
    """As the client named it, perhaps with a ":suffix"."""
    lora_config: dict[str, Any]
    optimizer_config: dict[str, Any]
    user_metadata: dict[str, Any] | None
    status: ModelStatus = "creating"
    applied_seq: int | None = None
    """The highest seq_id that succeeded, written in the transaction of its outcome; None before the model is created.

    Each success is in the model, and nothing of a failure. A failed forward_backward fails the next optim_step too, and
    a failed optim_step drops the gradients before it.
    """


@dataclass(frozen=True)
class SamplingSession:
    """The weights that a series of samples uses."""

    sampling_session_id: str
    session_id: str
    base_model: str
    snapshot_id: str | None = None
    """Request id of the save that made its snapshot."""
    model_id: str | None = None
    model_path: str | None = None
    """Its checkpoint, if it has no snapshot."""
    gone: str | None = None
    """The reason why its weights are gone, if they are."""
    inflight: bool = False
    """Whether it samples its model's newest weights instead of `snapshot_id`."""

    @property
    def weights_id(self) -> str | None:
        """A checkpoint, a snapshot, or None for the base weights."""
        return (
            ids.inflight_id(self.model_id) if self.inflight and self.model_id else self.model_path or self.snapshot_id
        )


@dataclass(frozen=True)
class Checkpoint:
    """Saved weights."""

    tinker_path: str
    model_id: str
    kind: CheckpointKind
    name: str
    directory: str
    """A name below the data directory's `checkpoints`, a path or a URL. Copies share it."""
    base_model: str
    """As it was configured."""
    architecture: str
    lora_config: dict[str, Any]
    has_optimizer: bool
    size_bytes: int
    user_metadata: dict[str, str] | None
    created_at: float
    expires_at: float | None
    public: bool = False
    """Whether other tenants may read it."""
    tenant: str = LOCAL
    """Its owner."""
    deleted_at: float | None = None
    """When it was deleted; it can be restored for a day."""


@dataclass(frozen=True)
class TrainingRun:
    """A model, in training or ended, as the API lists it."""

    model: Model
    tenant: str
    last_request_at: float
    last_training: Checkpoint | None
    last_sampler: Checkpoint | None


@dataclass(frozen=True)
class NewCommand:
    """A training operation to append to the log."""

    model_id: str
    seq_id: int
    kind: CommandKind
    payload: bytes
    image_digests: Sequence[bytes] = ()
    """SHA-256 of each image of the payload, in order."""
    images: Mapping[bytes, bytes] = field(default_factory=dict)
    """The encoded images by digest."""
    model: Model | None = None
    """The model that it creates."""
    sampling_session: SamplingSession | None = None
    """The sampling session that it creates."""
    digest: bytes | None = None
    """SHA-256 that a repeat must have; None for that of the payload."""


@dataclass(frozen=True)
class Command:
    """A queued training operation; `Store.payload` has its payload."""

    id: int
    """Its position in the log. A lower id may appear after a higher one."""
    model_id: str
    seq_id: int
    kind: CommandKind
    payload_bytes: int
    """Size when unpacked (`wire/compression.py`)."""
    created_at: float
    image_digests: tuple[bytes, ...] = ()
    """SHA-256 of each image of the payload, in order (`BlobFiles.read`)."""

    @property
    def request_id(self) -> str:
        return ids.request_id(self.model_id, self.seq_id)


@dataclass(frozen=True)
class Unfinished:
    """A queued operation, as budgets and limits count it."""

    request_id: str
    size: int
    """Bytes of its payload."""
    tenant: str
    base_model: str


@dataclass(frozen=True)
class HistoryChange:
    """What has changed in the history of a model (`engine/history.py`)."""

    model_id: str
    summary: dict[str, Any] | None = None
    """All of it but the events; None if it is as it was."""
    added: Sequence[tuple[int, dict[str, Any]]] = ()
    """Events by their numbers."""
    removed: Sequence[int] = ()
    released: Sequence[tuple[int, int]] = ()
    """No replay needs the requests of finished operations behind the first of two seq_ids, up to the second."""
    begins: bool = False
    """Whether the model is new."""
    ends: bool = False
    """Whether it would be lost from now on, as there is no state of it."""
    comebacks: int | None = None
    """How often its recovery has begun and not ended."""


@dataclass(frozen=True)
class StoredHistory:
    """A model that the next engine can bring back."""

    model_id: str
    summary: dict[str, Any]
    comebacks: int
    events: dict[int, dict[str, Any]]
    operations: list[tuple[Command, bool]]
    """All behind its oldest state, in order, and whether each is queued."""
    session_is_over: bool


COMPARED = ("kl_sampler_trainer/tokens", "kl_sampler_trainer/k1", "kl_sampler_trainer/k3")
"""Sums over sampled tokens, with d the trainer's log-probability less the sampler's: of 1, of -d and of exp(d) - 1 - d.

They are kept for curves, and are in no reply.
"""


@dataclass(frozen=True)
class OperationMetrics:
    """Metrics of an operation, for the curves of its run."""

    kind: str
    """Of the operation; `forward` for one without gradients."""
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """The result or the error of an operation."""

    request_id: str
    result: bytes | None
    result_type: Literal["protobuf", "json"] | None
    error: str | None
    category: Category | None
    resolved: dict[str, Any] | None = None
    """Things that it used or wrote beside its payload, for a replay.

    The directory of a checkpoint; for create_model the seed and the base model's fingerprint.
    """
    tokens: int = 0
    """Tokens of its passes, if it has succeeded."""
    gpu_seconds: float = 0.0
    """Seconds of devices for passes of its model, as far as they were known and no other operation has them."""
    replays: bool = False
    """Whether its request stays until it is released, because a replay after a crash may need it."""
    history: HistoryChange | None = None
    """What it, and what came before it, has changed in the history of its model."""
    measured: OperationMetrics | None = None


@dataclass(frozen=True, eq=False)
class RecordedSequence:
    """One sequence as it was sampled."""

    prompt_length: int
    """Tokens of its prompt, image tokens included."""
    tokens: "NDArray[np.int32]"
    """[n]"""
    logprobs: "NDArray[np.float32]"
    """[n] by the weights that sampled it, at the temperature of the request."""


@dataclass(frozen=True, eq=False)
class SequenceRoutes:
    """The experts that computed one sampled sequence."""

    tokens: "NDArray[np.int64]"
    """[n] of prompt and answer, images marked (`RenderedInput.identity`)."""
    experts: "ExpertIndices"
    """[mixtures, n - 1, per_token]: the last token was not computed."""
