"""Weights from one process to others: what arrives is what was sent, and an end that is lost, or does not receive, is noticed.

On GPUs (TINSMITH_TEST_DEVICE=cuda) each has one of its own. There the trainer is not told of an end that is lost: it gives up, as
`tests/sampling/vllm/test_transfers.py` shows.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.running import START_S
from tinsmith.distributed.meeting import LOOPBACK, set_communication_variables
from tinsmith.sampling.inside_vllm import transfer_group
from tinsmith.sampling.inside_vllm.transfer_group import FIRST_WORKER, TRAINER, TransferGroup

ON_GPU = os.environ.get("TINSMITH_TEST_DEVICE") == "cuda"
SENT = [torch.arange(6, dtype=torch.float32).reshape(2, 3).T, torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.zeros(0)]
SHAPES = [(tensor.shape, tensor.dtype) for tensor in SENT]
Work = Callable[[str, int, int, Connection], None]

with_gloo = pytest.mark.skipif(ON_GPU, reason="it is about what Gloo says")


def device_of(rank: int) -> torch.device:
    """What a process computes on."""
    return torch.device("cuda", rank) if ON_GPU else torch.device("cpu")


def receive(meeting_point: str, rank: int, size: int, pipe: Connection) -> None:
    """A worker's process: two updates, which it hands on."""
    group = TransferGroup(meeting_point, rank, size, device_of(rank))
    for _ in range(2):
        group.receive(SHAPES, lambda tensors: pipe.send(values_of(tensors)))


def values_of(tensors: Iterable[Tensor]) -> object:
    return [tensor.float().tolist() for tensor in tensors]


def fail_once(meeting_point: str, rank: int, size: int, pipe: Connection, lacks_memory: bool = False) -> None:
    """A worker that fails with the first tensor of the first update, or has no memory for the second one."""
    buffers = [torch.empty(shape, dtype=dtype, device=device_of(rank)) for shape, dtype in SHAPES]
    group = TransferGroup(meeting_point, rank, size, device_of(rank))
    found = iter([buffers[0], None, *buffers[1:]])

    def empty(*_: object, **__: object) -> Tensor:
        """The error is a new one: one that is kept keeps the group, by its traceback, until after Python's end, and then Gloo may abort."""
        if (tensor := next(found)) is None:
            raise MemoryError("no place")
        return tensor

    def fail(tensors: Iterator[Tensor]) -> None:
        next(tensors)
        raise ValueError("no place")

    with patch.object(torch, "empty", empty if lacks_memory else torch.empty), pytest.raises((MemoryError, ValueError), match="no place"):
        group.receive(SHAPES, list if lacks_memory else fail)  # type: ignore[arg-type]
    pipe.send("failed")
    group.receive(SHAPES, lambda tensors: pipe.send(values_of(tensors)))


def lack_memory_once(meeting_point: str, rank: int, size: int, pipe: Connection) -> None:
    """A worker that has no memory for the second tensor when it first asks for it."""
    fail_once(meeting_point, rank, size, pipe, lacks_memory=True)


def lack_memory(meeting_point: str, rank: int, size: int, pipe: Connection) -> None:
    """A worker that has no memory for any tensor."""
    group = TransferGroup(meeting_point, rank, size, device_of(rank))
    with patch.object(torch, "empty", side_effect=MemoryError("no memory")), pytest.raises(MemoryError, match="no memory"):
        group.receive(SHAPES, list)  # type: ignore[arg-type]
    pipe.send("failed")


def leave(meeting_point: str, rank: int, size: int, pipe: Connection) -> None:
    """A worker that ends, when it is told to, before it has received anything."""
    group = TransferGroup(meeting_point, rank, size, device_of(rank))
    pipe.recv()
    del group


def joined(directory: Path, *works: Work) -> tuple[TransferGroup, list[Connection], list[BaseProcess]]:
    """The trainer's end, and workers' processes that are at their work."""
    meeting_point, size = str(directory / "group"), 1 + len(works)
    if ON_GPU and torch.cuda.device_count() < size:
        pytest.skip(f"{size} processes need a GPU each")
    set_communication_variables(LOOPBACK)
    pipes: list[Connection] = []
    workers: list[BaseProcess] = []
    for rank, work in enumerate(works, FIRST_WORKER):
        ours, theirs = multiprocessing.Pipe()
        worker = multiprocessing.get_context("spawn").Process(target=work, args=(meeting_point, rank, size, theirs), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    return TransferGroup(meeting_point, TRAINER, size, device_of(TRAINER)), pipes, workers


def told(pipe: Connection) -> object:
    """What a worker says next."""
    assert pipe.poll(START_S)
    return pipe.recv()


def ended(workers: list[BaseProcess]) -> list[int | None]:
    """Exit codes of workers that end by themselves."""
    for worker in workers:
        worker.join(START_S)
    return [worker.exitcode for worker in workers]


def test_what_arrives_everywhere_is_what_was_sent(tmp_path: Path) -> None:
    group, pipes, workers = joined(tmp_path, receive, receive)
    for factor in (1.0, 3.0):
        tensors = [tensor.to(device_of(TRAINER)) * factor for tensor in SENT]
        group.send(tensors)
        assert [told(pipe) for pipe in pipes] == [values_of(tensors)] * 2
    assert ended(workers) == [0, 0]


@pytest.mark.parametrize("failing", [fail_once, lack_memory_once])
def test_a_worker_that_fails_keeps_nobody_waiting_and_takes_the_next_update(tmp_path: Path, failing: Work) -> None:
    """It receives what is left, because the others get each tensor at the same time."""
    group, pipes, workers = joined(tmp_path, failing, receive)
    values, sent = values_of(SENT), [tensor.to(device_of(TRAINER)) for tensor in SENT]
    group.send(sent)
    assert [told(pipe) for pipe in pipes] == ["failed", values]
    group.send(sent)
    assert [told(pipe) for pipe in pipes] == [values, values]
    assert ended(workers) == [0, 0]


@with_gloo
def test_a_worker_that_cannot_receive_ends_if_others_would_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it is an error: the trainer hears of it from vLLM, and gives up."""
    monkeypatch.setattr(transfer_group, "_LONGEST_WITH_GLOO", timedelta(seconds=5))
    (tmp_path / "alone").mkdir()
    _, (pipe,), workers = joined(tmp_path / "alone", lack_memory)
    assert told(pipe) == "failed"
    assert ended(workers)[0] != -signal.SIGKILL  # Gloo may abort a process that leaves before the others
    group, _, workers = joined(tmp_path, lack_memory, receive)
    with pytest.raises(RuntimeError):
        group.send([torch.ones(shape, dtype=dtype) for shape, dtype in SHAPES] + [torch.ones(1 << 22)])
    assert ended(workers[:1]) == [-signal.SIGKILL]
    workers[1].kill()  # it would wait for its share of the tensor for half a minute


@with_gloo
def test_an_end_that_is_lost_is_an_error(tmp_path: Path) -> None:
    group, (pipe,), workers = joined(tmp_path, leave)
    pipe.send("end")  # not before both are connected
    ended(workers)
    with pytest.raises(RuntimeError):
        group.send([torch.ones(1 << 20)])
