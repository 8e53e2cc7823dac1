"""A worker without models, for tests of what the engine does with its worker process.

It is run as a worker is, with the engine's process id as its last argument and the rest on standard input; an argument
before that says how it behaves:

ready     it is ready at once, and answers each ForgetCheckpoint with the path; for the path `lost` it ends itself, with
          a
          reason, for `follow` because others have ended, for `hang` it hangs, and for `spin` it hangs and uses its
          processor
stubborn  the same, but it does not end when it is told to
loading   it is never ready
lost      it ends before it is ready, with a reason
"""

import hashlib
import os
import sys
import threading

from tinsmith.protocol.child_process import Start
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Bye, ForgetCheckpoint, Shutdown
from tinsmith.protocol.work import Answer, WorkerReady

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


def end(link: ChildLink, last_words: Bye, code: int) -> None:
    """End with last words."""
    link.send(last_words)
    link.close()
    sys.exit(code)


def hang(heartbeat: Heartbeat) -> None:
    """Never come back from a turn, as from a driver that does not answer."""
    heartbeat.busy()
    threading.Event().wait()


def spin(heartbeat: Heartbeat) -> None:
    """Never come back from a turn, as from a driver that asks a device again and again."""
    heartbeat.busy()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # hours, without Python's lock


DOES = {"hang": hang, "spin": spin}
"""Turns, by their name."""


def take(message: Message, how: str, link: ChildLink, heartbeat: Heartbeat) -> None:
    """Do what a message asks for."""
    match message:
        case ForgetCheckpoint(path="lost"):
            end(link, Bye(REASON), 3)
        case ForgetCheckpoint(path="follow"):
            end(link, Bye("the others are gone", follows=True), 3)
        case ForgetCheckpoint(path=path) if path in DOES:
            DOES[path](heartbeat)
        case ForgetCheckpoint(path=path):
            link.send(Answer(0, {"path": path}))
        case Shutdown() if how != "stubborn":
            end(link, Bye(), 0)


def main() -> None:
    """Answer messages until told to stop, or until the engine is gone."""
    how, engine_pid = sys.argv[1:]
    start = Start.from_bytes(sys.stdin.buffer.read())
    link = ChildLink(start.address, start.keys)
    heartbeat = Heartbeat(start.address, keys=start.keys)
    heartbeat.idle()
    heartbeat.start()
    if how == "lost":
        end(link, Bye(REASON), 3)
    if how != "loading":
        link.send(WorkerReady([FACTS.to_dict()], "cpu"))
    while os.getppid() == int(engine_pid):
        for message in link.receive(0.5):
            take(message, how, link, heartbeat)


if __name__ == "__main__":
    main()
