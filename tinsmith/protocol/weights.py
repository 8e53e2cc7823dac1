"""The identity of weights that engine, workers, samplers and caches share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightsRef:
    """Weights that never change. Two refs are equal if and only if they mean the same numbers."""

    base_model: str
    key: str
    """Never given to two different weights: the request id of the save that made a snapshot, or the directory of a checkpoint's files.
    Empty for the base weights."""
    label: str
    """Name for clients: the base model's name, the path of a checkpoint, or the request id of a save."""
    inflight_of: str | None = None
    """The model whose newest weights these are, if inflight sampling sessions follow it; None for weights that nothing replaces."""

    @classmethod
    def of_base(cls, base_model: str) -> "WeightsRef":
        return cls(base_model, "", base_model)
