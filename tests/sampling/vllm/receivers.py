"""A vLLM server's end of a broadcast, in a process of its own, which starts quickly: nothing else is imported here."""

import multiprocessing
import os

import torch

from tinsmith.sampling.inside_vllm.transfer_group import FIRST_WORKER, TransferGroup

ON_GPU = os.environ.get("TINSMITH_TEST_DEVICE") == "cuda"
TRAINER_DEVICE, WORKER_DEVICE = (torch.device("cuda", 0), torch.device("cuda", 1)) if ON_GPU else (torch.device("cpu"), torch.device("cpu"))
"""The devices of the two ends."""
SIZE = 1 << 22
"""Values of the tensor that is sent."""


def join_and_ignore(meeting_point: str) -> None:
    """A server's worker that never receives anything."""
    group = TransferGroup(meeting_point, FIRST_WORKER, 2, WORKER_DEVICE)
    multiprocessing.Event().wait(3600)
    del group


def join_and_receive(meeting_point: str) -> None:
    """A server's worker that receives one tensor, whose values are all 2."""
    group = TransferGroup(meeting_point, FIRST_WORKER, 2, WORKER_DEVICE)
    received: list[torch.Tensor] = []
    group.receive([(torch.Size([SIZE]), torch.float32)], received.extend)
    assert [tensor.unique().tolist() for tensor in received] == [[2.0]]
