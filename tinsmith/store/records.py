"""The dataclasses that the store takes and returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tinsmith.store import ids
from tinsmith.wire.paths import CheckpointKind

if TYPE_CHECKING:  # commands that only ask for a checkpoint need no numpy
    import numpy as np
    from numpy.typing import NDArray

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
"""Kinds of training operations. `tinsmith/wire` says how each kind's payload is read."""
REJECTED: Literal["rejected"] = "rejected"
"""Kind of an operation that was refused when it came in. It keeps its place in the sequence; its payload is its error."""

SESSION_END = "session-end"
"""Name of the checkpoint that the server makes of a model when it unloads it."""

CLIENT_REASONS = ("success", "errored", "interrupted")
"""Reasons that a client can give for the end of its session."""

ModelStatus = Literal["creating", "ready", "failed", "finished", "unloaded", "lost", "copied"]
"""`sessions.py` says what each means. A copied model was never loaded: it only holds copies of checkpoints."""
Category = Literal["user", "server"]


@dataclass(frozen=True)
class Session:
    """A session of a client."""

    session_id: str
    created_at: float
    """Unix time, as all times here."""
    finished_at: float | None
    """None while the session is open."""


@dataclass(frozen=True)
class Model:
    """A model in training."""

    model_id: str
    session_id: str
    base_model: str
    """As the client asked for it, perhaps with a ":suffix"."""
    lora_config: dict[str, Any]
    optimizer_config: dict[str, Any]
    user_metadata: dict[str, Any] | None
    status: ModelStatus = "creating"
    applied_seq: int | None = None
    """The highest seq_id of its operations that succeeded; None before it is created. Written in the transaction of the outcome.

    The effect of each of them is in the model, and nothing of a failed one. A failed forward_backward also fails the next optim_step, and a
    failed optim_step drops the gradients before it.
    """


@dataclass(frozen=True)
class SamplingSession:
    """The weights that a series of samples is drawn from."""

    sampling_session_id: str
    session_id: str
    base_model: str
    snapshot_id: str | None = None
    """Request id of the save that made the snapshot to sample from."""
    model_id: str | None = None
    model_path: str | None = None
    """The checkpoint to sample from, instead of a snapshot."""
    gone: str | None = None
    """Why its weights no longer exist; None while they do."""
    inflight: bool = False
    """Whether it samples the newest weights of its model instead of `snapshot_id`."""

    @property
    def weights_id(self) -> str | None:
        """What to sample from: a checkpoint, a snapshot, or None for the base weights."""
        return ids.inflight_id(self.model_id) if self.inflight and self.model_id else self.model_path or self.snapshot_id


@dataclass(frozen=True)
class Checkpoint:
    """Saved weights."""

    tinker_path: str
    model_id: str
    kind: CheckpointKind
    name: str
    directory: str
    """A name below the data directory's `checkpoints`, or a path or URL. Copies share the directory."""
    base_model: str
    """As it was configured."""
    architecture: str
    lora_config: dict[str, Any]
    has_optimizer: bool
    size_bytes: int
    user_metadata: dict[str, str] | None
    created_at: float
    expires_at: float | None
    """None if it never expires."""
    public: bool = False
    """Gives nobody access: the server has a single user."""


@dataclass(frozen=True)
class TrainingRun:
    """A model, in training or ended, as the API lists it."""

    model: Model
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
    """SHA-256 of each image that the payload leaves out, in order."""
    images: Mapping[bytes, bytes] = field(default_factory=dict)
    """The encoded images by digest."""
    model: Model | None = None
    """The model that the command creates."""
    sampling_session: SamplingSession | None = None
    """The sampling session that the command creates."""
    digest: bytes | None = None
    """SHA-256 of what a repeat must repeat; None for that of the payload."""


@dataclass(frozen=True)
class Command:
    """A queued training operation; `Store.payload` has its payload."""

    id: int
    """Position in the log. A lower id may become visible after a higher one."""
    model_id: str
    seq_id: int
    kind: CommandKind
    payload_bytes: int
    """Size when unpacked (`wire/compression.py`)."""
    created_at: float
    image_digests: tuple[bytes, ...] = ()
    """SHA-256 of each image that the payload leaves out, in order (`BlobFiles.read`)."""

    @property
    def request_id(self) -> str:
        return ids.request_id(self.model_id, self.seq_id)


@dataclass(frozen=True)
class Outcome:
    """The result or the error of an operation."""

    request_id: str
    result: bytes | None
    result_type: Literal["protobuf", "json"] | None
    error: str | None
    category: Category | None
    resolved: dict[str, Any] | None = None
    """What the operation read or wrote outside of its payload, so that a replay need not look it up again.

    The directory of a checkpoint that was loaded or saved; for create_model the seed and the fingerprint of the base model.
    """


@dataclass(frozen=True, eq=False)
class RecordedSequence:
    """One sequence as it was sampled."""

    prompt_length: int
    """Tokens of its prompt, image tokens included."""
    tokens: "NDArray[np.int32]"
    """[n]"""
    logprobs: "NDArray[np.float32]"
    """[n] by the weights that sampled it, at the temperature of the request."""
