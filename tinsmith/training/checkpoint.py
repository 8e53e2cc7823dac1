"""The files of a saved adapter, and of its optimizer if it can be trained on. All that makes a resumed run equal an uninterrupted one.

    checkpoint.json         format version, base model, architecture, shape of the adapter
    adapter.safetensors     MODULE.a, MODULE.b: the float32 masters
    optimizer.safetensors   MODULE.a.exp_avg and so on: what AdamW remembers; only where it was asked for

They are written to a temporary directory beside the final one, flushed to the disk and then renamed: a checkpoint is complete or absent.
Gradients that wait for their optim_step are no part of it.
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter, LoraPair, LoraShape

FORMAT_VERSION = 1
TEMPORARY_PREFIX = ".writing-"
"""Directories of this name were never finished."""

_ABOUT, _ADAPTER, _OPTIMIZER = "checkpoint.json", "adapter.safetensors", "optimizer.safetensors"


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
        """The description of an adapter of this base."""
        return cls(base.name, base.tokenizer_id, base.family.model_type, shape)


def write_checkpoint(directory: Path, about: About, adapter: Adapter, moments: dict[str, Tensor] | None = None) -> None:
    """Write an adapter, and what its optimizer remembers, to `directory`, which must not exist.

    Raises TinsmithError if the disk does not take it; then nothing is there.
    """
    try:
        _write(directory, about, adapter, moments)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
        raise TinsmithError(
            f"the checkpoint could not be written to {directory.parent}: {error}; make room there and save again"
        ) from error


def _write(directory: Path, about: About, adapter: Adapter, moments: dict[str, Tensor] | None) -> None:
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=directory.parent, ignore_cleanup_errors=True) as temporary:
        files = Path(temporary)
        save_file(adapter.named_tensors(), files / _ADAPTER)
        if moments is not None:
            save_file(moments, files / _OPTIMIZER)
        (files / _ABOUT).write_text(json.dumps({"format_version": FORMAT_VERSION} | asdict(about), indent=1))
        for path in (*files.iterdir(), files):
            _flush(path)
        files.rename(directory)
    _flush(directory.parent)


def read_about(directory: Path) -> About:
    """What the checkpoint in `directory` is. Raises UserError if its format is newer than ours."""
    about = json.loads((directory / _ABOUT).read_text())
    version = about.pop("format_version")
    if version != FORMAT_VERSION:
        raise UserError(f"the checkpoint has format version {version}; this Tinsmith reads {FORMAT_VERSION}, use the one that wrote it")
    return About(**about | {"shape": LoraShape(**about["shape"])})


def read_adapter(directory: Path, base: BaseModel) -> Adapter:
    """The adapter of a checkpoint, on the device of `base`. Raises UserError if it does not fit that model."""
    about = read_about(directory)
    adapter = stored_adapter(directory, about, str(base.device), base.dtype)
    sizes = {name: (pair.a.shape[1], pair.b.shape[0]) for name, pair in adapter.masters.items()}
    targets = base.lora_targets(about.shape)
    if about.architecture != base.family.model_type or sizes != targets:
        raise UserError(
            f"the checkpoint was made for {about.base_model} ({about.architecture}) and does not fit base model {base.name} "
            f"({base.family.model_type}): modules or their sizes differ"
        )
    # In the order of a fresh adapter, so that sums over all tensors, such as the gradient norm, round as they did.
    return Adapter(adapter.shape, {name: adapter.masters[name] for name in targets}, adapter.dtype)


def stored_adapter(directory: Path, about: About, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Adapter:
    """The adapter as it lies in `directory`, whatever its base."""
    tensors = load_file(directory / _ADAPTER, device=device)
    names = dict.fromkeys(key.rpartition(".")[0] for key in tensors)
    return Adapter(about.shape, {name: LoraPair(tensors[f"{name}.a"], tensors[f"{name}.b"]) for name in names}, dtype)


def read_moments(directory: Path, device: torch.device) -> dict[str, Tensor]:
    """What the optimizer remembers. Raises UserError if the checkpoint holds weights only."""
    if not has_moments(directory):
        raise UserError("the checkpoint holds no optimizer state; load it without (create_training_client_from_state)")
    return load_file(directory / _OPTIMIZER, device=str(device))


def has_moments(directory: Path) -> bool:
    """Whether the checkpoint holds what its optimizer remembers."""
    return (directory / _OPTIMIZER).exists()


def _flush(path: Path) -> None:
    """Make the disk hold what was written to a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
