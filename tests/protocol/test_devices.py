"""How many workers an engine starts, on machines with and without GPUs."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tinsmith.config import Config, load
from tinsmith.errors import ConfigError
from tinsmith.protocol import devices
from tinsmith.protocol.devices import threads_of, usable_gpus, visible_gpus, worker_count

Machine = Callable[..., list[int]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this a machine with so many GPUs, as Linux shows them, of which `CUDA_VISIBLE_DEVICES` names some.

    PyTorch can use `usable` of them; None means all. What is returned lists what it has answered.
    """

    def make(gpus: int, visible: str | None = None, usable: int | None = None) -> list[int]:
        for name in [
            "nvidiactl",
            "nvidia-uvm",
            "nvidia-modeset",
            "null",
            *(f"nvidia{number}" for number in range(gpus)),
        ]:
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


def config(workers: int = 0, /, **options: object) -> Config:
    """Of a server with these options."""
    return load(options={"base_models": ["a=x/a"], "workers": workers} | options)


LOCAL = {"sampler": "local"}
VLLM = {"sampler": "vllm"}
CPU = {"device": "cpu"}
TWO_BASES = VLLM | {"base_models": ["a=x/a", "b=x/b"]}
DIVIDED = {"shard": "weights", "sampler": "none"}


@pytest.mark.parametrize(
    ("gpus", "asked", "options", "count"),
    [
        # One for each visible GPU by default, and one on a CPU or on a device with a number.
        (4, 0, LOCAL, 4),
        (4, 0, {"device": "cuda"}, 4),
        (4, 0, CPU, 1),
        (4, 0, {"device": "cuda:2"}, 1),
        (4, 0, DIVIDED, 4),
        # Where no GPU is seen there is one; with `cuda` torch finds one, or says that there is none.
        (0, 0, LOCAL, 1),
        (0, 0, {"device": "cuda"}, 1),
        # vLLM servers keep their GPUs, and one worker starts at least.
        (8, 0, VLLM | {"vllm_servers": 2}, 6),
        (8, 0, TWO_BASES | {"vllm_servers": 2}, 4),
        (8, 0, TWO_BASES | {"vllm_tensor_parallel": 3}, 2),
        (8, 0, TWO_BASES | {"vllm_servers": 5}, 1),
        # There is one where another would have no GPU or nothing to do.
        (4, 0, VLLM | {"vllm_turn_s": 5.0}, 1),
        (4, 0, VLLM | {"vllm_urls": ["unix:x"]}, 1),
        (4, 0, VLLM | {"train": "none", "vllm_tensor_parallel": 4}, 1),
        # As many as are asked for.
        (4, 4, {"device": "cuda"}, 4),
        (4, 3, DIVIDED | VLLM, 3),
        (0, 3, LOCAL, 3),
        (0, 1, {"device": "cuda"}, 1),  # where the GPU is not shown as Linux shows it, one can be asked for by name
        (4, 9, CPU, 9),
        (4, 1, {"device": "cuda:2"}, 1),
        (4, 3, VLLM, 3),
        (4, 2, TWO_BASES | {"vllm_urls": ["unix:x"], "vllm_servers": 9}, 2),
        # One has no others to divide sequences with.
        (2, 0, {"sequence_parallel_from": 1000}, 2),
        # Ray's GPUs may be on other hosts, and it says itself whether there are enough.
        (1, 3, {"ray_address": "auto"}, 3),
    ],
)
def test_so_many_workers_start(machine: Machine, gpus: int, asked: int, options: dict[str, object], count: int) -> None:
    machine(gpus)
    assert worker_count(config(asked, **options)) == count


OWN = "there are {} GPUs, and each worker needs its own; ask for {} or fewer$"
LOWER = "; there are 4; lower --workers, --vllm-servers or --vllm-te"
ALONE = "sequence_parallel_from has no effect with one worker; add --workers 2 or more"


@pytest.mark.parametrize(
    ("gpus", "asked", "options", "refusal"),
    [
        (4, 5, {"device": "cuda"}, f"--workers 5: {OWN.format(4, 4)}"),
        (0, 2, {"device": "cuda"}, f"--workers 2: {OWN.format(0, 1)}"),
        (
            4,
            2,
            {"device": "cuda:2"},
            "--workers 2 and --device cuda:2 contradict each other: each worker has its own GPU; leave one out$",
        ),
        (
            4,
            2,
            CPU | VLLM | {"train": "none"},
            "--workers 2, --train none and --sampler vllm: one .*; leave --workers out$",
        ),
        (
            1,
            0,
            {"ray_address": "auto"},
            "--ray-address auto: say how many workers Ray is to start, with --workers 1 or more; ",
        ),
        (2, 1, {"sequence_parallel_from": 1000}, ALONE),
        (2, 0, CPU | {"sequence_parallel_from": 1000}, ALONE),
        (4, 1, DIVIDED, "--shard weights divides weights over several workers; add --workers 2 or more"),
        (4, 4, DIVIDED | LOCAL, "--shard weights and --sampler local: no worker has all weights to sample from"),
        (
            4,
            4,
            DIVIDED | {"full_state": "compact"},
            "--shard weights and --full-state compact: the state of weights that are shar",
        ),
        (4, 4, DIVIDED | {"deterministic": True}, "--shard weights and --deterministic do not work together"),
        (
            4,
            4,
            VLLM,
            rf"--sampler vllm: 4 workers and 1 GPUs of .* \(1 for each of 1 base models, on 1 each\) are 5 GPUs{LOWER}",
        ),
        (
            4,
            2,
            TWO_BASES | {"vllm_servers": 2},
            rf"--sampler vllm: 2 workers and 4 GPUs of .* \(2 for each of 2 .* are 6 GPUs{LOWER}",
        ),
        (
            4,
            2,
            TWO_BASES | {"vllm_tensor_parallel": 2},
            rf"--sampler vllm: 2 workers and 4 GPUs of .*, on 2 each\) are 6 GPUs{LOWER}",
        ),
    ],
)
def test_workers_that_cannot_be_are_refused(
    machine: Machine, gpus: int, asked: int, options: dict[str, object], refusal: str
) -> None:
    machine(gpus)
    with pytest.raises(ConfigError, match=f"^{refusal}"):
        worker_count(config(asked, **options))


@pytest.mark.parametrize(("usable", "workers", "beside_vllm"), [(0, 1, 1), (3, 3, 2), (9, 4, 3)])
def test_by_default_gpus_that_pytorch_cannot_use_get_no_worker(
    machine: Machine, usable: int, workers: int, beside_vllm: int
) -> None:
    """With a PyTorch without CUDA, or a driver too old, what ran on the CPU still does."""
    machine(4, usable=usable)
    assert [worker_count(config()), worker_count(config(**VLLM))] == [workers, beside_vllm]
    assert worker_count(config(), usable=2) == 2  # says one who has asked


def test_pytorch_is_asked_only_where_the_number_of_workers_depends_on_it(machine: Machine) -> None:
    """That takes seconds, in a process of its own."""
    asked = machine(4)
    for numbered in (config(1), config(4), config(**CPU), config(device="cuda:1")):
        worker_count(numbered)
    assert (worker_count(config(), 3), worker_count(config(), usable=2), asked) == (3, 2, [])
    worker_count(config())
    assert asked == [4]
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
    refusal = r"^--workers 0 starts a worker on each GPU, .* was not found out \(.*--workers 1 or more, or add"
    with pytest.raises(ConfigError, match=refusal):
        usable_gpus()


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("2", 1),
        (" 3 , 1 ", 2),
        ("GPU-5f3e,GPU-77aa", 2),
        ("MIG-5f3e", 1),
        ("0,1,-1,2", 2),
        ("none", 0),
    ],
)
def test_the_environment_says_which_gpus_there_are(machine: Machine, visible: str | None, count: int) -> None:
    """CUDA shows those before the first that is none."""
    machine(4, visible)
    assert (visible_gpus(), worker_count(config())) == (count, max(1, count))
    if count:
        assert worker_count(config(count)) == count
        with pytest.raises(ConfigError, match=f"there are {count} GPUs"):
            worker_count(config(count + 1))


def test_workers_on_a_cpu_share_its_cores_and_those_on_gpus_do_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    machine(4)
    assert [threads_of(config(**CPU), count) for count in (1, 4, 100)] == [
        {},
        {"OMP_NUM_THREADS": "3"},
        {"OMP_NUM_THREADS": "1"},
    ]
    assert threads_of(config(), 4) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert threads_of(config(), 4) == {"OMP_NUM_THREADS": "3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # the user knows better
    assert threads_of(config(), 4) == {}
