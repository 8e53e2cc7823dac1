"""PEFT adapters and merged models load in transformers to the same log-probabilities, and come back."""

import json
import os
import stat
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.bases import datum, load, picture_chunks, random_adapter, random_tokens, renderer, shifted, transformers_model
from tests.training.test_against_peft import twin_logprobs
from tinsmith.config import TrainingConfig
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights, new_full_weights
from tinsmith.models.layout import read_layout
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import LocalBackend
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.peft_format import read_peft, write_merged, write_peft

FAMILIES = ["llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
Bases = Callable[[str], BaseModel]
Dirs = Callable[[str], Path]


@pytest.fixture(scope="module")
def family_base(family_dir: Dirs) -> Bases:
    """Base models on the CPU, wherever the other tests compute: that is where files are made and merged."""
    return cache(lambda family: load(family_dir(family), device="cpu"))


@pytest.fixture(scope="module")
def text_base(family_base: Bases) -> BaseModel:
    """A small Qwen3."""
    return family_base("qwen3")


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_exported_files_obey_the_umask(mask: int, text_base: BaseModel, family_dir: Dirs, tmp_path: Path) -> None:
    base, source = read_layout(str(family_dir("qwen3"))), str(family_dir("qwen3"))
    adapter = random_adapter(text_base)
    before = os.umask(mask)
    try:
        write_peft(adapter, base, source, tmp_path / "adapter")
        write_merged(adapter, base, source, tmp_path / "merged")
    finally:
        os.umask(before)
    files = [file for directory in ("adapter", "merged") for file in (tmp_path / directory).iterdir()]
    assert {"adapter_model.safetensors", "model.safetensors"} <= {file.name for file in files}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~mask}


def ours(base: BaseModel, weights: Weights, rendered: RenderedInput) -> np.ndarray:
    backend = LocalBackend(base, TrainingConfig())
    backend.optimizers["a"] = ModelOptimizer(weights)
    result = backend.run_pass([datum("a", rendered)], backward=False).results[0]
    assert result is not None
    return result.logprobs


def example(base: BaseModel) -> RenderedInput:
    return renderer(base).render(picture_chunks(base, 1, 10) if base.family.takes_images else [random_tokens(1, 12)])


@torch.no_grad()
def theirs(twin: Any, base: BaseModel, rendered: RenderedInput) -> np.ndarray:
    logprobs: np.ndarray = twin_logprobs(twin, base, rendered, shifted(rendered)).numpy()
    return logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_an_adapter_to_the_same_logprobs(family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str) -> None:
    base, source = family_base(family), family_dir(family)
    adapter, rendered = random_adapter(base, rank=4, seed=1), example(base)
    write_peft(adapter, read_layout(str(source)), str(source), tmp_path)
    keys = load_file(tmp_path / "adapter_model.safetensors")
    assert len(keys) == 2 * len({base.layout.targets[name].module for name in adapter.masters})
    assert all(key.endswith(("lora_A.weight", "lora_B.weight")) for key in keys)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of keys that it misses
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        twin = PeftModel.from_pretrained(transformers_model(source), str(tmp_path)).eval()
    np.testing.assert_allclose(theirs(twin, base, rendered), ours(base, adapter, rendered), atol=1e-4)
    again = read_peft(tmp_path, read_layout(str(source)))
    assert list(again.masters) == list(adapter.masters)
    assert all(torch.equal(one, other) for one, other in zip(again.tensors(), adapter.tensors(), strict=True))


def random_full(base: BaseModel) -> FullWeights:
    """Full weights that all differ from the base's."""
    shape = LoraShape(0, 0)
    weights = new_full_weights(shape, base.full_targets(shape), base.dtype)
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.tensors():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.02)
    weights.refresh()
    return weights


@pytest.mark.parametrize("make", [partial(random_adapter, rank=4, seed=1), random_full], ids=["adapter", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_a_merged_model_to_the_same_logprobs(
    family_base: Bases, family_dir: Dirs, tmp_path: Path, family: str, make: Callable[[BaseModel], Weights]
) -> None:
    base, source = family_base(family), family_dir(family)
    weights, rendered = make(base), example(base)
    write_merged(weights, read_layout(str(source)), str(source), tmp_path)
    np.testing.assert_allclose(theirs(transformers_model(tmp_path), base, rendered), ours(base, weights, rendered), atol=1e-4)
    assert (tmp_path / "tokenizer.json").is_file()
    assert (tmp_path / "preprocessor_config.json").is_file() == base.family.takes_images


def test_full_weights_of_another_base_are_not_merged(family_base: Bases, family_dir: Dirs, tmp_path: Path) -> None:
    source = str(family_dir("llama"))
    with pytest.raises(UserError, match=r"holds layers.0.self_attn.q_proj.bias of shape \(64,\), which this base model does not have"):
        write_merged(random_full(family_base("qwen2")), read_layout(source), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_peft_saved_is_read_with_its_scale(text_base: BaseModel, family_dir: Dirs, tmp_path: Path) -> None:
    source = family_dir("qwen3")
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    twin: Any = get_peft_model(transformers_model(source), config)
    twin.save_pretrained(tmp_path)
    adapter = read_peft(tmp_path, read_layout(str(source)))
    assert (adapter.shape.train_attn, adapter.shape.train_mlp, adapter.shape.train_unembed) == (True, False, False)
    rendered = example(text_base)
    np.testing.assert_allclose(ours(text_base, adapter, rendered), theirs(twin.eval(), text_base, rendered), atol=1e-4)


def test_what_is_no_plain_lora_of_this_base_is_refused(family_base: Bases, family_dir: Dirs, tmp_path: Path) -> None:
    base = read_layout(str(family_dir("qwen3_vl")))
    with pytest.raises(UserError, match="is no PEFT adapter"):
        read_peft(tmp_path, base)
    write_peft(random_adapter(family_base("qwen3_vl"), rank=4), base, "x", tmp_path)
    with pytest.raises(UserError, match=r"model\.language_model\.layers\.\S+, which is no matrix that LoRA trains on this base model"):
        read_peft(tmp_path, read_layout(str(family_dir("qwen3"))))
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    for option, value in (("use_dora", True), ("bias", "all"), ("layer_replication", [[0, 1]]), ("init_lora_weights", "pissa_niter_4")):
        path.write_text(json.dumps(config | {option: value}))
        with pytest.raises(UserError, match=f"{option}.* of PEFT cannot be used"):
            read_peft(tmp_path, base)
    path.write_text(json.dumps(config | {"rank_pattern": {"q_proj": 2}}))
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj: lora_A and lora_B are .*, which does not fit rank 2 and this base"):
        read_peft(tmp_path, base)


def peft_saves(base: BaseModel, source: Path, directory: Path, **options: Any) -> Any:
    """Let PEFT make a random adapter of the base and save it."""
    twin: Any = get_peft_model(transformers_model(source), LoraConfig(init_lora_weights=False, **options))
    twin.save_pretrained(directory)
    return twin.eval()


@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns_that_leave_one_rank_are_read_with_the_scale_of_each_layer(
    text_base: BaseModel, family_dir: Dirs, tmp_path: Path, use_rslora: bool
) -> None:
    source = family_dir("qwen3")
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 4, r"layers.\d+.mlp.up_proj": 4}, "alpha_pattern": {"up_proj": 1.5}}
    twin = peft_saves(
        text_base, source, tmp_path, r=8, lora_alpha=6, target_modules=["q_proj", "up_proj"], use_rslora=use_rslora, **patterns
    )
    adapter, rendered = read_peft(tmp_path, read_layout(str(source))), example(text_base)
    assert adapter.shape.rank == 4
    np.testing.assert_allclose(ours(text_base, adapter, rendered), theirs(twin, text_base, rendered), atol=1e-4)


def test_several_ranks_are_refused_by_name(text_base: BaseModel, family_dir: Dirs, tmp_path: Path) -> None:
    source = family_dir("qwen3")
    peft_saves(text_base, source, tmp_path, r=8, target_modules=["q_proj", "up_proj"], rank_pattern={"q_proj": 4})
    with pytest.raises(UserError, match=r"rank_pattern: the adapter has several ranks \(4 on model\.\S+q_proj, 8 on model\.\S+up_proj\)"):
        read_peft(tmp_path, read_layout(str(source)))
