"""Calls of the engine to models: create, step, snapshot, save, export, load. Each is answered once.

The device's thread computes and copies. Threads beside it write from the copy, and read, so that nobody's save or load
keeps others from training and sampling. A model goes on as soon as the engine has heard that its copy is there.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tinsmith.errors import TinsmithError
from tinsmith.models.fingerprint import check_fingerprint
from tinsmith.models.lora import Adapter
from tinsmith.observing.metrics import WORKER_TIME
from tinsmith.protocol.boundary import failing_into, result_or_error
from tinsmith.protocol.messages import Message
from tinsmith.protocol.shapes import AdamSettings, LoraShape, WeightsRef
from tinsmith.protocol.work import (
    Answer,
    Call,
    CallFailed,
    Copied,
    CopyEnded,
    CreateModel,
    ExportModel,
    LoadModel,
    OptimStep,
    SaveModel,
    TakeSnapshot,
    type_of,
)
from tinsmith.store import ids
from tinsmith.store.files import CheckpointFiles
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import SavedState, read_state, write_state
from tinsmith.worker.background import Background
from tinsmith.worker.checkpoint_files import JointSaves, opened_files, write_files
from tinsmith.worker.exports import parse_recipients, write_external
from tinsmith.worker.kept_copies import KeptCopies
from tinsmith.worker.snapshots import Snapshots

ACTIVITIES: Mapping[type[Call], str] = {
    CreateModel: "loading",
    LoadModel: "loading",
    OptimStep: "optimizer",
    TakeSnapshot: "publishing",
    SaveModel: "saving",
    ExportModel: "saving",
}
"""What the device's thread does (`WorkerTime`) while it runs each call."""


@dataclass(eq=False)
class Models:
    """The models of a worker.

    `enqueue` lets the device's thread do something; `check` raises UserError if a shape cannot be sampled.
    """

    backends: Mapping[str, LocalBackend]
    snapshots: Snapshots
    files: CheckpointFiles
    disk: Background
    send: Callable[[Message], None]
    enqueue: Callable[[Callable[[], None]], None]
    check: Callable[[str, LoraShape], None]
    kept: KeptCopies

    def __post_init__(self) -> None:
        self.joint = JointSaves(self.files, self.disk, self.send, self.kept.place, self._beside)

    def call(self, message: Call) -> None:
        """Do what a call asks for. It is answered now, or when its files are written or read."""
        with WORKER_TIME.during(ACTIVITIES[type(message)]), failing_into(partial(self._failed, message)):
            backend = self.backends[message.base_model]
            match message:
                case CreateModel():
                    shape = LoraShape(**message.shape)
                    if message.fingerprint:
                        base = backend.base
                        check_fingerprint(message.fingerprint, base.fingerprint, base.name, f"model {message.model_id}")
                    backend.agree_to_create(self._refusal(message.base_model, shape))
                    backend.create_model(message.model_id, shape)
                    self._answer(message, {"base_fingerprint": backend.base.known_fingerprint})
                case OptimStep():
                    self._step(backend, message)
                case TakeSnapshot():
                    self._take_snapshot(backend, message)
                    self._answer(message, {})
                case SaveModel() | ExportModel():
                    self._save(backend, message)
                case LoadModel():
                    self.disk.run(partial(self._read, message), partial(self._loaded, message))

    @property
    def loaded(self) -> set[str]:
        """Ids of all models."""
        return {model_id for backend in self.backends.values() for model_id in backend.optimizers}

    def delete(self, base_model: str, model_id: str) -> None:
        """Free a model, if it is there, and drop its snapshots."""
        self.backends[base_model].delete_model(model_id)
        self.snapshots.withdraw(model_id)
        self.kept.forget(model_id)

    def _step(self, backend: LocalBackend, message: OptimStep) -> None:
        """Take a step, and begin a copy of what it has left, if the engine wants one."""
        settings = message.settings | {"betas": tuple(message.settings["betas"])}
        metrics = backend.optim_step(message.model_id, AdamSettings(**settings))
        self._answer(message, {"metrics": metrics})
        if message.copy:

            def told(is_complete: bool, blocked_s: float) -> None:
                self.send(CopyEnded(message.model_id, message.copy, is_complete, blocked_s))

            self.kept.keep(backend, message.model_id, Path(message.copy), message.before, told)

    def _save(self, backend: LocalBackend, message: SaveModel | ExportModel) -> None:
        """Copy a model, or this worker's part of one that is sharded, for a thread to write."""
        optimizer, recipients = False, []
        if isinstance(message, ExportModel):
            # Bad ones are refused on all workers, before they exchange anything
            recipients = parse_recipients(message.recipients)
        else:
            optimizer = message.optimizer
        part = backend.copy_part(message.model_id, optimizer)
        if part is not None:
            self._copied(message)
            self.joint.write(message, part)
            return
        if not self.kept.place.writes(message.model_id):
            self._copied(message)
            self._answer(message, {})
            return
        state = backend.copy_state(message.model_id, optimizer)
        self._copied(message)
        write: Callable[[Path], None] = partial(write_state, state)
        if isinstance(message, ExportModel):
            write = partial(write_external, state, backend.base.layout, recipients=recipients)
        self._beside(message, partial(write_files, self.files, message.checkpoint, write))

    def _refusal(self, base_model: str, shape: LoraShape) -> TinsmithError | None:
        """Return why a model of this shape could not be sampled."""
        return result_or_error(partial(self.check, base_model, shape))

    def _take_snapshot(self, backend: LocalBackend, message: TakeSnapshot) -> None:
        """Publish a snapshot, or give the worker that does so what it needs of this one."""
        if backend.needs_all and self.kept.place.rank > 0:
            backend.help_to_snapshot(message.model_id)
            return
        followed = message.model_id if message.inflight else None
        weights = backend.snapshot(
            message.model_id, WeightsRef(message.base_model, message.request_id, message.request_id, followed)
        )
        device = self.snapshots.bases[message.base_model].device
        if isinstance(weights, Adapter) and weights.flat.device != device:
            weights = replace(weights, flat=weights.flat.to(device))
        weights_id = ids.inflight_id(message.model_id) if message.inflight else message.request_id
        self.snapshots.publish(message.base_model, weights_id, weights)
        if isinstance(weights, Adapter):
            self.snapshots.replicate(self.kept.threads, message.base_model, weights_id, weights)

    def _beside(self, message: SaveModel | ExportModel, work: Callable[[], dict[str, Any]]) -> None:
        """Let a thread do the work, whose result is the answer."""

        def then(ended: "Future[dict[str, Any]]") -> None:
            with failing_into(partial(self._failed, message)):
                result = ended.result()
                # One of this path may have been sampled before
                self.snapshots.forget(message.checkpoint["tinker_path"])
                self._answer(message, result)

        self.disk.run(work, then)

    def _read(self, message: LoadModel) -> SavedState:
        backend = self.backends[message.base_model]
        with opened_files(self.files, message.directory, message.optimizer) as directory:
            return read_state(directory, backend.base, message.optimizer)

    def _loaded(self, message: LoadModel, ended: "Future[SavedState]") -> None:
        self.enqueue(lambda: self._restore(message, ended))

    def _restore(self, message: LoadModel, ended: "Future[SavedState]") -> None:
        with WORKER_TIME.during(ACTIVITIES[LoadModel]), failing_into(partial(self._failed, message)):
            state = ended.result()
            # Of several, one that refuses would not have what the others have; samples are refused then
            if self.kept.place.count == 1:
                self.check(message.base_model, state.about.shape)
            self.backends[message.base_model].restore(message.model_id, state)
            self.kept.restored(
                message.model_id, message.directory, sum(tensor.numel() for tensor in state.tensors.values())
            )
            self._answer(message, {})

    def _copied(self, message: SaveModel | ExportModel) -> None:
        self.send(Copied(message.number))

    def _answer(self, message: Call, result: dict[str, Any]) -> None:
        self.send(Answer(message.number, result))

    def _failed(self, message: Call, error: TinsmithError) -> None:
        self.send(CallFailed(message.number, type_of(error), str(error)))
