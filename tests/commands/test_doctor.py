"""`tinsmith doctor`, typed as a person types it."""

import json
import re
import shutil
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.bases import load, new_ref, write_decoder
from tests.databases import PostgreSQL, run_sql
from tinsmith.cli import app
from tinsmith.config import ModelsConfig, TrainingConfig
from tinsmith.memory.budget import ModelBytes
from tinsmith.memory.sizing import size_of
from tinsmith.models.lora import Adapter
from tinsmith.models.machine import SUPPORTED, Gpu, Machine
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.disk import only_user
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend

WIDE = {"COLUMNS": "400"}
"""A screen that is wide enough for every line."""
FamilyDir = Callable[[str], Path]


def doctor(data_dir: Path, *arguments: str, lacks: str = "") -> str:
    """The report, with one space where there are several.

    Something is missing, and named at its end, if it `lacks` that.
    """
    ran = CliRunner().invoke(app, ["doctor", "--port", "0", "--data-dir", str(data_dir), *arguments], env=WIDE)
    report = re.sub(" +", " ", ran.stdout)
    assert (ran.stderr, ran.exit_code) == ("", 1 if lacks else 0), report
    assert report.endswith(f"missing: {lacks}\n" if lacks else "nothing is missing\n")
    return report


def test_a_machine_that_can_serve_misses_nothing(tmp_path: Path) -> None:
    report = doctor(tmp_path / "new")
    assert f"\ntorch ok {torch.__version__} (needs >= 2.11, < 2.14)" in report
    assert re.search(r"\ndata directory ok \S+/new: [\d.]+ GiB free on its disk", report)
    assert re.search(r"\nmemory ok [\d.]+ GiB of [\d.]+ GiB available", report)


def test_the_database_that_is_there_is_read(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    file = tmp_path / "tinsmith.db"
    assert f"database ok all of {file} can be read" in doctor(tmp_path)
    file.write_bytes(file.read_bytes()[:4096] + b"x" * 20_000)
    assert re.search(f"database missing {file} is damaged: .* Put back a copy", doctor(tmp_path, lacks="database"))


def test_a_database_in_postgresql_is_read(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """That of the directory, or the one that a server is to have. An empty one is filled by its first server."""
    name = postgresql.serve(tmp_path / "data")
    found = f"database ok all of the PostgreSQL database {name} on {postgresql.directory} can be read"
    for _ in range(2):
        assert found in doctor(tmp_path / "data")
        assert found in doctor(tmp_path / "new", "--database-url", postgresql.url(name))
        Store.open(tmp_path / "data").close()
    run_sql(tmp_path / "data", "DROP TABLE lease")
    assert re.search(
        "database missing .* is damaged: there is no table lease. Put", doctor(tmp_path / "data", lacks="database")
    )
    missing = doctor(tmp_path / "new", "--database-url", postgresql.url("missing"), lacks="database")
    assert "the PostgreSQL database missing on" in missing


def test_a_model_is_sized_without_loading_it(family_dir: FamilyDir, tmp_path: Path) -> None:
    model = ["--base-model", f"tiny={family_dir('qwen3')}", "--device", "cpu", "--dtype", "float32"]
    report = doctor(tmp_path, *model, "--kv-cache-gib", "0.125")
    parameters = sum(p.numel() for p in load(family_dir("qwen3"), device="cpu").network.parameters())
    assert f"\ntiny ok {parameters:,} parameters, float32 on cpu" in report
    # Keys and values of 2 layers, 2 heads of width 32, in 4 bytes.
    assert "a cached token ok 1.0 KiB; the cache holds 131,072 tokens" in report
    assert "key/value cache (--kv-cache-gib) ok 128.0 MiB" in report
    full = f"ok {20 * parameters / 2**20:.1f} MiB a model, a snapshot {4 * parameters / 2**10:.1f} KiB; "
    assert f"tiny, all parameters (rank 0) {full}" in report
    large = doctor(tmp_path, *model, "--kv-cache-gib", "9000", lacks="memory for all of it")
    assert re.search(r"memory for all of it missing about 9000\.\d GiB needed, [\d.]+ GiB free", large)
    assert re.search(
        r"tiny, all parameters \(rank 0\) note does not fit: [\d.]+ MiB a model, .+; 0.0 GiB left for it", large
    )


@pytest.mark.parametrize(
    ("file", "setting", "said"),
    [
        ("tokenizer_config.json", {"eos_token": {"a": 1}}, "its tokenizer cannot be loaded: Special token eos_token"),
        (
            "preprocessor_config.json",
            {"image_mean": "x"},
            "its image processor, Qwen2VLImageProcessor, does not compute what",
        ),
    ],
)
def test_what_only_the_libraries_can_tell_is_missing_too(
    file: str, setting: dict[str, object], said: str, family_dir: FamilyDir, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(family_dir("qwen3_vl"), tmp_path / "model"))
    (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | setting))
    assert f"\nm missing {model}: {said}" in doctor(
        tmp_path / "data", "--device", "cpu", "--base-model", f"m={model}", lacks="m"
    )


def test_a_mixture_without_room_is_advised_to_quantize_its_experts(
    family_dir: FamilyDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that helps."""
    directory, training = str(family_dir("qwen3_moe")), TrainingConfig(tokens_per_pass=16, planned_rank=1)
    options = ["--device", "cpu", "--base-model", f"m={directory}", "--kv-cache-gib", "0.001"]
    options += ["--tokens-per-pass", "16", "--planned-rank", "1"]
    sizes = size_of(directory, ModelsConfig(device="cpu"))
    passes, chunk = sizes.passes, training.logits_chunk
    needed = (
        sizes.weight_bytes + sizes.model(1).training + int(0.001 * 2**30) + passes.bytes(16, chunk, passes.smallest)
    )
    saved = sizes.weight_bytes - size_of(directory, ModelsConfig(device="cpu", expert_dtype="fp8")).weight_bytes

    def report(free: int, *more: str, lacks: str = "memory for all of it") -> str:
        machine = Machine(4, 2**36, free, [], "there is none")
        monkeypatch.setattr("tinsmith.commands.doctor.look_around", lambda: machine)
        return doctor(tmp_path, *options, *more, lacks=lacks)

    advice = "; --expert-dtype fp8 needs 0.0 GiB less"
    assert advice in report(needed - saved)
    assert advice not in report(needed - saved - 1000)
    fitting = report(needed - saved, "--expert-dtype", "fp8", lacks="")
    assert f"m ok {sizes.parameters:,} parameters, float32 on cpu, experts in fp8" in fitting
    assert "all parameters (rank 0)" not in fitting
    report(needed - saved - 1000, "--expert-dtype", "fp8")


def test_a_server_that_only_samples_needs_nothing_to_train(family_dir: FamilyDir, tmp_path: Path) -> None:
    report = doctor(tmp_path, "--device", "cpu", "--train", "none", "--base-model", f"tiny={family_dir('qwen3')}")
    assert (
        "training note none (--train none): no memory is planned for it, and training operations are refused" in report
    )
    assert re.search(r"\n a sampled adapter ok [\d.]+ \w+ at rank 32 \(--snapshot-gib\)", report)
    assert not any(
        part in report
        for part in ("one trained model", "a pass of", "one more trained model", "all parameters (rank 0)")
    )


GPUS = [Gpu(index, "a GPU", 2**36, 2**35, (9, 0)) for index in range(2)]
UNUSABLE = "PyTorch can use 0 of the 2 visible GPUs: torch 2 is built without CUDA"


@pytest.mark.parametrize(
    ("gpus", "options", "said", "lacks"),
    [
        (GPUS, ["--device", "cpu"], "ok one (--workers 0, the default)", ""),
        (GPUS, [], "ok 2 of the 2 GPUs, each with a worker of its own (--workers 0, the default)", ""),
        (GPUS, ["--workers", "1"], "ok 1 (--workers)", ""),
        (GPUS, ["--workers", "3"], "missing --workers 3: there are 2 GPUs, and each worker needs its own", "workers"),
        ([], [], f"note one (--workers 0, the default); {UNUSABLE}", ""),
        ([], ["--workers", "2"], f"missing --workers 2: {UNUSABLE}; ask for 1, or add --device cpu", "workers"),
        ([], ["--workers", "2", "--device", "cpu"], "ok 2 (--workers)", ""),
    ],
)
def test_it_says_how_many_workers_would_start_on_gpus_that_pytorch_can_use(
    gpus: list[Gpu], options: list[str], said: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    machine = Machine(4, 2**36, 2**35, gpus, "" if gpus else "torch 2 is built without CUDA")
    monkeypatch.setattr("tinsmith.commands.doctor.look_around", lambda: machine)
    report = doctor(tmp_path, *options, lacks=lacks)
    assert f"\nworkers {said}" in report
    assert gpus or "\nCUDA note torch 2 is built without CUDA; models run on the CPU" in report


def test_blocks_and_slots_of_a_hybrid_model_are_told(
    family_dir: FamilyDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None without the local sampler, as `tinsmith plan` and the workers count: workers of one host share its memory
    for the rest."""
    model = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--base-model",
        f"tiny={family_dir('qwen3_5')}",
        "--planned-rank",
        "8",
    ]
    report = doctor(tmp_path, *model, "--kv-cache-gib", "0.004")
    # Keys and values of one layer, 2 heads of width 32; states of 3 layers: 4 heads of 16 x 16, and 3 inputs of 128
    # channels; in 4 bytes.
    assert "a cached token ok 512 bytes; the cache holds 4,192 tokens" in report
    state = (
        "16.5 KiB; the cache holds 127 states, 112 of them for sequences that run at once, which take 1.8 MiB more "
        "during a pass"
    )
    assert f"a sequence's state ok {state}" in report
    monkeypatch.setattr("tinsmith.commands.doctor.look_around", lambda: Machine(4, 2**36, 2**35, [], "there is none"))
    report = doctor(tmp_path, *model, "--sampler", "none", "--workers", "2")
    assert "cache" not in report
    assert re.search(r"memory for all of it ok about [\d.]+ GiB needed, 16\.0 GiB free", report)
    assert "one trained model of rank 8 " in report


def test_a_refused_model_and_a_port_or_directory_that_cannot_be_had_are_missing(tmp_path: Path) -> None:
    write_decoder("olmoe", tmp_path / "moe", num_experts=4)
    (tmp_path / "file").touch()
    report = doctor(tmp_path / "file" / "data", "--base-model", f"moe={tmp_path / 'moe'}", lacks="data directory, moe")
    assert "'olmoe' is a mixture of experts" in report
    assert re.search(r"data directory missing \S+: cannot write to \S+/file; choose another with --data-dir", report)
    with socket.create_server(("127.0.0.1", 0)) as other, only_user(tmp_path):
        port = str(other.getsockname()[1])
        report = doctor(tmp_path, "--port", port, lacks="data directory, listens on")
        assert f"\ndata directory missing {tmp_path} is used by another server; stop it, or choose another" in report
        assert (
            f"\nlistens on missing cannot listen on host=127.0.0.1 port={port}: another program listens there" in report
        )
    doctor(tmp_path, "--port", port)
    (tmp_path / "server.lock").unlink()
    (tmp_path / "server.lock").symlink_to(tmp_path)
    assert f"\ndata directory missing {tmp_path}/server.lock cannot be locked: it is a link" in doctor(
        tmp_path, lacks="data directory"
    )


def test_a_mixture_of_experts_lacks_a_sampler_with_vllm(family_dir: FamilyDir, tmp_path: Path) -> None:
    arguments = ("--base-model", f"tiny={family_dir('qwen3_moe')}", "--sampler", "vllm", "--vllm-url", "http://[::1]:9")
    assert "tiny missing --sampler vllm: tiny (qwen3_moe) is a mixture" in doctor(tmp_path, *arguments, lacks="tiny")


def test_the_supported_versions_are_those_of_the_package() -> None:
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    supported = {
        f"{library}>={first[0]}.{first[1]},<{beyond[0]}.{beyond[1]}" for library, (first, beyond) in SUPPORTED.items()
    }
    assert supported <= set(wanted)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_the_estimate_of_a_trained_model_is_what_it_takes(family_dir: FamilyDir, family: str) -> None:
    backend = LocalBackend(load(family_dir(family), device="cpu"), TrainingConfig())
    backend.create_model("lora", LoraShape(32, 0))
    backend.create_model("full", LoraShape(0, 0))
    sizes = size_of(str(family_dir(family)), ModelsConfig(device="cpu", dtype="float32"))
    snapshot = backend.snapshot("lora", new_ref())
    assert isinstance(snapshot, Adapter)
    held, of_experts = (
        4 * sum(tensor.numel() for name, tensor in snapshot.named_tensors().items() if part in name)
        for part in ("", ".experts.")
    )
    # Gradients and two moments; those of experts are so large that they count twice while a pass adds them
    assert sizes.model(32) == ModelBytes(training=4 * held + of_experts, snapshot=held)
    full = backend.optimizers["full"]
    assert sizes.model(0) == ModelBytes(
        full.weights.nbytes + full.unclaimed, backend.snapshot("full", new_ref()).nbytes
    )
