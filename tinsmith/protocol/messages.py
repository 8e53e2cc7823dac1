"""The form of all messages between processes: ZeroMQ frames with a name, a JSON header, and for some raw bytes.

`serving.py` holds what server and engine say to each other, `work.py` what engine and workers do.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import orjson


@dataclass(frozen=True)
class Message:
    """Base of all messages: the dataclass fields travel as JSON, except `payload` (bytes), which travels as it is."""

    registry: ClassVar[dict[bytes, type["Message"]]] = {}

    def __init_subclass__(cls) -> None:
        Message.registry[cls.__name__.encode()] = cls

    def to_frames(self) -> list[bytes]:
        """The message as ZeroMQ frames."""
        header = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if spec.name != "payload"}
        return [type(self).__name__.encode(), orjson.dumps(header), getattr(self, "payload", b"")]

    @classmethod
    def from_frames(cls, frames: list[bytes]) -> "Message":
        """The inverse of `to_frames`. Raises KeyError for a name that is not in this file."""
        kind, header = Message.registry[frames[0]], orjson.loads(frames[1])
        has_payload = any(spec.name == "payload" for spec in dataclasses.fields(kind))
        return kind(**(header | {"payload": frames[2]} if has_payload else header))
