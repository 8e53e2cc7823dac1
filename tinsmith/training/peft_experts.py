"""Adapters of mixtures of experts as others lay them out: PEFT, downloads of the Tinker API, and the cookbook's tools.

Here the matrices on the hidden side, A of gate and up and B of down, are shared by all experts of a layer.

PEFT adapts two parameters that hold all experts of a layer: `gate_up_proj` [experts, 2 · width, hidden] and `down_proj`
[experts, hidden, width]. An adapter of one is a lora_A [experts · rank, in], expert by expert, and a lora_B
[out, rank · experts], whose neighbouring columns are the same column of all experts. A shared matrix is repeated for
each. Gate and up have one adapter, of twice the rank, whose B is block-diagonal: PEFT warns that it ignores this rank,
because it looks for a layer of that name, and yet applies it. In GPT-OSS parameters are [experts, in, out], and the
rows of B, those of gate and up in turns, are still outputs. PEFT wraps a layer's parameters one around the other, so
that its file calls the adapter of `gate_up_proj` `experts.base_layer`, and that of `down_proj` `experts`.

A download has `experts.w1`, `w3` and `w2` for gate, up and down, with matrices [experts, ...], or [1, ...] if all share
one. The cookbook builds from it what PEFT used to have: an adapter of each expert, such as `experts.0.gate_proj`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.errors import UserError
from tinsmith.models.experts import gate_and_up
from tinsmith.models.layers import Experts
from tinsmith.models.lora import LoraPair
from tinsmith.training.peft_config import PeftConfig

Part = str
"""`gate_proj`, `up_proj` or `down_proj`."""
PARTS: tuple[Part, ...] = ("gate_proj", "up_proj", "down_proj")
PARAMETERS: dict[str, tuple[Part, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The parameters of a layer's experts in transformers, and the parts that each holds, in the order of its outputs.

In this order PEFT wraps them, the first innermost.
"""
FILE_NAMES = {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
"""How PEFT's file calls the adapters of these parameters."""
DOWNLOADED: dict[Part, str] = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of the parts in downloads."""


# Writing


def for_peft(kind: Experts, gate: LoraPair, up: LoraPair, down: LoraPair) -> dict[str, LoraPair]:
    """The adapters of the experts of one layer as PEFT has them, by parameter."""
    experts, width, rank = gate.b.shape
    b = gate.b.new_zeros(experts, 2 * width, 2 * rank)
    of_gate, of_up = gate_and_up(kind, b)
    of_gate[..., :rank] = gate.b
    of_up[..., rank:] = up.b
    a = torch.cat([gate.a, up.a]).expand(experts, -1, -1)
    return {"gate_up_proj": _joined(a, b), "down_proj": _joined(down.a, down.b.expand(experts, -1, -1))}


def _joined(a: Tensor, b: Tensor) -> LoraPair:
    """[experts, rank, in] and [experts, out, rank] -> [experts · rank, in] and [out, rank · experts]."""
    return LoraPair(a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))


def for_download(pair: LoraPair) -> LoraPair:
    """An adapter of gate, up or down as a download has it: [1, ...] stands for a matrix that all experts share."""
    return LoraPair(*(matrix if matrix.dim() == 3 else matrix.unsqueeze(0) for matrix in pair))


# Reading


@dataclass(frozen=True)
class Stack:
    """An adapter of all experts of a layer, as a file has it."""

    name: str
    """The parameter or part, as error messages call it."""
    parts: tuple[Part, ...]
    a: Tensor
    """[experts, rank, in]"""
    b: Tensor
    """[experts, out, rank], the outputs of each part behind those of the one before"""
    scale: float

    def shared(self) -> LoraPair:
        """The same with one matrix for all experts on the hidden side. Raises UserError unless all have the same."""
        own_a = "down_proj" in self.parts
        common, matrix = (self.b, "lora_B") if own_a else (self.a, "lora_A")
        if not torch.equal(common, common[:1].expand_as(common)):
            raise UserError(
                f"{self.name}: its experts have each a {matrix} of their own, and here all of a layer share one, on "
                "the side of the hidden states; merge the adapter into its base model with PEFT, and serve that"
            )
        return LoraPair(self.a, common[0]) if own_a else LoraPair(common[0], self.b)


class ExpertReader:
    """Finds the adapters of the experts of one layer among the tensors of a file."""

    def __init__(self, tensors: Mapping[str, Tensor], config: PeftConfig, kind: Experts, hidden: int) -> None:
        """`tensors` by `NAME.lora_A.weight` and `NAME.lora_B.weight`; `hidden` is the width of the hidden states."""
        self.tensors = tensors
        self.config = config
        self.kind = kind
        self.hidden = hidden

    def read(self, name: str) -> Iterator[tuple[Stack, set[str]]]:
        """Yield the adapters of the experts that the file calls `name`, each with the tensors that it is made of.

        Raises UserError for an adapter of only some of gate, up and down, or of only some experts, and for matrices
        that do not fit the base.
        """
        for layout in (self._parameters, self._stacked, self._one_by_one):
            found = list(layout(name))
            covered = [part for stack, _ in found for part in stack.parts]
            missing = [part for part in PARTS if part not in covered]
            if found and missing:
                raise UserError(
                    f"{name}: the adapter covers {', '.join(covered)} of these experts and not {', '.join(missing)}, "
                    "which LoRA here trains together; train the adapter again on all three"
                )
            yield from found

    def _parameters(self, name: str) -> Iterator[tuple[Stack, set[str]]]:
        """As PEFT has them."""
        if _keys(name) <= self.tensors.keys():
            both = _keys(f"{name}.base_layer") <= self.tensors.keys()
            for parameter, parts in PARAMETERS.items():
                inner = parameter == "gate_up_proj"
                if not both and inner != self._has_outputs(name, PARAMETERS["gate_up_proj"]):
                    continue
                keys = _keys(f"{name}.base_layer" if both and inner else name)
                a, b = (self.tensors[key] for key in sorted(keys))
                rank = self.config.rank_of(f"{name}.{parameter}")
                inputs, outputs = self._sizes(parts)
                experts = self.kind.count
                self._require(f"{name}.{parameter}", a, b, (experts * rank, inputs), (outputs, rank * experts), rank)
                if inner:
                    b = torch.cat(gate_and_up(self.kind, b, 0))
                yield (
                    Stack(
                        f"{name}.{parameter}",
                        parts,
                        a.unflatten(0, (experts, rank)),
                        b.unflatten(1, (rank, experts)).permute(2, 0, 1),
                        self.config.scale_of(f"{name}.{parameter}"),
                    ),
                    keys,
                )

    def _has_outputs(self, name: str, parts: tuple[Part, ...]) -> bool:
        return self.tensors[f"{name}.lora_B.weight"].shape[:1] == (self._sizes(parts)[1],)

    def _stacked(self, name: str) -> Iterator[tuple[Stack, set[str]]]:
        """As downloads have them."""
        for part, short in DOWNLOADED.items():
            own, keys = f"{name}.{short}", _keys(f"{name}.{short}")
            if not keys <= self.tensors.keys():
                continue
            a, b = (self.tensors[key] for key in sorted(keys))
            rank = self.config.rank_of(own)
            inputs, outputs = self._sizes((part,))
            of_a, of_b = (1 if matrix.shape[:1] == (1,) else self.kind.count for matrix in (a, b))
            self._require(own, a, b, (of_a, rank, inputs), (of_b, outputs, rank), rank)
            a, b = (matrix.expand(self.kind.count, -1, -1) for matrix in (a, b))
            yield Stack(own, (part,), a, b, self.config.scale_of(own)), keys

    def _one_by_one(self, name: str) -> Iterator[tuple[Stack, set[str]]]:
        """As PEFT had them when each expert was made of linears."""
        for part in PARTS:
            names = [f"{name}.{expert}.{part}" for expert in range(self.kind.count)]
            there = [own for own in names if _keys(own) <= self.tensors.keys()]
            if not there:
                continue
            if len(there) < len(names):
                lacking = next(own for own in names if own not in there)
                raise UserError(f"{name}: the adapter covers {there[0]} and not {lacking}; train it on all experts")
            kinds = {(self.config.rank_of(own), self.config.scale_of(own)) for own in names}
            if len(kinds) > 1:
                raise UserError(
                    f"rank_pattern, alpha_pattern: the experts of {name} differ in the rank or scale of their {part}; "
                    "here they have one; train the adapter again"
                )
            ((rank, scale),) = kinds
            inputs, outputs = self._sizes((part,))
            for own in names:
                a, b = (self.tensors[key] for key in sorted(_keys(own)))
                self._require(own, a, b, (rank, inputs), (outputs, rank), rank)
            a, b = (torch.stack([self.tensors[f"{own}.lora_{side}.weight"] for own in names]) for side in "AB")
            yield Stack(f"{name}.*.{part}", (part,), a, b, scale), {key for own in names for key in _keys(own)}

    def _sizes(self, parts: Iterable[Part]) -> tuple[int, int]:
        """Inputs and outputs of parts that read the same."""
        ends = [(self.kind.width, self.hidden) if p == "down_proj" else (self.hidden, self.kind.width) for p in parts]
        return ends[0][0], sum(outputs for _, outputs in ends)

    def _require(
        self, name: str, a: Tensor, b: Tensor, of_a: tuple[int, ...], of_b: tuple[int, ...], rank: int
    ) -> None:
        if (tuple(a.shape), tuple(b.shape)) != (of_a, of_b):
            raise UserError(
                f"{name}: lora_A and lora_B are {tuple(a.shape)} and {tuple(b.shape)}, which does not fit rank {rank} "
                f"and the {self.kind.count} experts of this base model"
            )


def _keys(name: str) -> set[str]:
    """Names of the two matrices of an adapter."""
    return {f"{name}.lora_{matrix}.weight" for matrix in "AB"}
