"""Questions of a worker to the engine: database rows, and where the workers meet.

FindCheckpoint is answered by CheckpointRow, FindSequences by Sequences, FindRoutes by Routes, FindMeeting by
MeetingPort, the others by Answered, and any of them by NotAnswered. They have a socket of their own (`link.py`), so
that any thread of the worker may ask and wait, while a thread of the engine answers: the loops of both go on meanwhile.
"""

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import zmq
from numpy.typing import NDArray

from tinsmith.errors import StoreUnavailableError, TinsmithError
from tinsmith.protocol.boundary import result_or_error
from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.link import question_address
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import error_of, type_of
from tinsmith.store.records import Checkpoint, RecordedSequence, SequenceRoutes
from tinsmith.wire.paths import CheckpointKind
from tinsmith.wire.tensors import ExpertIndices

PATIENCE_S = 120.0
"""Seconds that a worker waits for an answer: longer than the engine waits for a locked database."""


@dataclass(frozen=True)
class FindCheckpoint(Message):
    """The row of a checkpoint, saved for that purpose."""

    path: str
    kind: CheckpointKind | None


@dataclass(frozen=True)
class CheckpointRow(Message):
    """The fields of a `Checkpoint`."""

    row: dict[str, Any]

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(**self.row)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        return cls(asdict(checkpoint))


@dataclass(frozen=True)
class FindSequences(Message):
    """Recorded sequences by id."""

    sequence_ids: list[str]


@dataclass(frozen=True)
class _CarriesSequences(Message):
    """Recorded sequences. `payload` holds of each its tokens (int32), then its log-probabilities (float32)."""

    headers: list[tuple[str, int, int]]
    """Id, tokens of the prompt, and sampled tokens of each."""
    payload: bytes

    @classmethod
    def of(cls, sequences: Mapping[str, RecordedSequence]) -> Self:
        headers = [(name, sequence.prompt_length, len(sequence.tokens)) for name, sequence in sequences.items()]
        arrays = [
            array for each in sequences.values() for array in (each.tokens.astype("<i4"), each.logprobs.astype("<f4"))
        ]
        return cls(headers, b"".join(array.tobytes() for array in arrays))

    @property
    def sequences(self) -> dict[str, RecordedSequence]:
        found: dict[str, RecordedSequence] = {}
        start = 0
        for name, prompt_length, count in self.headers:
            tokens = np.frombuffer(self.payload, "<i4", count, start)
            logprobs = np.frombuffer(self.payload, "<f4", count, start + tokens.nbytes)
            found[name] = RecordedSequence(prompt_length, tokens, logprobs)
            start += tokens.nbytes + logprobs.nbytes
        return found


@dataclass(frozen=True)
class Sequences(_CarriesSequences):
    """Those that were asked for and are there."""


@dataclass(frozen=True)
class KeepSequences(_CarriesSequences):
    """Asks the engine to record sequences."""


@dataclass(frozen=True)
class ForgetSequences(Message):
    """Delete what a session has sampled, and the experts of it."""

    session_id: str


@dataclass(frozen=True)
class KeepRoutes(Message):
    """Asks the engine to keep the experts of sequences that a training run's weights have sampled.

    `payload` holds of each its tokens (int64), then the experts of all but the last (uint8, or int16 if `wide`).
    """

    run: str
    tenant: str
    """Whose samples they are. Of another tenant than the run's they are not kept: training would follow them."""
    shapes: list[tuple[int, int, int]]
    """Of the experts of each."""
    wide: bool
    payload: bytes

    @classmethod
    def of(cls, run: str, tenant: str, routes: Sequence[SequenceRoutes]) -> Self:
        shapes: list[Any] = [each.experts.shape for each in routes]
        wide = any(each.experts.dtype == np.int16 for each in routes)
        arrays = [array for each in routes for array in (each.tokens, each.experts.astype(_number(wide)))]
        return cls(run, tenant, shapes, wide, b"".join(array.tobytes() for array in arrays))

    @property
    def routes(self) -> list[SequenceRoutes]:
        """Return the sequences and their experts."""
        found, start = [], 0
        for shape in self.shapes:
            tokens = np.frombuffer(self.payload, "<i8", shape[1] + 1, start)
            start += tokens.nbytes
            experts = np.frombuffer(self.payload, _number(self.wide), math.prod(shape), start).reshape(shape)
            start += experts.nbytes
            found.append(SequenceRoutes(tokens, experts.copy()))
        return found


@dataclass(frozen=True)
class FindRoutes(Message):
    """What the engine keeps of the longest sequences that these begin with. `payload` holds their tokens (int64)."""

    run: str
    lengths: list[int]
    payload: bytes

    @classmethod
    def of(cls, run: str, sequences: "Sequence[NDArray[np.int64]]") -> Self:
        return cls(run, [len(each) for each in sequences], b"".join(each.tobytes() for each in sequences))

    @property
    def sequences(self) -> "list[NDArray[np.int64]]":
        return np.split(np.frombuffer(self.payload, "<i8"), np.cumsum(self.lengths)[:-1])


@dataclass(frozen=True)
class Routes(Message):
    """The experts found for each sequence, one behind the other in `payload` (uint8, or int16 if `wide`)."""

    shapes: list[tuple[int, int, int] | None]
    """None where nothing was found."""
    wide: bool
    payload: bytes

    @classmethod
    def of(cls, found: "Sequence[ExpertIndices | None]") -> Self:
        wide = any(each is not None and each.dtype == np.int16 for each in found)
        shapes: list[Any] = [None if each is None else each.shape for each in found]
        return cls(shapes, wide, b"".join(each.astype(_number(wide)).tobytes() for each in found if each is not None))

    @property
    def experts(self) -> "list[ExpertIndices | None]":
        """Return the experts of each sequence; None where nothing was found."""
        found: list[ExpertIndices | None] = []
        start = 0
        for shape in self.shapes:
            if shape is None:
                found.append(None)
                continue
            experts = np.frombuffer(self.payload, _number(self.wide), math.prod(shape), start).reshape(shape)
            start += experts.nbytes
            found.append(experts)
        return found


def _number(wide: bool) -> str:
    return "<i2" if wide else "|u1"


@dataclass(frozen=True)
class FindMeeting(Message):
    """Asks where the workers of several hosts meet."""


@dataclass(frozen=True)
class MeetingPort(Message):
    """The port at which workers of several hosts meet, told by the first one once it is open; 0 in answers before."""

    host: str
    port: int


@dataclass(frozen=True)
class Answered(Message):
    """Answer without a value: the question's work is done."""


@dataclass(frozen=True)
class NotAnswered(Message):
    """It could not be done. Errors travel as those of calls do."""

    error_type: str
    error: str


Answers = Callable[[Message], Message]
"""Answers a question. Raises what `NotAnswered` is to say."""


class Questions:
    """The worker's end. Used by any thread, one question at a time."""

    def __init__(self, address: str, keys: ChildKeys | None = None, patience_s: float = PATIENCE_S) -> None:
        """Connect to the engine whose link has this `address`, between hosts with its `keys`."""
        self._patience_ms = int(1000 * patience_s)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.REQ_RELAXED, 1)  # another question may follow one that got no answer,
        self._socket.setsockopt(zmq.REQ_CORRELATE, 1)  # and an answer that comes too late is not taken for its own
        if keys is not None:
            keys.show(self._socket)
        self._socket.connect(question_address(address))

    def ask(self, question: Message) -> Message:
        """The answer. Raises what the engine says, or StoreUnavailableError if it says nothing."""
        with self._lock:
            self._socket.send_multipart(question.to_frames())
            if not self._socket.poll(self._patience_ms):
                raise StoreUnavailableError(
                    f"the engine did not answer within {self._patience_ms / 1000:g} s; send the request again"
                )
            answer = Message.from_frames(self._socket.recv_multipart())
        if isinstance(answer, NotAnswered):
            raise error_of(answer.error_type, answer.error)
        return answer

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Answering:
    """The engine's end: a thread that answers one worker until it is closed."""

    def __init__(self, socket: "zmq.Socket[bytes]", answers: Answers) -> None:
        """Take over `socket`, which is of type REP and bound. It belongs to the thread from now on."""
        self._socket = socket
        self._answers = answers
        self._bell, self._rope = os.pipe()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while self._bell not in dict(poller.poll()):
            question = Message.from_frames(self._socket.recv_multipart())
            self._socket.send_multipart(answer_to(question, self._answers).to_frames())
        self._socket.close(linger=0)
        os.close(self._bell)

    def close(self) -> None:
        """Answer nothing more; a question that is being answered is the last."""
        os.close(self._rope)


def answer_to(question: Message, answers: Answers) -> Message:
    """The message that answers a question, also if that fails."""
    answer = result_or_error(lambda: answers(question))
    return NotAnswered(type_of(answer), str(answer)) if isinstance(answer, TinsmithError) else answer
