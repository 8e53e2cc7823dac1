"""Weights between two processes: what arrives is what was sent, and a lost end is noticed."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tinsmith.vllm.process_pair import TRAINER, WORKER, ProcessPair

CPU = torch.device("cpu")
SENT = [torch.arange(6, dtype=torch.float32).reshape(2, 3).T, torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.zeros(0)]


def receive(meeting_point: str, pipe: Connection) -> None:
    """The worker's process: two updates, which it hands on."""
    pair = ProcessPair(meeting_point, WORKER, CPU)
    shapes = [(tensor.shape, tensor.dtype) for tensor in SENT]
    for _ in range(2):
        pipe.send([tensor.float().tolist() for tensor in pair.receive(shapes)])


def leave(meeting_point: str, pipe: Connection) -> None:
    """A worker that ends before it has received anything."""
    ProcessPair(meeting_point, WORKER, CPU)
    pipe.send("here")


def test_what_arrives_is_what_was_sent(tmp_path: Path) -> None:
    meeting_point = str(tmp_path / "pair")
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=receive, args=(meeting_point, theirs), daemon=True)
    worker.start()
    pair = ProcessPair(meeting_point, TRAINER, CPU)
    for factor in (1.0, 3.0):
        tensors = [tensor * factor for tensor in SENT]
        pair.send(tensors)
        assert ours.poll(30)
        assert ours.recv() == [tensor.float().tolist() for tensor in tensors]
    worker.join(30)
    assert worker.exitcode == 0


def test_an_end_that_is_lost_is_an_error(tmp_path: Path) -> None:
    meeting_point = str(tmp_path / "pair")
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=leave, args=(meeting_point, theirs), daemon=True)
    worker.start()
    pair = ProcessPair(meeting_point, TRAINER, CPU)
    assert ours.poll(30)
    worker.join(30)
    with pytest.raises(RuntimeError):
        pair.send([torch.ones(1 << 20)])
