"""Adapters on parts of a fused layer (queries, keys and values of a gated delta net): out to PEFT, in from PEFT, merged."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.bases import load, random_adapter
from tests.training.test_peft_format import Dirs, example, ours, peft_saves, theirs
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.layers import DeltaNet
from tinsmith.models.layout import Layout, read_layout
from tinsmith.models.lora import Adapter
from tinsmith.training.download_format import write_download
from tinsmith.training.peft_format import read_peft, write_peft

RANK = 4
FUSED = "layers.0.linear_attn.in_proj_qkv"
CLOSE = 1e-3
"""Bound on logprobs: this small model's float32 is up to 2.5e-4 from its float64 at single tokens, and differs between processors."""
KEY = f"base_model.model.model.language_model.{FUSED}.lora_%s.weight"


@pytest.fixture(scope="module")
def hybrid(family_dir: Dirs) -> BaseModel:
    """A small Qwen3.5 on the CPU, where files are made."""
    return load(family_dir("qwen3_5"), device="cpu")


@pytest.fixture
def layout(family_dir: Dirs) -> Layout:
    """What its configuration says."""
    return read_layout(str(family_dir("qwen3_5")))


def rewrite(directory: Path, change: Any) -> None:
    """Change the tensors of an adapter folder."""
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def parts(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor]]:
    """The matrices of queries, keys and values of the first layer."""
    return {part: adapter.masters[f"{FUSED}.{part}"] for part in "qkv"}


@pytest.mark.parametrize("in_alphabetical_order", [False, True])
def test_parts_leave_as_one_block_diagonal_adapter_of_the_same_scale(
    hybrid: BaseModel, layout: Layout, tmp_path: Path, in_alphabetical_order: bool
) -> None:
    """Also if they come from the file of a checkpoint, which holds k before q."""
    adapter = random_adapter(hybrid, rank=RANK, seed=1)
    if in_alphabetical_order:
        adapter = Adapter(adapter.shape, dict(sorted(adapter.masters.items())), adapter.dtype)
    write_peft(adapter, layout, "x", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"]) == (RANK, {"in_proj_qkv": 3 * RANK})
    assert (config["lora_alpha"], config["alpha_pattern"]) == (32, {"in_proj_qkv": 96})
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    kind = layout.layers[0]
    assert isinstance(kind, DeltaNet)
    a, b = tensors[KEY % "A"], tensors[KEY % "B"]
    assert (a.shape, b.shape) == ((3 * RANK, 64), (kind.channels, 3 * RANK))
    left = b.clone()
    for index, (part, (start, end)) in enumerate(kind.sections.items()):
        columns = slice(index * RANK, (index + 1) * RANK)
        assert torch.equal(a[columns], parts(adapter)[part][0])
        assert torch.equal(b[start:end, columns], parts(adapter)[part][1])
        left[start:end, columns] = 0
    assert not left.any()


@pytest.mark.parametrize("rank", [1, 5, 32])
def test_they_come_back_bit_for_bit(hybrid: BaseModel, layout: Layout, family_dir: Dirs, tmp_path: Path, rank: int) -> None:
    adapter = random_adapter(hybrid, rank=rank, seed=1)
    write_peft(adapter, layout, "x", tmp_path / "peft")
    write_download(adapter, layout, str(family_dir("qwen3_5")), "x", tmp_path / "download")
    for directory in ("peft", "download"):
        again = read_peft(tmp_path / directory, layout)
        assert (again.shape.rank, list(again.masters)) == (rank, list(adapter.masters))
        assert all(torch.equal(one, other) for one, other in zip(again.tensors(), adapter.tensors(), strict=True))


def test_a_download_has_the_parts_as_layers_of_their_own(hybrid: BaseModel, layout: Layout, family_dir: Dirs, tmp_path: Path) -> None:
    """So the hosted service names them, and so the Tinker cookbook expects them."""
    adapter = random_adapter(hybrid, rank=RANK, seed=1)
    write_download(adapter, layout, str(family_dir("qwen3_5")), "x", tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert all(len(tensor) == RANK for key, tensor in tensors.items() if ".lora_A." in key)
    for part, pair in parts(adapter).items():
        name = f"base_model.model.model.layers.0.linear_attn.in_proj_{part}"
        assert torch.equal(tensors[f"{name}.lora_A.weight"], pair[0])
        assert torch.equal(tensors[f"{name}.lora_B.weight"], pair[1])


def test_a_plain_adapter_of_peft_is_three_parts_with_one_a(hybrid: BaseModel, layout: Layout, family_dir: Dirs, tmp_path: Path) -> None:
    targets = ["in_proj_qkv", "out_proj", "q_proj"]
    twin = peft_saves(hybrid, family_dir("qwen3_5"), tmp_path, r=RANK, lora_alpha=6, target_modules=targets)
    adapter, rendered = read_peft(tmp_path, layout), example(hybrid)
    assert adapter.shape.rank == RANK
    q, k, v = (parts(adapter)[part][0] for part in "qkv")
    assert torch.equal(q, k)
    assert torch.equal(q, v)
    assert len({tensor.data_ptr() for tensor in (q, k, v)}) == 3  # they are trained apart
    np.testing.assert_allclose(ours(hybrid, adapter, rendered), theirs(twin, hybrid, rendered), atol=CLOSE)


@pytest.mark.parametrize("others", [[], ["q_proj"]])
def test_an_adapter_that_mixes_parts_is_refused_unless_all_have_its_rank(
    hybrid: BaseModel, layout: Layout, family_dir: Dirs, tmp_path: Path, others: list[str]
) -> None:
    options: dict[str, Any] = {"r": RANK, "target_modules": ["in_proj_qkv", *others], "rank_pattern": {"in_proj_qkv": 3 * RANK}}
    twin = peft_saves(hybrid, family_dir("qwen3_5"), tmp_path, **options)
    if not others:
        rendered = example(hybrid)
        adapter = read_peft(tmp_path, layout)
        assert adapter.shape.rank == 3 * RANK
        np.testing.assert_allclose(ours(hybrid, adapter, rendered), theirs(twin, hybrid, rendered), atol=CLOSE)
        return
    with pytest.raises(UserError, match=r"in_proj_qkv: lora_B of rank 12 is not block-diagonal; .* an adapter of rank 4 on each .*q, k, v"):
        read_peft(tmp_path, layout)


@pytest.mark.parametrize("value", [1e-30, float("nan")])
def test_a_single_number_off_the_diagonal_is_refused(hybrid: BaseModel, layout: Layout, tmp_path: Path, value: float) -> None:
    write_peft(random_adapter(hybrid, rank=RANK), layout, "x", tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[KEY % "B"][0, RANK] = value

    rewrite(tmp_path, spoil)
    with pytest.raises(UserError, match=r"layers.0.linear_attn.in_proj_qkv: lora_B of rank 12 is not block-diagonal"):
        read_peft(tmp_path, layout)


def test_an_adapter_of_another_size_is_refused(hybrid: BaseModel, layout: Layout, tmp_path: Path) -> None:
    write_peft(random_adapter(hybrid, rank=RANK), layout, "x", tmp_path)

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[KEY % "B"] = tensors[KEY % "B"][:-1].clone()

    rewrite(tmp_path, cut)
    with pytest.raises(UserError, match=r"in_proj_qkv: lora_A and lora_B are \(12, 64\) and \(127, 12\), which does not fit rank 12"):
        read_peft(tmp_path, layout)


@pytest.mark.parametrize("strange", ["in_proj_a", "in_proj_b", "conv1d"])
def test_what_has_no_adapter_here_is_refused_by_name(
    hybrid: BaseModel, layout: Layout, family_dir: Dirs, tmp_path: Path, strange: str
) -> None:
    options: dict[str, Any] = {
        "r": RANK,
        "target_modules": ["q_proj", strange],
        "rank_pattern": {"conv1d": 128} if strange == "conv1d" else {},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT has thoughts of its own about adapters of a convolution
        peft_saves(hybrid, family_dir("qwen3_5"), tmp_path, **options)
    with pytest.raises(UserError, match=rf"layers.0.linear_attn.{strange}.lora_A.weight, which is no matrix that LoRA trains on this base"):
        read_peft(tmp_path, layout)


def test_a_layer_that_is_covered_twice_is_refused(hybrid: BaseModel, layout: Layout, tmp_path: Path) -> None:
    write_peft(random_adapter(hybrid, rank=RANK), layout, "x", tmp_path)

    def add(tensors: dict[str, Tensor]) -> None:
        for matrix, rows in (("A", slice(0, RANK)), ("B", slice(0, 32))):
            tensors[KEY.replace("qkv", "q") % matrix] = tensors[KEY % matrix][rows, : 64 if matrix == "A" else RANK].clone()

    rewrite(tmp_path, add)
    with pytest.raises(UserError, match=r"the same layer twice, as \S+in_proj_qkv and as \S+in_proj_q;"):
        read_peft(tmp_path, layout)
