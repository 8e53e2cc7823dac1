"""Messages between server and engine.

Server to engine: Wake, Sample, CancelSample, EndSession, ForgetCheckpoint, Shutdown.
Engine to server: Starting, Ready, Recovering, Alive, Done, SampleEvents, SampleDone, SampleFailed,
SampleStopped, Status, Saving, Bye.
Nothing here is needed to recover data: what must last is in the store.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tinsmith.observing.metrics import Number
from tinsmith.observing.spans import Span
from tinsmith.protocol.messages import Message
from tinsmith.store import ids
from tinsmith.store.records import LOCAL, Category, Outcome


@dataclass(frozen=True)
class Wake(Message):
    """There are new commands in the log."""

    models: list[str]
    """Models with new operations. Empty if the server cannot say, because the engine has just become ready."""


@dataclass(frozen=True)
class Sample(Message):
    """Run one asample request. `payload` is the body as the client sent it, already validated."""

    request_id: str
    run: int
    """Tells apart runs of one request id: its client may give a sample up and send the id again."""
    base_model: str
    weights_id: str | None
    """Ephemeral snapshot, or path of the checkpoint, to sample from; None samples the base weights."""
    num_samples: int
    stream: bool
    """Whether its tokens are told as they come (`SampleEvents`)."""
    payload: bytes
    tenant: str = LOCAL

    @property
    def session_id(self) -> str:
        return ids.session_of(self.request_id)

    @property
    def name(self) -> str:
        """Name of this run in its sampler."""
        return f"{self.request_id}@{self.run}"


@dataclass(frozen=True)
class CancelSample(Message):
    """Nobody waits for this run of a sample any more."""

    request_id: str
    run: int


@dataclass(frozen=True)
class EndSession(Message):
    """The session is over: cancel its samples and its models' queued commands, unload these, and drop its snapshots."""

    session_id: str
    save: bool
    """Whether to keep its models as checkpoints: their client just went away."""


@dataclass(frozen=True)
class ForgetCheckpoint(Message):
    """The checkpoint of this path was deleted or expires at another time: look it up again before it is sampled."""

    path: str


@dataclass(frozen=True)
class Shutdown(Message):
    """Finish the pass that is running, record it, save all models, answer Bye and exit."""


IMPORTS = "imports its libraries"
"""The first step of a start."""


@dataclass(frozen=True)
class Starting(Message):
    """A step of the start begins, of the first worker, which stands for all."""

    step: str
    """A predicate: "loads tiny"."""
    to_come: list[str]


@dataclass(frozen=True)
class Ready(Message):
    """The engine can take work. `models` describes what it serves, one dictionary per base model (see `ModelFacts`)."""

    models: list[dict[str, Any]]


@dataclass(frozen=True)
class Recovering(Message):
    """A worker has ended.

    Its samples are lost; its models come back before `Ready`, which follows when another has taken its place.
    """

    reason: str


@dataclass(frozen=True)
class Alive(Message):
    """The sender's process runs. A thread sends it, on a socket of its own, however long the loop is busy."""

    busy_s: float
    """Seconds that the loop has been in its current turn; 0 while it waits for work."""
    still_s: float = 0.0
    """Seconds for which nothing has moved in a worker that is busy (`Progress`)."""
    stuck_s: float = 0.0
    """Seconds for which a busy worker has been in one and the same call."""
    waits: bool = False
    """Whether a worker is in an exchange: others, or the network, are what keeps it."""


@dataclass(frozen=True)
class Done(Message):
    """A training operation has ended. Its outcome rides along, so that the server need not look for it in the log."""

    request_id: str
    result_type: Literal["protobuf", "json"] | None
    error: str | None
    category: Category | None
    payload: bytes
    tokens: int = 0
    gpu_seconds: float = 0.0

    @classmethod
    def of(cls, outcome: Outcome) -> Self:
        about = outcome.request_id, outcome.result_type, outcome.error, outcome.category
        return cls(*about, outcome.result or b"", outcome.tokens, outcome.gpu_seconds)

    @property
    def outcome(self) -> Outcome:
        """Return the result or error as the store keeps it."""
        return Outcome(
            self.request_id,
            None if self.result_type is None else self.payload,
            self.result_type,
            self.error,
            self.category,
        )


@dataclass(frozen=True)
class SampleDone(Message):
    """`payload` is the protobuf SampleResponse, and `used` the fields of what is metered (`Used`)."""

    request_id: str
    run: int
    payload: bytes
    used: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleEvents(Message):
    """Tokens of streamed samples from one step of a sampler, in one message."""

    tokens: list[tuple[str, int, int, list[int], list[float]]]
    """Request id, run, index of the sample within its request, new token ids, and their log-probabilities."""


@dataclass(frozen=True)
class SampleFailed(Message):
    """The sample ended in an error.

    `gone` means that its weights no longer exist: the reply is 404, not a failed future.
    """

    request_id: str
    run: int
    error: str
    category: str
    gone: bool


@dataclass(frozen=True)
class SampleStopped(Message):
    """What a sample has cost that gave its client nothing: it was cancelled, or failed."""

    tenant: str
    base_model: str
    session_id: str
    gpu_seconds: float


@dataclass(frozen=True)
class Status(Message):
    """Status of engine and workers, sent as a report (`reports.py`)."""

    models: list[dict[str, Any]]
    """model_id, base_model, queued (operations) and trained_tokens of each loaded model."""
    workers: list[dict[str, Any]]
    """pid, device, state and pass_tokens of each worker."""
    numbers: list[Number]
    """All that the engine and, with the label `worker`, each worker counts (`observing/metrics.py`)."""
    spans: list[Span] = field(default_factory=list)
    """What they have done since the last report; those of a worker have a fact `worker`."""


@dataclass(frozen=True)
class Saving(Message):
    """The engine, told to stop, saves a model or waits for the database: it needs more time."""


@dataclass(frozen=True)
class Bye(Message):
    """The engine has recorded everything and exits."""

    reason: str = ""
    """Why it cannot go on; empty if it was told to stop."""
    follows: bool = False
    """Whether it ends because another worker has ended, which is the one to name."""
