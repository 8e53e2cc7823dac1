"""Weights between two processes: what arrives is what was sent, and an end that is lost, or does not receive, is noticed."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from tinsmith.sampling.inside_vllm import process_pair
from tinsmith.sampling.inside_vllm.process_pair import TRAINER, WORKER, ProcessPair

CPU = torch.device("cpu")
SENT = [torch.arange(6, dtype=torch.float32).reshape(2, 3).T, torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.zeros(0)]


def receive(meeting_point: str, pipe: Connection) -> None:
    """The worker's process: two updates, which it hands on."""
    pair = ProcessPair(meeting_point, WORKER, CPU)
    shapes = [(tensor.shape, tensor.dtype) for tensor in SENT]
    for _ in range(2):
        pipe.send([tensor.float().tolist() for tensor in pair.receive(shapes)])


def leave(meeting_point: str, pipe: Connection) -> None:
    """A worker that ends, when it is told to, before it has received anything."""
    pair = ProcessPair(meeting_point, WORKER, CPU)
    pipe.recv()
    del pair


def ignore(meeting_point: str, pipe: Connection) -> None:
    """A worker that lives on and receives nothing."""
    pair = ProcessPair(meeting_point, WORKER, CPU)
    pipe.recv()
    del pair


def joined(directory: Path, work: Callable[[str, Connection], None]) -> tuple[ProcessPair, Connection, BaseProcess]:
    """The trainer's end, and a worker's process that is at its work."""
    meeting_point = str(directory / "pair")
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(meeting_point, theirs), daemon=True)
    worker.start()
    return ProcessPair(meeting_point, TRAINER, CPU), ours, worker


def test_what_arrives_is_what_was_sent(tmp_path: Path) -> None:
    pair, pipe, worker = joined(tmp_path, receive)
    for factor in (1.0, 3.0):
        tensors = [tensor * factor for tensor in SENT]
        pair.send(tensors)
        assert pipe.poll(30)
        assert pipe.recv() == [tensor.float().tolist() for tensor in tensors]
    worker.join(30)
    assert worker.exitcode == 0


def test_an_end_that_is_lost_is_an_error(tmp_path: Path) -> None:
    pair, pipe, worker = joined(tmp_path, leave)
    pipe.send("end")  # not before both are connected
    worker.join(30)
    with pytest.raises(RuntimeError):
        pair.send([torch.ones(1 << 20)])


def test_an_end_that_does_not_receive_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pair, "_LONGEST_WITH_GLOO", timedelta(seconds=2))
    pair, pipe, worker = joined(tmp_path, ignore)
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        pair.send([torch.ones(1 << 22)])
    pipe.send("end")
    worker.join(30)
    assert worker.exitcode == 0
