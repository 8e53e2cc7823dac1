"""A worker without models, for tests of what the engine does with its worker process.

It is run as a worker is, with the link's address and the engine's process id as its last arguments and the configuration on standard input;
an argument before them says how it behaves:

ready     it is ready at once, and answers each ForgetCheckpoint with the path; for the path `lost` it ends itself, with a reason
stubborn  the same, but it does not end when it is told to
loading   it is never ready
broken    it ends before it is ready, without a word
lost      it ends before it is ready, with a reason
"""

import os
import sys

from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
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


def end(link: ChildLink, reason: str, code: int) -> None:
    """End with last words."""
    link.send(Bye(reason))
    link.close()
    sys.exit(code)


def main() -> None:
    """Answer messages until told to stop, or until the engine is gone."""
    how, address, engine_pid, *_ = sys.argv[1:]
    link = ChildLink(address)
    Heartbeat(address).start()
    sys.stdin.read()
    if how == "broken":
        sys.exit(2)
    if how == "lost":
        end(link, REASON, 3)
    if how != "loading":
        link.send(WorkerReady([FACTS.to_dict()], "cpu"))
    while os.getppid() == int(engine_pid):
        for message in link.receive(0.5):
            match message:
                case ForgetCheckpoint(path="lost"):
                    end(link, REASON, 3)
                case ForgetCheckpoint(path=path):
                    link.send(Answer(0, {"path": path}))
                case Shutdown() if how != "stubborn":
                    end(link, "", 0)


if __name__ == "__main__":
    main()
