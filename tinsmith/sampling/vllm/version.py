"""What vLLM servers are asked to sample from: a version of the weights, and what the trainer makes of the canary with it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.lora import Adapter
from tinsmith.protocol.weights import WeightsRef


@dataclass(frozen=True, eq=False)
class Version:
    """Weights to sample from."""

    weights: Weights | None
    """None are the base's."""
    canary: NDArray[np.float32]
    """What the trainer makes of the canary prompt with them."""
    ref: WeightsRef
    """Their identity."""

    @property
    def full(self) -> FullWeights | None:
        """What takes the place of the base's weights."""
        return self.weights if isinstance(self.weights, FullWeights) else None

    @property
    def adapter(self) -> Adapter | None:
        """What lies over the base's weights."""
        return self.weights if isinstance(self.weights, Adapter) else None

    def __str__(self) -> str:
        kind = {Adapter: "adapter", FullWeights: "full weights"}.get(type(self.weights))
        return f"{kind} {self.ref.label}" if kind else "the base weights"
