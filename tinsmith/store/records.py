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
"""The kind of a training operation. The code that appends it to the log names it; `tinsmith/wire` says how each kind's payload is read."""
REJECTED: Literal["rejected"] = "rejected"
"""Kind of an operation that was refused when it came in. It only takes its place in the sequence: its payload is the message (UTF-8)
of the UserError that its future ends with."""

SESSION_END = "session-end"
"""Name of the checkpoint that the server makes of a model when it unloads it: its session was idle, or the server is stopped."""

CLIENT_REASONS = ("success", "errored", "interrupted")
"""The reasons that a client can give for the end of its session."""

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
    """Name that the client asked for, with its ":suffix" if it sent one."""
    lora_config: dict[str, Any]
    optimizer_config: dict[str, Any]
    user_metadata: dict[str, Any] | None
    status: ModelStatus = "creating"
    applied_seq: int | None = None
    """The highest seq_id of its operations that succeeded: the effect of each of them is in the model. None before it is created.

    It is written in the same transaction as the operation's outcome. A failed operation never counts: nothing of it is in the weights, the
    optimizer's state or the gradients. What a failure does to the step that is open follows from the log: a forward_backward that fails
    spoils its step, so that the next optim_step fails too, and an optim_step that fails drops the gradients before it."""


@dataclass(frozen=True)
class SamplingSession:
    """The weights that a series of samples is drawn from."""

    sampling_session_id: str
    session_id: str
    base_model: str
    snapshot_id: str | None = None
    """The snapshot to sample from: request id of the save that made it. None if there is none."""
    model_id: str | None = None
    """The model that the snapshot is of."""
    model_path: str | None = None
    """The saved checkpoint to sample from, instead of a snapshot."""
    gone: str | None = None
    """The reason why its weights no longer exist; None while they exist."""
    inflight: bool = False
    """Whether it samples the newest weights of its model, instead of those of `snapshot_id` only."""

    @property
    def weights_id(self) -> str | None:
        """The checkpoint or the snapshot to sample from; None for the base weights."""
        return ids.inflight_id(self.model_id) if self.inflight and self.model_id else self.model_path or self.snapshot_id


@dataclass(frozen=True)
class Checkpoint:
    """Saved weights."""

    tinker_path: str
    model_id: str
    kind: CheckpointKind
    name: str
    directory: str
    """Place of its files: a name below the data directory's `checkpoints`, or a path or URL. A copy has the directory of its source."""
    base_model: str
    """Name of the base model as it was configured."""
    architecture: str
    lora_config: dict[str, Any]
    has_optimizer: bool
    """Whether the files include the state of the optimizer."""
    size_bytes: int
    user_metadata: dict[str, str] | None
    created_at: float
    expires_at: float | None
    """None if it never expires."""
    public: bool = False
    """Set by publish and unpublish. It gives nobody access: the server has a single user."""


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
    """SHA-256 of the bytes of each image that the payload leaves out, in the order in which they stand there."""
    images: Mapping[bytes, bytes] = field(default_factory=dict)
    """The encoded images by digest."""
    model: Model | None = None
    """The model that comes into being with the command."""
    sampling_session: SamplingSession | None = None
    """The sampling session that comes into being with the command."""
    digest: bytes | None = None
    """SHA-256 of what a repeat of the command repeats; None for that of the payload."""


@dataclass(frozen=True)
class Command:
    """A training operation that waits to be run. Its payload stays in the store until then (`Store.payload`)."""

    id: int
    """Position in the log over all models. A lower id may become visible after a higher one."""
    model_id: str
    seq_id: int
    kind: CommandKind
    payload_bytes: int
    """Once it is unpacked (`wire/compression.py`)."""
    created_at: float
    image_digests: tuple[bytes, ...] = ()
    """SHA-256 of the bytes of each image that the payload leaves out, in the order in which they stand there (`Store.read_blob`)."""

    @property
    def request_id(self) -> str:
        """Id that the client polls for."""
        return ids.request_id(self.model_id, self.seq_id)


@dataclass(frozen=True)
class Outcome:
    """Outcome of an operation: a result or an error."""

    request_id: str
    result: bytes | None
    result_type: Literal["protobuf", "json"] | None
    error: str | None
    category: Category | None
    resolved: dict[str, Any] | None = None
    """Values that the operation read or wrote outside of its payload, as JSON, so that a later replay need not look it up again.

    load_weights and create_from_checkpoint: the directory of the checkpoint that the path meant. create_model: the seed, and the
    fingerprint of the base model. Saves: the directory that was written. None if the payload says everything."""


@dataclass(frozen=True, eq=False)
class RecordedSequence:
    """One sequence as it was sampled."""

    prompt_length: int
    """Tokens of its prompt, image tokens included."""
    tokens: "NDArray[np.int32]"
    """[n] what was sampled."""
    logprobs: "NDArray[np.float32]"
    """[n] of each token, by the weights that sampled it and at the temperature of the request."""
