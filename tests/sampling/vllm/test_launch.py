"""Which GPU a server gets, and how full weights get there."""

import pytest
import torch

from tinsmith.config import Config, load
from tinsmith.errors import ConfigError
from tinsmith.sampling.inside_vllm import TransferKind
from tinsmith.sampling.vllm.launch import gpus_of, transfer_kind


@pytest.mark.parametrize(
    ("trainer", "gpus", "servers", "expected"),
    [
        ("cuda:0", 1, 1, [(0, "ipc")]),
        ("cuda:0", 4, 4, [(1, "broadcast"), (2, "broadcast"), (3, "broadcast"), (0, "ipc")]),
        ("cuda:2", 3, 3, [(0, "broadcast"), (1, "broadcast"), (2, "ipc")]),
        ("cpu", 0, 2, [(None, "file"), (None, "file")]),
    ],
)
def test_servers_take_the_gpus_behind_the_trainers(
    trainer: str, gpus: int, servers: int, expected: list[tuple[int | None, TransferKind]]
) -> None:
    device = torch.device(trainer)
    places = gpus_of("a", config_of(["a=x/a"], servers), device, gpus)
    assert [(gpu, transfer_kind("auto", device, gpu)) for gpu in places] == expected


def config_of(bases: list[str], servers: int, *options: str) -> Config:
    return load(options={"base_models": bases, "vllm_servers": servers, "vllm_args": list(options)})


def test_the_servers_of_two_base_models_get_different_gpus() -> None:
    """Before, both got 1 and 2."""
    config, trainer = config_of(["a=x/a", "b=x/b"], 2), torch.device("cuda:0")
    assert [gpus_of(name, config, trainer, 8) for name in "ab"] == [[1, 2], [3, 4]]
    assert [gpus_of(name, config, trainer, 4) for name in "ab"] == [[1, 2], [3, 0]]


def test_servers_share_a_gpu_only_where_it_has_room_for_both() -> None:
    bases, trainer = ["a=x/a", "b=x/b"], torch.device("cuda:0")
    with pytest.raises(
        ConfigError,
        match=r"on 1 GPUs: 2 would share GPU 0, and each takes 0.92 of .*utilization=0.45",
    ):
        gpus_of("a", config_of(bases, 1), trainer, 1)
    for passed in (["--gpu-memory-utilization=0.3"], ["--gpu_memory_utilization", "0.3"]):
        assert gpus_of("b", config_of(bases, 1, *passed), trainer, 1) == [0]


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
