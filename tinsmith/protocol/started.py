"""Standard input of a worker that starts."""

from typing import BinaryIO

import orjson

from tinsmith.config import Config, from_tree
from tinsmith.protocol.gate import ChildKeys


def read_start(standard_input: BinaryIO) -> tuple[Config, ChildKeys | None]:
    """The configuration, and the keys for the engine's link if that goes over TCP."""
    started = orjson.loads(standard_input.read())
    keys = started["keys"]
    return from_tree(started["config"]), None if keys is None else ChildKeys(**keys)
