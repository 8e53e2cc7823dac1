"""A linear layer with LoRA as a module, for networks that run through their transformers modules (`models/packed_lora.py` computes it)."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from tinsmith.models.joined_linear import JoinedLinear, WeightPiece
from tinsmith.models.layout import LoraTarget, Projection
from tinsmith.models.lora import ActiveSegments
from tinsmith.models.packed_lora import SegmentAdapters


class LoraLinear(nn.Module):
    """A linear layer plus, on each segment of the row, that segment's adapter. Its parameters are those of the layer that it replaces."""

    def __init__(self, name: str, base: nn.Linear, targets: Mapping[str, LoraTarget], active: ActiveSegments) -> None:
        """`targets` are what adapters cover of the layer, by name."""
        super().__init__()
        self.weight = base.weight
        self.bias: nn.Parameter | None = base.bias
        self.rows = (0, base.out_features)
        own = {target_name: target.rows or self.rows for target_name, target in targets.items()}
        self.projection = Projection(name, (name,), own, base.in_features, base.out_features)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] to [..., out_features]; it holds the tokens of the row, [1, tokens] of them or, as in OPT, [tokens]."""
        # Made anew each time: full-parameter training puts another weight in the place of this one for a pass.
        linear = JoinedLinear(self.projection, (self.rows,), (WeightPiece(self.rows, self.weight, self.bias),))
        y = SegmentAdapters(self.active.segments).apply(linear, x.flatten(0, -2))
        return y.view(*x.shape[:-1], -1)


def attach(model: nn.Module, targets: Mapping[str, LoraTarget], active: ActiveSegments) -> None:
    """Replace the linear layers of `model` that these targets are, or are parts of, by ones with LoRA."""
    for module, own in groupby(targets.items(), key=lambda item: item[1].module):
        parent, _, child = module.rpartition(".")
        linear: Any = model.get_submodule(module)
        setattr(model.get_submodule(parent), child, LoraLinear(module, linear, dict(own), active))
