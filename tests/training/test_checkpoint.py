"""Files of checkpoints: exact, complete or absent, refused where they do not fit."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.bases import datum, load, new_ref, random_tokens, renderer, write_family
from tinsmith.config import TrainingConfig
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import read_about, read_state, weights_from, write_state

SETTINGS = AdamSettings(0.01, (0.9, 0.95), 1e-8, 0.1, 0.5)


def trained(base: BaseModel, rank: int = 4, steps: int = 2) -> LocalBackend:
    """A backend with a model "a" after some steps."""
    backend = LocalBackend(base, TrainingConfig())
    backend.create_model("a", LoraShape(rank, seed=1))
    for step in range(steps):
        advance(backend, "a", step)
    return backend


def advance(backend: LocalBackend, model_id: str, seed: int) -> dict[str, float]:
    """One step; its metrics."""
    backend.run_pass([datum(model_id, renderer(backend.base).render([random_tokens(seed, 9)]), seed)], backward=True)
    return backend.optim_step(model_id, SETTINGS)


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize(
    ("family", "steps"),
    [("qwen3", 2), ("qwen3", 0), ("qwen3_5", 2), ("qwen3_moe", 2), ("qwen3_5_moe", 0), ("gpt_oss", 2), ("gpt_oss", 0)],
)
def test_training_goes_on_exactly(
    family_base: Callable[[str], BaseModel], tmp_path: Path, family: str, steps: int, rank: int
) -> None:
    """Also if it was saved before its first step."""
    base = family_base(family)
    backend = trained(base, rank, steps)
    write_state(backend.copy_state("a", optimizer=True), tmp_path / "c")
    backend.restore("b", read_state(tmp_path / "c", base, optimizer=True))
    assert list(backend.optimizers["b"].weights.masters) == list(backend.optimizers["a"].weights.masters)
    assert (backend.optimizers["b"].moments() == {}) == (steps == 0)
    for step in range(steps, steps + 2):
        assert advance(backend, "a", step) == advance(backend, "b", step)
    one, other = backend.optimizers["a"], backend.optimizers["b"]
    assert all(torch.equal(a, b) for a, b in zip(one.weights.tensors(), other.weights.tensors(), strict=True))
    moments = other.moments()
    assert all(torch.equal(value, moments[name]) for name, value in one.moments().items())
    assert {value.item() for name, value in moments.items() if name.endswith(".step")} == {steps + 2}


@pytest.mark.parametrize("rank", [4, 0])
def test_a_copy_is_written_as_it_was_taken_while_training_goes_on(
    text_base: BaseModel, tmp_path: Path, rank: int
) -> None:
    backend = trained(text_base, rank)
    optimizer = backend.optimizers["a"]
    before = [
        tensor.detach().to("cpu", copy=True) for tensor in (*optimizer.weights.tensors(), *optimizer.moments().values())
    ]
    state = backend.copy_state("a", optimizer=True)
    advance(backend, "a", 2)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write_state, state, tmp_path / "c")
        advance(backend, "a", 3)
        writing.result()
        read = thread.submit(read_state, tmp_path / "c", text_base, optimizer=True).result()
    assert read.moments is not None
    moments = [read.moments[name] for name in optimizer.moments()]
    assert all(torch.equal(a, b) for a, b in zip(before, (*read.tensors.values(), *moments), strict=True))
    assert not all(torch.equal(a, b.cpu()) for a, b in zip(before, optimizer.weights.tensors(), strict=False))
    backend.restore("b", read)
    advance(backend, "b", 4)  # what is read is not changed by the model that begins with it
    again = weights_from(read_state(tmp_path / "c", text_base), text_base)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, again.tensors(), strict=False))


def test_weights_alone_and_another_format_are_refused(text_base: BaseModel, tmp_path: Path) -> None:
    backend = trained(text_base)
    write_state(backend.copy_state("a", optimizer=False), tmp_path / "c")
    with pytest.raises(UserError, match="holds no optimizer state"):
        backend.restore("b", read_state(tmp_path / "c", text_base, optimizer=True))
    assert "b" not in backend.optimizers
    about = tmp_path / "c" / "checkpoint.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format_version": 3}))
    with pytest.raises(UserError, match="format version 3; this Tinsmith reads 2"):
        read_about(tmp_path / "c")


@pytest.mark.parametrize("rank", [4, 0])
def test_a_damaged_optimizer_is_refused(text_base: BaseModel, tmp_path: Path, rank: int) -> None:
    """Also one that remembers other steps, or not all; the weights beside it are read."""
    state = trained(text_base, rank).copy_state("a", optimizer=True)
    assert state.moments is not None
    name = list(state.tensors)[1]
    missing = {key: value for key, value in state.moments.items() if key != f"{name}.exp_avg"}
    write_state(state, tmp_path / "c")
    damaged = tmp_path / "c" / "optimizer.safetensors"
    for moments, reason in (
        (None, ""),
        ({"nothing.exp_avg": torch.zeros(1)}, ".*nothing.exp_avg belongs to no tensor"),
        ({**state.moments, f"{name}.step": torch.tensor(7.0)}, ".*have made 2 to 7 steps"),
        (missing, f".*{name}.exp_avg is missing"),
    ):
        if moments is None:
            os.truncate(damaged, 1000)
        else:
            save_file({key: value.clone() for key, value in moments.items()}, damaged)
        with pytest.raises(TinsmithError, match=rf"optimizer\.safetensors is damaged {reason}"):
            read_state(tmp_path / "c", text_base, optimizer=True)
        read_state(tmp_path / "c", text_base)


@pytest.mark.parametrize("rank", [4, 0])
def test_a_checkpoint_of_experts_is_refused_by_a_base_of_fewer(
    family_base: Callable[[str], BaseModel], tmp_path: Path, rank: int
) -> None:
    base, source = family_base("qwen3_moe"), tmp_path / "base"
    write_family("qwen3_moe", source)
    config = AutoConfig.from_pretrained(source)
    config.num_experts = 4
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(source)
    write_state(trained(base, rank, steps=0).copy_state("a", optimizer=False), tmp_path / "c")
    with pytest.raises(UserError, match=r"does not fit base model .*: modules or their sizes differ"):
        read_state(tmp_path / "c", load(source))


def test_full_weights_to_sample_come_in_the_precision_of_the_base(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    base = load(family_dir("llama"), dtype="bfloat16")
    backend = trained(base, rank=0)
    write_state(backend.copy_state("a", optimizer=False), tmp_path / "c")
    frozen = weights_from(read_state(tmp_path / "c", base), base, new_ref())
    assert frozen.nbytes == 2 * frozen.parameter_count
    assert all(
        torch.equal(a, b) for a, b in zip(frozen.leaves(), backend.snapshot("a", new_ref()).leaves(), strict=True)
    )
    exact = weights_from(read_state(tmp_path / "c", base), base)
    assert all(
        torch.equal(a, b) for a, b in zip(exact.tensors(), backend.optimizers["a"].weights.tensors(), strict=True)
    )


@pytest.mark.parametrize("rank", [4, 0])
def test_another_base_model_is_refused(family_base: Callable[[str], BaseModel], tmp_path: Path, rank: int) -> None:
    """Also of other sizes of one architecture: a row of keys more and one of values less, so that the fused layer has
    as many as before."""
    base = family_base("qwen3_5")
    state = trained(base, rank).copy_state("a", optimizer=False)
    if rank:
        part = "layers.0.linear_attn.in_proj_qkv"
        keys, values = state.tensors[f"{part}.k.b"], state.tensors[f"{part}.v.b"]
        moved = {f"{part}.k.b": torch.cat([keys, values[:1]]), f"{part}.v.b": values[1:].clone()}
    else:
        moved = {"layers.0.linear_attn.A_log": torch.zeros(5)}
    write_state(replace(state, tensors={**state.tensors, **moved}), tmp_path / "c")
    for other, reason in ((base, r"tiny \(qwen3_5\): modules or"), (family_base("llama"), r"tiny \(llama\)")):
        with pytest.raises(UserError, match=r"was made for tiny \(qwen3_5\) and does not fit base model " + reason):
            read_state(tmp_path / "c", other)
