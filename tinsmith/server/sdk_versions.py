"""Which versions of the SDK work with this server. Others are told when their session begins, before anything fails."""

import re

OLDEST = "0.22.3"
"""The first SDK that sends every forward pass in protobuf when it is asked to."""
NEWEST = "0.38.0"
"""The newest SDK that was tested."""

FLAGS_FOR_OLDER = {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True, "create_model_via_load_weights": True}
"""Flags of client/config for what SDKs from 0.25.0 on do anyway: training data in protobuf, forward passes among it, one request to go on
from a checkpoint."""


def objection(sdk_version: str) -> str | None:
    """What to tell a client of this version when its session begins; None if it works, or names no version."""
    release = _release(sdk_version)
    if not release or _release(OLDEST) <= release <= _release(NEWEST):
        return None
    fault = (
        "is too old for this server: training will fail" if release < _release(OLDEST) else "is newer than what this server was tested with"
    )
    return f"tinker {sdk_version} {fault}. It works with {OLDEST} to {NEWEST}; pip install tinker=={NEWEST}"


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with; none if it does not begin like one."""
    start = re.match(r"[0-9]{1,6}(\.[0-9]{1,6}){0,2}", version)
    return tuple(int(number) for number in start[0].split(".")) if start else ()
