"""A worker without models that exchanges with others over gloo, as real ones do: how it does so is the first of its arguments.

apart  it is ready, and told to forget a checkpoint it enters an exchange to which the others never come
hang   before the second one meets the others, it computes for long, and then hangs
"""

import sys
from typing import TYPE_CHECKING

from tests.engine.light_worker import FACTS, compute, hang
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
    if how == "hang" and rank == "1":
        for _ in range(TURNS):
            compute(heartbeat)
        hang(heartbeat)
    heartbeat.busy()
    import torch  # which takes seconds, in which heartbeats come

    from tinsmith.distributed.process_group import ProcessGroup

    group = ProcessGroup(Place(int(rank), int(count), meeting), torch.device("cpu"), None, heartbeat.exchanges)
    group.connect()
    link.send(WorkerReady([FACTS.to_dict()], "cpu"))
    while True:
        heartbeat.idle()
        messages = link.receive(0.5)
        heartbeat.busy()
        if any(isinstance(message, ForgetCheckpoint) for message in messages):
            enter_apart(group)


if __name__ == "__main__":
    main()
