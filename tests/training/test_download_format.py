"""How the modules of downloaded adapters are named, and that they come back. What the cookbook makes of them: tests/recipes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.bases import load, random_adapter
from tinsmith.models.layout import read_layout
from tinsmith.training.download_format import write_download
from tinsmith.training.peft_format import read_peft, write_peft

Dirs = Callable[[str], Path]
PROJECTION = "layers.0.self_attn.q_proj"


def names(directory: Path, is_refused: bool = False) -> set[str]:
    """The modules of an adapter. Its configuration targets all of them, or all but the output projection, so that PEFT refuses it."""
    tensors = load_file(directory / "adapter_model.safetensors")
    found = {key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for key in tensors if ".lora_A" in key}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert found - set(config["target_modules"]) == ({"lm_head"} if is_refused else set())
    assert config["base_model_name_or_path"] == "the base"
    return found


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("llama", "model."), ("qwen3", "model."), ("qwen3_vl", "model."), ("qwen2_5_vl", "model.language_model.")],
)
def test_modules_are_named_as_the_cookbook_expects_for_the_files_of_the_base(
    family_dir: Dirs, tmp_path: Path, family: str, prefix: str
) -> None:
    """llama has an output projection of its own; the files of the tiny Qwen2.5-VL, as those on the Hub, leave `language_model.` out."""
    source = str(family_dir(family))
    adapter = random_adapter(load(family_dir(family), device="cpu"), rank=4, seed=1)
    write_download(adapter, read_layout(source), source, "the base", tmp_path)
    modules = names(tmp_path, is_refused=family == "qwen3_vl")
    assert {f"{prefix}{PROJECTION}", "lm_head"} < modules
    assert all(name.startswith(f"{prefix}layers.") or name == "lm_head" for name in modules)
    again = read_peft(tmp_path, read_layout(source))
    assert all(torch.equal(one, other) for one, other in zip(again.tensors(), adapter.tensors(), strict=True))


def test_the_names_in_several_files_of_a_base_are_read(family_dir: Dirs, tmp_path: Path) -> None:
    source = family_dir("qwen3_vl")
    AutoModelForImageTextToText.from_pretrained(source).save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    adapter = random_adapter(load(source, device="cpu"), rank=4, seed=1)
    write_download(adapter, read_layout(str(source)), str(tmp_path / "parts"), "the base", tmp_path / "out")
    assert f"model.{PROJECTION}" in names(tmp_path / "out", is_refused=True)


def test_a_download_of_the_hosted_service_is_read(family_dir: Dirs, tmp_path: Path) -> None:
    """It calls the output projection `model.unembed_tokens`."""
    base = read_layout(str(family_dir("qwen3_vl")))
    adapter = random_adapter(load(family_dir("qwen3_vl"), device="cpu"), rank=4, seed=1)
    write_peft(adapter, base, "the base", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    renamed = {
        key.replace(".lm_head.", ".model.unembed_tokens.").replace("model.language_model.", "model."): tensor
        for key, tensor in load_file(file).items()
    }
    save_file(renamed, file)
    again = read_peft(tmp_path, base)
    assert all(torch.equal(one, other) for one, other in zip(again.tensors(), adapter.tensors(), strict=True))
