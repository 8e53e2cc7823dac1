"""The versions of the SDK that work with this server. Clients of others are told when their session begins, before anything fails."""

from packaging.version import InvalidVersion, Version

OLDEST = "0.22.3"
"""The first SDK that sends every forward pass in protobuf when it is asked to."""
NEWEST = "0.38.0"
"""The newest SDK that was tested."""

FLAGS_FOR_OLDER = {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True, "create_model_via_load_weights": True}
"""Flags of client/config that turn on what SDKs from 0.25.0 on do anyway: training data in protobuf, forward passes too, and one request to
create a model from a checkpoint."""


def objection(sdk_version: str) -> str | None:
    """Return a warning for a client of this version when its session begins; None if it works, or names no version."""
    try:
        release = Version(Version(sdk_version).base_version)  # without a suffix such as rc1
    except InvalidVersion:
        return None
    if Version(OLDEST) <= release <= Version(NEWEST):
        return None
    too_old = release < Version(OLDEST)
    fault = "is too old for this server: training will fail" if too_old else "is newer than what this server was tested with"
    return f"tinker {sdk_version} {fault}. It works with {OLDEST} to {NEWEST}; pip install tinker=={NEWEST}"
