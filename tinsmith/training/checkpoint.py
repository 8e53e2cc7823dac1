"""The files of saved weights, and of their optimizer if they can be trained on. All that makes a resumed run equal an uninterrupted one.

    checkpoint.json         format version, base model, architecture, shape of the adapter; rank 0 means full weights
    adapter.safetensors     MODULE.a, MODULE.b: the float32 masters; of full weights the parameters by their names in the language model
    optimizer.safetensors   MODULE.a.exp_avg and so on: what AdamW remembers; only where it was asked for

They are written to a temporary directory beside the final one, flushed to the disk and then renamed: a checkpoint is complete or absent.
Gradients that wait for their optim_step are no part of it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.lora import Adapter, LoraPair, LoraShape
from tinsmith.store.files import whole_directory

FORMAT_VERSION = 1

_ABOUT, _WEIGHTS, _OPTIMIZER = "checkpoint.json", "adapter.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class About:
    """What checkpoint.json says."""

    base_model: str
    base_source: str
    """Where the base model was loaded from: a directory or a Hub id."""
    architecture: str
    shape: LoraShape

    @classmethod
    def of(cls, base: BaseModel, shape: LoraShape) -> "About":
        """The description of weights for this base."""
        return cls(base.name, base.tokenizer_id, base.family.model_type, shape)


def write_checkpoint(directory: Path, about: About, weights: Weights, moments: dict[str, Tensor] | None = None) -> None:
    """Write weights, and what their optimizer remembers, to `directory`, which must not exist.

    Raises TinsmithError if the disk does not take it; then nothing is there.
    """
    try:
        _write(directory, about, weights, moments)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
        raise TinsmithError(
            f"the checkpoint could not be written to {directory.parent}: {error}; make room there and save again"
        ) from error


def _write(directory: Path, about: About, weights: Weights, moments: dict[str, Tensor] | None) -> None:
    with whole_directory(directory) as files:
        save_file(weights.named_tensors(), files / _WEIGHTS)
        if moments is not None:
            save_file(moments, files / _OPTIMIZER)
        (files / _ABOUT).write_text(json.dumps({"format_version": FORMAT_VERSION} | asdict(about), indent=1))


def read_about(directory: Path) -> About:
    """What the checkpoint in `directory` is. Raises UserError if its format is newer than ours."""
    about = json.loads((directory / _ABOUT).read_text())
    version = about.pop("format_version")
    if version != FORMAT_VERSION:
        raise UserError(f"the checkpoint has format version {version}; this Tinsmith reads {FORMAT_VERSION}, use the one that wrote it")
    return About(**about | {"shape": LoraShape(**about["shape"])})


def read_weights(directory: Path, base: BaseModel, frozen: bool = False) -> Weights:
    """The weights of a checkpoint, on the device of `base`; full ones that are `frozen` only in its precision.

    Raises UserError if they do not fit that model.
    """
    about = read_about(directory)
    dtype = base.dtype if frozen and about.shape.rank == 0 else torch.float32
    tensors = _tensors(directory, str(base.device), dtype)
    expected = _expected(base, about.shape)
    if about.architecture != base.family.model_type or {name: tensor.shape for name, tensor in tensors.items()} != expected:
        raise UserError(
            f"the checkpoint was made for {about.base_model} ({about.architecture}) and does not fit base model {base.name} "
            f"({base.family.model_type}): modules or their sizes differ"
        )
    # In the order of fresh weights, so that sums over all tensors, such as the gradient norm, round as they did.
    return _weights(about.shape, {name: tensors[name] for name in expected}, base.dtype)


def stored_weights(directory: Path, about: About) -> Weights:
    """The weights as they lie in `directory`, whatever their base, on the CPU."""
    return _weights(about.shape, _tensors(directory, "cpu", torch.float32), torch.float32)


def _expected(base: BaseModel, shape: LoraShape) -> dict[str, tuple[int, ...]]:
    """The shape of every master tensor that weights of this base have, by name, in order."""
    if shape.rank == 0:
        return {name: tuple(parameter.shape) for name, parameter in base.full_targets(shape).items()}
    expected: dict[str, tuple[int, ...]] = {}
    for name, (in_features, out_features) in base.lora_targets(shape).items():
        expected |= {f"{name}.a": (shape.rank, in_features), f"{name}.b": (out_features, shape.rank)}
    return expected


def _tensors(directory: Path, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What was saved, one tensor after the other: never all of it in two precisions."""
    with safe_open(directory / _WEIGHTS, "pt", device=device) as file:
        return {name: file.get_tensor(name).to(dtype) for name in file.offset_keys()}


def _weights(shape: LoraShape, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    if shape.rank == 0:
        return FullWeights(shape, dict(tensors), dtype)
    names = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    return Adapter(shape, {name: LoraPair(tensors[f"{name}.a"], tensors[f"{name}.b"]) for name in names}, dtype)


def read_moments(directory: Path, device: torch.device) -> dict[str, Tensor]:
    """What the optimizer remembers. Raises UserError if the checkpoint holds weights only."""
    if not has_moments(directory):
        raise UserError("the checkpoint holds no optimizer state; load it without (create_training_client_from_state)")
    return load_file(directory / _OPTIMIZER, device=str(device))


def has_moments(directory: Path) -> bool:
    """Whether the checkpoint holds what its optimizer remembers."""
    return (directory / _OPTIMIZER).exists()
