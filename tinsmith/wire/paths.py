"""Paths of checkpoints: tinker://MODEL_ID/SEGMENT/NAME.

Segments: `weights` to train further, `sampler_weights` to sample, `external_weights` to download.
"""

from typing import Literal, NamedTuple

from tinsmith.errors import UserError

CheckpointKind = Literal["training", "sampler", "external"]

_SCHEME = "tinker://"
_SEGMENTS: dict[CheckpointKind, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
_KINDS: dict[str, CheckpointKind] = {segment: kind for kind, segment in _SEGMENTS.items()}
_IMPORTED = "imported"
"""Model id in paths of imported checkpoints."""
_MAX_NAME = 200
_NOT_IN_NAMES = set("/\\?#%")
"""Clients put names into URLs without escaping these."""


class CheckpointPath(NamedTuple):
    """The three parts of a path. `str` puts them together."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """SEGMENT/NAME, unique within a model."""
        return f"{_SEGMENTS[self.kind]}/{self.name}"


def check_name(name: str) -> str:
    """The name of a checkpoint, one segment of a path. Raises UserError."""
    if not name or name in (".", "..") or len(name) > _MAX_NAME:
        raise UserError(
            f"path={name[:_MAX_NAME]!r} cannot name a checkpoint; use 1 to {_MAX_NAME} characters, not '.' or '..'"
        )
    if name != name.strip() or not name.isprintable() or _NOT_IN_NAMES & set(name):
        raise UserError(
            f"path={name!r} cannot name a checkpoint; use printable characters but / \\ ? # %, "
            "and no blanks around them"
        )
    return name


def imported_paths(name: str) -> list[CheckpointPath]:
    """Paths of an imported adapter: to train further, and to sample. Raises UserError as `check_name`."""
    kinds: tuple[CheckpointKind, ...] = ("training", "sampler")
    return [CheckpointPath(_IMPORTED, kind, check_name(name)) for kind in kinds]


def is_path(text: str) -> bool:
    """Whether a text begins like a checkpoint's path."""
    return text.startswith(_SCHEME)


def parse_path(text: str) -> CheckpointPath:
    """The parts of a path. Raises UserError if it names no checkpoint of ours."""
    parts = text.removeprefix(_SCHEME).split("/")
    if not is_path(text) or len(parts) != 3 or not parts[0] or parts[1] not in _KINDS:
        raise UserError(
            f"path={text!r} is not tinker://MODEL_ID/SEGMENT/NAME, SEGMENT being one of {', '.join(_KINDS)}"
        )
    return CheckpointPath(parts[0], _KINDS[parts[1]], check_name(parts[2]))
