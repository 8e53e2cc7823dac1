"""A worker without models that exchanges with others over gloo, as real ones do: how it does so is the first of its arguments.

apart    it is ready, and told to forget a checkpoint it enters an exchange to which the others never come
early    it does so while it starts, once all have met
hang     the second one hangs while it starts, before it meets the others
compute  there it computes for long in the place of that
"""

import sys
from typing import TYPE_CHECKING

from tests.engine.light_worker import DOES, FACTS
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.place import Place
from tinsmith.protocol.serving import ForgetCheckpoint
from tinsmith.protocol.started import read_start
from tinsmith.protocol.work import WorkerReady

if TYPE_CHECKING:
    from tinsmith.distributed.process_group import ProcessGroup

TURNS = 5
"""How often it computes in the place of loading."""


def enter_apart(group: "ProcessGroup") -> None:
    """Wait for others that wait for this one elsewhere."""
    import torch
    import torch.distributed as dist

    own = [dist.new_group() for _ in range(group.count)][group.place.rank]
    with group._not_alone():
        dist.all_reduce(torch.zeros(8), group=own)


def main() -> None:
    """Meet the others, and wait to be told."""
    how, address, engine_pid, rank, count, meeting = sys.argv[1:]
    _, keys = read_start(sys.stdin.buffer)
    link = ChildLink(address, keys)
    heartbeat = Heartbeat(address, int(engine_pid), keys)
    heartbeat.start()
    for _ in range(TURNS if how in DOES and rank == "1" else 0):
        DOES[how](heartbeat)
        heartbeat.busy()
    import torch  # which takes seconds, in which heartbeats come

    from tinsmith.distributed.process_group import ProcessGroup

    group = ProcessGroup(Place(int(rank), int(count), meeting), torch.device("cpu"), None, heartbeat.exchanges)
    group.connect()
    if how == "early":
        enter_apart(group)
    link.send(WorkerReady([FACTS.to_dict()], "cpu"))
    while True:
        heartbeat.idle()
        messages = link.receive(0.5)
        heartbeat.busy()
        if any(isinstance(message, ForgetCheckpoint) for message in messages):
            enter_apart(group)


if __name__ == "__main__":
    main()
