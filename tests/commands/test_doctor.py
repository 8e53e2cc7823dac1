"""`tinsmith doctor`, typed as a person types it."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.bases import load, new_ref, write_decoder
from tests.running import START_S
from tinsmith.cli import app
from tinsmith.config import ModelsConfig, TrainingConfig
from tinsmith.models.budget import ModelBytes
from tinsmith.models.machine import SUPPORTED, Gpu, Machine
from tinsmith.models.sizing import size_of
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.lock import only_user
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend

WIDE = {"COLUMNS": "400"}
"""A screen that is wide enough for every line."""


def doctor(*arguments: str) -> tuple[int, str]:
    """Exit code and output."""
    ran = CliRunner().invoke(app, ["doctor", "--port", "0", *arguments], env=WIDE)
    assert ran.stderr == ""
    return ran.exit_code, ran.stdout


def test_a_machine_that_can_serve_misses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinsmith.cli", "doctor", "--port", "0", "--data-dir", str(tmp_path / "new")]
    report = subprocess.run(command, check=True, capture_output=True, text=True, timeout=START_S, env=os.environ | WIDE).stdout
    assert re.search(rf"^torch +ok +{re.escape(torch.__version__)} \(needs >= 2.11, < 2.14\)", report, re.MULTILINE)
    assert re.search(r"^data directory +ok +\S+/new: [\d.]+ GiB free on its disk", report, re.MULTILINE)
    assert re.search(r"^memory +ok +[\d.]+ GiB of [\d.]+ GiB available", report, re.MULTILINE)
    assert report.endswith("nothing is missing\n")


def test_the_database_that_is_there_is_read(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    code, report = doctor("--data-dir", str(tmp_path))
    assert code == 0
    assert re.search(r"^database +ok +all of \S+/tinsmith.db can be read", report, re.MULTILINE)
    file = tmp_path / "tinsmith.db"
    file.write_bytes(file.read_bytes()[:4096] + b"x" * 20_000)
    code, report = doctor("--data-dir", str(tmp_path))
    assert code == 1
    assert re.search(r"^database +missing +\S+/tinsmith.db is damaged: .* Put back a copy", report, re.MULTILINE)


def test_a_model_is_sized_without_loading_it(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--data-dir", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--kv-cache-gib", "0.125"]
    code, report = doctor("--base-model", f"tiny={family_dir('qwen3')}", *options)
    assert code == 0
    parameters = sum(p.numel() for p in load(family_dir("qwen3"), device="cpu").network.parameters())
    assert re.search(rf"^tiny +ok +{parameters:,} parameters, float32 on cpu", report, re.MULTILINE)
    # Keys and values of 2 layers, 2 heads of width 32, in 4 bytes.
    assert re.search(r"a cached token +ok +1.0 KiB; the cache holds 131,072 tokens", report)
    assert re.search(r"key/value cache \(--kv-cache-gib\) +ok +128.0 MiB", report)
    full = rf"tiny, all parameters \(rank 0\) +ok +{20 * parameters / 2**20:.1f} MiB a model, a snapshot {4 * parameters / 2**10:.1f} KiB; "
    assert re.search(full + r"\d+\.\d GiB left for it", report)


@pytest.mark.parametrize(
    ("file", "setting", "said"),
    [
        ("tokenizer_config.json", {"eos_token": {"a": 1}}, "its tokenizer cannot be loaded: Special token eos_token"),
        ("preprocessor_config.json", {"image_mean": "x"}, "its image processor, Qwen2VLImageProcessor, does not compute what"),
    ],
)
def test_what_only_the_libraries_can_tell_is_missing_too(
    file: str, setting: dict[str, object], said: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(family_dir("qwen3_vl"), tmp_path / "model"))
    (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | setting))
    code, report = doctor("--data-dir", str(tmp_path / "data"), "--device", "cpu", "--base-model", f"m={model}")
    assert code == 1
    assert re.search(rf"^m +missing +{model}: {said}", report, re.MULTILINE)
    assert report.endswith("missing: m\n")


def test_a_server_that_only_samples_needs_nothing_to_train(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--data-dir", str(tmp_path), "--device", "cpu", "--train", "none", "--base-model", f"tiny={family_dir('qwen3')}"]
    code, report = doctor(*options)
    assert code == 0
    assert re.search(
        r"^training +note +none \(--train none\): no memory is planned for it, and training operations are refused", report, re.M
    )
    assert re.search(r"^  a sampled adapter +ok +[\d.]+ \w+ at rank 32 \(--snapshot-gib\)", report, re.M)
    assert not any(part in report for part in ("one trained model", "a pass of", "one more trained model", "all parameters (rank 0)"))


def test_it_says_how_many_workers_would_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--data-dir", str(tmp_path)]
    assert re.search(r"^workers +ok +one \(--workers 0, the default\)", doctor(*options, "--device", "cpu")[1], re.M)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    gpus = [Gpu(index, "a GPU", 2**36, 2**35, (9, 0)) for index in range(2)]
    monkeypatch.setattr("tinsmith.commands.doctor.look_around", lambda: Machine(4, 2**36, 2**35, gpus, ""))
    own = r"^workers +ok +2 of the 2 GPUs, each with a worker of its own \(--workers 0, the default\)"
    assert re.search(own, doctor(*options)[1], re.M)
    assert re.search(r"^workers +ok +1 \(--workers\)", doctor(*options, "--workers", "1")[1], re.M)
    code, report = doctor(*options, "--workers", "3")
    assert code == 1
    assert re.search(r"^workers +missing +--workers 3: there are 2 GPUs, and each worker needs its own", report, re.M)


def test_gpus_that_pytorch_cannot_use_are_told_and_get_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--data-dir", str(tmp_path)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr("tinsmith.commands.doctor.look_around", lambda: Machine(4, 2**36, 2**35, [], "torch 2 is built without CUDA"))
    code, report = doctor(*options)
    assert code == 0
    fewer = "PyTorch can use 0 of the 2 visible GPUs: torch 2 is built without CUDA"
    assert re.search(rf"^workers +note +one \(--workers 0, the default\); {fewer}$", report.replace(" \n", "\n"), re.M)
    assert re.search(r"^CUDA +note +torch 2 is built without CUDA; models run on the CPU", report, re.M)
    code, report = doctor(*options, "--workers", "2")
    assert code == 1
    assert re.search(rf"^workers +missing +--workers 2: {fewer}; ask for 1, or add --device cpu", report, re.M)
    assert re.search(r"^workers +ok +2 \(--workers\)", doctor(*options, "--workers", "2", "--device", "cpu")[1], re.M)


def test_blocks_and_slots_of_a_hybrid_model_are_told(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--data-dir", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--base-model", f"tiny={family_dir('qwen3_5')}"]
    code, report = doctor(*options, "--kv-cache-gib", "0.004")
    assert code == 0
    # Keys and values of one layer, 2 heads of width 32; states of 3 layers: 4 heads of 16 x 16, and 3 inputs of 128 channels; in 4 bytes.
    assert re.search(r"a cached token +ok +512 bytes; the cache holds 4,192 tokens", report)
    state = r"16.5 KiB; the cache holds 127 states, 112 of them for sequences that run at once, which take 1.8 MiB more during a pass"
    assert re.search(rf"a sequence's state +ok +{state}", report)


def test_without_the_local_sampler_there_is_no_cache_and_workers_of_one_host_share_its_memory(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `tinsmith plan` and the workers count: a hybrid model is not refused for a cache that nobody makes."""
    monkeypatch.setattr("tinsmith.commands.doctor.look_around", lambda: Machine(4, 2**36, 2**35, [], "there is none"))
    options = ["--data-dir", str(tmp_path), "--device", "cpu", "--sampler", "none", "--workers", "2"]
    code, report = doctor("--base-model", f"tiny={family_dir('qwen3_5')}", "--planned-rank", "8", *options)
    assert code == 0
    assert "cache" not in report
    assert re.search(r"memory for all of it +ok +about [\d.]+ GiB needed, 16\.0 GiB free", report)
    assert "one trained model of rank 8 " in report


def test_what_does_not_fit_is_missing(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--data-dir", str(tmp_path), "--device", "cpu", "--kv-cache-gib", "9000"]
    code, report = doctor("--base-model", f"tiny={family_dir('qwen3')}", *options)
    assert code == 1
    assert re.search(r"memory for all of it +missing +about 9000\.\d GiB needed, [\d.]+ GiB free", report)
    assert re.search(r"tiny, all parameters \(rank 0\) +note +does not fit: [\d.]+ MiB a model, .+; 0.0 GiB left for it", report)
    assert report.endswith("missing: memory for all of it\n")


def test_a_model_that_would_be_refused_and_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    write_decoder("mixtral", tmp_path / "moe", num_local_experts=4)
    (tmp_path / "file").touch()
    code, report = doctor("--base-model", f"moe={tmp_path / 'moe'}", "--data-dir", str(tmp_path / "file" / "data"))
    assert code == 1
    assert "'mixtral' is a mixture of experts" in report
    assert re.search(r"data directory +missing +\S+: cannot write to \S+/file; choose another with --data-dir", report)
    assert report.endswith("missing: data directory, moe\n")


def test_a_port_and_a_data_directory_in_use_are_missing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, only_user(tmp_path):
        port = other.getsockname()[1]
        code, report = doctor("--data-dir", str(tmp_path), "--port", str(port))
        assert code == 1
        assert re.search(r"^data directory +missing +\S+ is used by another server; stop it, or choose another", report, re.M)
        assert re.search(rf"^listens on +missing +cannot listen on host=127.0.0.1 port={port}: another program listens there", report, re.M)
        assert report.endswith("missing: data directory, listens on\n")
    assert doctor("--data-dir", str(tmp_path), "--port", str(port))[0] == 0
    (tmp_path / "server.lock").unlink()
    (tmp_path / "server.lock").symlink_to(tmp_path)
    code, report = doctor("--data-dir", str(tmp_path), "--port", "0")
    assert (code, bool(re.search(r"^data directory +missing +\S+/server.lock cannot be locked: it is a link", report, re.M))) == (1, True)


def test_the_supported_versions_are_those_of_the_package() -> None:
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    for library, (first, beyond) in SUPPORTED.items():
        assert f"{library}>={first[0]}.{first[1]},<{beyond[0]}.{beyond[1]}" in wanted


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_the_estimate_of_a_trained_model_is_what_it_takes(family_dir: Callable[[str], Path], family: str) -> None:
    base = load(family_dir(family), device="cpu")
    backend = LocalBackend(base, TrainingConfig())
    backend.create_model("a", LoraShape(32, 0))
    sizes = size_of(str(family_dir(family)), ModelsConfig(device="cpu", dtype="float32"))
    held = 4 * backend.snapshot("a", new_ref()).parameter_count
    assert sizes.model(32) == ModelBytes(training=4 * held, snapshot=held)  # gradients and two moments


@pytest.mark.parametrize("family", ["llama", "qwen3_vl", "qwen3_5"])
def test_the_estimate_of_full_training_is_what_it_takes(family_dir: Callable[[str], Path], family: str) -> None:
    backend = LocalBackend(load(family_dir(family), device="cpu"), TrainingConfig())
    backend.create_model("a", LoraShape(0, 0))
    sizes = size_of(str(family_dir(family)), ModelsConfig(device="cpu", dtype="float32"))
    model = backend.optimizers["a"]
    assert sizes.model(0) == ModelBytes(model.weights.nbytes + model.unclaimed, backend.snapshot("a", new_ref()).nbytes)
