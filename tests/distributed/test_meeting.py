"""Workers of several hosts find each other over TCP, and compare what they compute with.

The hosts are addresses of this one.

Each is `python -m tests.distributed.test_meeting RANK COUNT HOST ADDRESS`. Its keys, and which weights it has, are JSON
on its standard input. It writes the sum of all ranks and counts, or why it would not compute.

Invariant: Workers of several hosts meet at the port of their own group, refuse different weights or programs, and a
host that lacks what they share. Also: `tests/engine/test_worker_group.py`, `tests/distributed/test_ray.py`.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.running import START_S
from tinsmith.config import Config
from tinsmith.engine.records import GroupAnswers, Records
from tinsmith.errors import ConfigError
from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.link import ParentLink
from tinsmith.protocol.place import Place, meeting_at
from tinsmith.protocol.questions import Answering, Questions
from tinsmith.training.parallel.process_group import LOOPBACK, ProcessGroup, interface_of, set_communication_variables
from tinsmith.worker.bases import require_same


def main() -> None:
    """Meet, compare and add up."""
    rank, count, host, address = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    told = json.loads(sys.stdin.read())
    questions = Questions(address, ChildKeys(**told["keys"]))
    group = ProcessGroup(Place(rank, count, meeting_at(host)), torch.device("cpu"), questions.ask)
    for weights in told["weights"]:
        bases: Any = {"tiny": SimpleNamespace(fingerprint=weights)}
        try:
            require_same(group, bases)
        except ConfigError as error:
            print(error)
        else:
            total = torch.tensor([rank, 1])
            group.all_reduce(total)
            print(total.tolist())
    group.close()


HOSTS = ("127.0.0.1", "127.0.0.2")


def test_workers_of_two_hosts_meet_and_refuse_each_other_if_their_weights_differ() -> None:
    answers = GroupAnswers(Records(Config(["tiny=unused"])))
    with ExitStack() as ends:
        workers = []
        for rank, host in enumerate(HOSTS):
            link = ParentLink(HOSTS[0])
            ends.callback(link.close)
            ends.callback(Answering(link.take_questions(), answers.answer).close)
            assert link.keys is not None
            command = [sys.executable, "-m", "tests.distributed.test_meeting", str(rank), "2", host, link.address]
            worker = ends.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            ends.callback(worker.kill)
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"keys": asdict(link.keys), "weights": ["same", f"of {rank}"]}))
            worker.stdin.close()
            worker.stdin = None
            workers.append(worker)
        said = [worker.communicate(timeout=START_S)[0].splitlines() for worker in workers]
    assert said[0] == said[1]
    assert said[0][0] == "[1, 2]"
    assert "the weights of tiny differs: of 0 on 127.0.0.1, of 1 on 127.0.0.2" in said[0][1]


def test_the_interface_between_hosts_is_the_one_with_their_address() -> None:
    assert [interface_of(host) for host in HOSTS] == [LOOPBACK] * 2
    with pytest.raises(ConfigError, match=r"no network interface here has the address 203\.0\.113\.1"):
        interface_of("203.0.113.1")


def test_the_environment_may_name_another_interface_and_allow_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(os, "environ", environment)
    set_communication_variables("eth0")
    assert environment == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NVLS_ENABLE": "0"}
    environment["NCCL_NVLS_ENABLE"] = "1"
    set_communication_variables("eth0")
    assert environment["NCCL_NVLS_ENABLE"] == "1"


if __name__ == "__main__":
    main()
