"""Reads and writes adapters in PEFT's format, and merges weights into their base model.

A PEFT adapter holds lora_A and lora_B of each layer under its name in transformers, which the base's `Layout` has.

Of a fused layer our LoRA may cover n parts, each with an adapter of its own, as of `in_proj_qkv` of a gated delta net.
PEFT has one adapter for all of it: its rank is n times as large and B is block-diagonal. The scale stays 32 / rank,
because its alpha is n times as large too. Experts are in `training/peft_experts.py`.

Downloads have names that the cookbook's `weights` tools turn into PEFT's. Where the files of the base model have names
that begin with `model.language_model.`, as in Qwen3-VL and Qwen3.5, the tools put `language_model.` behind every
`model.`, so an adapter must leave it out. There queries, keys and values of a gated delta net are adapters of their own
on `in_proj_q`, `in_proj_k` and `in_proj_v`, which the tools add to their rows of `in_proj_qkv`. Experts, too, have
adapters that only the tools understand. Everywhere else the file is the one that PEFT loads directly. The output
projection is always `lm_head`. The tools also know it as `model.unembed_tokens`; but where the base has no output
projection of its own they would take that for the input embedding.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from tinsmith.errors import UserError
from tinsmith.models.experts import gate_and_up
from tinsmith.models.families import load_network
from tinsmith.models.files import holds_all_weights, local_directory, read_header, safetensors_files
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.layers import Experts
from tinsmith.models.layout import GROUPS, HEAD_WEIGHT, LM_HEAD, Layout, LoraTarget
from tinsmith.models.lora import LORA_ALPHA, Adapter, LoraPair, adapter_of, new_adapter
from tinsmith.models.mxfp4 import unpacked_shapes
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.peft_config import CONFIG_FILE, WEIGHTS_FILE, PeftConfig, require_peft
from tinsmith.training.peft_experts import (
    DOWNLOADED,
    FILE_NAMES,
    PARTS,
    ExpertReader,
    Part,
    for_download,
    for_peft,
)

log = logging.getLogger(__name__)

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
"""Files beside a model's weights that transformers reads."""
_ROOT = "base_model.model."
"""Prefix that PEFT puts before the name of every module."""
_READ = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Precisions in which the matrices of an adapter may be stored."""


def write_peft(adapter: Adapter, base: Layout, base_name: str, directory: Path) -> None:
    """Write a PEFT adapter folder, created if missing. Raises UserError for layers that the base does not have."""
    layers = _whole_layers(adapter, base)
    targets = [layer.name for layer in layers if layer.parameter is None]
    # Whole names: a part of a name would also reach the vision tower.
    _write(layers, adapter.shape.rank, targets, base_name, directory)


@dataclass(frozen=True)
class _Written:
    """One adapter of a file that is written."""

    name: str
    """Name of its layer in the file."""
    pair: LoraPair
    rank: int
    parameter: str | None = None
    """The parameter that PEFT adapts, if it shall not look for a layer."""

    @property
    def pattern(self) -> str:
        """What `rank_pattern` calls it."""
        return ".".join((self.parameter or self.name).split(".")[-1 if self.parameter is None else -2 :])


def _whole_layers(adapter: Adapter, base: Layout) -> list[_Written]:
    """Return the matrices of each layer that the adapter reaches, by transformers' name, a layer's parts joined."""
    _require_places(adapter, base)
    layers = []
    covered = (name for name in base.targets if name in adapter.masters)  # which a checkpoint may hold in another order
    for _, parts in groupby(covered, key=lambda name: _layer_at_peft(base.targets[name])):
        names = list(parts)
        pairs = [adapter.masters[name] for name in names]
        module = base.module_name(names[0])
        if base.targets[names[0]].experts:
            layers += _experts(module.rpartition(".experts.")[0], _kind_of(names[0], base), pairs)
            continue
        # The layout lists the parts of a layer in the order of its outputs, of which none is left out
        if len(pairs) > 1:
            pairs = [LoraPair(torch.cat([pair.a for pair in pairs]), torch.block_diag(*(pair.b for pair in pairs)))]
        # In target_modules PEFT takes the names of a dense MLP for those of experts, wherever there are some
        beside_experts = bool(base.experts) and module.endswith(tuple(f".mlp.{part}" for part in PARTS))
        parameter = f"{module}.weight" if beside_experts else None
        layers.append(_Written(module, pairs[0], len(pairs[0].a), parameter))
    return layers


def _layer_at_peft(target: LoraTarget) -> str:
    """The name of what PEFT adapts together: a layer, or all experts of one."""
    return target.module.rpartition(".")[0] if target.experts else target.module


def _kind_of(name: str, base: Layout) -> Experts:
    """The mixture of experts of a target."""
    return base.experts[int(base.targets[name].module.split(".")[1])]


def _experts(mlp: str, kind: Experts, pairs: list[LoraPair]) -> list[_Written]:
    gate, up, down = pairs
    ranks = {"gate_up_proj": 2 * len(gate.a), "down_proj": down.b.shape[1]}
    return [
        _Written(f"{mlp}.{FILE_NAMES[parameter]}", pair, ranks[parameter], f"{mlp}.experts.{parameter}")
        for parameter, pair in for_peft(kind, gate, up, down).items()
    ]


def _require_places(adapter: Adapter, base: Layout) -> None:
    """Raise UserError unless the base has each layer of an adapter, of its size."""
    for name, (a, b) in adapter.masters.items():
        target = base.targets.get(name)
        if target is None or (a.shape, b.shape) != target.shapes(adapter.shape.rank):
            sizes = " x ".join(map(str, (*a.shape[:-2], *b.shape[:-1], a.shape[-1])))
            raise UserError(
                f"the checkpoint adapts {name} of {sizes}, which this base model does not have; "
                "use the one of its training"
            )


def write_adapter(
    pairs: Mapping[str, LoraPair],
    rank: int,
    names: Mapping[str, str],
    targets: list[str],
    base_name: str,
    directory: Path,
) -> None:
    """Write the two files of an adapter, which may have layers of other ranks than `rank`.

    `names` maps names of `pairs` to those in the file; `targets` is what PEFT looks for.
    """
    layers = [_Written(names[name], pair, pair.a.shape[-2]) for name, pair in pairs.items()]
    _write(layers, rank, targets, base_name, directory)


def _write(layers: Sequence[_Written], rank: int, targets: list[str], base_name: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        tensors[f"{_ROOT}{layer.name}.lora_A.weight"] = layer.pair.a.contiguous()
        tensors[f"{_ROOT}{layer.name}.lora_B.weight"] = layer.pair.b.contiguous()
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    ranks = {layer.pattern: layer.rank for layer in layers if layer.rank != rank}
    parameters = [layer.parameter for layer in layers if layer.parameter is not None]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": LORA_ALPHA,
        "rank_pattern": ranks,
        "alpha_pattern": {name: LORA_ALPHA * (own // rank) for name, own in ranks.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    } | ({"target_parameters": parameters} if parameters else {})
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    _share_as(directory / CONFIG_FILE)


@torch.no_grad()
def write_merged(weights: Weights, base: Layout, base_source: str, directory: Path) -> None:
    """Write a transformers model with what was trained, in the dtype of the base; other files are copied from the base.

    Tensors have the names and shapes that they have in the files of the base. What transformers does not load, such as
    layers that predict several tokens at once, is left out, with a warning.

    Raises UserError for weights of other names or sizes than the base's, and ConfigError for an unusable base.
    """
    network = load_network(base_source, base.family, "auto")
    if isinstance(weights, FullWeights):
        _replace(network, weights, base)
    else:
        _add(network, weights, base)
    stored = _stored_shapes(base_source)
    _lay_out_as(stored, network)
    # One that can be saved; that of the base may be refused, though it can be loaded
    network.generation_config = GenerationConfig()
    network.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    left_out = stored.keys() - _shapes_in(directory).keys() - ({HEAD_WEIGHT} if _tied(network) else set())
    if left_out:
        log.warning(
            "%s holds %s and %d more that transformers does not load; the merged model is without them",
            *(base_source, min(left_out), len(left_out) - 1),
        )
    _copy_files(base_source, directory)
    _share_as(directory / "config.json")


def _lay_out_as(stored: Mapping[str, tuple[int, ...]], network: Any) -> None:
    """Transpose the experts that lie so in the base's files: transformers transposes them as it loads them only."""
    for name, parameter in network.named_parameters():
        if parameter.dim() == 3 and parameter.shape != stored.get(name) == parameter.shape[:1] + parameter.shape[:0:-1]:
            parameter.data = parameter.data.transpose(1, 2).contiguous()


def _tied(network: Any) -> bool:
    """Whether the output projection is the embedding."""
    tied: bool = network.get_output_embeddings().weight is network.get_input_embeddings().weight
    return tied


def _copy_files(source: str, directory: Path) -> None:
    """Copy tokenizer, chat templates, processors and generation settings unchanged: saving could alter them or fail."""
    files = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=list(_COPIED)))
    for file in (file for pattern in _COPIED for file in files.glob(pattern)):
        if file.name != "config.json" and not file.name.endswith(".index.json"):
            copied = directory / file.relative_to(files)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copied)


def _share_as(config: Path) -> None:
    """Give the weights the permissions of the configuration: safetensors makes files for their owner alone (0600)."""
    for file in config.parent.glob("*.safetensors"):
        file.chmod(config.stat().st_mode & 0o777)


def _replace(network: Any, weights: FullWeights, base: Layout) -> None:
    parameters = dict(network.named_parameters())
    for name, master in weights.masters.items():
        parameter = parameters.get(base.parameter_name(name))
        if parameter is None or parameter.shape != master.shape:
            raise UserError(
                f"the checkpoint holds {name} of shape {tuple(master.shape)}, which this base model does not have"
            )
        parameter.copy_(master)


def _add(network: Any, adapter: Adapter, base: Layout) -> None:
    """Add an adapter to the weights. An output projection that was the embedding becomes the model's own."""
    _require_places(adapter, base)
    head = network.get_submodule(base.head)
    if LM_HEAD in adapter.masters and head.weight is network.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.clone())
        network.config.tie_word_embeddings = network.config.get_text_config().tie_word_embeddings = False
    for name, pair in adapter.masters.items():
        target = base.targets[name]
        if target.experts:
            mixture, _, part = base.module_name(name).rpartition(".")
            a, b = (matrix if matrix.dim() == 3 else [matrix] * target.experts for matrix in pair)
            weights = _of_part(network.get_submodule(mixture), _kind_of(name, base), part)
            for weight, own_a, own_b in zip(weights, a, b, strict=True):
                weight.copy_(weight.float() + adapter.scale * (own_b @ own_a))  # one by one: all in float32 are large
            continue
        weight = network.get_submodule(base.module_name(name)).weight[slice(*(target.rows or (None, None)))]
        weight.copy_(weight.float() + adapter.scale * (pair.b @ pair.a))


def _of_part(experts: Any, kind: Experts, part: Part) -> Tensor:
    """The weights of gate, up or down of all experts [experts, out, in], a view of their parameter."""
    stored: Tensor = experts.down_proj if part == "down_proj" else experts.gate_up_proj
    matrices = stored if kind.clamped is None else stored.transpose(1, 2)
    return matrices if part == "down_proj" else gate_and_up(kind, matrices)[PARTS.index(part)]


_STORED_PREFIX = "model.language_model."
"""Prefix of names in base models for which the download tools rename tensors."""


def write_download(adapter: Adapter, base: Layout, source: str, label: str, directory: Path) -> None:
    """Write an adapter for download into `directory`, created if missing.

    The base's files are at `source`; `adapter_config.json` calls the base `label`.
    """
    prefixed = any(name.startswith(_STORED_PREFIX) for name in _stored_shapes(source))
    has_experts = any(base.targets[name].experts for name in adapter.masters if name in base.targets)
    if not prefixed and not has_experts:
        write_peft(adapter, base, label, directory)
        return
    _require_places(adapter, base)
    root = "model" if prefixed else base.language_model
    names = {name: name if name == LM_HEAD else f"{root}.{_name_apart(name, base)}" for name in adapter.masters}
    # PEFT refuses an adapter if it finds no target, but drops the others without a word if it finds one.
    missed = [name for name in names if base.targets[name].experts] or [name for name in names if name != LM_HEAD]
    targets = [names[name] for name in missed or names]
    pairs = {name: for_download(pair) if base.targets[name].experts else pair for name, pair in adapter.masters.items()}
    write_adapter(pairs, adapter.shape.rank, names, targets, label, directory)


def _name_apart(name: str, base: Layout) -> str:
    """The name of a target in downloads."""
    if not base.targets[name].experts:
        return base.name_apart(name)
    mixture, _, part = name.rpartition(".")
    return f"{mixture}.{DOWNLOADED[part]}"


def _stored_shapes(source: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters in the safetensors files of a model, if it has any, by name."""
    directory = local_directory(source)
    return {} if directory is None else unpacked_shapes(_shapes_in(directory))


def _shapes_in(directory: Path) -> dict[str, tuple[int, ...]]:
    headers = [read_header(file)[1] for file in safetensors_files(directory)]
    return {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}


# Reading


@dataclass(frozen=True)
class _Found:
    """One adapter of a file."""

    name: str
    """Name of its layer in the file."""
    targets: dict[str, LoraTarget]
    """Targets that it covers, by our names: one, or all parts of a fused layer."""
    pair: LoraPair
    """Of experts one matrix is [experts, ...]."""
    scale: float

    @property
    def rank(self) -> int:
        return self.pair.a.shape[-2]

    def pairs(self, rank: int) -> dict[str, LoraPair]:
        """Return its matrices as those of targets of ours of this rank; none if they cannot be."""
        a, b = self.pair
        count = len(self.targets)
        rows = b.split([target.out_features for target in self.targets.values()], dim=-2)  # of each target
        if self.rank == rank:  # all targets have the same A
            return {name: LoraPair(a, own) for name, own in zip(self.targets, rows, strict=True)}
        if self.rank != count * rank:
            return {}
        blocks = [own[..., index * rank : (index + 1) * rank] for index, own in enumerate(rows)]
        if sum(int(block.count_nonzero()) for block in blocks) != int(b.count_nonzero()):  # it is not block-diagonal
            return {}
        return {name: LoraPair(*both) for name, *both in zip(self.targets, a.split(rank), blocks, strict=True)}


def read_peft(
    directory: Path, base: Layout, source: str | None = None, check: Callable[[LoraShape], None] = lambda shape: None
) -> Adapter:
    """Read a PEFT folder, or a download of the Tinker API, with its scale taken into B.

    Attention, MLP and output projection are each trained wholly or not at all: a group that the folder covers in part
    is completed with modules that change nothing yet. Copies of the base's output projection and embedding, which PEFT
    saves beside an adapter of them, are compared with the files of the base, `source`. `check` may refuse the shape
    before there is anything of its size.

    Raises UserError for what LoRA on this base cannot be, what `check` raises, and ConfigError for a damaged file.
    """
    config = require_peft(directory)
    tensors = load_file(directory / WEIGHTS_FILE)
    for name, tensor in tensors.items():
        if tensor.dtype not in _READ or not tensor.isfinite().all():
            what = (
                "holds values that are not finite"
                if tensor.dtype in _READ
                else f"is in {str(tensor.dtype).removeprefix('torch.')}"
            )
            raise UserError(
                f"{directory / WEIGHTS_FILE}: {name} {what}, which cannot be used; train or export the adapter again"
            )
    _drop_copies(tensors, base, source)
    found = _adapters(tensors, config, base)
    rank = _common_rank(found, config.rank)
    pairs: dict[str, LoraPair] = {}
    for one in found:
        ratio = one.scale / (LORA_ALPHA / rank)
        pairs |= {
            name: LoraPair(pair.a.float().clone(), pair.b.float() * ratio) for name, pair in one.pairs(rank).items()
        }
    for name, pair in pairs.items():
        if not all(tensor.isfinite().all() for tensor in pair):
            raise UserError(
                f"{directory}: {name}, with its scale, is larger than float32 holds; train or export the adapter again"
            )
    groups = {base.targets[name].group for name in pairs}
    shape = LoraShape(rank, seed=0, **{f"train_{group}": group in groups for group in GROUPS})
    check(shape)
    adapter = new_adapter(shape, base, torch.device("cpu"), torch.float32)
    return adapter_of(shape, adapter.masters | pairs, torch.float32)


def _adapters(tensors: Mapping[str, Tensor], config: PeftConfig, base: Layout) -> list[_Found]:
    """Find the adapters of a file.

    Raises UserError naming a tensor that has no place in the base, or not the right shape.
    """
    found: list[_Found] = []
    rest = set(tensors)
    for name, targets in _places(base):
        a, b = (f"{_ROOT}{name}.lora_{matrix}.weight" for matrix in "AB")
        if a not in rest or b not in rest:
            continue
        rank = config.rank_of(name)
        inputs, outputs = (
            next(iter(targets.values())).in_features,
            sum(target.out_features for target in targets.values()),
        )
        if tensors[a].shape != (rank, inputs) or tensors[b].shape != (outputs, rank):
            sizes = f"{tuple(tensors[a].shape)} and {tuple(tensors[b].shape)}"
            raise UserError(
                f"{name}: lora_A and lora_B are {sizes}, which does not fit rank {rank} and this base model"
            )
        found.append(_Found(name, targets, LoraPair(tensors[a], tensors[b]), config.scale_of(name)))
        rest -= {a, b}
    for one, keys in _adapters_of_experts(tensors, config, base):
        found.append(one)
        rest -= keys
    _require_once(found)
    if rest or not found:
        raise UserError(
            f"the adapter holds {min(rest, default='nothing')}, which is no matrix that LoRA trains on this base model"
        )
    return found


def _require_once(found: list[_Found]) -> None:
    """Raise UserError if two adapters are of the same layer."""
    covered: dict[str, str] = {}
    for one in found:
        for target in one.targets:
            if target in covered:
                raise UserError(
                    f"the adapter covers the same layer twice, as {covered[target]} and as {one.name}; "
                    "leave one of them out"
                )
            covered[target] = one.name


def _adapters_of_experts(
    tensors: Mapping[str, Tensor], config: PeftConfig, base: Layout
) -> Iterator[tuple[_Found, set[str]]]:
    """Yield the adapters of experts in a file, each with the names of its tensors. Raises as `_adapters`."""
    apart = {name.removeprefix(_ROOT): tensor for name, tensor in tensors.items() if name.startswith(_ROOT)}
    for index, kind in base.experts.items():
        mixture = f"layers.{index}.mlp.experts"
        reader = ExpertReader(apart, config, kind, base.targets[f"{mixture}.gate_proj"].in_features)
        for name in dict.fromkeys((f"{base.language_model}.{mixture}", _downloaded_name(mixture))):
            for stack, keys in reader.read(name):
                targets = {f"{mixture}.{part}": base.targets[f"{mixture}.{part}"] for part in stack.parts}
                yield _Found(stack.name, targets, stack.shared(), stack.scale), {f"{_ROOT}{key}" for key in keys}


def _places(base: Layout) -> Iterator[tuple[str, dict[str, LoraTarget]]]:
    """Yield each name that a file may use for a layer or a part of one, and our targets that it covers."""
    layers = {name: target for name, target in base.targets.items() if not target.experts}
    for module, group in groupby(layers.items(), key=lambda item: item[1].module):
        targets = dict(group)
        first = next(iter(targets))
        yield base.module_name(first), targets
        yield _downloaded_name(module), targets
        if ".self_attn." in module:  # as Tinker's downloads of GPT-OSS have it
            yield _downloaded_name(module.replace(".self_attn.", ".attn.")), targets
        if len(targets) > 1:
            for name, target in targets.items():
                inside = base.name_apart(name)
                own = {name: target}
                yield f"{base.language_model}.{inside}", own
                yield _downloaded_name(inside), own


def _drop_copies(tensors: dict[str, Tensor], base: Layout, source: str | None) -> None:
    """Drop copies of the base's output projection and embedding.

    Raises UserError if one differs, or cannot be compared.
    """
    for module in (base.head, f"{base.language_model}.embed_tokens"):
        for name in (f"{_ROOT}{module}.base_layer.weight", f"{_ROOT}{module}.weight"):
            if name not in tensors:
                continue
            copy = tensors.pop(name)
            own = None if source is None else _weight_of(source, module.rpartition(".")[2], list(copy.shape))
            if own is None:
                raise UserError(
                    f"the adapter holds {name}, and {source or 'the base model'} has no such weights in safetensors on "
                    "this machine to compare it with; download them, or save the adapter with "
                    "save_embedding_layers=False"
                )
            if not torch.equal(own.to(copy.dtype), copy):
                raise UserError(
                    f"the adapter holds {name}, which is not that of {source}: "
                    "use the base model that the adapter was trained on"
                )


def _weight_of(source: str, module: str, shape: list[int]) -> Tensor | None:
    """Read the embedding or output projection from a base model's files; if tied, the one that is there."""
    directory = local_directory(source)
    found: dict[str, Path] = {}
    for file in safetensors_files(directory) if directory is not None and holds_all_weights(directory) else []:
        found |= {name: file for name, entry in read_header(file)[1].items() if entry["shape"] == shape}
    name = next((name for name in found if name.endswith(f"{module}.weight")), next(iter(found), None))
    if name is None:
        return None
    with safe_open(found[name], framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _common_rank(found: list[_Found], usual: int) -> int:
    """Return the one rank that all adapters have as adapters of our targets; `usual` is that of PEFT's configuration.

    Raises UserError if they have several, or if one on a fused layer is neither for all of its parts nor for each.
    """
    ranks = {one.rank: one.name for one in found}
    for rank in dict.fromkeys((*(one.rank for one in found if len(one.targets) == 1), usual, *ranks)):
        if all(one.pairs(rank) for one in found):
            return rank
    for one in found:
        if len(one.targets) > 1 and one.rank == len(one.targets) * usual and not one.pairs(usual):
            parts = ", ".join(name.rpartition(".")[2] for name in one.targets)
            raise UserError(
                f"{one.name}: lora_B of rank {one.rank} is not block-diagonal; "
                f"here LoRA has an adapter of rank {usual} on each of "
                f"its parts ({parts}) and none that mixes them; give it one of rank {usual}, which the parts then share"
            )
    listed = ", ".join(f"{rank} on {name}" for rank, name in sorted(ranks.items()))
    raise UserError(f"rank_pattern: the adapter has several ranks ({listed}); only LoRA of one rank can be used")


def _downloaded_name(name: str) -> str:
    """Return the name of a layer in downloads of the Tinker API."""
    return "model.unembed_tokens" if name == LM_HEAD else f"model.{name}"
