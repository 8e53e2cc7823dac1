"""How many workers an engine starts, on machines with and without GPUs."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tinsmith.config import Config, DistributedConfig, ModelsConfig, SamplingConfig, TrainingConfig, VLLMConfig
from tinsmith.engine import devices
from tinsmith.engine.devices import threads_of, usable_gpus, visible_gpus, worker_count
from tinsmith.errors import ConfigError

Machine = Callable[..., list[int]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this a machine with so many GPUs, as Linux shows them, of which `CUDA_VISIBLE_DEVICES` names some.

    PyTorch can use `usable` of them; None means all. What is returned lists what it has answered.
    """

    def make(gpus: int, visible: str | None = None, usable: int | None = None) -> list[int]:
        for name in ["nvidiactl", "nvidia-uvm", "nvidia-modeset", "null", *(f"nvidia{number}" for number in range(gpus))]:
            (tmp_path / name).touch()
        monkeypatch.setattr(devices, "_DEVICES", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        asked: list[int] = []

        def count() -> int:
            asked.append(visible_gpus() if usable is None else usable)
            return asked[-1]

        monkeypatch.setattr(devices, "usable_gpus", count)
        return asked

    return make


def config(workers: int = 0, device: str = "auto", sampler: str = "local") -> Config:
    return Config(
        distributed=DistributedConfig(workers),
        models=ModelsConfig(device=device),
        sampling=SamplingConfig(sampler=sampler),
    )


def test_one_worker_for_each_visible_gpu_by_default_and_one_on_a_cpu(machine: Machine) -> None:
    machine(4)
    assert Config().distributed.workers == 0
    assert worker_count(Config()) == worker_count(config(device="cuda")) == worker_count(config(sampler="none")) == 4
    assert worker_count(config(device="cpu")) == worker_count(config(device="cuda:2")) == 1
    assert worker_count(replace(config(), distributed=DistributedConfig(0, "weights"), sampling=SamplingConfig(sampler="none"))) == 4


@pytest.mark.parametrize(("usable", "workers", "beside_vllm"), [(0, 1, 1), (1, 1, 1), (3, 3, 2), (9, 4, 3)])
def test_by_default_gpus_that_pytorch_cannot_use_get_no_worker(machine: Machine, usable: int, workers: int, beside_vllm: int) -> None:
    """With a PyTorch without CUDA, or a driver too old, what ran on the CPU still does."""
    machine(4, usable=usable)
    assert worker_count(config()) == workers
    assert worker_count(config(sampler="vllm")) == beside_vllm
    assert worker_count(config(), usable=2) == 2  # says one who has asked


def test_pytorch_is_asked_only_where_the_number_of_workers_depends_on_it(machine: Machine) -> None:
    """That takes seconds."""
    asked = machine(4)
    for numbered in (config(1), config(4), config(device="cpu"), config(device="cuda:1")):
        worker_count(numbered)
    assert worker_count(config(), 3) == 3
    assert worker_count(config(), usable=2) == 2
    assert asked == []
    asked = machine(4, "2")
    assert worker_count(config()) == 1
    assert asked == []
    asked = machine(4)
    worker_count(config())
    assert asked == [4]


def test_a_process_of_its_own_asks_pytorch() -> None:
    assert usable_gpus() == torch.cuda.device_count()


@pytest.mark.parametrize("program", ["echo many", "exit 3", "exec sleep 60"])
def test_where_pytorch_does_not_say_it_one_has_to_say_how_many_workers_start(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text(f"#!/bin/sh\n{program}\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setattr(devices, "COUNTING_S", 2.0)
    with pytest.raises(
        ConfigError, match=r"^--workers 0 starts a worker on each GPU, .* was not found out \(.*--workers 1 or more, or add"
    ):
        usable_gpus()


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_where_no_gpu_is_seen_one_worker_starts_by_default(machine: Machine, device: str) -> None:
    """With `cuda` torch finds one, or says that there is none."""
    machine(0)
    assert worker_count(config(device=device)) == 1


@pytest.mark.parametrize(
    ("bases", "servers", "ranks", "workers"), [(1, 1, 1, 7), (1, 2, 1, 6), (2, 2, 1, 4), (2, 1, 3, 2), (1, 8, 1, 1), (3, 5, 1, 1)]
)
def test_by_default_vllm_servers_keep_their_gpus_and_one_worker_starts_at_least(
    machine: Machine, bases: int, servers: int, ranks: int, workers: int
) -> None:
    machine(8)
    served = replace(config(sampler="vllm"), base_models=["x"] * bases, vllm=VLLMConfig(vllm_servers=servers, vllm_tensor_parallel=ranks))
    assert worker_count(served) == workers


@pytest.mark.parametrize(
    "change",
    [{"vllm": VLLMConfig(vllm_turn_s=5.0)}, {"vllm": VLLMConfig(vllm_urls=["unix:x"])}, {"training": TrainingConfig(train="none")}],
)
def test_where_another_worker_would_have_no_gpu_or_nothing_to_do_there_is_one(machine: Machine, change: dict[str, Any]) -> None:
    machine(4)
    assert worker_count(replace(config(sampler="vllm"), **change)) == 1


def test_workers_beside_one_that_only_compares_are_refused(machine: Machine) -> None:
    machine(4)
    compares = replace(config(2, "cpu", sampler="vllm"), training=TrainingConfig(train="none"))
    with pytest.raises(ConfigError, match=r"^--workers 2, --train none and --sampler vllm: one worker compares .*; leave --workers out$"):
        worker_count(compares)


def test_ray_is_told_how_many_workers(machine: Machine) -> None:
    """Its GPUs may be on other hosts, and it says itself whether there are enough."""
    machine(1)
    with_ray = [replace(config(), distributed=DistributedConfig(workers, ray_address="auto")) for workers in (0, 3)]
    assert worker_count(with_ray[1]) == 3
    with pytest.raises(ConfigError, match=r"^--ray-address auto: say how many workers Ray is to start, with --workers 1 or more; "):
        worker_count(with_ray[0])


def test_one_worker_has_no_others_to_divide_sequences_with(machine: Machine) -> None:
    machine(2)
    divided = TrainingConfig(sequence_parallel_from=1000)
    assert worker_count(replace(config(), training=divided)) == 2
    for alone in (config(1), config(device="cpu")):
        with pytest.raises(ConfigError, match=r"^sequence_parallel_from has no effect with one worker; add --workers 2 or more"):
            worker_count(replace(alone, training=divided))


def test_as_many_workers_as_are_asked_for(machine: Machine) -> None:
    machine(4)
    assert [worker_count(config(workers, device)) for workers in (1, 2, 4) for device in ("auto", "cuda")] == [1, 1, 2, 2, 4, 4]
    assert worker_count(config(4, sampler="none")) == 4


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_workers_than_gpus_are_refused(machine: Machine, device: str) -> None:
    machine(4)
    with pytest.raises(ConfigError, match=r"^--workers 5: there are 4 GPUs, and each worker needs its own; ask for 4 or fewer$"):
        worker_count(config(5, device))


def test_without_gpus_there_are_as_many_workers_as_are_asked_for(machine: Machine) -> None:
    machine(0)
    assert [worker_count(config(workers)) for workers in (1, 3)] == [1, 3]
    # Where the GPU is not shown as Linux shows it, one can be asked for by name, and torch finds it or not.
    assert worker_count(config(1, "cuda")) == 1
    with pytest.raises(ConfigError, match=r"^--workers 2: there are 0 GPUs, and each worker needs its own; ask for 1 or fewer$"):
        worker_count(config(2, "cuda"))


def test_a_cpu_has_as_many_workers_as_are_asked_for_whatever_gpus_there_are(machine: Machine) -> None:
    machine(4)
    assert [worker_count(config(workers, "cpu")) for workers in (1, 9)] == [1, 9]


def test_what_cannot_divide_weights_is_refused(machine: Machine) -> None:
    machine(4)
    divided = config(4, sampler="none")
    divided.distributed.shard = "weights"
    assert worker_count(divided) == 4
    assert worker_count(replace(divided, sampling=SamplingConfig(sampler="vllm"), distributed=DistributedConfig(3, "weights"))) == 3
    for change, refused in (
        ({"distributed": DistributedConfig(1, "weights")}, "--shard weights divides weights over several workers; add --workers 2 or more"),
        ({"sampling": SamplingConfig(sampler="local")}, "--shard weights and --sampler local: no worker has all weights to sample from"),
        ({"sampling": SamplingConfig(sampler="vllm")}, "--sampler vllm: 4 workers and 1 GPUs of vLLM servers .* are 5 GPUs; there are 4"),
        ({"training": TrainingConfig(full_state="compact")}, "--shard weights and --full-state compact: the state of weights that are div"),
        ({"models": ModelsConfig(deterministic=True)}, "--shard weights and --deterministic do not work together"),
    ):
        with pytest.raises(ConfigError, match=f"^{refused}"):
            worker_count(replace(divided, **change))


def test_a_device_with_a_number_has_one_worker(machine: Machine) -> None:
    machine(4)
    assert worker_count(config(1, "cuda:2")) == 1
    contradict = r"^--workers 2 and --device cuda:2 contradict each other: each worker has its own GPU; leave one out$"
    with pytest.raises(ConfigError, match=contradict):
        worker_count(config(2, "cuda:2"))


def test_vllm_servers_share_no_gpu_with_several_workers(machine: Machine) -> None:
    """One worker may share its own with a server."""
    machine(4)
    assert [worker_count(config(count, sampler="vllm")) for count in (1, 2, 3)] == [1, 2, 3]
    assert worker_count(config(2, "cpu", sampler="vllm")) == 2
    two_each = replace(config(2, sampler="vllm"), base_models=["a", "b"])
    assert worker_count(two_each) == 2
    assert worker_count(replace(two_each, vllm=VLLMConfig(vllm_urls=["unix:x"], vllm_servers=9))) == 2
    for refused, numbers in (
        (config(4, sampler="vllm"), r"4 workers and 1 GPUs of vLLM servers \(1 for each of 1 base models, on 1 each\) are 5 GPUs"),
        (replace(two_each, vllm=VLLMConfig(vllm_servers=2)), r"2 workers and 4 GPUs of vLLM servers \(2 for each of 2 .* are 6 GPUs"),
        (replace(two_each, vllm=VLLMConfig(vllm_tensor_parallel=2)), r"2 workers and 4 GPUs of .*, on 2 each\) are 6 GPUs"),
        (replace(config(1, sampler="vllm"), vllm=VLLMConfig(vllm_tensor_parallel=4)), r"1 workers and 4 GPUs of .* are 5 GPUs"),
    ):
        with pytest.raises(ConfigError, match=rf"^--sampler vllm: {numbers}; there are 4; lower --workers, --vllm-servers or --vllm-te"):
            worker_count(refused)
    alone = replace(config(sampler="vllm"), training=TrainingConfig(train="none"), vllm=VLLMConfig(vllm_tensor_parallel=4))
    assert worker_count(alone) == 1


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("2", 1),
        ("0,1", 2),
        (" 3 , 1 ", 2),
        ("GPU-5f3e,GPU-77aa", 2),
        ("MIG-5f3e", 1),
        ("0,1,-1,2", 2),  # CUDA shows those before the first that is none
        ("none", 0),
        ("NoDevFiles", 0),
    ],
)
def test_the_environment_says_which_gpus_there_are(machine: Machine, visible: str | None, count: int) -> None:
    machine(4, visible)
    assert visible_gpus() == count
    assert worker_count(config()) == max(1, count)
    if count:
        assert worker_count(config(count)) == count
        with pytest.raises(ConfigError, match=f"there are {count} GPUs"):
            worker_count(config(count + 1))


def test_workers_on_a_cpu_share_its_cores_and_those_on_gpus_do_not(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    machine(4)
    assert [threads_of(config(device="cpu"), count) for count in (1, 4, 100)] == [{}, {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "1"}]
    assert threads_of(config(), 4) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert threads_of(config(), 4) == {"OMP_NUM_THREADS": "3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # the user knows better
    assert threads_of(config(), 4) == {}
