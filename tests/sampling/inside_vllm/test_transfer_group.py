"""Weights from one process to others: what arrives is what was sent, and an end that is lost, or does not receive, is
noticed.

On GPUs (TINSMITH_TEST_DEVICE=cuda) each has one of its own. There the trainer is not told of an end that is lost: it
gives up, as `tests/sampling/vllm/test_transfers.py` shows.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.running import START_S
from tinsmith.sampling.inside_vllm import transfer_group
from tinsmith.sampling.inside_vllm.transfer_group import FIRST_WORKER, TRAINER, TransferGroup
from tinsmith.training.parallel.process_group import LOOPBACK, set_communication_variables

ON_GPU = os.environ.get("TINSMITH_TEST_DEVICE") == "cuda"
SENT = [
    torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.zeros(0),
]
SHAPES = [(tensor.shape, tensor.dtype) for tensor in SENT]

with_gloo = pytest.mark.skipif(ON_GPU, reason="it is about what Gloo says")


def device_of(rank: int) -> torch.device:
    """What a process computes on."""
    return torch.device("cuda", rank) if ON_GPU else torch.device("cpu")


def values_of(tensors: Iterable[Tensor]) -> object:
    return [tensor.float().tolist() for tensor in tensors]


def fail(tensors: Iterator[Tensor]) -> None:
    next(tensors)
    raise ValueError("no place")


def work(meeting_point: str, rank: int, size: int, pipe: Connection, plan: Sequence[str]) -> None:
    """A worker's process, and what it does with each update. It sends what it has received."""
    buffers: list[Any] = [torch.empty(shape, dtype=dtype, device=device_of(rank)) for shape, dtype in SHAPES]
    group = TransferGroup(meeting_point, rank, size, device_of(rank))
    for what in plan:
        if what == "leaves":
            pipe.recv()
            return
        # A single error that is kept would keep the group, by its traceback, until after Python's end, and then Gloo
        # may abort.
        lacks = {"lacks memory": [MemoryError] * 9, "lacks memory once": [buffers[0], MemoryError, *buffers[1:]]}.get(
            what
        )
        try:
            with patch.object(torch, "empty", side_effect=lacks) if lacks else nullcontext():
                group.receive(SHAPES, fail if what == "fails" else lambda tensors: pipe.send(values_of(tensors)))
        except (MemoryError, ValueError):
            pipe.send("failed")


def joined(directory: Path, *plans: Sequence[str]) -> tuple[TransferGroup, list[Connection], list[BaseProcess]]:
    """The trainer's end, and workers' processes that are at their work."""
    meeting_point, size = str(directory / "group"), 1 + len(plans)
    if ON_GPU and torch.cuda.device_count() < size:
        pytest.skip(f"{size} processes need a GPU each")
    set_communication_variables(LOOPBACK)
    pipes, workers = list[Connection](), list[BaseProcess]()
    for rank, plan in enumerate(plans, FIRST_WORKER):
        ours, theirs = multiprocessing.Pipe()
        workers.append(
            multiprocessing.get_context("spawn").Process(
                target=work, args=(meeting_point, rank, size, theirs, plan), daemon=True
            )
        )
        workers[-1].start()
        pipes.append(ours)
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
    group, pipes, workers = joined(tmp_path, ["receives"] * 2, ["receives"] * 2)
    for factor in (1.0, 3.0):
        tensors = [tensor.to(device_of(TRAINER)) * factor for tensor in SENT]
        group.send(tensors)
        assert [told(pipe) for pipe in pipes] == [values_of(tensors)] * 2
    assert ended(workers) == [0, 0]


@pytest.mark.parametrize("failing", ["fails", "lacks memory once"])
def test_a_worker_that_fails_keeps_nobody_waiting_and_takes_the_next_update(tmp_path: Path, failing: str) -> None:
    """It receives what is left, because the others get each tensor at the same time."""
    group, pipes, workers = joined(tmp_path, [failing, "receives"], ["receives"] * 2)
    values, sent = values_of(SENT), [tensor.to(device_of(TRAINER)) for tensor in SENT]
    group.send(sent)
    assert [told(pipe) for pipe in pipes] == ["failed", values]
    group.send(sent)
    assert [told(pipe) for pipe in pipes] == [values, values]
    assert ended(workers) == [0, 0]


@with_gloo
def test_a_worker_that_cannot_receive_ends_if_others_would_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it is an error: the trainer hears of it from vLLM, and gives up."""
    monkeypatch.setattr(transfer_group, "_LONGEST_WITH_GLOO", timedelta(seconds=5))
    (tmp_path / "alone").mkdir()
    _, (pipe,), workers = joined(tmp_path / "alone", ["lacks memory"])
    assert told(pipe) == "failed"
    assert ended(workers)[0] != -signal.SIGKILL  # Gloo may abort a process that leaves before the others
    group, _, workers = joined(tmp_path, ["lacks memory"], ["receives"])
    with pytest.raises(RuntimeError):
        group.send([torch.ones(shape, dtype=dtype) for shape, dtype in SHAPES] + [torch.ones(1 << 22)])
    assert ended(workers[:1]) == [-signal.SIGKILL]
    workers[1].kill()  # it would wait for its share of the tensor for half a minute


@with_gloo
def test_an_end_that_is_lost_is_an_error(tmp_path: Path) -> None:
    group, (pipe,), workers = joined(tmp_path, ["leaves"])
    pipe.send("end")  # not before both are connected
    ended(workers)
    with pytest.raises(RuntimeError):
        group.send([torch.ones(1 << 20)])
