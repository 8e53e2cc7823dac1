"""A worker without models, for tests of what the engine does with its worker process.

It is run as a worker is, with the link's address and the engine's process id as its last arguments and the configuration on standard input;
an argument before them says how it behaves:

ready     it is ready at once, and answers each ForgetCheckpoint with the path; for the path `lost` it ends itself, with a
          reason, for `hang` it hangs, for `spin` it does so and uses its processor, and for `compute` it answers after a long turn
stubborn  the same, but it does not end when it is told to
loading   it is never ready; with a word of these behind it, it does that while it starts
broken    it ends before it is ready, without a word
lost      it ends before it is ready, with a reason
member    one of several, which answers everything; what it is asked for says how (`Member`)
"""

import hashlib
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Bye, CancelSample, EndSession, ForgetCheckpoint, Sample, SampleDone, SampleFailed, Shutdown
from tinsmith.protocol.started import read_start
from tinsmith.protocol.work import (
    Answer,
    CallFailed,
    ClearGradients,
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

COMPUTES_S = 5.0
"""Seconds of a processor that a long turn takes."""

REASON = "cuda:0 computes nothing any more"

FACTS = ModelFacts(
    name="tiny",
    tokenizer_id="/models/tiny",
    architecture="qwen3",
    vocab_size=100,
    max_context=32,
    max_trained=24,
    max_sampled=32,
    takes_images=False,
    max_lora_rank=16,
)


def end(link: ChildLink, reason: str, code: int) -> None:
    """End with last words."""
    link.send(Bye(reason))
    link.close()
    sys.exit(code)


class Member:
    """One of several workers. Marks in the names of operations, models and samples say what it does with them:

    fail@RANK    the worker of that rank fails
    hold@RANK    it answers when it is told to forget the checkpoint `release`
    die@RANK     it ends itself
    done@RANK    it answers a sample, with its rank
    gone@RANK    it has dropped the weights of a sample
    long@RANK    the first datum is too long for it alone
    part         all have a part of what is saved
    copy@RANK    it says first that it has its copy of what is saved

    Told to forget the checkpoint `exchange`, the second one hangs, and the first waits for it. A worker tells what it has heard when it
    is told to forget the checkpoint `heard`, and what it does for `status`.
    """

    def __init__(self, link: ChildLink, rank: int, late: str, meeting: str) -> None:
        """With a path in `late` the last one is ready when that file exists."""
        self.link = link
        self.rank = rank
        self.late = late
        self.meeting = meeting
        self.heard: list[tuple[str, str]] = []
        self.held: list[Message] = []
        self.heartbeat: Heartbeat | None = None

    def run(self, engine_pid: int) -> None:
        """Answer until told to stop."""
        while self.rank and self.late and not Path(self.late).exists():
            time.sleep(0.01)
        facts = replace(FACTS, max_trained=24 - self.rank, max_sampled=20 + self.rank)
        self.link.send(WorkerReady([facts.to_dict()], f"cpu {self.rank}"))
        while os.getppid() == engine_pid:
            for message in self.link.receive(0.5):
                self.take(message)

    def take(self, message: Message) -> None:
        """Note a message, and answer it now or later."""
        if isinstance(message, Shutdown):
            end(self.link, "", 0)
        if isinstance(message, ForgetCheckpoint) and message.path in ("heard", "release", "status", "follow", "exchange"):
            self.told(message.path)
            return
        name = name_of(message)
        self.heard.append((type(message).__name__, name))
        if f"die@{self.rank}" in name:
            self.link.close()
            sys.exit(9)
        if not answers(message, self.rank):
            return
        if f"copy@{self.rank}" in name and isinstance(message, SaveModel | ExportModel):
            self.link.send(Copied(message.number))
        if f"hold@{self.rank}" in name:
            self.held.append(message)
        else:
            self.link.send(self.answer(message))

    def told(self, path: str) -> None:
        """Do what the test asks for."""
        match path:
            case "heard":
                self.link.send(Answer(0, {"rank": self.rank, "heard": self.heard, "meeting": self.meeting, "threads": threads()}))
                self.heard = []
            case "release":
                for held in self.held:
                    self.link.send(self.answer(held))
                self.held = []
            case "status":
                ten = 10 * (self.rank + 1)
                self.link.send(WorkerStatus(ten, ten + 1, ten + 2, ten + 3, ten + 4, {"weights": 7, str(self.rank): 1}, {}))
            case "exchange":
                assert self.heartbeat is not None
                self.heartbeat.exchanges.waits = self.rank == 0
                hang(self.heartbeat)
            case "follow" if self.rank == 0:
                self.link.send(Bye("the others are gone", follows=True))
                self.link.close()
                sys.exit(3)

    def answer(self, message: Any) -> Message:
        """What it says of work."""
        fails = f"fail@{self.rank}" in name_of(message)
        reason = f"worker {self.rank} cannot"
        match message:
            case Sample() if f"gone@{self.rank}" in name_of(message):
                return SampleFailed(message.request_id, message.run, reason, "user", gone=True)
            case Sample():
                return SampleDone(message.request_id, message.run, str(self.rank).encode())
            case Prepare() if fails:
                return PrepareFailed(message.number, message.operation, True, "StoreUnavailableError", reason)
            case Prepare():
                lengths = [int(length) for length in message.payload.split()]
                pixels = [{f"{index}": 5, f"{index} of {self.rank}": 3} for index in range(len(lengths))]
                long = [0] if f"long@{self.rank}" in message.operation else []
                return Prepared(message.number, message.operation, True, lengths, pixels, long)
            case RunPass():
                done = [] if fails else message.pieces
                failed = [(*piece, "UserError", reason) for piece in message.pieces] if fails else []
                losses = np.array([100.0 * self.rank + index for _, index in done])
                logprobs = np.array([-length for length in (message.lengths if done else [])], np.float32)
                tokens = 10 if f"less@{self.rank}" in message.base_model else 100
                payload = losses.tobytes() + logprobs.tobytes()
                return PassDone(message.number, [(*piece, [1]) for piece in done], failed, tokens, [[] for _ in done], payload)
            case SaveModel() | ExportModel() if "part" in message.model_id and not fails:
                return PartWritten(message.number, [("a", self.rank, 1, 0)])
            case FinishSave() if message.error_type:
                return CallFailed(message.number, message.error_type, message.error)
            case FinishSave():
                return Answer(message.number, {"pieces": message.pieces})
        return CallFailed(message.number, "TinsmithError", reason) if fails else Answer(message.number, {"rank": self.rank})


def hang(heartbeat: Heartbeat) -> None:
    """Never come back from a turn, as from a driver that does not answer."""
    heartbeat.busy()
    threading.Event().wait()


def spin(heartbeat: Heartbeat) -> None:
    """Never come back from a turn, as from a driver that asks a device again and again."""
    heartbeat.busy()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # hours, without Python's lock


def compute(heartbeat: Heartbeat) -> None:
    """A long turn that is all work, in one call after the other."""
    heartbeat.busy()
    begun = time.process_time()
    while time.process_time() - begun < COMPUTES_S:
        for rounds in range(1, 1000):
            hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    heartbeat.idle()


DOES = {"hang": hang, "spin": spin, "compute": compute}
"""Turns, by their name."""


def threads() -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


def answers(message: Message, rank: int) -> bool:
    """Whether a worker answers it."""
    if isinstance(message, Sample):
        return f"done@{rank}" in message.request_id or f"gone@{rank}" in message.request_id
    return not isinstance(message, CancelSample | EndSession | ForgetCheckpoint | Drop | DropFiles | ClearGradients | DeleteModel)


def name_of(message: Message) -> str:
    """What it is about."""
    match message:
        case Prepare():
            return message.operation
        case Drop():
            return " ".join(message.operations)
        case RunPass():
            return " ".join(f"{operation}/{index}" for operation, index in message.pieces)
        case Sample() | CancelSample():
            return message.request_id
        case EndSession():
            return message.session_id
        case ForgetCheckpoint():
            return message.path
        case FinishSave():
            return message.directory
        case DropFiles():
            return " ".join(message.directories)
        case CreateModel() | OptimStep() | TakeSnapshot() | SaveModel() | ExportModel() | LoadModel() | ClearGradients() | DeleteModel():
            return message.model_id
    return ""


def take(message: Message, how: str, link: ChildLink, heartbeat: Heartbeat) -> None:
    """Do what a message asks for."""
    match message:
        case ForgetCheckpoint(path="lost"):
            end(link, REASON, 3)
        case ForgetCheckpoint(path=path) if path in DOES:
            DOES[path](heartbeat)
            link.send(Answer(0, {"path": path}))
        case ForgetCheckpoint(path=path):
            link.send(Answer(0, {"path": path}))
        case Shutdown() if how != "stubborn":
            end(link, "", 0)


def main() -> None:
    """Answer messages until told to stop, or until the engine is gone."""
    how, address, engine_pid, rank, _, meeting = sys.argv[1:]
    _, keys = read_start(sys.stdin.buffer)
    link = ChildLink(address, keys)
    heartbeat = Heartbeat(address, keys=keys)
    heartbeat.idle()
    heartbeat.start()
    if how.startswith("member"):
        member = Member(link, int(rank), how.removeprefix("member"), meeting)
        member.heartbeat = heartbeat
        member.run(int(engine_pid))
    if how == "broken":
        sys.exit(2)
    if how == "lost":
        end(link, REASON, 3)
    if how.startswith("loading "):
        DOES[how.split()[1]](heartbeat)
    if not how.startswith("loading"):
        link.send(WorkerReady([FACTS.to_dict()], "cpu"))
    while os.getppid() == int(engine_pid):
        for message in link.receive(0.5):
            take(message, how, link, heartbeat)


if __name__ == "__main__":
    main()
