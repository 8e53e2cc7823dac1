"""Which GPU a server gets, and how full weights get there."""

import pytest
import torch

from tinsmith.errors import ConfigError
from tinsmith.vllm import TransferKind
from tinsmith.vllm.launches import gpu_of, transfer_kind


@pytest.mark.parametrize(
    ("trainer", "gpus", "expected"),
    [
        ("cuda:0", 1, [(0, "ipc"), (0, "ipc")]),
        ("cuda:0", 4, [(1, "broadcast"), (2, "broadcast"), (3, "broadcast"), (0, "ipc"), (1, "broadcast")]),
        ("cuda:2", 3, [(0, "broadcast"), (1, "broadcast"), (2, "ipc")]),
        ("cpu", 0, [(None, "file"), (None, "file")]),
    ],
)
def test_servers_take_the_gpus_behind_the_trainers(trainer: str, gpus: int, expected: list[tuple[int | None, TransferKind]]) -> None:
    device = torch.device(trainer)
    places = [gpu_of(device, gpus, index) for index in range(len(expected))]
    assert [(gpu, transfer_kind("auto", device, gpu)) for gpu in places] == expected


@pytest.mark.parametrize("wanted", ["file", "broadcast"])
def test_without_a_gpu_the_cpu_can_do_both(wanted: str) -> None:
    assert transfer_kind(wanted, torch.device("cpu"), None) == wanted


@pytest.mark.parametrize(
    ("wanted", "trainer", "gpu", "reason"),
    [
        ("ipc", "cpu", None, "the server has no GPU"),
        ("ipc", "cuda:0", 1, "the server has GPU 1"),
        ("broadcast", "cuda:1", 1, "one shares the trainer's"),
    ],
)
def test_a_way_that_does_not_exist_is_refused(wanted: str, trainer: str, gpu: int | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        transfer_kind(wanted, torch.device(trainer), gpu)
