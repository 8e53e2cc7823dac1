"""Messages between the engine and its workers.

Engine to worker: Prepare, Drop, RunPass, the calls (CreateModel, OptimStep, TakeSnapshot, SaveModel, ExportModel,
LoadModel), FinishSave, the orders that need no answer (ClearGradients, DeleteModel, DropFiles), and of what the server
says: Sample, CancelSample, EndSession, ForgetCheckpoint, Shutdown. Worker to engine: WorkerReady, Alive, Prepared,
PrepareFailed, PassDone, CopyEnded, Copied, PartWritten, Answer, CallFailed, WorkerStatus, Bye, and for the server:
SampleDone, SampleFailed, SampleEvents.

A worker answers a call once, under the number that the engine gave it. Numbers are never used twice. Errors travel as
the name of their class in `errors.py` and their message.
"""

from dataclasses import dataclass, field
from typing import Any

from tinsmith import errors
from tinsmith.errors import TinsmithError
from tinsmith.observing.metrics import Number
from tinsmith.observing.spans import Span
from tinsmith.protocol.messages import Message


@dataclass(frozen=True)
class WorkerReady(Message):
    """The worker has loaded its base models and can take work. `models` holds their `ModelFacts`."""

    models: list[dict[str, Any]]
    device: str


# ---- Forward and forward_backward operations


@dataclass(frozen=True)
class Prepare(Message):
    """Check an operation and measure its datums. `payload` is the stored protobuf."""

    number: int
    """Comes back with the answer: an operation may be dropped and asked for again."""
    operation: str
    model_id: str
    base_model: str
    image_digests: list[str]
    """SHA-256 (hexadecimal) of each image, in the order of the payload. The worker reads them from the store."""
    payload: bytes


@dataclass(frozen=True)
class Prepared(Message):
    """An operation is right as far as that can be known before its images are decoded.

    The worker holds its datums until they are run.
    """

    number: int
    operation: str
    backward: bool
    lengths: list[int]
    """Tokens of each datum, image tokens included."""
    pixels: list[dict[str, int]]
    """Pixels of each datum's images that are still to be decoded, by digest (hexadecimal)."""
    together: list[int] = field(default_factory=list)
    """Indices of datums longer than one worker computes, which all are to compute together."""
    routed: list[int] = field(default_factory=list)
    """Tokens of each datum whose experts are given; empty if there are none."""


@dataclass(frozen=True)
class PrepareFailed(Message):
    """An operation is wrong, or what it needs cannot be read now."""

    number: int
    operation: str
    backward: bool
    """Whether it would have contributed gradients, as far as that could be read."""
    error_type: str
    error: str


@dataclass(frozen=True)
class Drop(Message):
    """Operations of which nothing more will be run."""

    operations: list[str]


@dataclass(frozen=True)
class RunPass(Message):
    """Compute datums of prepared operations together, on one base model and all in one direction."""

    number: int
    base_model: str
    backward: bool
    pieces: list[tuple[str, int]]
    """Operation and index of each datum."""
    lengths: list[int]
    together: bool = False
    """Whether all workers compute the one datum that it holds, each a slice of it."""
    pixels: list[dict[str, int]] = field(default_factory=list)
    """`Prepared.pixels` of each datum, by which the pass is divided; empty if no image is still to be decoded."""


@dataclass(frozen=True)
class PassDone(Message):
    """Outcome of each datum of a pass.

    `payload` holds of those in `results` first all losses, then all metrics (float64), then all log-probabilities
    (float32): JSON has no infinity and no NaN.
    """

    number: int
    results: list[tuple[str, int, list[int]]]
    """Operation, index, and the shape of the log-probabilities."""
    failures: list[tuple[str, int, str, str]]
    """Operation, index, type and message of the error. A datum that failed left no gradient."""
    tokens_per_pass: int
    """Most tokens of later passes on this base model: fewer, after the worker ran out of memory."""
    metrics: list[list[str]]
    """Names of the metrics of each of `results`."""
    took: list[tuple[str, bool, list[int], float]]
    """Passes found to have ended since this was last told: a GPU is at a backward pass for longer than the worker.

    Each has its base model, whether with backward, lengths of the sequences, and seconds of the device. Not those that
    failed or were given up, nor those that all workers compute together: of them a smaller one would cost nearly as
    much.
    """
    payload: bytes


# ---- Calls, each answered once


@dataclass(frozen=True)
class CreateModel(Message):
    """Make a fresh model."""

    number: int
    base_model: str
    model_id: str
    shape: dict[str, Any]
    """Fields of `LoraShape`."""
    fingerprint: str = ""
    """Of the weights that the base model must have; empty for any."""


@dataclass(frozen=True)
class OptimStep(Message):
    """Apply and clear a model's gradients.

    The answer holds `metrics`. `CopyEnded` follows if a copy was asked for.
    """

    number: int
    base_model: str
    model_id: str
    settings: dict[str, Any]
    """Fields of `AdamSettings`."""
    copy: str = ""
    """Directory for a kept copy of the result; empty if this worker writes none."""
    before: str = ""
    """Directory of the copy before, which stays beside it; empty if there is none."""


@dataclass(frozen=True)
class CopyEnded(Message):
    """A kept copy is complete, or there is none."""

    model_id: str
    directory: str
    is_complete: bool
    blocked_s: float
    """Seconds for which the device waited for the copy."""


@dataclass(frozen=True)
class TakeSnapshot(Message):
    """Keep a frozen copy of a model's weights for sampling sessions."""

    number: int
    base_model: str
    model_id: str
    request_id: str
    """Request id of the save: the key and the label of these weights."""
    inflight: bool
    """Whether the model's inflight sampling sessions go on with them."""


@dataclass(frozen=True)
class SaveModel(Message):
    """Copy a model as it is now, and write the copy beside the device.

    `Copied` is told before the answer, which holds `size_bytes` and `has_optimizer`.
    """

    number: int
    base_model: str
    model_id: str
    optimizer: bool
    checkpoint: dict[str, Any]
    """Known fields of the checkpoint's row; `directory` says where its files go."""


@dataclass(frozen=True)
class ExportModel(Message):
    """Copy a model as it is now, and write it beside the device in the formats of other tools.

    Answered as `SaveModel` is.
    """

    number: int
    base_model: str
    model_id: str
    recipients: list[str]
    """Keys of age to encrypt the files for; empty leaves them in plain."""
    checkpoint: dict[str, Any]


@dataclass(frozen=True)
class Copied(Message):
    """A worker has the copy for SaveModel or ExportModel: what it does to the model from now on is not in it."""

    number: int
    """Number of the call, which is answered when the copy is written."""


@dataclass(frozen=True)
class PartWritten(Message):
    """A worker has written its part of a save of sharded weights."""

    number: int
    """Number of the call, which FinishSave will bring to an answer."""
    pieces: list[tuple[str, int, int, int]]
    """Pieces that this worker wrote, as `store/pieces.py` describes them."""


@dataclass(frozen=True)
class FinishSave(Message):
    """All workers have written their parts, or one has failed.

    The call is answered when there is a checkpoint, or nothing left.
    """

    number: int
    directory: str
    pieces: list[tuple[str, int, int, int]]
    error_type: str = ""
    """Type and message of the error with which the call is to fail; empty if all went well."""
    error: str = ""
    tinker_path: str = ""
    """Path of the checkpoint: a worker forgets an earlier one that it has sampled."""


@dataclass(frozen=True)
class LoadModel(Message):
    """Make a model from a checkpoint, or replace the weights of one that is there.

    The files are read beside the device.
    """

    number: int
    base_model: str
    model_id: str
    tinker_path: str
    directory: str
    optimizer: bool


@dataclass(frozen=True)
class Answer(Message):
    """A call has had its effect."""

    number: int
    result: dict[str, Any]


@dataclass(frozen=True)
class CallFailed(Message):
    """A call failed and left the model as it was, unless its message says otherwise."""

    number: int
    error_type: str
    error: str


# ---- Orders that cannot fail


@dataclass(frozen=True)
class ClearGradients(Message):
    """Forget the gradients that a model has accumulated."""

    base_model: str
    model_id: str


@dataclass(frozen=True)
class DeleteModel(Message):
    """Free a model, if it is there, and drop its snapshots."""

    base_model: str
    model_id: str


@dataclass(frozen=True)
class DropFiles(Message):
    """Delete what saves have left that ended with their workers."""

    directories: list[str]


@dataclass(frozen=True)
class WorkerStatus(Message):
    """All that a worker counts (`observing/metrics.py`), sent as a report (`reports.py`)."""

    numbers: list[Number]
    spans: list[Span]
    """What it has done since the last report."""


Call = CreateModel | OptimStep | TakeSnapshot | SaveModel | ExportModel | LoadModel


def error_of(error_type: str, message: str) -> TinsmithError:
    """Return the error that travelled so. One whose class is not in `errors.py` becomes a TinsmithError."""
    found = getattr(errors, error_type, TinsmithError)
    family = isinstance(found, type) and issubclass(found, TinsmithError)
    return found(message) if family else TinsmithError(message)


def type_of(error: TinsmithError) -> str:
    """Return the name under which the class of an error travels."""
    return type(error).__name__
