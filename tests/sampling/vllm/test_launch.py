"""Which GPU a server gets, and how full weights get there."""

from pathlib import Path

import pytest
import torch

from tinsmith.config import Config, load
from tinsmith.distributed.meeting import LOOPBACK
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel, loading_of
from tinsmith.sampling.inside_vllm import TransferKind
from tinsmith.sampling.vllm.launch import Sizes, _environment, check_divisible, divided, gpus_of, transfer_kind


@pytest.mark.parametrize(
    ("trainer", "gpus", "servers", "expected"),
    [
        ("cuda:0", 1, 1, [((0,), "ipc")]),
        ("cuda:0", 4, 4, [((1,), "broadcast"), ((2,), "broadcast"), ((3,), "broadcast"), ((0,), "ipc")]),
        ("cuda:2", 3, 3, [((0,), "broadcast"), ((1,), "broadcast"), ((2,), "ipc")]),
        ("cpu", 0, 2, [((), "file"), ((), "file")]),
    ],
)
def test_servers_take_the_gpus_behind_the_trainers(
    trainer: str, gpus: int, servers: int, expected: list[tuple[tuple[int, ...], TransferKind]]
) -> None:
    device = torch.device(trainer)
    places = gpus_of("a", config_of(["a=x/a"], servers), device, gpus)
    assert [(gpus_of_server, transfer_kind("auto", device, gpus_of_server)) for gpus_of_server in places] == expected


def config_of(bases: list[str], servers: int, *options: str) -> Config:
    return load(options={"base_models": bases, "vllm_servers": servers, "vllm_args": list(options)})


def test_the_servers_of_two_base_models_get_different_gpus() -> None:
    """Before, both got 1 and 2."""
    config, trainer = config_of(["a=x/a", "b=x/b"], 2), torch.device("cuda:0")
    assert [gpus_of(name, config, trainer, 8) for name in "ab"] == [[(1,), (2,)], [(3,), (4,)]]
    assert [gpus_of(name, config, trainer, 4) for name in "ab"] == [[(1,), (2,)], [(3,), (0,)]]


def test_servers_share_a_gpu_only_where_it_has_room_for_both() -> None:
    bases, trainer = ["a=x/a", "b=x/b"], torch.device("cuda:0")
    with pytest.raises(
        ConfigError,
        match=r"on 1 GPUs: 2 would share GPU 0, and each takes 0.92 of .*utilization=0.45",
    ):
        gpus_of("a", config_of(bases, 1), trainer, 1)
    for passed in (["--gpu-memory-utilization=0.3"], ["--gpu_memory_utilization", "0.3"]):
        assert gpus_of("b", config_of(bases, 1, *passed), trainer, 1) == [(0,)]


@pytest.mark.parametrize("wanted", ["file", "broadcast"])
def test_without_a_gpu_the_cpu_can_do_both(wanted: str) -> None:
    assert transfer_kind(wanted, torch.device("cpu"), ()) == wanted


@pytest.mark.parametrize(
    ("wanted", "trainer", "gpus", "reason"),
    [
        ("ipc", "cpu", (), "the server has no GPU"),
        ("ipc", "cuda:0", (1,), "the server has GPU 1"),
        ("broadcast", "cuda:1", (1,), "one shares the trainer's"),
    ],
)
def test_a_way_that_does_not_exist_is_refused(wanted: str, trainer: str, gpus: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        transfer_kind(wanted, torch.device(trainer), gpus)


# Servers that take several GPUs


def test_servers_of_two_gpus_share_none() -> None:
    """They are counted over all base models, behind the trainer's."""
    config, trainer = config_of(["a=x/a", "b=x/b"], 2), torch.device("cuda:0")
    config.vllm.vllm_tensor_parallel = 2
    assert [gpus_of(name, config, trainer, 9) for name in "ab"] == [[(1, 2), (3, 4)], [(5, 6), (7, 8)]]
    assert gpus_of("a", config, torch.device("cuda:7"), 9) == [(8, 0), (1, 2)]
    assert gpus_of("a", config, torch.device("cpu"), 0) == [(), ()]
    with pytest.raises(ConfigError, match=r"for 2 base models, of 2 GPUs each .*, and one GPU for the trainer are 9 GPUs; there are 8"):
        gpus_of("a", config, trainer, 8)


@pytest.mark.parametrize(
    ("workers", "servers", "ranks", "expected"),
    [
        (2, 1, 1, [[(2,)], [(3,)]]),
        (2, 2, 1, [[(2,), (3,)], [(4,), (5,)]]),
        (3, 1, 2, [[(3, 4)], [(5, 6)]]),
        (6, 1, 1, [[(6,)], [(7,)]]),
    ],
)
def test_servers_are_behind_all_workers(workers: int, servers: int, ranks: int, expected: list[list[tuple[int, ...]]]) -> None:
    """Of all base models in one numbering. Weights come from the first worker's GPU, on which none of them is."""
    config, first = config_of(["a=x/a", "b=x/b"], servers), torch.device("cuda:0")
    config.distributed.workers = workers
    config.vllm.vllm_tensor_parallel = ranks
    places = [gpus_of(name, config, first, 8) for name in "ab"]
    assert places == expected
    taken = [gpu for of_base in places for gpus in of_base for gpu in gpus]
    assert len({*taken, *range(workers)}) == len(taken) + workers <= 8
    for gpus in (gpus for of_base in places for gpus in of_base):
        assert transfer_kind("auto", first, gpus, ranks) == "broadcast"
        with pytest.raises(ConfigError, match="vllm_transfer=ipc"):
            transfer_kind("ipc", first, gpus, ranks)
    with pytest.raises(ConfigError, match=rf"and {workers} GPUs for the workers are {len(taken) + workers} GPUs; there are {workers + 1}"):
        gpus_of("a", config, first, workers + 1)


def test_a_server_finds_its_gpu_among_those_that_the_first_worker_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(["a=x/a"], 1)
    config.distributed.workers = 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    (gpus,) = gpus_of("a", config, torch.device("cuda:0"), 4)
    assert _environment(config, Path("sockets"), gpus)["CUDA_VISIBLE_DEVICES"] == "3"


def test_what_servers_say_to_each_other_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user names a network interface. NCCL uses no multicast, which the trainer must not use with it either."""
    for variable in ("NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    environment = _environment(config_of(["a=x/a"], 1), Path("sockets"), ())
    assert (environment["NCCL_SOCKET_IFNAME"], environment["GLOO_SOCKET_IFNAME"]) == (f"={LOOPBACK}", "eth7")
    assert environment["NCCL_NVLS_ENABLE"] == "0"


def test_full_weights_get_to_several_gpus_as_a_file_or_by_broadcast() -> None:
    device, host = torch.device("cuda:0"), torch.device("cpu")
    assert transfer_kind("auto", device, (1, 2), 2) == transfer_kind("broadcast", device, (1, 2), 2) == "broadcast"
    assert transfer_kind("broadcast", host, (), 2) == "broadcast"
    assert transfer_kind("file", device, (1, 2), 2) == "file"
    assert transfer_kind("auto", host, (), 2) == transfer_kind("auto", host, (1, 2), 2) == "file"
    with pytest.raises(ConfigError, match="vllm_transfer=ipc reaches one GPU of a server, and --vllm-tensor-parallel 2 gives it more"):
        transfer_kind("ipc", device, (1, 2), 2)


def test_what_cannot_be_divided_is_refused(text_base: BaseModel, hybrid_base: BaseModel) -> None:
    heads = text_base.text_config.num_attention_heads
    check_divisible(text_base, heads)
    check_divisible(hybrid_base, 1)
    with pytest.raises(ConfigError, match=f"--vllm-tensor-parallel {heads + 1} does not divide the {heads} attention heads of tiny"):
        check_divisible(text_base, heads + 1)
    with pytest.raises(ConfigError, match="has gated delta nets, with which --vllm-tensor-parallel 2 was not tested"):
        check_divisible(hybrid_base, 2)


def test_each_gpu_holds_its_part() -> None:
    """Heads of keys and values that are fewer than GPUs are on several."""
    whole = Sizes(weights=1000, cache_per_token=64, state=0, per_lora_rank=10)
    assert divided(whole, 1, 8) == whole
    assert divided(whole, 4, 8) == Sizes(250, 16, 0, 10)
    assert divided(whole, 4, 2) == Sizes(250, 32, 0, 10)


# Turns


def test_servers_that_take_turns_with_the_trainer_are_on_its_gpu() -> None:
    config = config_of(["a=x/a", "b=x/b"], 1, "--gpu-memory-utilization=0.4")
    config.vllm.vllm_turn_s = 10.0
    assert [gpus_of(name, config, torch.device("cuda:1"), 8) for name in "ab"] == [[(1,)], [(1,)]]
    assert transfer_kind("auto", torch.device("cuda:1"), (1,)) == "ipc"
    config.vllm.vllm_args = []
    with pytest.raises(ConfigError, match="2 would share GPU 1"):
        gpus_of("a", config, torch.device("cuda:1"), 8)


# Without a trainer


def test_without_a_trainer_servers_begin_at_the_first_gpu_and_get_weights_from_the_host() -> None:
    config, host = config_of(["a=x/a"], 2), torch.device("cpu")
    config.training.train = "none"
    assert gpus_of("a", config, torch.device("cuda:0"), 2) == [(0,), (1,)]
    assert gpus_of("a", config, torch.device("cuda:1"), 2) == [(1,), (0,)]
    config.vllm.vllm_tensor_parallel = 2
    assert gpus_of("a", config, torch.device("cuda:0"), 4) == [(0, 1), (2, 3)]
    with pytest.raises(ConfigError, match=r"of 2 GPUs each \(--vllm-tensor-parallel\) are 4 GPUs; there are 3"):
        gpus_of("a", config, torch.device("cuda:0"), 3)
    assert transfer_kind("auto", host, (0,)) == transfer_kind("file", host, (0,)) == "file"
    for wanted in ("ipc", "broadcast"):
        with pytest.raises(
            ConfigError, match=f"vllm_transfer={wanted} begins at a GPU; weights come from the host's memory with train=none or sh"
        ):
            transfer_kind(wanted, host, (0,))


def test_a_worker_that_only_compares_loads_into_the_hosts_memory_in_the_precision_of_the_servers() -> None:
    config = load(options={"device": "cpu", "sampler": "vllm"})
    assert loading_of(config) is config.models
    config.training.train = "none"
    assert (loading_of(config).device, loading_of(config).dtype) == ("cpu", "float32")
    config.models.dtype = "bfloat16"
    assert (loading_of(config).device, loading_of(config).dtype) == ("cpu", "bfloat16")
    config.sampling.sampler = "local"
    assert loading_of(config) is config.models
