"""The files of saved weights, and of their optimizer if they can be trained on. All that makes a resumed run equal an uninterrupted one.

    checkpoint.json         format version, base model and its fingerprint, architecture, shape of the adapter; rank 0 means full weights
    adapter.safetensors     MODULE.a, MODULE.b: the float32 masters; of full weights the parameters by their names in the language model
    optimizer.safetensors   MODULE.a.exp_avg and so on: what AdamW remembers; only where it was asked for

Gradients that wait for their optim_step are no part of it. `store/files.py` makes the directory complete or absent, `store/manifest.py`
keeps the checksums of its files.
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
from tinsmith.models.fingerprint import check_fingerprint
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.lora import Adapter, LoraPair
from tinsmith.protocol.shapes import LoraShape

FORMAT_VERSION = 2
_READABLE = (1, 2)
"""Version 1 has no fingerprint of the base."""

OPTIMIZER_FILE = "optimizer.safetensors"
_ABOUT, _WEIGHTS = "checkpoint.json", "adapter.safetensors"


@dataclass(frozen=True)
class About:
    """What checkpoint.json says."""

    base_model: str
    base_source: str
    """Where the base model was loaded from: a directory or a Hub id."""
    architecture: str
    shape: LoraShape
    base_fingerprint: str | None
    """Of the base's weights (`models/fingerprint.py`); None if they are not known."""
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, base: BaseModel, shape: LoraShape) -> "About":
        """The description of weights for this base."""
        return cls(base.name, base.tokenizer_id, base.family.model_type, shape, base.fingerprint)

    @property
    def public_base(self) -> str:
        """The base's name outside this machine: its Hub id, or the name that it is served under if it was loaded from a directory."""
        return self.base_model if Path(self.base_source).is_absolute() else self.base_source


def write_checkpoint(directory: Path, about: About, weights: Weights, moments: dict[str, Tensor] | None = None) -> None:
    """Write weights, and what their optimizer remembers, to `directory`, made if it is not there.

    Raises TinsmithError if the disk does not take it; what there is then must be deleted.
    """
    try:
        directory.mkdir(exist_ok=True)
        save_file(weights.named_tensors(), directory / _WEIGHTS)
        if moments is not None:
            save_file(moments, directory / OPTIMIZER_FILE)
        (directory / _ABOUT).write_text(json.dumps(asdict(about), indent=1))
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
        raise TinsmithError(
            f"the checkpoint could not be written to {directory.parent}: {error}; make room there and save again"
        ) from error


def read_about(directory: Path) -> About:
    """What the checkpoint in `directory` is.

    Raises UserError if its format is newer than ours, TinsmithError naming the file if it is damaged, FileNotFoundError if it is not there.
    """
    path = directory / _ABOUT
    text = path.read_bytes()
    try:
        about = json.loads(text)
        version = about["format_version"]
        if version not in _READABLE:
            raise UserError(
                f"the checkpoint has format version {version}; this Tinsmith reads up to {FORMAT_VERSION}, use the one that wrote it"
            )
        return About(**{"base_fingerprint": None} | about | {"shape": LoraShape(**about["shape"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> TinsmithError:
    return TinsmithError(f"{path} is damaged ({error}); put back a copy of its directory {path.parent.name}, or use another checkpoint")


def read_weights(directory: Path, base: BaseModel, frozen: bool = False) -> Weights:
    """The weights of a checkpoint, on the device of `base`; full ones that are `frozen` only in its precision.

    Raises UserError if they do not fit that model or were trained on other weights of it, TinsmithError if a file is damaged.
    """
    about = check_fits(directory, base)
    dtype = base.dtype if frozen and about.shape.rank == 0 else torch.float32
    tensors = _tensors(directory, str(base.device), dtype)
    # In the order of fresh weights, so that sums over all tensors, such as the gradient norm, round as they did.
    return _weights(about.shape, {name: tensors[name] for name in _expected(base, about.shape)}, base.dtype)


def check_fits(directory: Path, base: BaseModel) -> About:
    """What the checkpoint in `directory` is, after a look at the names and sizes of its weights. Raises as `read_weights`."""
    about = read_about(directory)
    path = directory / _WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    except SafetensorError as error:
        raise _damaged(path, error) from error
    if about.architecture != base.family.model_type or shapes != _expected(base, about.shape):
        raise UserError(
            f"the checkpoint was made for {about.base_model} ({about.architecture}) and does not fit base model {base.name} "
            f"({base.family.model_type}): modules or their sizes differ"
        )
    check_fingerprint(about.base_fingerprint, base.fingerprint, base.name, "the checkpoint")
    return about


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
    path = directory / _WEIGHTS
    try:
        with safe_open(path, "pt", device=device) as file:
            return {name: file.get_tensor(name).to(dtype) for name in file.offset_keys()}
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _weights(shape: LoraShape, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    if shape.rank == 0:
        return FullWeights(shape, dict(tensors), dtype)
    names = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    return Adapter(shape, {name: LoraPair(tensors[f"{name}.a"], tensors[f"{name}.b"]) for name in names}, dtype)


def read_moments(directory: Path, device: torch.device) -> dict[str, Tensor]:
    """What the optimizer remembers. Raises UserError if the checkpoint holds weights only."""
    if not has_moments(directory):
        raise UserError("the checkpoint holds no optimizer state; load it without (create_training_client_from_state)")
    try:
        return load_file(directory / OPTIMIZER_FILE, device=str(device))
    except SafetensorError as error:
        raise _damaged(directory / OPTIMIZER_FILE, error) from error


def has_moments(directory: Path) -> bool:
    """Whether the checkpoint holds what its optimizer remembers."""
    return (directory / OPTIMIZER_FILE).exists()
