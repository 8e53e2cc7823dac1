"""An engine and its worker in this process: real messages between them, real store, real models; only the processes are
left out."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from sqlalchemy import Connection

from tests.databases import locked
from tinsmith.config import Config, SamplingConfig
from tinsmith.engine.loop import Engine
from tinsmith.engine.records import Records
from tinsmith.engine.scheduler import OperationScheduler
from tinsmith.errors import DeviceLostError
from tinsmith.models.base import BaseModel
from tinsmith.observing.spans import Span
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Done, Status
from tinsmith.protocol.work import PassDone, RunPass, WorkerReady
from tinsmith.store.files import CHECKPOINTS_DIR, delete_copies_left
from tinsmith.store.records import CommandKind, Model, NewCommand, Outcome
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend
from tinsmith.wire import tinker_pb2
from tinsmith.wire.forward_backward import StoredRequest, move_images_out
from tinsmith.worker.loop import Worker
from tinsmith.worker.records import AskedRecords

LONG_S = 120.0
"""How long anything here may take on a busy machine."""

PLACE = "a machine"
"""Where all engines of a test run."""

IMAGE_TOKENS = 6
"""Of an image of `bases.png` in the tiny models."""


def travelled(message: Message) -> Message:
    """The message as it arrives in another process."""
    return Message.from_frames(message.to_frames())


class Wire:
    """In the place of the link of a process: what is sent lies in `sent`, and nothing arrives by itself."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(travelled(message))

    def receive(self, timeout_s: float) -> list[Message]:
        time.sleep(min(timeout_s, 0.01))
        return []

    def wake(self) -> None:
        """Nobody sleeps."""

    def taken(self) -> list[Message]:
        """What was sent, which is forgotten."""
        sent, self.sent = self.sent, []
        return sent


class Beat:
    """In the place of the heartbeat of a process."""

    worker_busy_s: float | None = None

    def busy(self) -> None: ...

    def idle(self) -> None: ...


Computed = tuple[list[str], int, bool]
"""A pass: the model of each datum, tokens, and whether it was backward."""


class WorkerHere:
    """In the place of a `WorkerProcess`: a worker that does its turns when the engine asks what it has said."""

    def __init__(self, config: Config, bases: dict[str, BaseModel]) -> None:
        self.config = config
        self.bases = bases
        self.records = Records(config)
        self.passes: list[RunPass] = []
        """All that the engine has asked for."""
        self.computed: list[Computed] = []
        """All passes that workers have told the results of."""
        self.is_stuck = False
        """Whether to do nothing that needs the device, as while something takes long on it."""
        self.end: str | None = None
        """Why it has ended, once it has."""
        self.status = Status([], [{"pid": 0, "device": "cpu", "state": "ready", "pass_tokens": 0}], [])
        self.count, self.busy_s, self.wait_s, self.is_hopeless = 1, 0.0, float("inf"), False
        self.start()
        self.models: dict[str, ModelFacts] = {facts.name: facts for facts in self.worker.facts()}

    def start(self) -> WorkerReady:
        """A worker with nothing but base models, in the place of the one before; what it says first."""
        self.wire = Wire()
        records = AskedRecords(lambda question: travelled(self.records.answer(travelled(question))))
        self.worker = Worker(self.config, self.bases, self.wire, Beat(), records)  # type: ignore[arg-type]
        self.last_messages: list[Message] = []
        self.is_ready = True
        return WorkerReady([facts.to_dict() for facts in self.worker.facts()], "cpu")

    def take_spans(self) -> list[Span]:
        """Nothing: what the worker notes is noted in the engine's process."""
        return []

    def die(self, reason: str) -> None:
        """End at once, as a process does that is killed. What it has said before still arrives."""
        self.is_ready, self.end = False, reason
        for threads in self.worker.beside:
            threads.close()

    def send(self, message: Message) -> None:
        if self.is_ready:
            arrived = travelled(message)
            if isinstance(arrived, RunPass):
                self.passes.append(arrived)
            self.worker.handle(arrived)

    def receive(self) -> list[Message]:
        """Do all that can be done now, and return what it came to."""
        if self.is_ready:
            try:
                self.work()
            except DeviceLostError as error:
                self.die(str(error))
        said = [message for message in self.wire.taken() if not isinstance(message, WorkerReady)]
        asked = {message.number: message for message in self.passes}
        for done in (asked[message.number] for message in said if isinstance(message, PassDone)):
            self.computed.append(
                ([operation.rpartition("/")[0] for operation, _ in done.pieces], sum(done.lengths), done.backward)
            )
        return said

    def work(self) -> None:
        """Do all that can be done now."""
        self.worker.receive(0.0)
        while self.worker.has_work and not self.is_stuck:
            self.worker.turn()
            self.worker.receive(0.0)

    @property
    def is_resting(self) -> bool:
        """Whether no thread beside the device is at work."""
        if not self.is_ready:
            return not self.wire.sent
        return not (any(threads.running for threads in self.worker.beside) or self.worker.has_work or self.wire.sent)

    def watch(self) -> None: ...

    def start_if_due(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...

    def ended(self) -> str | None:
        reason, self.end = self.end, None
        return reason


def is_idle(scheduler: OperationScheduler) -> bool:
    """Whether nothing is being computed, and nothing will be before a new command comes."""
    begun = (
        scheduler.forward.operations
        or scheduler.forward.complete
        or any(state.begun for state in scheduler.models.values())
    )
    waits = (
        scheduler.models.put_off
        or scheduler.crash_recovery.waiting
        or any(state.queue.head() for state in scheduler.models.values())
    )
    return not (begun or waits or scheduler.to_unload())


class Here:
    """An engine with its worker, and ways to feed it. Models are s:train:NAME."""

    def __init__(self, bases: dict[str, BaseModel], data_dir: Path, **settings: Any) -> None:
        """`settings` are sections of the configuration."""
        sections = {"sampling": SamplingConfig(kv_cache_gib=0.01)} | settings
        self.config = Config([f"{name}=unused" for name in bases], str(data_dir), **sections)
        store = Store.open(data_dir)
        if store.session("s") is None:
            store.create_session(
                "s", {"tags": [], "user_metadata": None, "sdk_version": "0", "project_id": None, "display_name": None}
            )
        left = store.fail_unfinished("the engine ended", PLACE)  # as the server does before each start
        store.close()
        delete_copies_left(data_dir, left)
        self.bases = bases
        self.server = Wire()
        self.process = WorkerHere(self.config, bases)
        self.engine = Engine(self.config, self.server, Beat(), self.process)  # type: ignore[arg-type]
        self.store = self.engine.store
        self.told: list[str] = []
        """Request ids of the outcomes that the server was told of, in order."""
        self.said: list[Message] = []
        """All that the server was told, in order."""

    def next_engine(self) -> "Here":
        """An engine with a new worker that takes the place of this one, which dies with its worker as it is."""
        self.process.die("signal 9")
        self.engine.store.close()
        sections = {"training": self.config.training, "sampling": self.config.sampling}
        return Here(self.bases, Path(self.config.data_dir), **sections)

    @property
    def worker(self) -> Worker:
        return self.process.worker

    def backend(self, base: str = "tiny") -> LocalBackend:
        backend = self.worker.models.backends[base]
        assert isinstance(backend, LocalBackend)
        return backend

    # ---- Requests

    def add(self, model: str, seq: int, kind: CommandKind, payload: Any, /, **fields: Any) -> None:
        """Put a command into the log and wake the engine."""
        body = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        self.store.append([NewCommand(f"s:train:{model}", seq, kind, body, **fields)])
        self.engine.log_reader.unread.add(f"s:train:{model}")

    def create(self, model: str, base_model: str = "tiny", rank: int = 4) -> None:
        model_id = f"s:train:{model}"
        body = {"session_id": "s", "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": rank}}
        self.add(model, 0, "create_model", body, model=Model(model_id, "s", base_model, {"rank": rank}, {}, None))

    def forward(
        self,
        model: str,
        seq: int,
        lengths: Sequence[int] = (),
        forward_only: bool = False,
        target: int = 1,
        images: Sequence[bytes] = (),
    ) -> None:
        """Ask for what `forward_request` says."""
        stored = forward_request(lengths, images, forward_only, target)
        self.add(
            model, seq, "forward_backward", stored.payload, image_digests=stored.image_digests, images=stored.images
        )

    def snapshot(self, model: str, seq: int, number: int = 1) -> None:
        body = {"model_id": f"s:train:{model}", "seq_id": seq, "sampling_session_seq_id": number}
        self.add(model, seq, "save_weights_for_sampler", body)

    def optim(self, model: str, seq: int, **adam: float) -> None:
        params = {"learning_rate": 1e-3} | adam
        self.add(model, seq, "optim_step", {"model_id": f"s:train:{model}", "seq_id": seq, "adam_params": params})

    def save(self, model: str, seq: int, name: str) -> None:
        self.add(model, seq, "save_weights", {"model_id": f"s:train:{model}", "seq_id": seq, "path": name})

    # ---- Time

    def turn(self) -> None:
        """Once through the engine's loop: what the worker did before is taken in, then what is due is sent."""
        self.engine.receive(0.0)
        self.engine.turn()
        self._hear()

    def _hear(self) -> None:
        said = self.server.taken()
        self.said += said
        self.told += [message.request_id for message in said if isinstance(message, Done)]

    def settle(self) -> None:
        """Go on until nothing is left to do."""
        self.until(lambda: self.is_at_rest)

    @property
    def is_at_rest(self) -> bool:
        engine = self.engine
        waiting = (
            engine.log_reader.unread or engine.log_reader.ended_sessions or engine.recorder.waiting or engine.has_lost
        )
        return (
            not waiting
            and not engine.scheduler.forward.passes
            and is_idle(engine.scheduler)
            and self.process.is_resting
        )

    def until(self, seen: Callable[[], object]) -> None:
        """Go through the loop until that is true."""
        deadline = time.monotonic() + LONG_S
        self.turn()
        while not seen():
            assert time.monotonic() < deadline, "the engine does not come to rest"
            time.sleep(min(0.005, self.engine.patience()))
            self.turn()

    def new_worker(self) -> None:
        """Another worker takes the place of the one that has ended."""
        self.engine.handle_worker(travelled(self.process.start()))

    def say(self, message: Message) -> None:
        """What the server says."""
        self.engine.handle(travelled(message))

    def locked(self) -> AbstractContextManager[Connection]:
        """While the body runs, another connection holds the lock of the database, as a backup does."""
        return locked(Path(self.config.data_dir))

    # ---- Outcomes

    def checkpoint_directories(self) -> list[str]:
        """Names of those that hold files of checkpoints."""
        return [path.name for path in (Path(self.config.data_dir) / CHECKPOINTS_DIR).iterdir()]

    def outcome(self, model: str, seq: int) -> Outcome:
        found = self.store.outcome(f"s:train:{model}/{seq}")
        assert found is not None, f"operation {seq} of {model} has not ended"
        return found

    def error(self, model: str, seq: int) -> str | None:
        return self.outcome(model, seq).error


def forward_request(
    lengths: Sequence[int] = (), images: Sequence[bytes] = (), forward_only: bool = False, target: int = 1
) -> StoredRequest:
    """A datum of text for each length, then one for each image, of `IMAGE_TOKENS` and a word before it."""
    message = tinker_pb2.ForwardBackwardRequest(
        model_id="m", seq_id=1, loss_fn="cross_entropy", forward_only=forward_only
    )
    for length in lengths:
        _add_datum(message, length, length, target)
    for data in images:
        image = _add_datum(message, 1, 1 + IMAGE_TOKENS, target).model_input.add().image
        image.data, image.format = data, "png"
    return move_images_out(message)


def _add_datum(message: tinker_pb2.ForwardBackwardRequest, words: int, length: int, target: int) -> tinker_pb2.Datum:
    """A datum that begins with `words` tokens of text and has `length` of all kinds in the end."""
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(words, dtype="<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dense = np.full(length, target, dtype="<i8").tobytes()
    tensor.dtype = tinker_pb2.DTYPE_INT64
    tensor.shape.append(length)
    return datum
