"""Whether layers are sharded where the settings leave that open."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.published import SERVED
from tinsmith.config import Config, load, to_tree
from tinsmith.errors import ConfigError
from tinsmith.memory import shard_choice
from tinsmith.memory.shard_choice import Fit, choose, chosen_shard, estimated
from tinsmith.models.machine import Gpu, Machine
from tinsmith.protocol.devices import worker_count

GIB = 2**30
RUN = subprocess.run
WHOLE, PARTS, NEITHER = Fit("a", True, True, False), Fit("b", True, False, True), Fit("c", True, False, False)
ANYHOW, LARGE = Fit("d", True, True, True), Fit("e", False, False, True)


@pytest.mark.parametrize(
    ("fits", "chosen"),
    [
        ([WHOLE], "none"),
        ([ANYHOW], "none"),
        ([PARTS], "weights"),
        ([ANYHOW, PARTS], "weights"),
        ([WHOLE, PARTS], "none"),  # that model cannot be sharded
        ([NEITHER], "none"),
        ([PARTS, NEITHER], "none"),
    ],
)
def test_layers_are_divided_if_a_model_trains_in_no_other_way(fits: Sequence[Fit], chosen: str) -> None:
    """And no setting is one that sharded layers refuse."""
    for sampler in ("vllm", "none"):
        assert choose(fits, load(options={"sampler": sampler})) == chosen
    refused: list[dict[str, object]] = [
        {"full_state": "compact"},
        {"deterministic": True},
        {"sequence_parallel_from": 4096},
    ]
    assert {choose(fits, load(options={"sampler": "none"} | setting)) for setting in refused} == {"none"}


def test_the_local_sampler_needs_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    """A model that loads is served as before, with less room; one that does not would end in an error of the device."""
    assert choose([WHOLE], load()) == "none"
    assert caplog.text == ""
    assert choose([WHOLE, ANYHOW], load()) == "none"
    assert choose([ANYHOW, PARTS], load()) == "none"
    assert "b has little room to train as a whole on each GPU. To divide its layers, add --sampler vllm" in caplog.text
    with pytest.raises(ConfigError, match=r"e is too large for the GPU of a worker.*--sampler vllm.*--shard none"):
        choose([PARTS, LARGE], load())
    with pytest.raises(
        ConfigError, match=r"^e and e together are too large for the GPU of a worker.*--shard none loads them"
    ):
        choose([LARGE, LARGE], load())
    assert choose([PARTS, LARGE], load(options={"sampler": "none"})) == "weights"


def test_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without several GPUs nothing is estimated."""
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **keywords: pytest.fail("an estimate"))
    monkeypatch.setattr(shard_choice, "visible_gpus", lambda: 4)
    assert [chosen_shard(load(options={"shard": shard}), 4) for shard in ("none", "weights")] == ["none", "weights"]
    assert chosen_shard(load(), 1) == "none"
    assert chosen_shard(load(options={"device": "cpu"}), 4) == "none"
    monkeypatch.setattr(shard_choice, "visible_gpus", lambda: 0)
    assert chosen_shard(load(), 4) == "none"


def program(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Let another program make the estimate, for four GPUs."""

    def running(command: Sequence[str], **keywords: Any) -> Any:
        assert command == [sys.executable, "-P", "-m", "tinsmith.memory.shard_choice"]
        return RUN([sys.executable, "-c", source], **keywords)

    monkeypatch.setattr(shard_choice, "visible_gpus", lambda: 4)
    monkeypatch.setattr(subprocess, "run", running)


def test_the_estimate_of_another_process_decides_and_without_one_nothing_is_divided(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = json.dumps([{"name": "large", "loads": False, "whole": False, "sharded": True}])
    good = f"import sys, json; json.load(sys.stdin); print('a word of a library'); print({told!r})"
    for source, shard in (
        (good, "weights"),
        ("import sys; sys.exit('no such card')", "none"),
        ("print('no JSON')", "none"),
        ("", "none"),
    ):
        program(monkeypatch, source)
        assert chosen_shard(load(options={"sampler": "none"}), 4) == shard
    assert "no such card" in caplog.text
    assert caplog.text.count("nothing is sharded") == 3


def test_the_estimate_is_that_of_the_plan(family_dir: Callable[[str], Path]) -> None:
    """In its own process, of this machine."""
    config = Config([f"small={family_dir('qwen3')}", f"other={family_dir('qwen3_vl')}"])
    config.models.device, config.distributed.workers = "cpu", 2
    command = [sys.executable, "-P", "-m", "tinsmith.memory.shard_choice"]
    done = subprocess.run(command, input=json.dumps(to_tree(config)), capture_output=True, text=True, check=True)
    fits = [Fit(**each) for each in json.loads(done.stdout.splitlines()[-1])]
    assert fits == [Fit("small", True, True, True), Fit("other", True, True, True)]


def gpus_here(monkeypatch: pytest.MonkeyPatch, count: int, gib: float) -> None:
    """Let this machine have so many GPUs, all usable, of which no process holds anything."""
    gpus = [Gpu(index, "a GPU", int(gib * GIB), int(gib * GIB), (9, 0)) for index in range(count)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    monkeypatch.setattr("tinsmith.models.machine.look_around", lambda: Machine(8, 2**40, 2**40, gpus, ""))
    monkeypatch.setattr("tinsmith.models.machine.usable_gpus", lambda: count)
    monkeypatch.setattr("tinsmith.memory.sizing.pick_device", lambda wanted: torch.device("cuda", 0))


def of_8b(directory: Path, bases: int, **options: object) -> Config:
    """As many base models of 15.3 GiB."""
    source = SERVED["Qwen/Qwen3-8B"].write(directory)
    return load(options={"base_models": [f"{name}={source}" for name in "abc"[:bases]]} | options)


def test_base_models_of_one_server_share_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of two fits alone into 25 GiB, and both do not: then only parts of both fit. With 50 GiB both fit as wholes.

    Each has a cache of its own.
    """
    one, two = (of_8b(tmp_path, bases, sampler="none") for bases in (1, 2))
    gpus_here(monkeypatch, 4, 25)
    assert estimated(one) == [Fit("a", loads=True, whole=True, sharded=True)]
    assert estimated(two) == [Fit(name, loads=False, whole=False, sharded=True) for name in "ab"]
    assert [choose(estimated(config), config) for config in (one, two)] == ["none", "weights"]
    gpus_here(monkeypatch, 4, 50)
    assert estimated(two) == [Fit(name, loads=True, whole=True, sharded=True) for name in "ab"]
    # Beside weights of 31 GiB and a cache of 10 GiB there is room to train, beside two of these there is not
    gpus_here(monkeypatch, 4, 49)
    assert [{fit.whole for fit in estimated(of_8b(tmp_path, 2, kv_cache_gib=gib))} for gib in (5, 10)] == [
        {True},
        {False},
    ]
    gpus_here(monkeypatch, 4, 12)
    assert [choose(estimated(config), config) for config in (one, two)] == ["weights", "none"]  # nor do parts of both


def test_the_estimate_is_for_the_workers_that_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two base models have a vLLM server each, so that two of four GPUs train; for three workers the parts would be
    small enough."""
    fits = {}
    for gpus, workers in ((4, 2), (5, 3)):
        gpus_here(monkeypatch, gpus, 22)
        unsaid, said = (of_8b(tmp_path, 2, sampler="vllm", **options) for options in ({}, {"workers": workers}))
        assert worker_count(unsaid, usable=gpus) == workers
        assert estimated(unsaid) == estimated(said)
        fits[workers] = {fit.sharded for fit in estimated(unsaid)}
    assert fits == {2: {False}, 3: {True}}


def test_gpus_that_pytorch_cannot_use_hold_no_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server counts those that the system shows; the engine starts workers on those that can be used."""
    gpus_here(monkeypatch, 4, 25)
    monkeypatch.setattr("tinsmith.models.machine.usable_gpus", lambda: 1)
    config = of_8b(tmp_path, 2, sampler="none")
    assert worker_count(config, usable=1) == 1
    assert choose(estimated(config), config) == "none"
