"""The differences between model families, one place each. Everything else is read from a model's configuration.

A text model needs no entry here: whatever `AutoModelForCausalLM` loads is taken, and the self-check
(`sampling/self_check.py`) decides.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from tinsmith.errors import ConfigError
from tinsmith.models.files import EXPERT_MODELS, EXPERTS, code_of_its_own, require_usable, safetensors_files
from tinsmith.models.layers import layers_of
from tinsmith.models.mxfp4 import BLOCKS, METHOD, SCALES, StoredParameter, dequantized, stored_parameters

_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StrictDataclassError)
"""Exceptions of transformers for configurations with damaged values."""
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary types whose angles do not depend on how long the row is; with the others, packing would change the numbers."""


@dataclass(frozen=True)
class Family:
    """A model architecture as transformers names it (`model_type`), and how Tinsmith treats it."""

    model_type: str
    takes_images: bool = False
    mrope: bool = False
    """Positions have three rows: time, height and width of an image's patches."""

    @property
    def auto_class(self) -> Any:
        """The class of transformers that loads such a model."""
        return AutoModelForImageTextToText if self.takes_images else AutoModelForCausalLM

    def language_model(self, network: Any) -> Any:
        """The decoder without its output projection, inside a loaded transformers model."""
        return network.model.language_model if self.takes_images else network.base_model


IMAGE_FAMILIES = {
    kind: Family(kind, takes_images=True, mrope=True)
    for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
}


def read_config(source: str) -> Any:
    """The transformers configuration of a model in a local directory or of a Hub id. Raises ConfigError without one."""
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except _UNREADABLE as error:
        code = code_of_its_own(source) if "trust_remote_code" in str(error) else None
        if code is not None:
            raise ConfigError(
                f"{source}: it needs code of its own ({code}), which is not run; name another model"
            ) from error
        if Path(source).is_dir():
            raise ConfigError(
                f"{source}/config.json cannot be used: {_reason(error)}; download it again, or name another model"
            ) from error
        reason = (str(error).splitlines() or [repr(error)])[0].rstrip(".")
        raise ConfigError(
            f"{source}: the model's configuration cannot be read: {reason}; "
            "there is no directory of that name, and where the Hub "
            "cannot be reached, give --base-model the directory of the model"
        ) from error


def empty_network(source: str, family: Family, config: Any) -> Any:
    """The transformers model without memory for its weights. Raises ConfigError if there is no such network."""
    try:
        with torch.device("meta"):
            return family.auto_class.from_config(config, trust_remote_code=False)
    except (RuntimeError, *_UNREADABLE) as error:
        raise ConfigError(
            f"{source}: no network can be made of its config.json: {_reason(error)}; download it again"
        ) from error


def load_network(source: str, family: Family, dtype: Any, apart: Mapping[str, StoredParameter] | None = None) -> Any:
    """The network with all of its weights from the files: transformers only warns of those that it makes at random.

    Parameters `apart`, from `packed_parameters`, get their shape and no numbers, nor memory for these. Files are
    checked before, and those from the Hub afterwards too. Raises ConfigError for what cannot be used.
    """
    local = Path(source).is_dir()
    require_usable([source], whole=local)  # a command has looked at a directory, but not at what comes from the Hub
    try:
        # Tensors of other sizes are refused below, by name
        settings = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        config = read_config(source)
        if is_packed(config):
            network, loaded = _load_packed(source, family, config, settings, apart or {})
        else:
            network, loaded = family.auto_class.from_pretrained(source, **settings, trust_remote_code=False)
    except (*_UNREADABLE, RuntimeError, ImportError, EOFError, PickleError, SafetensorError) as error:
        require_usable([source], whole=False)
        remedy = (
            "download config.json and weights of the same model again"
            if local
            else "try again, or name a directory that has it"
        )
        raise ConfigError(f"{source}: transformers cannot load it as a decoder: {_reason(error)}; {remedy}") from error
    if not local:
        require_usable([source], whole=False)
    if loaded["mismatched_keys"]:
        name, theirs, ours = min(loaded["mismatched_keys"])
        raise ConfigError(
            f"{source}: its weights hold {name} of shape {list(theirs)}, and a {family.model_type} of its config.json "
            f"has {list(ours)}; "
            "download both of the same model again"
        )
    if loaded["missing_keys"]:
        raise ConfigError(
            f"{source}: its weights lack {min(loaded['missing_keys'])}, which a {family.model_type} of its config.json "
            "has; "
            "download both of the same model again"
        )
    return network


def is_packed(config: Any) -> bool:
    """Whether experts of a model with this transformers configuration are in MXFP4 on disk."""
    return (getattr(config, "quantization_config", None) or {}).get("quant_method") == METHOD


def packed_parameters(source: str) -> dict[str, StoredParameter]:
    """The parameters of a model that are in MXFP4 on disk, by name; none of most models.

    Raises ConfigError for files that cannot be used.
    """
    require_usable([source], whole=Path(source).is_dir())
    return stored_parameters(_packed_files(source)) if is_packed(read_config(source)) else {}


def _packed_files(source: str) -> list[Path]:
    directory = Path(source)
    if not directory.is_dir():  # other formats of the same weights lie in directories beside
        directory = Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"], ignore_patterns="*/*"))
    return safetensors_files(directory)


def _load_packed(
    source: str, family: Family, config: Any, settings: dict[str, Any], apart: Mapping[str, StoredParameter]
) -> tuple[Any, Any]:
    """Load a network whose experts are in MXFP4 on disk, in the precision of the others.

    Returns also what transformers says of it. Packed experts are read here, as transformers computes with them packed
    where it can.
    """
    del config.quantization_config
    if settings["dtype"] == "auto":  # published configurations name none; what is not packed is in bfloat16
        settings = settings | {"dtype": config.dtype or torch.bfloat16}
    files, dtype = _packed_files(source), settings["dtype"]
    tensors: dict[str, Any] = {name: torch.zeros((), dtype=dtype).expand(own.shape) for name, own in apart.items()}
    for name, own in stored_parameters(files).items():
        if name not in apart:
            tensors[name] = dequantized(own.read(), dtype)
    with ExitStack() as opened:
        for file in files:
            each = opened.enter_context(safe_open(file, framework="pt"))
            names = (name for name in list(each.keys()) if not name.endswith((BLOCKS, SCALES)))
            tensors |= {name: each.get_slice(name) for name in names}
        kind = type(empty_network(source, family, config))
        network, loaded = kind.from_pretrained(None, config=config, state_dict=tensors, **settings)
    directory = files[0].parent
    if (directory / "generation_config.json").exists():
        network.generation_config = GenerationConfig.from_pretrained(directory)
    return network, loaded


def _reason(error: Exception) -> str:
    """Return an error's message as one line without a final dot."""
    return " ".join(str(error).split()).rstrip(".") or repr(error)


def family_of(source: str, config: Any) -> Family:
    """The family of a model with this transformers configuration.

    Raises ConfigError, naming `source`, for other image or audio models, encoders, mixtures of experts, unknown kinds
    of layers, and rotary positions that depend on the length of a row.
    """
    text = config.get_text_config()
    kind = config.model_type
    if kind not in IMAGE_FAMILIES and text is not config:
        raise ConfigError(
            f"{source}: image models of type {kind!r} are not supported; supported are {', '.join(IMAGE_FAMILIES)}"
        )
    if config.is_encoder_decoder:
        raise ConfigError(f"{source}: {kind!r} has an encoder; Tinsmith trains decoders")
    for name in EXPERTS:
        if (getattr(text, name, None) or 0) > 1 and kind not in EXPERT_MODELS:
            raise ConfigError(
                f"{source}: {kind!r} is a mixture of experts ({name}={getattr(text, name)}), which LoRA "
                f"does not reach yet; it reaches those of {', '.join(EXPERT_MODELS)}"
            )
    layers_of(source, kind, text)
    _check_rope(source, getattr(text, "rope_parameters", None) or {})
    return IMAGE_FAMILIES.get(kind) or Family(kind)


def _check_rope(source: str, parameters: dict[str, Any]) -> None:
    for group in [parameters, *(group for group in parameters.values() if isinstance(group, dict))]:
        kind = group.get("rope_type", "default")
        if kind not in SUPPORTED_ROPE:
            raise ConfigError(
                f"{source}: rotary type {kind!r} changes with the length of a row; "
                f"supported are {', '.join(SUPPORTED_ROPE)}"
            )


def context_length(name: str, text_config: Any, wanted: int) -> int:
    """The longest sequence in tokens: `wanted` (max_context), or for 0 what the model was built for.

    Raises ConfigError beyond that.
    """
    limit: int = text_config.max_position_embeddings
    if wanted > limit:
        raise ConfigError(f"max_context={wanted} is more than {name} was built for: {limit} tokens")
    return wanted or limit


@dataclass(frozen=True)
class ImageSpan:
    """Place of one image in a sequence: positions [offset, offset + length), a (t, h, w) grid of patches."""

    offset: int
    length: int
    grid_thw: tuple[int, int, int]


def positions(family: Family, length: int, spans: tuple[ImageSpan, ...], merge_size: int) -> Tensor:
    """Rotary positions of a sequence of `length` tokens: [1, length], or [3, length] for an M-RoPE family.

    M-RoPE (Qwen2-VL, arXiv 2409.12191): text advances all three rows together; an image keeps time still and counts its
    merged rows and columns; what follows starts after the larger of the two.
    """
    if not family.mrope:
        return torch.arange(length).unsqueeze(0)
    parts, end, start = [], 0, 0
    for span in spans:
        text = span.offset - end
        parts.append(_text_positions(start, text))
        start += text
        height, width = span.grid_thw[1] // merge_size, span.grid_thw[2] // merge_size
        parts.append(_image_positions(start, span.grid_thw[0], height, width))
        start += max(height, width)
        end = span.offset + span.length
    parts.append(_text_positions(start, length - end))
    return torch.cat(parts, dim=1)


def _text_positions(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).expand(3, -1)


def _image_positions(start: int, frames: int, height: int, width: int) -> Tensor:
    grid = torch.stack(torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij"))
    return grid.reshape(3, -1) + start
