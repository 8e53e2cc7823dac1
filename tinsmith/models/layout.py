"""Describes the linears of a transformers model and which of them LoRA can train: all rooms ask here.

A configuration is enough to make it: the network is built on torch's meta device, which takes no memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from tinsmith.errors import ConfigError
from tinsmith.models.families import Family, empty_network, family_of, read_config
from tinsmith.models.layers import DeltaNet, Experts, LayerKind, layers_of
from tinsmith.protocol.shapes import LoraShape

ATTENTION_LINEARS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "out_proj",
    "qkv_proj",
    "query_key_value",
    "dense",
    "in_proj_qkv",
    "in_proj_z",
)
"""Linears around attention. A fused one is trained as one matrix, as PEFT does.

Only in `in_proj_qkv` of a gated delta net do queries, keys and values have matrices of their own.
"""
MLP_LINEARS = (
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj",
    "c_fc",
    "c_proj",
    "fc1",
    "fc2",
    "dense_h_to_4h",
    "dense_4h_to_h",
)
"""Linears of a dense MLP."""

SAME_INPUT: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up": ("gate_proj", "up_proj"),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
"""Linears of one block that read the same input, and what they are called together."""

_SECTIONS = tuple(f"in_proj_qkv.{section}" for section in "qkv")
"""Suffixes of the parts of `in_proj_qkv`, in the order of its rows."""

LM_HEAD = "lm_head"
"""Name of the output projection among an adapter's modules."""
HEAD_WEIGHT = "lm_head.weight"
"""Name of an untied output projection among full weights. It lies outside of the language model."""

Group = Literal["attn", "mlp", "unembed"]
GROUPS: tuple[Group, ...] = ("attn", "mlp", "unembed")
"""Groups of linears that a client switches together: `LoraShape.train_attn`, `train_mlp` and `train_unembed`."""


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer that LoRA can train, or a part of its outputs: [tokens, in_features] -> [tokens, out_features]."""

    group: Group
    module: str
    """Name of the layer inside the language model; `LM_HEAD` for the output projection."""
    in_features: int
    out_features: int
    rows: tuple[int, int] | None = None
    """The outputs [start, end) of the layer; None means all."""
    experts: int = 0
    """Number of experts, each of which has such a layer; 0 for a linear that is alone."""
    own_factor: Literal["a", "b"] | None = None
    """The matrix that each expert has of its own: the one on its inside. The other, on the hidden side, all share."""

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B of an adapter: [experts, ...] for the one that each expert has of its own."""
        a, b = (rank, self.in_features), (self.out_features, rank)
        return (self.experts, *a) if self.own_factor == "a" else a, (self.experts, *b) if self.own_factor == "b" else b

    @property
    def width(self) -> int:
        """Number of parameters that an adapter of rank 1 has here."""
        return sum(math.prod(shape) for shape in self.shapes(1))


@dataclass(frozen=True)
class Projection:
    """Linear layers that read the same input, computed by one multiplication with their stacked weights."""

    name: str
    """`layers.0.self_attn.qkv` for several linears; one that is alone keeps its own name."""
    modules: tuple[str, ...]
    """Names of the linears in the language model, in the order of their rows; `LM_HEAD` for the output projection."""
    targets: dict[str, tuple[int, int]]
    """Rows [start, end) of the joint output that LoRA can train, if any, in order, by the name in `Layout.targets`."""
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Layout:
    """Names and sizes of what can be trained in a base model."""

    family: Family
    language_model: str
    """Name of the language model inside the transformers model."""
    head: str
    """Name of the output projection inside the transformers model."""
    layers: tuple[LayerKind, ...]
    experts: dict[int, Experts]
    """The mixtures of experts, by layer."""
    targets: dict[str, LoraTarget]
    """All that LoRA can train, by the module's name in the language model and in the order of modules; last `LM_HEAD`.

    A part of a module is named behind it: `layers.0.linear_attn.in_proj_qkv.q`.
    """
    projections: dict[str, Projection]
    """Every linear of the language model, joined where several read the same input, by name; last `LM_HEAD`."""

    def covered(self, shape: LoraShape) -> dict[str, LoraTarget]:
        """Return the targets that an adapter of this shape covers."""
        groups = switched_on(shape)
        return {name: target for name, target in self.targets.items() if target.group in groups}

    def lora_parameters(self, shape: LoraShape) -> int:
        """Count the parameters of an adapter of this shape."""
        return sum(shape.rank * target.width for target in self.covered(shape).values())

    def group_parameters(self, rank: int) -> dict[Group, int]:
        """Count the parameters of an adapter of this rank in each group."""
        return {
            group: rank * sum(target.width for target in self.targets.values() if target.group == group)
            for group in GROUPS
        }

    def frozen_blocks(self, shape: LoraShape) -> tuple[str, ...]:
        """Return the prefixes of parameters that full-parameter training leaves out.

        They are the whole blocks, with norms and biases, of groups that are switched off.
        """
        groups = {*switched_on(shape), "unembed"}
        left = dict.fromkeys(target.module for target in self.targets.values() if target.group not in groups)
        return tuple(f"{module.rpartition('.')[0]}." for module in left)

    @property
    def mixture(self) -> Experts | None:
        """The kind of its mixtures of experts, which they have in common; None if there is none."""
        return next(iter(self.experts.values()), None)

    @property
    def expert_widths(self) -> int:
        """Numbers of experts' adapters of rank 1 in a decoding step, where each target has its own A and B."""
        return sum(target.width for target in self.targets.values() if target.experts)

    @property
    def routers(self) -> tuple[str, ...]:
        """Prefixes of the parameters that choose experts, or weigh a shared one. They are never trained."""
        return tuple(f"layers.{index}.mlp.{gate}." for index in self.experts for gate in ("gate", "shared_expert_gate"))

    @cached_property
    def active_weights(self) -> int:
        """Weights of what LoRA can train that a token is multiplied with: of experts, those of the chosen ones."""
        total = 0
        for target in self.targets.values():
            chosen = self.experts[int(target.module.split(".")[1])].per_token if target.experts else 1
            total += chosen * target.in_features * target.out_features
        return total

    def module_name(self, name: str) -> str:
        """The name that transformers gives the module of a target."""
        return self.head if name == LM_HEAD else f"{self.language_model}.{self.targets[name].module}"

    def name_apart(self, name: str) -> str:
        """Name of a target for tools without fused layers, such as Tinker: `in_proj_q` for a part."""
        module, rows = self.targets[name].module, self.targets[name].rows
        return name if rows is None else f"{module.removesuffix('qkv')}{name.rpartition('.')[2]}"

    def parameter_name(self, name: str) -> str:
        """The name that transformers gives a parameter of `FullWeights`."""
        return f"{self.head}.weight" if name == HEAD_WEIGHT else f"{self.language_model}.{name}"


def side_by_side(names: Iterable[str]) -> list[list[str]]:
    """Group names of LoRA targets that read the same input, in the order of the rows of their `Projection`.

    By the names alone, because adapters of a checkpoint have no `Layout` at hand.
    """
    groups: dict[str, list[tuple[tuple[int, int], str]]] = {}
    for name in names:
        module, _, section = name.rpartition(".") if name.endswith(_SECTIONS) else (name, "", "")
        parent, _, last = module.rpartition(".")
        together = next((key for key, parts in SAME_INPUT.items() if last in parts), None)
        if together is None:
            groups[name] = [((0, 0), name)]
        else:
            place = SAME_INPUT[together].index(last), "qkv".index(section)  # "" is at 0
            groups.setdefault(f"{parent}.{together}", []).append((place, name))
    return [[name for _, name in sorted(group)] for group in groups.values()]


def switched_on(shape: LoraShape) -> set[Group]:
    """The groups that a shape trains."""
    switches: dict[Group, bool] = {"attn": shape.train_attn, "mlp": shape.train_mlp, "unembed": shape.train_unembed}
    return {group for group, on in switches.items() if on}


def read_layout(source: str) -> Layout:
    """The layout of a model in a local directory or of a Hub id. Raises ConfigError for what could not be served."""
    config = read_config(source)
    family = family_of(source, config)
    return layout_of(source, family, empty_network(source, family, config))


def layout_of(source: str, family: Family, network: Any) -> Layout:
    """The layout of a network, before LoRA is attached to it.

    Raises ConfigError, naming `source`, without linears around attention and in the MLP, or if the output projection is
    more than a matrix.
    """
    language_model, head = family.language_model(network), network.get_output_embeddings()
    linears = {name: module for name, module in language_model.named_modules() if isinstance(module, nn.Linear)}
    config = network.config
    layers = layers_of(source, config.model_type, config.get_text_config())
    experts: dict[int, Experts] = {}
    targets: dict[str, LoraTarget] = {}
    for name, module in language_model.named_modules():
        if name.endswith(".mlp") and hasattr(module, "experts"):
            experts[int(name.split(".")[1])] = kind = _experts(source, name, module)
            targets |= _expert_targets(f"{name}.experts", kind, config.get_text_config().hidden_size)
        elif name in linears and (group := _group(name)) is not None:
            targets |= _targets(name, linears[name], group, layers)
    for group, what, known in (("attn", "attention", ATTENTION_LINEARS), ("mlp", "MLP", MLP_LINEARS)):
        if not any(target.group == group for target in targets.values()):
            found = ", ".join(sorted({_last_part(name) for name in linears})) or "no linear layer at all"
            raise ConfigError(
                f"{source}: no {what} linear that LoRA can train; known are {', '.join(known)}, found {found}"
            )
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ConfigError(f"{source}: its output projection is {head}; Tinsmith needs a linear layer without a bias")
    targets[LM_HEAD] = LoraTarget("unembed", LM_HEAD, head.in_features, head.out_features)
    names = {module: name for name, module in network.named_modules()}
    projections = _projections(linears | {LM_HEAD: head}, targets)
    return Layout(family, names[language_model], names[head], layers, experts, targets, projections)


def _experts(source: str, name: str, module: Any) -> Experts:
    """Read a mixture of experts. Raises ConfigError for weights in another layout than we compute."""
    stack, router = module.experts, module.gate
    count, width = stack.num_experts, stack.intermediate_dim
    shared = getattr(module, "shared_expert", None)
    expected = {
        "gate_up_proj": (count, 2 * width, stack.hidden_dim),
        "down_proj": (count, stack.hidden_dim, width),
    }
    found = {parameter: tuple(tensor.shape) for parameter, tensor in stack.named_parameters()}
    if found != expected or not is_silu(stack.act_fn):
        raise ConfigError(f"{source}: the experts of {name} are not those that Tinsmith computes: {found}")
    return Experts(
        count,
        router.top_k,
        width,
        getattr(router, "norm_topk_prob", True),
        0 if shared is None else shared.gate_proj.out_features,
    )


def is_silu(activation: Any) -> bool:
    """Whether an activation is silu(x) = x · sigmoid(x)."""
    x = torch.linspace(-8, 8, 33, device="cpu")
    return torch.equal(activation(x), nn.functional.silu(x))


def _expert_targets(name: str, kind: Experts, hidden: int) -> dict[str, LoraTarget]:
    gate, up = (
        LoraTarget("mlp", f"{name}.{part}_proj", hidden, kind.width, None, kind.count, "b") for part in ("gate", "up")
    )
    down = LoraTarget("mlp", f"{name}.down_proj", kind.width, hidden, None, kind.count, "a")
    return {target.module: target for target in (gate, up, down)}


def _targets(name: str, linear: nn.Linear, group: Group, layers: tuple[LayerKind, ...]) -> dict[str, LoraTarget]:
    if _last_part(name) != "in_proj_qkv":
        return {name: LoraTarget(group, name, linear.in_features, linear.out_features)}
    layer = layers[int(name.split(".")[1])]
    assert isinstance(layer, DeltaNet), f"{name} belongs to a {layer}"
    return {
        f"{name}.{part}": LoraTarget(group, name, linear.in_features, end - start, (start, end))
        for part, (start, end) in layer.sections.items()
    }


def _projections(linears: dict[str, nn.Linear], targets: dict[str, LoraTarget]) -> dict[str, Projection]:
    parts: dict[str, list[tuple[str, LoraTarget]]] = {}
    for name, target in targets.items():
        parts.setdefault(target.module, []).append((name, target))
    joined: dict[str, Projection] = {}
    for first_name, first_linear in linears.items():
        name, modules = _same_input(first_name, linears)
        if name in joined:
            continue
        rows: dict[str, tuple[int, int]] = {}
        start = 0
        for module in modules:
            for part, target in parts.get(module, []):
                first, end = target.rows or (0, target.out_features)
                rows[part] = start + first, start + end
            start += linears[module].out_features
        joined[name] = Projection(name, modules, rows, first_linear.in_features, start)
    return joined


def _same_input(name: str, linears: dict[str, nn.Linear]) -> tuple[str, tuple[str, ...]]:
    """The linears that read the same input as this one, itself included, behind the name of all of them together."""
    parent, _, last = name.rpartition(".")
    for together, parts in SAME_INPUT.items():
        modules = tuple(f"{parent}.{part}" for part in parts)
        if last in parts and all(module in linears for module in modules):
            return f"{parent}.{together}", modules
    return name, (name,)


def _group(name: str) -> Group | None:
    last = _last_part(name)
    return "attn" if last in ATTENTION_LINEARS else "mlp" if last in MLP_LINEARS else None


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
