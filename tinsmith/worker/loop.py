"""The worker's loop: its thread owns the device and does one thing at a time.

    new messages -> at most one pass or call -> decode steps for as long as that took -> again

Neither training nor sampling starves the other, and nothing that touches weights needs a lock. What needs no device
runs in threads beside it. With no work the thread sleeps on its socket.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tinsmith.config import Config
from tinsmith.errors import NotFoundError
from tinsmith.kernels.device import require_device
from tinsmith.models.base import BaseModel
from tinsmith.models.machine import give_back_memory
from tinsmith.observing.metrics import WORKER_TIME
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import Place
from tinsmith.protocol.serving import CancelSample, EndSession, ForgetCheckpoint, Sample, SampleFailed, Shutdown
from tinsmith.protocol.work import (
    CallFailed,
    ClearGradients,
    CreateModel,
    DeleteModel,
    Drop,
    DropFiles,
    ExportModel,
    FinishSave,
    LoadModel,
    OptimStep,
    PassDone,
    Prepare,
    RunPass,
    SaveModel,
    TakeSnapshot,
    WorkerReady,
)
from tinsmith.rendering.renderer import Renderer
from tinsmith.store.blobs import BlobFiles
from tinsmith.store.files import SNAPSHOTS_DIR, CheckpointFiles
from tinsmith.store.shared import SharedCheckpoints
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.worker.admission import SamplingBase
from tinsmith.worker.background import Background
from tinsmith.worker.bases import backend_of, local_samplers, training_base, vllm_samplers
from tinsmith.worker.device_memory import DeviceMemory
from tinsmith.worker.device_turns import DeviceTurns, Sleeper
from tinsmith.worker.kept_copies import KeptCopies
from tinsmith.worker.models import Models
from tinsmith.worker.passes import Passes
from tinsmith.worker.records import AskedRecords
from tinsmith.worker.samples import Samples
from tinsmith.worker.snapshots import Snapshots
from tinsmith.worker.status import WorkerBoard

log = logging.getLogger(__name__)

IDLE_S = 1.0
"""Seconds that an idle worker sleeps before it looks whether its engine still lives."""

RENDERING_THREADS = 2
"""Threads that read and check large requests. They decode no image, so that texts never wait for images."""

IMAGE_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that decode images side by side, without Python's lock; half of the cores are left to what else computes."""

DISK_THREADS = 4
"""Files that are written or read at a time: each waits for a disk or an object store."""

COPY_THREADS = 1
"""Kept copies and snapshots that are written at a time: one after the other, in their order."""


class Worker:
    """Base models, what is trained and sampled on them, and the loop that drives them."""

    def __init__(
        self,
        config: Config,
        bases: dict[str, BaseModel],
        link: ChildLink,
        heartbeat: Heartbeat,
        records: AskedRecords,
        group: ProcessGroup | None = None,
        place: Place | None = None,
        compared: dict[str, BaseModel] | None = None,
    ) -> None:
        """Join `group`, whose workers hold the same models and share each pass; without a `place` this one is alone.

        `compared` are whole base models for the sampler, where those that train are sharded (`worker/bases.py`).
        """
        place = place or Place()
        self.config = config
        self.bases = bases
        self.sampled_bases = compared or bases
        """Base models that the sampler computes with, and to which snapshots belong."""
        self.link = link
        self.heartbeat = heartbeat
        self.blobs = BlobFiles(Path(config.data_dir))
        self.rendering = Background("rendering", RENDERING_THREADS, link.wake)
        self.images = Background("images", IMAGE_THREADS, link.wake)
        self.disk = Background("disk", DISK_THREADS, link.wake)
        self.copies = Background("copies", COPY_THREADS, link.wake)
        self.beside = self.rendering, self.images, self.disk, self.copies
        self.early: list[Message] = []
        """Messages that arrived in the middle of a pass."""
        self.due: deque[Callable[[], None]] = deque()
        """Passes and calls for the device, oldest first."""
        self.renderers = renderers = {
            name: Renderer(base, config.images, self._read_blob) for name, base in self.bases.items()
        }
        backends = {name: backend_of(base, config, group) for name, base in self.bases.items()}
        self.memory = DeviceMemory(self.bases, config, group)
        memories = [backend.memory for backend in backends.values()]
        for memory in memories if group else ():
            memory.share_host(self.memory.host - self.memory.paged_room, memories)
        pager = self.memory.pager(memories, group)
        files = CheckpointFiles(Path(config.data_dir), config.checkpoint_root, only_read=not config.training.trains)
        sampling = config.sampling
        disk, idle_s = disk_for_snapshots(config, place), sampling.snapshot_idle_h * 3600
        spill = Path(config.data_dir) / SNAPSHOTS_DIR / (str(place.rank) if group else "")
        shared = None if config.training.trains else SharedCheckpoints(files)
        self.snapshots = Snapshots(
            self.sampled_bases, records, files, spill, sampling.snapshot_gib * 2**30, disk, idle_s, shared
        )
        sampled: dict[str, SamplingBase] = {}
        sleepers: list[Sleeper] = []
        """Samplers whose servers take turns with training."""
        if sampling.sampler == "vllm":
            self._give_back_memory()  # servers on the same GPU start now
            sampled, sleepers = vllm_samplers(self.sampled_bases, renderers, config, link.wake)
        elif sampling.sampler == "local":
            sampled = local_samplers(self.bases, renderers, config, self.memory)
        records_routes = sampling.recorded_routes_gib > 0 and config.training.trains
        self.samples = Samples(
            sampled,
            self.snapshots,
            self.rendering,
            self.images,
            self.disk,
            records,
            self.send,
            records.put_routes if records_routes else None,
        )
        trained = {
            name: training_base(backends[name], renderers[name], config, self.memory, group) for name in self.bases
        }
        self.longest_trained = {name: each.longest for name, each in trained.items()}
        self.passes = Passes(
            trained,
            self.rendering,
            self.images,
            self.send,
            self.due.append,
            records.find,
            records.find_routes if records_routes else None,
            self._dropped,
        )
        room = config.training.kept_copies_gib * 2**30
        kept = KeptCopies(Path(config.data_dir), room, self.copies, place)
        self.models = Models(
            backends, self.snapshots, files, self.disk, self.send, self.due.append, self.samples.check_model, kept
        )
        self.turns = DeviceTurns(sleepers, config.vllm.vllm_turn_s, self._give_back_memory)
        devices = {base.device for base in bases.values()}
        self.status = WorkerBoard(self.samples, pager.facts, lambda: self.models.loaded, devices)
        self.stopping = False
        self.suspicious = False
        """Whether something failed for which no client is to blame, since the devices were last tried."""

    def run(self, parent_pid: int) -> None:
        """Serve until told to stop, or until our parent is gone: the engine, or its actor in Ray.

        Raises DeviceLostError if a device computes nothing any more.
        """
        if os.getppid() != parent_pid:
            return
        device = next(iter(self.bases.values())).device
        self.link.send(WorkerReady([facts.to_dict() for facts in self.facts()], str(device)))
        WORKER_TIME.begin("other")
        try:
            while (not self.stopping or self.is_needed) and os.getppid() == parent_pid:
                self.heartbeat.idle()
                patience_s = 0.0 if self.has_work else self.turns.patience_s(IDLE_S)
                with WORKER_TIME.during(self.waits_for if patience_s else "other"):
                    arrived = self.link.receive(patience_s)
                self.take(arrived)
                self.heartbeat.busy()
                self.turn()
            self.status.sum_up()
        finally:  # a process does not end before its threads have done all that they were given
            for threads in self.beside:
                threads.close()

    @property
    def has_work(self) -> bool:
        """Whether a `turn` would do something."""
        beside = any(threads.has_ended for threads in self.beside)
        return bool(self.early or (self.due and self.turns.is_trainers) or beside or self.samples.has_work)

    @property
    def is_needed(self) -> bool:
        """Whether the other workers wait for this one, or will, in passes that all were told to compute."""
        return self.config.shards_weights and bool(self.due or self.passes.passes)

    @property
    def waits_for(self) -> str:
        """What the thread waits for when it has no work: the name of that activity."""
        if self.samples.load()[0] or not self.turns.is_trainers:
            return "waiting for samplers"
        if self.images.running:
            return "waiting for images"
        if self.copies.running or self.disk.running:
            return "waiting for files"
        return "waiting for requests"

    def receive(self, timeout_s: float) -> None:
        """Handle messages of the engine and results of threads beside the device."""
        self.take(self.link.receive(timeout_s))

    def take(self, arrived: list[Message]) -> None:
        """Handle these messages of the engine, behind earlier ones, and results of threads beside the device."""
        early, self.early = self.early, []
        for message in early + arrived:
            self.handle(message)
        for threads in self.beside:
            threads.deliver()

    def _dropped(self) -> set[str]:
        """Return operations that the engine dropped during a pass; its messages are handled after the pass."""
        self.early += self.link.receive(0.0)
        return {operation for message in self.early if isinstance(message, Drop) for operation in message.operations}

    def turn(self) -> None:
        """Do at most one pass or call, then decode steps for as long as that took."""
        started = time.monotonic()
        if self.turns.look(wanted=bool(self.due)) and self.due:
            self.due.popleft()()
            self.turns.has_trained()
        self._sample_until(2 * time.monotonic() - started)
        self._try_devices()
        self.snapshots.drop_idle()
        self.status.note()

    def facts(self) -> list[ModelFacts]:
        """Return the facts of each base model that engine and server must know."""
        return [
            ModelFacts(
                name=name,
                tokenizer_id=base.tokenizer_id,
                architecture=base.family.model_type,
                vocab_size=base.vocab_size,
                max_context=base.max_context,
                max_trained=self.longest_trained[name],
                max_sampled=self.samples.longest(name, base.max_context),
                takes_images=base.family.takes_images,
                max_lora_rank=self.config.models.max_lora_rank,
                **self.renderers[name].image_facts,
            )
            for name, base in self.bases.items()
        ]

    def handle(self, message: Message) -> None:
        """Take in one message of the engine."""
        match message:
            case Prepare():
                self.passes.prepare(message)
            case RunPass():
                self.passes.run(message)
            case Drop():
                self.passes.drop(message.operations)
            case ClearGradients():
                self.passes.in_turn(lambda: self.models.backends[message.base_model].clear_gradients(message.model_id))
            case DeleteModel():
                self.passes.in_turn(lambda: self.models.delete(message.base_model, message.model_id))
            case FinishSave():
                self.models.joint.finish(message)
            case DropFiles():
                self.models.joint.drop(message)
            case Shutdown():
                self.stopping = True
            case CreateModel() | OptimStep() | TakeSnapshot() | SaveModel() | ExportModel() | LoadModel():
                self.passes.in_turn(lambda: self.models.call(message))
            case _:
                self._handle_sampling(message)

    def _handle_sampling(self, message: Message) -> None:
        match message:
            case Sample():
                self.samples.add(message)
            case CancelSample():
                self.samples.cancel(message.request_id, message.run)
            case EndSession():
                self.samples.end_session(message.session_id)
            case ForgetCheckpoint():
                self.snapshots.forget(message.path)

    def send(self, message: Message) -> None:
        """Send a message to the engine."""
        match message:
            case SampleFailed(category="server"):
                self.suspicious = True
            case CallFailed(error_type="TinsmithError"):
                self.suspicious = True
            case PassDone(failures=failures) if any(error_type == "TinsmithError" for _, _, error_type, _ in failures):
                self.suspicious = True
        self.link.send(message)

    def _sample_until(self, deadline: float) -> None:
        """Do at least one sampling step, and more until `deadline` (monotonic); new requests join between steps."""
        while self.samples.has_work and not self.stopping:
            with WORKER_TIME.during("sampling"):
                self.samples.step()
            if time.monotonic() >= deadline:
                return
            self.receive(0.0)

    def _try_devices(self) -> None:
        """Try the devices after a failure that no client is to blame for: everything may fail on them from now on."""
        if self.suspicious:
            self.suspicious = False
            for base in self.bases.values():
                require_device(base.device)

    def _give_back_memory(self) -> None:
        for base in self.bases.values():
            give_back_memory(base.device)

    def _read_blob(self, sha256: bytes) -> bytes:
        data = self.blobs.read(sha256)
        if data is None:
            raise NotFoundError(f"image {sha256.hex()} is not in the store")
        return data


def disk_for_snapshots(config: Config, place: Place) -> float:
    """Bytes of the disk for a worker's snapshots: its part of the server's, if several sample."""
    samplers = place.count if config.sampling.sampler == "local" else 1
    return config.sampling.snapshot_disk_gib * 2**30 / samplers
