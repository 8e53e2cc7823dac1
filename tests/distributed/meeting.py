"""`python -m tests.distributed.meeting RANK COUNT HOST ADDRESS`: one of several workers on different hosts, which compares what it has.

Its keys, and which weights it has, are JSON on its standard input. It writes the sum of all ranks and counts, or why it would not compute.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import ConfigError
from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.place import Place, meeting_at
from tinsmith.protocol.questions import Questions
from tinsmith.worker.sameness import require_same


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
            group.sum(total)
            print(total.tolist())
    group.close()


if __name__ == "__main__":
    main()
