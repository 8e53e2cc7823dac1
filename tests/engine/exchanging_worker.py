"""A worker without models that exchanges with others over gloo, as real ones do: how it does so is the first of its
arguments.

apart  it is ready, and told to forget a checkpoint it enters an exchange to which the others never come
behind it is ready, and told so the second one hangs, for which the others wait in an exchange
"""

import sys
from typing import TYPE_CHECKING

from tests.engine.light_worker import FACTS, hang
from tinsmith.protocol.child_process import Start
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.serving import ForgetCheckpoint
from tinsmith.protocol.work import WorkerReady

if TYPE_CHECKING:
    from tinsmith.training.parallel.process_group import ProcessGroup


def enter(group: "ProcessGroup", is_apart: bool) -> None:
    """Wait for the others in an exchange, or each in one of its own."""
    import torch
    import torch.distributed as dist

    own = [dist.new_group() for _ in range(group.count)][group.place.rank] if is_apart else None
    with group._not_alone():
        dist.all_reduce(torch.zeros(8), group=own)


def main() -> None:
    """Meet the others, and wait to be told."""
    how, engine_pid = sys.argv[1:]
    start = Start.from_bytes(sys.stdin.buffer.read())
    link = ChildLink(start.address, start.keys)
    heartbeat = Heartbeat(start.address, int(engine_pid), start.keys)
    heartbeat.start()
    heartbeat.busy()
    import torch  # which takes seconds, in which heartbeats come

    from tinsmith.training.parallel.process_group import ProcessGroup

    group = ProcessGroup(start.place, torch.device("cpu"), None, heartbeat.exchanges)
    group.connect()
    link.send(WorkerReady([FACTS.to_dict()], "cpu"))
    while True:
        heartbeat.idle()
        messages = link.receive(0.5)
        heartbeat.busy()
        if any(isinstance(message, ForgetCheckpoint) for message in messages):
            if how == "behind" and start.place.rank == 1:
                hang(heartbeat)
            enter(group, is_apart=how == "apart")


if __name__ == "__main__":
    main()
