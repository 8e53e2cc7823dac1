"""The pass plan for a slice of a sequence: attention and delta rules by heads, convolutions with the neighbour's last tokens.

It stands where `PackedPlan` does (`models/pass_plan.py`), and computes with one for the whole sequence.
"""

import torch
from torch import Tensor

from tinsmith.models.delta_rule import convolve_anew
from tinsmith.models.pass_plan import PackedPlan
from tinsmith.training.sequence_slices import HeadShares, SequenceSlices, share_heads


class SlicedPlan:
    """A `PassPlan` of one sequence of which each worker has a slice. All workers call the same methods in the same order."""

    def __init__(self, slices: SequenceSlices, device: torch.device, dtype: torch.dtype) -> None:
        self.slices = slices
        self.whole = PackedPlan([slices.tokens], device, dtype)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        heads = query.shape[1]
        shares = self._shares(heads, key.shape[1])
        query, key, value = self.slices.to_heads((query, shares.heads), (key, shares.shared), (value, shares.shared))
        key, value = self._matched(key, shares), self._matched(value, shares)
        out = query if query.shape[1] == 0 else self.whole.attend(layer, query, key, value, scale, window)
        return self.slices.to_tokens(out, shares.heads, heads)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        history = weight.shape[1] - 1
        longer = self.slices.after_the_last(x, history)
        return convolve_anew(longer, weight, (len(longer),))[history:]

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        heads = value.shape[1]
        shares = self._shares(heads, key.shape[1])
        of_keys, of_values = ((x, shares.shared) for x in (query, key)), ((x, shares.heads) for x in (value, decay, beta))
        query, key, value, decay, beta = self.slices.to_heads(*of_keys, *of_values)
        query, key = self._matched(query, shares), self._matched(key, shares)
        out = value if value.shape[1] == 0 else self.whole.delta_rule(layer, query, key, value, decay, beta)
        return self.slices.to_tokens(out, shares.heads, heads)

    def _shares(self, heads: int, shared: int) -> HeadShares:
        return share_heads(heads, shared, len(self.slices.slices))

    def _matched(self, x: Tensor, shares: HeadShares) -> Tensor:
        """Shared heads [tokens, heads, width] as often as the heads that share them, where these are not as many of each."""
        places = shares.places[self.slices.rank]
        return x if places is None else x[:, list(places)]
