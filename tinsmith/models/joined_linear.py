"""Joins linear layers that read the same input: one tensor holds their weights, and one multiplication serves all.

The parameters of the transformers modules become views of that tensor: nothing lies in memory twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tinsmith.models.layout import LM_HEAD, Layout, Projection


class WeightPiece(NamedTuple):
    """Outputs [start, end) of a joined linear layer whose weights lie in one tensor."""

    rows: tuple[int, int]
    weight: Tensor
    """[end - start, in]"""
    bias: Tensor | None
    """[end - start]"""


@dataclass(frozen=True, eq=False)
class JoinedLinear:
    """One or several linear layers of a decoder layer: x [tokens, in] -> [tokens, out]."""

    projection: Projection
    """Its names in the layout."""
    rows: tuple[tuple[int, int], ...]
    """Outputs [start, end) of each of the projection's modules."""
    pieces: tuple[WeightPiece, ...]
    """All rows, in order: one piece of a base model, one for each module of full weights."""

    @property
    def weight(self) -> Tensor:
        """[out, in], of a base model."""
        return self._only_piece.weight

    @property
    def bias(self) -> Tensor | None:
        """[out], of a base model."""
        return self._only_piece.bias

    @property
    def _only_piece(self) -> WeightPiece:
        if len(self.pieces) != 1:
            raise ValueError(f"the weights of {self.projection.name} lie in {len(self.pieces)} tensors; use `multiply`")
        return self.pieces[0]

    def multiply(self, x: Tensor) -> Tensor:
        """The layer without adapters and gradients: x [tokens, in] -> [tokens, out]."""
        if len(self.pieces) == 1:
            return linear(x, self.weight, self.bias)
        y = x.new_empty(len(x), self.projection.out_features)
        for (start, end), weight, bias in self.pieces:
            if bias is None:
                torch.mm(x, weight.t(), out=y[:, start:end])
            else:
                torch.addmm(bias, x, weight.t(), out=y[:, start:end])
        return y

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "JoinedLinear":
        """Use these parameters, by name, in the place of its own."""
        pieces = []
        own = self._only_piece
        for module, (start, end) in zip(self.projection.modules, self.rows, strict=True):
            bias = None if own.bias is None else own.bias[start:end]
            weight = parameters.get(f"{module}.weight", own.weight[start:end])
            pieces.append(
                WeightPiece((start, end), weight, bias if bias is None else parameters.get(f"{module}.bias", bias))
            )
        return replace(self, pieces=tuple(pieces))


def join_linears(language_model: nn.Module, layout: Layout) -> dict[str, JoinedLinear]:
    """All projections of the language model, by name.

    The parameters of its linears become views of the joined weights one by one.
    """
    return {name: _join(language_model, own) for name, own in layout.projections.items() if name != LM_HEAD}


@torch.no_grad()
def _join(language_model: nn.Module, projection: Projection) -> JoinedLinear:
    linears: list[Any] = [language_model.get_submodule(name) for name in projection.modules]
    joined = join_on(linears[0].weight.device, linears, projection)
    if len(linears) == 1:
        return joined
    weight, bias = joined.weight, joined.bias
    for one, (first, end) in zip(linears, joined.rows, strict=True):
        one.weight = nn.Parameter(weight[first:end], requires_grad=False)
        if bias is not None and one.bias is not None:
            one.bias = nn.Parameter(bias[first:end], requires_grad=False)
    return joined


@torch.no_grad()
def join_on(device: torch.device, linears: Sequence[Any], projection: Projection) -> JoinedLinear:
    """The linears of a projection as one, on a device.

    One that is alone there is not copied; the others are, and stay as they are.
    """
    rows = []
    start = 0
    for one in linears:
        rows.append((start, start + len(one.weight)))
        start += len(one.weight)
    if len(linears) == 1:
        (one,) = linears
        return JoinedLinear(
            projection, tuple(rows), (WeightPiece(rows[0], one.weight.to(device), _bias_on(device, one)),)
        )
    weight = torch.cat([one.weight.to(device) for one in linears])  # [out, in]
    bias = None
    if any(one.bias is not None for one in linears):  # rows without one add 0
        of_each = [_bias_on(device, one) for one in linears]
        bias = torch.cat(
            [weight.new_zeros(len(one.weight)) if b is None else b for one, b in zip(linears, of_each, strict=True)]
        )
    return JoinedLinear(projection, tuple(rows), (WeightPiece((0, start), weight, bias),))


def _bias_on(device: torch.device, linear: Any) -> Tensor | None:
    return None if linear.bias is None else linear.bias.to(device)
