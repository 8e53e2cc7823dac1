"""The workers as one: they hold the same models, share the work, and end together.

Every worker has every base model, every model and its optimizer. A pass is divided by what its datums cost, so that each worker accumulates
gradients of its share. A step adds these up over all workers (`training/together.py`), and each takes it for itself, with the same numbers
to the last bit. A sample runs on one worker.

A worker that ends takes the others with it: they may wait for it in a sum that it will never come to, and none has all gradients. All are
started again.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tinsmith.config import Config
from tinsmith.engine.devices import threads_of, visible_gpus
from tinsmith.engine.launching import ChildProcesses, Launcher
from tinsmith.engine.records import Records
from tinsmith.engine.routing import Routing
from tinsmith.engine.shares import divide, join, same_outcome
from tinsmith.engine.watching import hanging
from tinsmith.engine.worker_process import WORKER, WorkerProcess
from tinsmith.protocol.child_process import LAST_WORDS_S
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.own_directory import OwnDirectory
from tinsmith.protocol.place import Place, meeting_at, writer_of
from tinsmith.protocol.questions import Answered, FindMeeting, MeetingPort, OpenMeeting
from tinsmith.protocol.serving import CancelSample, EndSession, ForgetCheckpoint, Sample, SampleDone, SampleFailed, Starting
from tinsmith.protocol.work import (
    Answer,
    Call,
    CallFailed,
    Copied,
    CreateModel,
    DeleteModel,
    Drop,
    DropFiles,
    ExportModel,
    FinishSave,
    LoadModel,
    OptimStep,
    PartWritten,
    PassDone,
    Prepare,
    Prepared,
    PrepareFailed,
    RunPass,
    SaveModel,
    TakeSnapshot,
    WorkerReady,
    WorkerStatus,
)
from tinsmith.store import ids
from tinsmith.store.files import SNAPSHOTS_DIR

log = logging.getLogger(__name__)

LOOK_FOR_HOSTS_S = 1.0
"""Seconds between two looks whether there are hosts for workers that have none."""

Asked = Prepare | RunPass | Call | FinishSave
Reply = Prepared | PrepareFailed | PassDone | PartWritten | Answer | CallFailed
R = TypeVar("R")


class Awaited:
    """A question to some workers under one number, and their answers."""

    def __init__(self, message: Asked, ranks: Sequence[int]) -> None:
        self.message = message
        self.ranks = list(ranks)
        self.replies: dict[int, Reply] = {}
        self.copied: set[int] = set()
        """Those that have their copy of what is to be saved."""

    def of(self, kind: type[R]) -> dict[int, R]:
        """The replies of one kind, by worker."""
        return {rank: reply for rank in self.ranks if isinstance(reply := self.replies.get(rank), kind)}

    @property
    def is_complete(self) -> bool:
        """Whether all have answered."""
        return len(self.replies) == len(self.ranks)


class GroupAnswers:
    """Answers questions of the current group of workers, in threads; those of an earlier group do not count."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._meeting = MeetingPort("", 0)

    def answer(self, question: Message) -> Message:
        """Answer a worker's question."""
        match question:
            case OpenMeeting():
                self._meeting = MeetingPort(question.host, question.port)
                return Answered()
            case FindMeeting():
                return self._meeting
        return self._records.answer(question)


class WorkerGroup:
    """All workers of an engine."""

    def __init__(
        self, config: Config, engine: ChildLink, count: int, program: Sequence[str] = WORKER, launcher: Launcher | None = None
    ) -> None:
        """Nothing runs yet. `engine` is woken up by what the workers say. Without a `launcher` they are children of this process."""
        self.config = config
        self.launcher: Launcher = launcher or ChildProcesses()
        configs = [_config_of(config, rank, count, self.launcher.gpus_by_number) for rank in range(count)]
        self.records = Records(config)
        self.workers = [WorkerProcess(each, engine, program, self.launcher) for each in configs]
        self.samplers = range(count if config.sampling.sampler == "local" else 1)
        """The workers that sample, and keep what is sampled. vLLM servers are the first one's."""
        self.models: dict[str, ModelFacts] = {}
        """Base models that all serve, once the first group is ready."""
        self.last_messages: list[Message] = []
        """Messages of a group that has ended which `receive` did not return."""
        self._awaited: dict[int, Awaited] = {}
        self._passes_of: dict[tuple[str, int], int] = {}
        """Most tokens of a pass on a base model that a worker has told, by name and rank."""
        self._pass_tokens = [0] * count
        """Tokens of passes that were given to each, by rank, those before it included."""
        self._loaded: set[str] = set()
        """Models that all workers have."""
        self._routing = Routing(len(self.samplers))
        self._meeting: OwnDirectory | None = None
        """Directory in which workers on this host find each other."""
        self._look_at = 0.0
        """The monotonic time at which to look again on which hosts workers can start."""
        self._left: list[str] = []
        """Directories of saves that ended with the workers before."""
        self._told = False
        """Whether the engine knows that they are ready."""

    @property
    def count(self) -> int:
        """Number of workers."""
        return len(self.workers)

    @property
    def _is_sharded(self) -> bool:
        """Whether the workers share the weights, so that all of them take part in everything."""
        return self.config.shards_weights

    @property
    def is_ready(self) -> bool:
        """Whether they can take work."""
        return all(worker.is_ready for worker in self.workers)

    @property
    def was_ever_ready(self) -> bool:
        """Whether a group could ever take work."""
        return bool(self.models)

    @property
    def busy_s(self) -> float:
        """Seconds that the busiest had been in its current turn at its last heartbeat; 0 while all wait for work."""
        return max(worker.busy_s for worker in self.workers)

    @property
    def wait_s(self) -> float:
        """Seconds until `start_if_due` would start them; endless while they run."""
        if self._runs:
            return float("inf")
        return max(self._look_at - time.monotonic(), *(worker.wait_s for worker in self.workers))

    @property
    def sampled_tokens(self) -> int:
        """Tokens that all workers have sampled, those before them included."""
        return sum(worker.sampled_tokens for worker in self.workers)

    @property
    def status(self) -> WorkerStatus:
        """Status of all workers together."""
        of_workers = [worker.status for worker in self.workers]
        return WorkerStatus(
            done=sum(each.done for each in of_workers),
            running_samples=sum(each.running_samples for each in of_workers),
            waiting_samples=sum(each.waiting_samples for each in of_workers),
            finished_samples=sum(each.finished_samples for each in of_workers),
            sampled_tokens=sum(each.sampled_tokens for each in of_workers),
            memory=_sums([each.memory for each in of_workers]),
            graphs=_sums([each.graphs for each in of_workers]),
        )

    @property
    def shown(self) -> list[dict[str, object]]:
        """Process, device and state of each, and the tokens of its shares of passes, for `tinsmith status`."""
        return [
            {"pid": each.pid, "device": _device_of(each), "state": each.state, "pass_tokens": tokens}
            for each, tokens in zip(self.workers, self._pass_tokens, strict=True)
        ]

    # ---- Processes

    @property
    def _runs(self) -> bool:
        return any(worker.process is not None for worker in self.workers)

    def start_if_due(self) -> None:
        """Start all if none runs and it is time."""
        if self._runs or self.wait_s > 0:
            return
        hosts = self.launcher.hosts()
        if hosts is None:
            self._look_at = time.monotonic() + LOOK_FOR_HOSTS_S
            return
        self._forget_meeting()
        shutil.rmtree(Path(self.config.data_dir) / SNAPSHOTS_DIR, ignore_errors=True)  # they ended with the workers before
        self._told = False
        meeting = ""
        if self.count > 1 and not hosts:
            self._meeting = OwnDirectory("tinsmith-meeting-", Path(tempfile.gettempdir()))
            meeting = f"file://{self._meeting.path}/store"
        answers = GroupAnswers(self.records)
        for rank, worker in enumerate(self.workers):
            worker.answers = answers.answer
            worker.place = Place(rank, self.count, meeting_at(hosts[rank]) if hosts else meeting)
            worker.environment = threads_of(self.config, self.count)
            worker.start_if_due()

    def watch(self) -> None:
        """Kill a worker that hangs, and all if each waits for the others in an exchange: then nothing can come of it any more."""
        for worker in self.workers:
            worker.watch()
        found = hanging([worker.liveness for worker in self.workers])
        for worker, liveness in [(worker, worker.liveness) for worker in self.workers if worker.liveness in found]:
            why = "all wait for each other in an exchange, and nothing comes: " if liveness.waits else ""
            worker.kill_hung(f"{why}it had {liveness.stillness or liveness.standstill} and was killed")

    def ended(self) -> str | None:
        """The reason why the workers have ended, told once; None while they run, or if none does."""
        reasons = self._ends()
        if not reasons:
            return None
        deadline = time.monotonic() + LAST_WORDS_S
        while all(worker.follows for worker, _ in reasons) and time.monotonic() < deadline:  # the one whose end they noticed ends just now
            time.sleep(0.01)
            reasons += self._ends()
        for worker in self.workers:
            worker.begin_to_kill()
        for worker in self.workers:
            worker.kill()
            worker.ended()
        self.last_messages = [
            kept for rank, worker in enumerate(self.workers) for message in worker.last_messages for kept in self._take(rank, message)
        ]
        self._left += [place for awaited in self._awaited.values() if (place := _written_by(awaited.message))]
        self._awaited.clear()
        self._loaded.clear()
        self._routing = Routing(len(self.samplers))
        self._passes_of.clear()
        self._forget_meeting()
        worker, reason = min(reasons, key=lambda end: end[0].follows)
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
        self._forget_meeting()
        self.launcher.close()
        self.records.close()

    def _forget_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    # ---- What the engine says

    def send(self, message: Message) -> None:
        """Tell those whom it concerns. What is meant for a group that is not ready is dropped."""
        if not self.is_ready:
            return
        match message:
            case RunPass():
                self._send_pass(message)
            case Prepare() | CreateModel() | LoadModel() | OptimStep():
                self._ask(message, range(self.count))
            case TakeSnapshot():
                self._ask(message, range(self.count) if self.config.compares_with_copy else self.samplers)
            case SaveModel() | ExportModel():
                self._ask(message, self._asked_to_save(message.model_id))
            case Sample():
                self.workers[self._routing.choose(message)].send(message)
            case CancelSample():
                holder = self._routing.of(message.request_id, message.run)
                if holder is not None:
                    self._routing.ended(message.request_id, message.run)
                    self.workers[holder].send(message)
            case _:
                self._tell_all(message)

    def _send_pass(self, message: RunPass) -> None:
        """Give each worker its share, or its slice of a sequence of all."""
        if message.together:
            self._pass_tokens = [tokens + sum(message.lengths) // self.count for tokens in self._pass_tokens]
            self._ask(message, range(self.count))
            return
        most = self._tokens_per_pass(message.base_model) // self.count
        divided = divide(message, self.count, most, self._is_sharded)
        shares = {rank: share for rank, share in enumerate(divided) if share is not None}
        self._awaited[message.number] = Awaited(message, list(shares))
        for rank, share in shares.items():
            self._pass_tokens[rank] += sum(share.lengths)
            self.workers[rank].send(share)

    def _writer_of(self, model_id: str) -> int:
        """The worker that writes what is saved of a model."""
        return writer_of(model_id, self.count)

    def _asked_to_save(self, model_id: str) -> Sequence[int]:
        """One where all have the same: different models keep different workers from training. With divided weights each gives its part."""
        return range(self.count) if self._is_sharded else [self._writer_of(model_id)]

    def _ask(self, message: Asked, ranks: Sequence[int]) -> None:
        self._awaited[message.number] = Awaited(message, ranks)
        for rank in ranks:
            if isinstance(message, OptimStep) and rank != self._writer_of(message.model_id):
                self.workers[rank].send(replace(message, copy=""))
            else:
                self.workers[rank].send(message)

    def _tell_all(self, message: Message) -> None:
        match message:
            case DeleteModel():
                self._loaded.discard(message.model_id)
            case Drop():
                dropped = set(message.operations)
                for number, awaited in list(self._awaited.items()):
                    if isinstance(awaited.message, Prepare) and awaited.message.operation in dropped:
                        del self._awaited[number]
            case EndSession():
                self._routing.forget(lambda request_id: ids.session_of(request_id) == message.session_id)
        for worker in self.workers:
            worker.send(message)

    # ---- What the workers say

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
                return [message] if rank == 0 else []
            case SampleFailed(gone=True) if (other := self._routing.elsewhere(message.request_id, message.run)) is not None:
                self.workers[other[0]].send(other[1])
                return []
            case SampleDone() | SampleFailed():
                self._routing.ended(message.request_id, message.run)
                return [message]
            case Copied():
                return self._copied(rank, message)
            case PassDone() | Prepared() | PrepareFailed() | PartWritten() | Answer() | CallFailed():
                return self._replied(rank, message)
        return [message]

    def _ready(self) -> list[Message]:
        if self._told or not self.is_ready:
            return []
        self._told = True
        if self._left:
            self.workers[0].send(DropFiles(self._left))
            self._left = []
        facts = [worker.models for worker in self.workers]
        self.models = {name: _common([of_worker[name] for of_worker in facts]) for name in facts[0]}
        return [WorkerReady([each.to_dict() for each in self.models.values()], self.workers[0].device)]

    def _copied(self, rank: int, message: Copied) -> list[Message]:
        """The model can go on when all have copied their parts. Where one fails to, it waits for the failure."""
        awaited = self._awaited[message.number]
        awaited.copied.add(rank)
        return [message] if len(awaited.copied) == len(awaited.ranks) else []

    def _replied(self, rank: int, message: Reply) -> list[Message]:
        awaited = self._awaited.get(message.number)
        if awaited is None:  # of operations that were dropped, which nobody waits for
            return [message] if isinstance(message, Answer | CallFailed) else []
        awaited.replies[rank] = message
        if not awaited.is_complete:
            return []
        del self._awaited[message.number]
        match awaited.message:
            case RunPass() as asked:
                parts = awaited.of(PassDone)
                self._passes_of |= {(asked.base_model, rank): part.tokens_per_pass for rank, part in parts.items()}
                if asked.together:
                    return self._joined(asked, parts)
                return [join(list(parts.values()), self._tokens_per_pass(asked.base_model))]
            case Prepare() as asked:
                return [self._prepared(asked, awaited)]
            case FinishSave() as asked:
                if awaited.of(Answer):
                    self._tell_all(ForgetCheckpoint(asked.tinker_path))  # one of this path may have been sampled before
                return list(awaited.replies.values())
            case SaveModel() | ExportModel() as asked if self._is_sharded and len(awaited.of(Answer)) < self.count:
                self._finish(asked, awaited)
                return []
            case asked:
                return self._called(asked, awaited)

    def _joined(self, asked: RunPass, parts: dict[int, PassDone]) -> list[Message]:
        """The result of a sequence that all have computed together: each has all of it, and the first one's is taken."""
        of_first = parts[0]
        other = next((rank for rank, part in parts.items() if not same_outcome(part, of_first)), None)
        if other is not None:
            self._break(other, f"the gradients of {asked.pieces[0][0]} are not those of one sequence: not all workers have computed it")
            return []  # `ended` comes next
        return [replace(of_first, tokens_per_pass=self._tokens_per_pass(asked.base_model))]

    def _tokens_per_pass(self, base_model: str) -> int:
        """Most tokens of a pass of all workers on a base model: as many for each as the one with least memory left takes."""
        most = self.config.training.tokens_per_pass
        return self.count * min(self._passes_of.get((base_model, rank), most) for rank in range(self.count))

    def _prepared(self, asked: Prepare, awaited: Awaited) -> Message:
        """One worker may fail alone, as where the database is locked: then none keeps the operation."""
        failed, prepared = awaited.of(PrepareFailed), awaited.of(Prepared)
        if failed:
            for rank in prepared:
                self.workers[rank].send(Drop([asked.operation]))
            return next(iter(failed.values()))
        # What one has decoded another may not have.
        of_datums = zip(*(each.pixels for each in prepared.values()), strict=True)
        pixels = [{digest: size for of_worker in of_datum for digest, size in of_worker.items()} for of_datum in of_datums]
        together = sorted({index for each in prepared.values() for index in each.together})  # too long for one of them is enough
        return replace(next(iter(prepared.values())), pixels=pixels, together=together)

    def _finish(self, asked: SaveModel | ExportModel, awaited: Awaited) -> None:
        """All have written their parts, or failed to: let one of them make a checkpoint of the parts, or delete them."""
        failure = next(iter(awaited.of(CallFailed).values()), CallFailed(asked.number, "", ""))
        pieces = [piece for part in awaited.of(PartWritten).values() for piece in part.pieces]
        row = asked.checkpoint
        finish = FinishSave(asked.number, row["directory"], pieces, failure.error_type, failure.error, row["tinker_path"])
        self._ask(finish, [self._writer_of(asked.model_id)])

    def _called(self, asked: Call, awaited: Awaited) -> list[Message]:
        failed, answered = awaited.of(CallFailed), awaited.of(Answer)
        if isinstance(asked, SaveModel | ExportModel) and answered and self.count > 1:
            self._tell_all(ForgetCheckpoint(asked.checkpoint["tinker_path"]))  # one of this path may have been sampled before
        if failed and answered:
            rank, failure = next(iter(failed.items()))
            match asked:
                case CreateModel() | LoadModel() if asked.model_id not in self._loaded:
                    self._tell_all(DeleteModel(asked.base_model, asked.model_id))
                case TakeSnapshot() if asked.inflight and len(self.samplers) > 1:
                    self._break(rank, f"samples of model {asked.model_id} would follow different weights: {failure.error}")
                    return []
                case OptimStep() | LoadModel():
                    self._break(rank, f"model {asked.model_id} is not the same on all workers any more: {failure.error}")
                    return []  # `ended` comes next
        if isinstance(asked, CreateModel | LoadModel) and not failed:
            self._loaded.add(asked.model_id)
        if isinstance(asked, OptimStep | SaveModel | ExportModel) and not failed:  # the one that writes says more than the others
            return [answered[self._writer_of(asked.model_id)]]
        return [next(iter((failed or answered).values()))]

    def _break(self, rank: int, reason: str) -> None:
        """End the group: what its workers hold is not the same."""
        self.workers[rank].fault = reason
        self.workers[rank].kill()


def _config_of(config: Config, rank: int, count: int, gpus_by_number: bool) -> Config:
    """The configuration of one of so many workers: a GPU of its own if there are several, and vLLM is the first one's."""
    config = replace(config, distributed=replace(config.distributed, workers=count))
    if count == 1:
        return config
    device = config.models.device
    if gpus_by_number:
        device = f"cuda:{rank}" if device != "cpu" and visible_gpus() else "cpu"
    sampler = config.sampling.sampler if rank == 0 or config.sampling.sampler == "local" else "none"
    return replace(config, models=replace(config.models, device=device), sampling=replace(config.sampling, sampler=sampler))


def _written_by(message: Asked) -> str:
    """The directory that a message lets workers write to; empty if it does not."""
    match message:
        case SaveModel() | ExportModel():
            return str(message.checkpoint["directory"])
        case FinishSave():
            return message.directory
    return ""


def _device_of(worker: WorkerProcess) -> str:
    host = worker.place.host
    return f"{worker.device} on {host}" if worker.device and host else worker.device


def _common(facts: Sequence[ModelFacts]) -> ModelFacts:
    """Return the facts of a base model that hold on all workers."""
    trained, sampled = min(each.max_trained for each in facts), min(each.max_sampled for each in facts)
    return replace(facts[0], max_trained=trained, max_sampled=sampled)


def _sums(of_workers: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for each in of_workers for name in each)
    return {name: sum(each.get(name, 0) for each in of_workers) for name in names}
