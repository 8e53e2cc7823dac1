"""Place of a worker among those that hold the same models."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from tinsmith.errors import ConfigError

_TCP = "tcp://"


@contextmanager
def listening_at(host: str) -> Iterator[None]:
    """Run the body, which listens at an address of this host. Raises ConfigError if that is not possible."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(
            f"cannot listen at {host}, by which workers on other hosts should reach this one: {error}"
        ) from error


def meeting_at(host: str) -> str:
    """The `meeting` of a worker on this host."""
    return f"{_TCP}{host}"


@dataclass(frozen=True)
class Place:
    """One of `count` workers."""

    rank: int = 0
    count: int = 1
    meeting: str = ""
    """Address at which the workers of a group meet (`training/parallel/process_group.py`).

    It is `file://` and a path if all are on the server's host, otherwise `tcp://` and the address by which others reach
    this worker's host. Empty for a worker alone on the server's host.
    """

    @property
    def host(self) -> str:
        """Address of its host, if the workers are not all on the server's; empty otherwise."""
        return self.meeting.removeprefix(_TCP) if self.meeting.startswith(_TCP) else ""

    @property
    def name(self) -> str:
        there = f" on {self.host}" if self.host else ""
        return f"worker {self.rank} of {self.count}{there}" if self.count > 1 else f"the worker{there}"

    def writes(self, model_id: str) -> bool:
        return writer_of(model_id, self.count) == self.rank


def writer_of(model_id: str, count: int) -> int:
    """Return the rank that writes what is saved of a model: all have the same, and models spread over the ranks."""
    return zlib.crc32(model_id.encode()) % count
