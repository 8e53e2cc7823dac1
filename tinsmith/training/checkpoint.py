"""The files of saved weights, and of their optimizer if they can be trained on.

All that makes a resumed run equal an uninterrupted one.

    checkpoint.json         format version, base model and its fingerprint, architecture, shape of the adapter; rank 0
                            means full weights
    adapter.safetensors     MODULE.a, MODULE.b: the float32 masters; of full weights the parameters by their names in
                            the language model
    optimizer.safetensors   MODULE.a.exp_avg and so on: what AdamW remembers; only where it was asked for

Gradients that wait for their optim_step are no part of it. `store/files.py` makes the directory complete or absent,
`store/manifest.py` keeps the checksums of its files.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinsmith.errors import TinsmithError, UserError
from tinsmith.kernels.device import to_host
from tinsmith.models.base import BaseModel
from tinsmith.models.fingerprint import check_fingerprint
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.lora import Adapter, LoraPair, adapter_of
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.store.files import ABOUT_FILE, OPTIMIZER_FILE
from tinsmith.training.tensor_files import write_tensors
from tinsmith.training.update_check import MOMENTS

FORMAT_VERSION = 2

WEIGHTS_FILE = "adapter.safetensors"


@dataclass(frozen=True)
class About:
    """Contents of checkpoint.json."""

    base_model: str
    base_source: str
    """Directory or Hub id of the base model."""
    architecture: str
    shape: LoraShape
    base_fingerprint: str | None
    """Fingerprint of the base's weights (`models/fingerprint.py`); None if unknown."""
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, base: BaseModel, shape: LoraShape) -> "About":
        return cls(base.name, base.tokenizer_id, base.family.model_type, shape, base.fingerprint)

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @property
    def public_base(self) -> str:
        """The base's name outside this machine: its Hub id, or the served name of a directory."""
        return self.base_model if Path(self.base_source).is_absolute() else self.base_source


@dataclass(frozen=True, eq=False)
class SavedState:
    """State of a checkpoint, copied from a model or read from files."""

    about: About
    tensors: Mapping[str, Tensor]
    """Masters by name, in the order of fresh weights: float32, or the base's precision for frozen full weights."""
    moments: Mapping[str, Tensor] | None = None
    """Moments of AdamW (`ModelOptimizer.moments`); None for weights alone."""

    def on_host(self) -> "SavedState":
        """Copy to host memory what does not lie there. Any thread may do this, and waits for the device alone."""
        moments = None if self.moments is None else copied(self.moments)
        return SavedState(self.about, copied(self.tensors), moments)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move tensors to the host's memory. What lies side by side in memory travels at once, and lies so again."""
    memories: dict[int, tuple[Tensor, Tensor]] = {}
    """The bytes of each memory, which must not be freed meanwhile, and where they are now."""

    def moved(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in memories:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            memories[place] = whole, to_host(whole)
        there = memories[place][1].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())

    return {name: moved(tensor) for name, tensor in tensors.items()}


def copy_to_host(about: About, weights: Weights, moments: Mapping[str, Tensor] | None) -> SavedState:
    """Copy weights and moments to host memory. Any thread may write the copy while training goes on."""
    copied = None if moments is None else {name: tensor.to("cpu", copy=True) for name, tensor in moments.items()}
    return SavedState(
        about, {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.named_tensors().items()}, copied
    )


def write_state(state: SavedState, directory: Path) -> None:
    """Write the files of a checkpoint to `directory`, which is made if missing; any thread may do this.

    Raises TinsmithError if the disk does not take it; delete then what is in the directory.
    """
    try:
        directory.mkdir(exist_ok=True)
        write_tensors(state.tensors, directory / WEIGHTS_FILE)
        if state.moments is not None:
            write_tensors(state.moments, directory / OPTIMIZER_FILE)
        (directory / ABOUT_FILE).write_text(state.about.text)
    except OSError as error:
        raise TinsmithError(
            f"the checkpoint could not be written to {directory.parent}: {error}; make room there and save again"
        ) from error


def read_about(directory: Path) -> About:
    """Read the description of the checkpoint in `directory`.

    Raises UserError if its format is not ours, TinsmithError naming the file if it is damaged, FileNotFoundError if it
    is not there.
    """
    path = directory / ABOUT_FILE
    text = path.read_bytes()
    try:
        about = json.loads(text)
        version = about["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"the checkpoint has format version {version}; this Tinsmith reads {FORMAT_VERSION}, "
                "use the one that wrote it"
            )
        return About(**about | {"shape": LoraShape(**about["shape"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> TinsmithError:
    return TinsmithError(
        f"{path} is damaged ({error}); put back a copy of its directory {path.parent.name}, or use another checkpoint"
    )


def read_state(directory: Path, base: BaseModel, optimizer: bool = False) -> SavedState:
    """Read the checkpoint in `directory`, with AdamW's moments if `optimizer`, and check that it fits `base`.

    Any thread may do this. Adapters are read into memory. Full weights are mapped, so that they take none before a
    model that they replace has given up its own.

    Raises UserError if the checkpoint does not fit, was trained on other weights of the base, or lacks the moments;
    TinsmithError naming a damaged file.
    """
    about = _check_fits(directory, base)
    mapped = about.shape.rank == 0
    tensors = _tensors(directory / WEIGHTS_FILE, mapped)
    # In the order of fresh weights, so that sums over all tensors, such as the gradient norm, round as they did.
    ordered = {name: tensors[name] for name in _expected(base, about.shape)}
    return SavedState(about, ordered, _moments(directory, ordered, mapped) if optimizer else None)


def weights_from(state: SavedState, base: BaseModel, ref: WeightsRef | None = None) -> Weights:
    """Make weights of a state on the device of `base`.

    On a CPU they are copied too: products round by where a matrix begins, which in a file is any multiple of 8 bytes.

    With a `ref` they are only sampled from, under that identity: full weights then have only the base's precision.
    """
    shape = state.about.shape
    if shape.rank > 0:
        return _adapter(shape, state.tensors, base.dtype, ref, base.device)
    dtype = base.dtype if ref is not None else torch.float32
    masters = {
        name: tensor.to(base.device, dtype, copy=base.device.type == "cpu") for name, tensor in state.tensors.items()
    }
    return FullWeights(shape, masters, base.dtype, ref)


def _moments(directory: Path, weights: Mapping[str, Tensor], mapped: bool) -> dict[str, Tensor]:
    """Read AdamW's moments of these weights. Raises UserError if the checkpoint holds weights only."""
    path = directory / OPTIMIZER_FILE
    if not has_moments(directory):
        raise UserError("the checkpoint holds no optimizer state; load it without (create_training_client_from_state)")
    moments = _tensors(path, mapped)
    strange = [name for name in moments if name.rpartition(".")[0] not in weights]
    if strange:
        raise _damaged(path, ValueError(f"{strange[0]} belongs to no tensor of {WEIGHTS_FILE}"))
    missing = [
        f"{name}.{entry}" for name in weights for entry in MOMENTS if moments and f"{name}.{entry}" not in moments
    ]
    if missing:
        raise _damaged(path, ValueError(f"{missing[0]} is missing"))
    steps = {moments[f"{name}.step"].item() for name in weights} if moments else set()
    if len(steps) > 1:
        raise _damaged(
            path,
            ValueError(
                f"its tensors have made {min(steps):.0f} to {max(steps):.0f} steps, but all make each step together"
            ),
        )
    return moments


def _check_fits(directory: Path, base: BaseModel) -> About:
    """Read the description of a checkpoint and check names and sizes of its weights. Raises as `read_state`."""
    about = read_about(directory)
    with _opened(directory / WEIGHTS_FILE) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    if about.architecture != base.family.model_type or shapes != _expected(base, about.shape):
        raise UserError(
            f"the checkpoint was made for {about.base_model} ({about.architecture}) and does not fit base model "
            f"{base.name} ({base.family.model_type}): modules or their sizes differ"
        )
    check_fingerprint(about.base_fingerprint, base.fingerprint, base.name, "the checkpoint")
    return about


def stored_weights(directory: Path, about: About) -> Weights:
    """Map the weights in `directory`, whatever their base, on the CPU."""
    return weights_on_host(SavedState(about, _tensors(directory / WEIGHTS_FILE, mapped=True)))


def weights_on_host(state: SavedState) -> Weights:
    """Make weights on the CPU in float32; full weights take the tensors of `state`."""
    shape, tensors = state.about.shape, state.on_host().tensors
    return _adapter(shape, tensors, torch.float32) if shape.rank > 0 else FullWeights(shape, tensors, torch.float32)


def _expected(base: BaseModel, shape: LoraShape) -> dict[str, tuple[int, ...]]:
    """The shape of every master tensor of weights of this base, by name, in order."""
    if shape.rank == 0:
        return {name: tuple(parameter.shape) for name, parameter in base.full_targets(shape).items()}
    expected: dict[str, tuple[int, ...]] = {}
    for name, target in base.layout.covered(shape).items():
        expected |= dict(zip((f"{name}.a", f"{name}.b"), target.shapes(shape.rank), strict=True))
    return expected


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors. Raises TinsmithError if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _tensors(path: Path, mapped: bool) -> dict[str, Tensor]:
    """Read a file: `mapped`, so that its pages come and go, or copied into memory."""
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    return tensors if mapped else {name: tensor.clone() for name, tensor in tensors.items()}


def _adapter(
    shape: LoraShape,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    ref: WeightsRef | None = None,
    device: torch.device | None = None,
) -> Adapter:
    names = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    pairs = {name: LoraPair(tensors[f"{name}.a"].float(), tensors[f"{name}.b"].float()) for name in names}
    return adapter_of(shape, pairs, dtype, ref, device)


def has_moments(directory: Path) -> bool:
    """Whether the checkpoint holds AdamW's moments."""
    return (directory / OPTIMIZER_FILE).exists()
