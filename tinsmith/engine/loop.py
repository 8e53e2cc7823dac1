"""The engine process: it owns the device and does one thing at a time.

    new messages -> at most one training pass -> decode steps for as long as the pass took -> again

Neither training nor sampling starves the other, and nothing that touches weights needs a lock. With no work it sleeps on the socket.
"""

import logging
import os
import time
from functools import partial
from pathlib import Path

from tinsmith.config import Config, base_model_sources
from tinsmith.engine.backoff import Backoff
from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.operations import Operations, Served
from tinsmith.engine.recorder import Recorder
from tinsmith.engine.samples import Sampled, Samples
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.status import StatusReporter
from tinsmith.engine.trainer import Trainer
from tinsmith.errors import NotFoundError, StoreUnavailableError, TinsmithError
from tinsmith.models.base import BaseModel, load_base_model
from tinsmith.models.device import require_device
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import EngineLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Bye, CancelSample, EndSession, ForgetCheckpoint, Ready, Sample, SampleFailed, Saving, Shutdown, Wake
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.self_check import check_base_model
from tinsmith.store.database import BUSY_S
from tinsmith.store.files import SNAPSHOTS_DIR, CheckpointFiles
from tinsmith.store.records import Outcome
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend

log = logging.getLogger(__name__)

READ_AT_ONCE = 1000
"""Commands taken from the log in one read."""

IDLE_S = 1.0
"""How long an idle engine sleeps before it looks whether its server still lives."""

DATABASE_BUSY_S = 0.5
"""How long the engine waits for the lock of the database before it goes on with other work and tries again later."""


class Engine:
    """Base models, their trainer and samplers, and the loop that drives them."""

    def __init__(self, config: Config, link: EngineLink, heartbeat: Heartbeat) -> None:
        self.config = config
        self.link = link
        self.heartbeat = heartbeat
        self.store = Store.open(Path(config.data_dir), DATABASE_BUSY_S, config.server.kept_operations_mib * 2**20)
        self.bases = load_bases(config)
        for base in self.bases.values():
            started = time.monotonic()
            check_base_model(base, samples=config.sampling.sampler == "local")
            log.info("%s passes its self-check, %.1f s", base.name, time.monotonic() - started)
        renderers = {name: Renderer(base, config.images, self._read_blob) for name, base in self.bases.items()}
        checkpoints = Checkpoints(self.store, CheckpointFiles(Path(config.data_dir), config.checkpoint_root))
        sampling = config.sampling
        memory, disk, idle_s = sampling.snapshot_gib * 2**30, sampling.snapshot_disk_gib * 2**30, sampling.snapshot_idle_h * 3600
        snapshots = Snapshots(self.bases, checkpoints, Path(config.data_dir) / SNAPSHOTS_DIR, memory, disk, idle_s)
        self.snapshots = snapshots
        self.samples = Samples(self._sampled(renderers), snapshots, self._answer)
        backends = {name: LocalBackend(base, config.training) for name, base in self.bases.items()}
        served = {name: Served(name, backends[name], renderers[name]) for name in self.bases}
        ended_ttl_s = config.training.ended_model_ttl_s
        operations = Operations(served, config.models.max_lora_rank, checkpoints, snapshots, ended_ttl_s, self.store.payload)
        queue = CommandQueue(config.training.held_operation_s)
        self.recorder = Recorder(self.store, link.send, config.training.max_unrecorded_mib * 2**20)
        self.trainer = Trainer(operations, queue, config.training.tokens_per_pass, self._finish)
        self.status = StatusReporter(self.trainer, self.samples, link.send)
        self.last_command = 0
        self.ended_sessions: list[EndSession] = []
        """Sessions to end once all that is in the log before is filed."""
        self.reading = Backoff()
        """Of reading the log."""
        self.stopping = False
        self.suspicious = False
        """Something failed for which no client is to blame, since the devices were last tried."""

    def run(self, server_pid: int) -> None:
        """Serve until told to stop, or until the server process, which is our parent, is gone: perhaps it went while models were loaded.

        Raises DeviceLostError if a device computes nothing any more.
        """
        if os.getppid() != server_pid:
            return
        self.link.send(Ready([facts.to_dict() for facts in self.facts()]))
        self._take_commands()
        while not self.stopping and os.getppid() == server_pid:
            self.heartbeat.idle()
            self._receive(self._patience())
            self.heartbeat.busy()
            started = time.monotonic()
            self.recorder.flush()
            if self._may_train:
                self.trainer.turn()
            self._sample_until(2 * time.monotonic() - started)
            self._try_devices()
            self.snapshots.drop_idle()
            self.status.report()
        deadline = time.monotonic() + BUSY_S
        self._record_rest(time.monotonic())
        if self.stopping:
            self._keep_models(deadline)
            self._record_rest(deadline)
        self.status.sum_up()
        log.info("the engine stops; %d outcomes could not be recorded", len(self.recorder.waiting))
        self.link.send(Bye())
        self.store.close()

    def _record_rest(self, deadline: float) -> None:
        """Record the outcomes that are left, and wait for a database that is locked until `deadline` (monotonic).

        A step that was applied and saved must not be called failed by the next server: its client would repeat it.
        """
        self.recorder.backoff.succeeded()  # at least one attempt, however short a while ago the one before was
        self.recorder.flush()
        while self.recorder.waiting and time.monotonic() < deadline:
            self.link.send(Saving())
            time.sleep(DATABASE_BUSY_S)
            self.recorder.backoff.succeeded()
            self.recorder.flush()

    def _keep_models(self, deadline: float) -> None:
        """Save the models of open sessions, as those of idle ones are: the server is stopped, and its clients are not.

        Those of a locked database wait for it until `deadline` (monotonic).
        """
        operations = self.trainer.operations
        models = [model_id for model_id in operations.models if self.trainer.ending.get(model_id, True)]
        for number, model_id in enumerate(models, 1):
            log.info("saving model %s (%d of %d)", model_id, number, len(models))
            self.link.send(Saving())
            with failing_into(partial(_log_lost, model_id)):
                self._keep_by(deadline, model_id)

    def _keep_by(self, deadline: float, model_id: str) -> None:
        """Save a model, and wait for a database that is locked until `deadline` (monotonic): there is no later."""
        while True:
            try:
                self.trainer.operations.keep(model_id)
            except StoreUnavailableError:
                if time.monotonic() >= deadline:
                    raise
                self.link.send(Saving())
                time.sleep(DATABASE_BUSY_S)
            else:
                return

    def facts(self) -> list[ModelFacts]:
        """What the server must know of each base model."""
        return [
            ModelFacts(
                name=base.name,
                tokenizer_id=base.tokenizer_id,
                architecture=base.family.model_type,
                vocab_size=base.vocab_size,
                max_context=base.max_context,
                takes_images=base.family.takes_images,
                max_lora_rank=self.config.models.max_lora_rank,
            )
            for base in self.bases.values()
        ]

    @property
    def _may_train(self) -> bool:
        """Whether there is training to do, and room for its results."""
        return self.trainer.has_work and not self.recorder.is_full

    def _patience(self) -> float:
        """Seconds to wait for a message: none while there is work, and not past the time of what is to be done by then."""
        if self._may_train or self.samples.has_work:
            return 0.0
        waits = [IDLE_S]
        waits += [self.recorder.backoff.wait_s] if self.recorder.waiting else []
        waits += [self.reading.wait_s] if self.reading.is_failing else []
        waits += [self.trainer.backoff.wait_s] if self.trainer.put_off and not self.recorder.is_full else []
        deadline = self.trainer.queue.next_deadline()
        waits += [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        return min(waits)

    def _receive(self, timeout_s: float) -> None:
        woken = False
        for message in self.link.receive(timeout_s):
            woken |= isinstance(message, Wake)
            self._handle(message)
        if woken or (self.reading.is_failing and self.reading.wait_s == 0):
            self._take_commands()
        self.trainer.fail_overdue()

    def _handle(self, message: Message) -> None:
        match message:
            case Sample():
                self.samples.add(message)
            case CancelSample():
                self.samples.cancel(message.request_id, message.run)
            case EndSession():
                self.samples.end_session(message.session_id)
                self.ended_sessions.append(message)
                self._take_commands()
            case ForgetCheckpoint():
                self.snapshots.forget(message.path)
            case Shutdown():
                self.stopping = True

    def _take_commands(self) -> None:
        """File everything that is new in the log, then end the sessions that have ended. If the log cannot be read, that is done later."""
        try:
            self._read_log()
        except StoreUnavailableError as error:
            log.warning("new operations wait for the database: %s", error)
            self.reading.failed()
            return
        self.reading.succeeded()
        for message in self.ended_sessions:
            self.trainer.end_session(message.session_id, message.save)
        self.ended_sessions.clear()

    def _read_log(self) -> None:
        more = True
        while more:  # a read that is not full was the last: what is appended after it comes with a wake-up of its own
            commands = self.store.read_new(self.last_command, READ_AT_ONCE)
            for command in commands:
                self.trainer.add(command)
                self.last_command = command.id
            more = len(commands) == READ_AT_ONCE

    def _sample_until(self, deadline: float) -> None:
        """At least one sampling step, and more until `deadline` (monotonic); new requests join between steps."""
        while self.samples.has_work and not self.stopping:
            self.samples.step()
            if time.monotonic() >= deadline:
                return
            self._receive(0.0)

    def _finish(self, outcomes: list[Outcome]) -> None:
        if outcomes:
            self.suspicious |= any(outcome.category == "server" for outcome in outcomes)
            self.recorder.record(outcomes)

    def _answer(self, message: Message) -> None:
        self.suspicious |= isinstance(message, SampleFailed) and message.category == "server"
        self.link.send(message)

    def _try_devices(self) -> None:
        """After a failure that no client is to blame for: it may have left a device on which everything fails from now on."""
        if self.suspicious:
            self.suspicious = False
            for base in self.bases.values():
                require_device(base.device)

    def _read_blob(self, sha256: bytes) -> bytes:
        data = self.store.read_blob(sha256)
        if data is None:
            raise NotFoundError(f"image {sha256.hex()} is not in the store")
        return data

    def _sampled(self, renderers: dict[str, Renderer]) -> dict[str, Sampled]:
        if self.config.sampling.sampler == "none":
            return {}
        if self.config.sampling.sampler == "vllm":
            from tinsmith.sampling.vllm.sampler import start_vllm_sampler  # needs packages that are not there without vLLM

            return {
                name: Sampled(start_vllm_sampler(base, renderers[name], self.config, self.link.wake), renderers[name])
                for name, base in self.bases.items()
            }
        chunk = self.config.training.logits_chunk
        return {name: Sampled(LocalSampler(base, self.config.sampling, chunk), renderers[name]) for name, base in self.bases.items()}


def _log_lost(model_id: str, error: TinsmithError) -> None:
    log.error("model %s could not be saved and is lost: %s", model_id, error)


def load_bases(config: Config) -> dict[str, BaseModel]:
    """Every base model of the configuration, by name. Raises ConfigError as `load_base_model` does."""
    features = config.images.image_cache_mib * 2**19  # the other half is for pixel values
    bases: dict[str, BaseModel] = {}
    for name, source in base_model_sources(config).items():
        started = time.monotonic()
        log.info("loading %s from %s ...", name, source)
        base = bases[name] = load_base_model(name, source, config.models, features)
        log.info("loaded %s (%s) on %s in %s, %.1f s", name, base.family.model_type, base.device, base.dtype, time.monotonic() - started)
    return bases
