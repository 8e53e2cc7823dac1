"""The workers as one: they hold the same models, share the work (`shares.py`), and end together.

A worker that ends takes the others with it: they may wait for it in a sum that it will never come to, and none has all
gradients. All are started again.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from tinsmith.config import Config
from tinsmith.engine.launching import WORKER, Launcher
from tinsmith.engine.shares import SharedWork
from tinsmith.engine.worker_process import WorkerProcess, hanging
from tinsmith.observing.spans import Span
from tinsmith.protocol.child_process import LAST_WORDS_S
from tinsmith.protocol.devices import threads_of, visible_gpus
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.own_directory import OwnDirectory
from tinsmith.protocol.place import Place, meeting_at
from tinsmith.protocol.serving import IMPORTS, Starting, Status
from tinsmith.protocol.work import DropFiles, WorkerReady

if TYPE_CHECKING:
    from tinsmith.engine.records import GroupAnswers, Records

STAND_BY_S = 5.0
"""Seconds until a fork server starts: its imports would take time from those that load and check small models."""

LOOK_FOR_HOSTS_S = 1.0
"""Seconds between two looks whether there are hosts for workers that have none."""


class WorkerGroup:
    """All workers of an engine."""

    def __init__(
        self,
        config: Config,
        engine: ChildLink,
        count: int,
        program: Sequence[str] = WORKER,
        launcher: Launcher | None = None,
    ) -> None:
        """Nothing runs yet.

        `engine` is woken up by what the workers say. Without a `launcher` they are children of this process.
        """
        self.config = config
        self.launcher = launcher or Launcher(Path(config.data_dir) if config.server.stand_by else None)
        configs = [_config_of(config, rank, count, self.launcher.gpus_by_number) for rank in range(count)]
        self._records: Records | None = None
        self._lock = Lock()
        self.workers = [WorkerProcess(each, engine, program, self.launcher) for each in configs]
        self.count = count
        self.models: dict[str, ModelFacts] = {}
        """Base models that all serve; empty until a group was ready."""
        self.is_hopeless = False
        """Whether none was ever ready, and the end of the last says that none will be."""
        self.last_messages: list[Message] = []
        """Messages of a group that has ended which `receive` did not return."""
        self._pass_tokens = [0] * count
        """Tokens of passes that were given to each, by rank, those before it included."""
        self.work = SharedWork(config, self.workers, self._pass_tokens)
        self._meeting = ExitStack()
        """Deletes the directory in which workers on this host find each other, if there is one."""
        self._look_at = 0.0
        self._left: list[str] = []
        """Directories of saves that ended with the workers before."""
        self._told = False
        self._stand_by_at = math.inf
        """Monotonic time at which a fork server is to stand by for the next group."""

    @property
    def is_ready(self) -> bool:
        return all(worker.is_ready for worker in self.workers)

    @property
    def busy_s(self) -> float:
        """Seconds that the busiest had been in its current turn at its last heartbeat; 0 while all wait for work."""
        return max(worker.liveness.last.busy_s for worker in self.workers)

    @property
    def wait_s(self) -> float:
        """Seconds until `start_if_due` would start them; endless while they run."""
        if self._runs:
            return float("inf")
        return max(self._look_at - time.monotonic(), *(worker.wait_s for worker in self.workers))

    @property
    def status(self) -> Status:
        """Status of all workers together, for an engine that says the rest."""
        described = [
            {"pid": each.pid, "device": _device_of(each), "state": each.state, "pass_tokens": tokens}
            for each, tokens in zip(self.workers, self._pass_tokens, strict=True)
        ]
        counted = [
            (name, labels | {"worker": str(rank)}, value)
            for rank, each in enumerate(self.workers)
            for name, labels, value in each.numbers
        ]
        return Status(models=[], workers=described, numbers=counted)

    def take_spans(self) -> list[Span]:
        """Return what the workers have told since the last call that they did."""
        return [
            (name, track, began, seconds, facts | {"worker": rank})
            for rank, worker in enumerate(self.workers)
            for name, track, began, seconds, facts in (worker.spans.popleft() for _ in range(len(worker.spans)))
        ]

    @property
    def _runs(self) -> bool:
        return any(worker.process is not None for worker in self.workers)

    @property
    def records(self) -> "Records":
        """The databases; any thread may ask. To import SQLAlchemy takes a second: workers are started before."""
        from tinsmith.engine.records import Records

        with self._lock:
            self._records = self._records or Records(self.config)
            return self._records

    # ---- Processes

    def start_if_due(self) -> None:
        """Start all if none runs and it is time."""
        if self._runs or self.wait_s > 0:
            return
        hosts = self.launcher.hosts()
        if hosts is None:
            self._look_at = time.monotonic() + LOOK_FOR_HOSTS_S
            return
        self._meeting.close()
        self._told = False
        meeting = ""
        if self.count > 1 and not hosts:
            directory = OwnDirectory("tinsmith-meeting-", Path(tempfile.gettempdir()))
            self._meeting.callback(directory.close)
            meeting = f"file://{directory.path}/store"
        answers = _Answers(self)
        for rank, worker in enumerate(self.workers):
            worker.answers = answers.answer
            worker.place = Place(rank, self.count, meeting_at(hosts[rank]) if hosts else meeting)
            worker.environment = threads_of(self.config, self.count)
            worker.start_if_due()

    def watch(self) -> None:
        """Kill a worker that hangs, and all if each waits for the others in an exchange, as then nothing can come."""
        for worker in self.workers:
            worker.watch()
        if time.monotonic() >= self._stand_by_at:
            self._stand_by_at = math.inf
            self.launcher.stand_by(self.workers[0].surroundings, self.is_ready)
        found = hanging([worker.liveness for worker in self.workers])
        for worker, liveness in [(worker, worker.liveness) for worker in self.workers if worker.liveness in found]:
            why = "all wait for each other in an exchange, and nothing comes: " if liveness.last.waits else ""
            worker.kill_hung(f"{why}it had {liveness.stillness or liveness.standstill} and was killed")

    def ended(self) -> str | None:
        """Return why the workers have ended, once; None while they run, or if none does."""
        reasons = self._ends()
        if not reasons:
            return None
        self._stand_by_at = math.inf
        deadline = time.monotonic() + LAST_WORDS_S
        # The one whose end they noticed ends just now
        while all(worker.follows for worker, _ in reasons) and time.monotonic() < deadline:
            time.sleep(0.01)
            reasons += self._ends()
        for worker in self.workers:
            worker.kill(wait=False)
        for worker in self.workers:
            worker.kill()
            worker.ended()
        self.last_messages = [
            kept
            for rank, worker in enumerate(self.workers)
            for message in worker.last_messages
            for kept in self._take(rank, message)
        ]
        self._left += self.work.written
        self.work = SharedWork(self.config, self.workers, self._pass_tokens)
        self._meeting.close()
        worker, reason = min(reasons, key=lambda end: end[0].follows)
        self.is_hopeless = not self.models and worker.is_hopeless
        return f"{worker.place.name}: {reason}" if self.count > 1 or worker.place.host else reason

    def _ends(self) -> list[tuple[WorkerProcess, str]]:
        return [(worker, reason) for worker in self.workers if (reason := worker.ended()) is not None]

    def stop(self, timeout_s: float) -> None:
        """Let the workers finish what they compute and end; kill those that take longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            worker.begin_to_stop()
        for worker in self.workers:
            worker.stop(max(0.0, deadline - time.monotonic()))
        self._meeting.close()
        self.launcher.close()
        if self._records is not None:
            self._records.close()

    def _stand_by_soon(self) -> None:
        """Let a fork server stand by, so that it is there when a large model is loaded; it may be there already."""
        self._stand_by_at = min(self._stand_by_at, time.monotonic() + STAND_BY_S)

    # ---- Messages

    def send(self, message: Message) -> None:
        """Tell those whom it concerns. What is meant for a group that is not ready is dropped."""
        if self.is_ready:
            self.work.send(message)

    def receive(self) -> list[Message]:
        """Return the workers' messages, joined: each answer once, when all that were asked have answered."""
        said = [(rank, message) for rank, worker in enumerate(self.workers) for message in worker.receive()]
        return [kept for rank, message in said for kept in self._take(rank, message)]

    def _take(self, rank: int, message: Message) -> list[Message]:
        match message:
            case WorkerReady():
                for worker in self.workers:
                    worker.liveness.another_went_on()
                return self._ready()
            case Starting():
                if message.step != IMPORTS:
                    self._stand_by_soon()
                return [message] if rank == 0 else []
        return self.work.take(rank, message)

    def _ready(self) -> list[Message]:
        if self._told or not self.is_ready:
            return []
        self._told = True
        self._stand_by_soon()
        if self._left:
            self.workers[0].send(DropFiles(self._left))
            self._left = []
        facts = [worker.models for worker in self.workers]
        self.models = {name: _common([of_worker[name] for of_worker in facts]) for name in facts[0]}
        return [WorkerReady([each.to_dict() for each in self.models.values()], self.workers[0].device)]


class _Answers:
    """Answers the questions of one group of workers, in threads, from the first question on."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._answers: GroupAnswers | None = None
        self._lock = Lock()

    def answer(self, question: Message) -> Message:
        """Answer a worker's question."""
        from tinsmith.engine.records import GroupAnswers

        with self._lock:
            self._answers = self._answers or GroupAnswers(self._group.records)
        return self._answers.answer(question)


def _config_of(config: Config, rank: int, count: int, gpus_by_number: bool) -> Config:
    """The configuration of one of `count` workers: if there are several, a GPU each, and vLLM is the first one's."""
    config = replace(config, distributed=replace(config.distributed, workers=count))
    if count == 1:
        return config
    device = config.models.device
    if gpus_by_number:
        device = f"cuda:{rank}" if device != "cpu" and visible_gpus() else "cpu"
    sampler = config.sampling.sampler if rank == 0 or config.sampling.sampler == "local" else "none"
    return replace(
        config, models=replace(config.models, device=device), sampling=replace(config.sampling, sampler=sampler)
    )


def _device_of(worker: WorkerProcess) -> str:
    host = worker.place.host
    return f"{worker.device} on {host}" if worker.device and host else worker.device


def _common(facts: Sequence[ModelFacts]) -> ModelFacts:
    """Return the facts of a base model that hold on all workers."""
    trained, sampled = min(each.max_trained for each in facts), min(each.max_sampled for each in facts)
    return replace(facts[0], max_trained=trained, max_sampled=sampled)
