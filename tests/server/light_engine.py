"""An engine without models, for tests of what the server does with its engine process.

It is ready at once, and says for each EndSession that the session has ended. For session `lost` it ends itself, with a
reason; for `worker lost` it has lost its worker, and for `worker back` it has another. It is run as the engine is: with
an `EngineStart` on standard input.
"""

import sys

from tinsmith.protocol.child_process import EngineStart
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.serving import Bye, Done, EndSession, Ready, Recovering, Shutdown

REASON = "cuda:0 computes nothing any more"


def main() -> None:
    told = sys.stdin.buffer.read()
    if not told:
        return
    address = EngineStart.from_bytes(told).address
    link = ChildLink(address)
    Heartbeat(address).start()
    link.send(Ready([]))
    while True:
        for message in link.receive(1.0):
            if isinstance(message, EndSession):
                link.send(Done(f"ended {message.session_id}", None, str(message.save), None, b""))
            if message == EndSession("worker lost", save=False):
                link.send(Recovering(REASON))
            if message == EndSession("worker back", save=False):
                link.send(Ready([]))
            is_lost = message == EndSession("lost", save=False)
            if is_lost or isinstance(message, Shutdown):
                link.send(Bye(REASON if is_lost else ""))
                link.close()
                sys.exit(3 if is_lost else 0)


if __name__ == "__main__":
    main()
