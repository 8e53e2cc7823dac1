"""The engine process: it owns the device and does one thing at a time.

    new messages -> at most one training pass -> decode steps for as long as the pass took -> again

Neither training nor sampling starves the other, and nothing that touches weights needs a lock. With no work it sleeps on the socket.
"""

import logging
import os
import time
from pathlib import Path

from tinsmith.config import Config, base_model_sources
from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.link import EngineLink
from tinsmith.engine.messages import (
    Bye,
    CancelSample,
    Done,
    EndSession,
    ForgetCheckpoint,
    Message,
    ModelFacts,
    Ready,
    Sample,
    Shutdown,
    Wake,
)
from tinsmith.engine.operations import Operations, Served
from tinsmith.engine.samples import Sampled, Samples
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.status import StatusReporter
from tinsmith.engine.trainer import Trainer
from tinsmith.errors import ConfigError, NotFoundError
from tinsmith.models.base import BaseModel, load_base_model
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.local import LocalSampler
from tinsmith.sampling.self_check import check_base_model
from tinsmith.store.files import SNAPSHOTS_DIR, CheckpointFiles
from tinsmith.store.records import Outcome
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend

log = logging.getLogger(__name__)

READ_AT_ONCE = 1000
"""Commands taken from the log in one read."""

IDLE_S = 1.0
"""How long an idle engine sleeps before it looks whether its server still lives."""


class Engine:
    """Base models, their trainer and samplers, and the loop that drives them."""

    def __init__(self, config: Config, link: EngineLink) -> None:
        self.config = config
        self.link = link
        self.store = Store.open(Path(config.data_dir))
        self.bases = load_bases(config)
        for base in self.bases.values():
            started = time.monotonic()
            check_base_model(base, samples=config.sampling.sampler == "local")
            log.info("%s passes its self-check, %.1f s", base.name, time.monotonic() - started)
        renderers = {name: Renderer(base, config.images, self._read_blob) for name, base in self.bases.items()}
        checkpoints = Checkpoints(self.store, CheckpointFiles(Path(config.data_dir), config.checkpoint_root))
        limit = config.sampling.snapshot_gib * 2**30
        snapshots = Snapshots(self.bases, checkpoints, Path(config.data_dir) / SNAPSHOTS_DIR, limit)
        self.snapshots = snapshots
        self.samples = Samples(self._sampled(renderers), snapshots, link.send)
        backends = {name: LocalBackend(base, config.training) for name, base in self.bases.items()}
        served = {name: Served(name, backends[name], renderers[name]) for name in self.bases}
        operations = Operations(served, config.models.max_lora_rank, checkpoints, snapshots, config.training.ended_model_ttl_s)
        queue = CommandQueue(config.training.held_operation_s)
        self.trainer = Trainer(operations, queue, config.training.tokens_per_pass, self._finish)
        self.status = StatusReporter(self.trainer, self.samples, link.send)
        self.last_command = 0
        self.stopping = False

    def run(self, server_pid: int) -> None:
        """Serve until told to stop, or until the server process, which is our parent, is gone: perhaps it went while models were loaded."""
        if os.getppid() != server_pid:
            return
        self.link.send(Ready([facts.to_dict() for facts in self.facts()]))
        self._take_commands()
        while not self.stopping and os.getppid() == server_pid:
            self._receive(self._patience())
            started = time.monotonic()
            if self.trainer.has_work:
                self.trainer.turn()
            self._sample_until(2 * time.monotonic() - started)
            self.status.report()
        log.info("engine stops")
        self.link.send(Bye())
        self.store.close()

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

    def _patience(self) -> float:
        """Seconds to wait for a message: none while there is work, and not past the deadline of a held command."""
        if self.trainer.has_work or self.samples.has_work:
            return 0.0
        deadline = self.trainer.queue.next_deadline()
        return IDLE_S if deadline is None else min(IDLE_S, max(0.0, deadline - time.time()))

    def _receive(self, timeout_s: float) -> None:
        woken = False
        for message in self.link.receive(timeout_s):
            woken |= isinstance(message, Wake)
            self._handle(message)
        if woken:
            self._take_commands()
        self.trainer.fail_overdue()

    def _handle(self, message: Message) -> None:
        match message:
            case Sample():
                self.samples.add(message)
            case CancelSample():
                self.samples.cancel(message.request_id)
            case EndSession():
                self._take_commands()
                self.trainer.end_session(message.session_id, message.save)
            case ForgetCheckpoint():
                self.snapshots.forget(message.path)
            case Shutdown():
                self.stopping = True

    def _take_commands(self) -> None:
        """File everything that is new in the log."""
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
            self.store.record(outcomes)
            for outcome in outcomes:
                self.link.send(Done.of(outcome))

    def _read_blob(self, sha256: bytes) -> bytes:
        data = self.store.read_blob(sha256)
        if data is None:
            raise NotFoundError(f"image {sha256.hex()} is not in the store")
        return data

    def _sampled(self, renderers: dict[str, Renderer]) -> dict[str, Sampled]:
        if self.config.vllm.renderer == "vllm" and self.config.sampling.sampler != "vllm":
            raise ConfigError("renderer=vllm needs vLLM servers, and they come with sampler=vllm")
        if self.config.sampling.sampler == "none":
            return {}
        if self.config.sampling.sampler == "vllm":
            from tinsmith.vllm.start import start_vllm_sampler  # needs packages that are not there without vLLM

            return {
                name: Sampled(start_vllm_sampler(base, renderers[name], self.config, self.link.wake), renderers[name])
                for name, base in self.bases.items()
            }
        chunk = self.config.training.logits_chunk
        return {name: Sampled(LocalSampler(base, self.config.sampling, chunk), renderers[name]) for name, base in self.bases.items()}


def load_bases(config: Config) -> dict[str, BaseModel]:
    """Every base model of the configuration, by name. Raises ConfigError as `load_base_model` does."""
    features = config.images.image_cache_mib * 2**19  # the other half is for pixel values
    bases: dict[str, BaseModel] = {}
    for name, source in base_model_sources(config).items():
        started = time.monotonic()
        base = bases[name] = load_base_model(name, source, config.models, features)
        log.info("loaded %s (%s) on %s in %s, %.1f s", name, base.family.model_type, base.device, base.dtype, time.monotonic() - started)
    return bases
