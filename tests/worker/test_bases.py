"""Base models of a worker: which form of the self-check runs at a start, and what is remembered of it.

Invariant: The quick form of the self-check runs only where the full one was passed with the same files, code, versions,
device and settings.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.bases import DEVICE
from tinsmith.config import Config, DistributedConfig, ModelsConfig, SamplingConfig, TrainingConfig, VLLMConfig
from tinsmith.errors import ConfigError
from tinsmith.models.attention import PackedPlan
from tinsmith.worker import bases
from tinsmith.worker.bases import PASSED_DIR, load_bases


@pytest.fixture
def model(family_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny model whose files may be changed."""
    return shutil.copytree(family_dir("qwen3"), tmp_path / "model")


@pytest.fixture
def start(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Load the model as a worker does, and say which form of the self-check passed."""
    caplog.set_level(logging.INFO, "tinsmith.worker.bases")

    def load(sampler: str = "none", again: bool = False, **models: object) -> str:
        caplog.clear()
        settings = ModelsConfig(device=DEVICE, **models)  # type: ignore[arg-type]
        sampling = SamplingConfig(sampler=sampler)
        config = Config([f"tiny={model}"], str(tmp_path / "data"), models=settings, sampling=sampling)
        load_bases(config, again=again)
        if "tiny is not checked again" in caplog.text:
            return "none"
        return next(form for form in ("full", "quick") if f"s, in its {form} form" in caplog.text)

    return load


def test_what_has_passed_in_full_is_checked_quickly_and_anything_else_in_full(
    start: Callable[..., str], model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other settings, files, versions or variables."""
    assert start(again=True) == "full"
    assert "tiny: the full self-check runs: none was passed yet with these files, versions and settings" in caplog.text
    assert [start(), start(self_check="full"), start()] == ["quick", "full", "quick"]
    assert [start(again=True), start(again=True, self_check="full")] == ["none", "full"]
    assert start(dtype="bfloat16" if DEVICE == "cpu" else "float32") == "full"
    assert start("local", again=True) == "full", "the sampler was not checked"
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    kept = (model / "model.safetensors").stat()
    (model / "model.safetensors").write_bytes(weights)
    os.utime(model / "model.safetensors", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert start() == "full"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert start() == "full"
    monkeypatch.setattr(torch.version, "cuda", "another")
    assert start() == "full"
    monkeypatch.setattr(bases, "digest_of_sources", lambda: "of another version of Tinsmith")
    assert [start(), start()] == ["full", "quick"]


def test_a_damaged_memory_counts_for_nothing_and_one_that_cannot_be_kept_does_not_keep_from_serving(
    start: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    (file,) = (tmp_path / "data" / PASSED_DIR).iterdir()
    right = file.read_bytes()
    for damage in (b"", b"\xff\xfe", b"of another key"):
        file.write_bytes(damage)
        assert start() == "full"
        assert str(file) in caplog.text
        assert [found.read_bytes() for found in file.parent.iterdir()] == [right]
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "data").write_text("no directory")
    assert (start(), start()) == ("full", "full")


def test_a_check_that_fails_is_forgotten(
    start: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    own = PackedPlan.attend
    monkeypatch.setattr(PackedPlan, "attend", lambda *arguments: 1.1 * own(*arguments))
    with pytest.raises(ConfigError, match="transformers computes other log-probabilities"):
        start()
    assert not list((tmp_path / "data" / PASSED_DIR).iterdir())


def test_the_log_says_what_quantized_experts_cost_and_a_later_start_remembers_it(
    family_dir: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each way to hold them, and again if what was noted is damaged. One of several workers says it."""
    caplog.set_level(logging.INFO, "tinsmith.worker.bases")

    def told(held: str, measures: bool = True) -> str:
        caplog.clear()
        models = ModelsConfig(device=DEVICE, expert_dtype=held)
        load_bases(Config([f"tiny={family_dir('qwen3_moe')}"], str(tmp_path), models=models), measures=measures)
        found = [line for line in caplog.messages if "its experts are held in" in line]
        assert len(found) <= 1
        return found[0] if found else ""

    assert told("model") == ""
    first = {held: told(held) for held in ("fp8", "nf4")}
    for held, line in first.items():
        cost = re.fullmatch(f"tiny: its experts are held in {held}, which costs ([0-9.e-]+) nats a token .*", line)
        assert cost is not None
        assert 0.0001 < float(cost[1]) < 1
    assert told("fp8", measures=False) == ""
    monkeypatch.setattr(bases, "measure_cost", lambda base: pytest.fail("it is measured again"))
    assert {held: told(held) for held in first} == first
    monkeypatch.undo()
    for file in (tmp_path / PASSED_DIR).glob("*.cost"):
        file.write_text("{}")
    assert {held: told(held) for held in first} == first
    assert all(len(file.read_text()) > 20 for file in (tmp_path / PASSED_DIR).glob("*.cost"))


@pytest.mark.parametrize("form", ["own servers", "a running server", "train none", "shard weights"])
def test_mixtures_of_experts_are_not_given_to_vllm(
    form: str, family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused by name before their weights are read, however vLLM is used."""
    monkeypatch.setattr(bases, "load_base_model", lambda *_: pytest.fail("it reads the weights"))
    config = Config(
        [f"mixture={family_dir('qwen3_moe')}"],
        str(tmp_path / "data"),
        models=ModelsConfig(device=DEVICE),
        sampling=SamplingConfig(sampler="vllm"),
        vllm=VLLMConfig(vllm_urls=["http://127.0.0.1:9"] if form == "a running server" else []),
        training=TrainingConfig(train="none" if form == "train none" else "any"),
        distributed=DistributedConfig(2, "weights") if form == "shard weights" else DistributedConfig(),
    )
    refused = r"^--sampler vllm: mixture \(qwen3_moe\) is a mixture of experts.*; serve it with --sampler local, or"
    with pytest.raises(ConfigError, match=refused):
        load_bases(config)
