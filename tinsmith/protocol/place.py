"""Where a worker stands among those that hold the same models."""

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One of `count` workers."""

    rank: int = 0
    """From 0 to `count` - 1."""
    count: int = 1
    meeting: str = ""
    """The URL at which the workers of a group find each other: `file://` and a path on one host. Empty for a worker alone."""

    @property
    def name(self) -> str:
        """As messages name it."""
        return f"worker {self.rank} of {self.count}" if self.count > 1 else "the worker"

    def writes(self, model_id: str) -> bool:
        """Whether this is the worker that writes what is saved of a model."""
        return writer_of(model_id, self.count) == self.rank


def writer_of(model_id: str, count: int) -> int:
    """The one of `count` workers that writes what is saved of a model: all have the same, and different models keep different ones busy."""
    return zlib.crc32(model_id.encode()) % count
