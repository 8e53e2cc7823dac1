"""Adapters as PEFT keeps them, and adapters and full weights merged into their base model.

A PEFT adapter holds lora_A and lora_B of each module under the name that transformers gives it, and nothing of the base. Our names begin
inside the language model; the `Layout` of the base translates, and is made without reading a weight.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoTokenizer

from tinsmith.errors import UserError
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.layout import GROUPS, LM_HEAD, Layout
from tinsmith.models.lora import LORA_ALPHA, Adapter, LoraPair, new_adapter
from tinsmith.protocol.shapes import LoraShape

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."
"""What PEFT puts before the name of every module."""
_UNSUPPORTED = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias", "target_parameters")
"""Options of PEFT that change what an adapter computes, or its size."""


def write_peft(adapter: Adapter, base: Layout, base_name: str, directory: Path) -> None:
    """Write a PEFT adapter folder, created if it is not there. It names its base model `base_name`."""
    names = {name: base.module_name(name) for name in adapter.masters}
    # Whole names: a part of a name would also reach the vision tower.
    write_adapter(adapter, names, list(names.values()), base_name, directory)


def write_adapter(adapter: Adapter, names: Mapping[str, str], targets: list[str], base_name: str, directory: Path) -> None:
    """Write the two files of an adapter. `names` maps our names of its modules to those in the file; `targets` is what PEFT looks for."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, pair in adapter.masters.items():
        tensors[f"{_ROOT}{names[name]}.lora_A.weight"] = pair.a
        tensors[f"{_ROOT}{names[name]}.lora_B.weight"] = pair.b
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapter.shape.rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    _share_as(directory / _CONFIG)


@torch.no_grad()
def write_merged(weights: Weights, base: Layout, base_source: str, directory: Path) -> None:
    """Write a transformers model with what was trained, in the dtype of the base, with tokenizer and image processor.

    Raises UserError for full weights of other sizes than those of the base.
    """
    network: Any = base.family.auto_class.from_pretrained(base_source, dtype="auto")
    if isinstance(weights, FullWeights):
        _replace(network, weights, base)
    else:
        _add(network, weights, base)
    network.save_pretrained(directory)
    AutoTokenizer.from_pretrained(base_source).save_pretrained(directory)
    if base.family.takes_images:
        AutoImageProcessor.from_pretrained(base_source).save_pretrained(directory)
    _share_as(directory / "config.json")


def _share_as(config: Path) -> None:
    """Let those read the weights who may read the configuration beside them: safetensors makes files for their owner alone (0600)."""
    for file in config.parent.glob("*.safetensors"):
        file.chmod(config.stat().st_mode & 0o777)


def _replace(network: Any, weights: FullWeights, base: Layout) -> None:
    """Put full weights into the place of the base's."""
    parameters = dict(network.named_parameters())
    for name, master in weights.masters.items():
        parameter = parameters.get(base.parameter_name(name))
        if parameter is None or parameter.shape != master.shape:
            raise UserError(f"the checkpoint holds {name} of shape {tuple(master.shape)}, which this base model does not have")
        parameter.copy_(master)


def _add(network: Any, adapter: Adapter, base: Layout) -> None:
    """Add an adapter to the weights that it changes. An output projection among them becomes the model's own, if it was the embedding."""
    head = network.get_submodule(base.head)
    if LM_HEAD in adapter.masters and head.weight is network.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.clone())
        network.config.tie_word_embeddings = network.config.get_text_config().tie_word_embeddings = False
    for name, pair in adapter.masters.items():
        weight = network.get_submodule(base.module_name(name)).weight
        weight.copy_(weight.float() + adapter.scale * (pair.b @ pair.a))


def read_peft(directory: Path, base: Layout) -> Adapter:
    """The adapter of a PEFT folder, or of a download of the Tinker API, with its scale taken into B.

    It trains attention, MLP and output projection, each wholly or not at all: a group that the folder covers in part is completed with
    modules that change nothing yet. Raises UserError for what LoRA on this base cannot be.
    """
    if not (directory / _CONFIG).is_file() or not (directory / _WEIGHTS).is_file():
        raise UserError(f"{directory} is no PEFT adapter: it must hold {_CONFIG} and {_WEIGHTS}")
    config = json.loads((directory / _CONFIG).read_text())
    wrong = [name for name in _UNSUPPORTED if config.get(name)] + (["bias"] if config.get("bias", "none") != "none" else [])
    if config.get("peft_type") != "LORA" or wrong:
        raise UserError(f"{directory}: {', '.join(wrong) or config.get('peft_type')} of PEFT cannot be used, only plain LoRA of one rank")
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    pairs = _pairs(load_file(directory / _WEIGHTS), base, rank)
    groups = {base.targets[name].group for name in pairs}
    shape = LoraShape(rank, seed=0, **{f"train_{group}": group in groups for group in GROUPS})
    adapter = new_adapter(shape, base, torch.device("cpu"), torch.float32)
    ratio = scale / (LORA_ALPHA / rank)
    scaled = {name: LoraPair(pair.a.float(), pair.b.float() * ratio) for name, pair in pairs.items()}
    return Adapter(shape, adapter.masters | scaled, torch.float32)


def _pairs(tensors: Mapping[str, Tensor], base: Layout, rank: int) -> dict[str, LoraPair]:
    """The matrices by our names. Raises UserError naming a tensor that has no place in the base, or not the right shape."""
    pairs = {}
    rest = set(tensors)
    for name, target in base.targets.items():
        for key in (f"{_ROOT}{base.module_name(name)}", f"{_ROOT}{_downloaded_name(name)}"):
            a, b = f"{key}.lora_A.weight", f"{key}.lora_B.weight"
            if a not in rest or b not in rest:
                continue
            if tensors[a].shape != (rank, target.in_features) or tensors[b].shape != (target.out_features, rank):
                sizes = f"{tuple(tensors[a].shape)} and {tuple(tensors[b].shape)}"
                raise UserError(f"{key}: lora_A and lora_B are {sizes}, which does not fit rank {rank} and this base model")
            pairs[name] = LoraPair(tensors[a], tensors[b])
            rest -= {a, b}
    if rest or not pairs:
        raise UserError(f"the adapter holds {min(rest, default='nothing')}, which is no LoRA matrix of this base model's language model")
    return pairs


def _downloaded_name(name: str) -> str:
    """What downloads of the Tinker API call a module, whatever model the language model is a part of."""
    return "model.unembed_tokens" if name == LM_HEAD else f"model.{name}"
