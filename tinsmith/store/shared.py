"""Checkpoints that another server writes below the root of our checkpoint files, found by their manifests.

A server that only samples looks there for what its own database does not know. It changes nothing: what is found is kept in memory, and
the other server alone deletes it. Lists of checkpoints do not show it.
"""

import logging
import time
from threading import Lock
from typing import Protocol

from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.manifest import parse_manifest
from tinsmith.store.records import Checkpoint
from tinsmith.wire.paths import CheckpointKind

log = logging.getLogger(__name__)


class SharedCheckpoints:
    """Checkpoints to sample from below the root of `files`. Used from several threads."""

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self._lock = Lock()
        self._rows: dict[str, Checkpoint | None] = {}
        """Rows of all manifests that were read, by place: they never change. None if it is no checkpoint to sample from."""

    def find(self, tinker_path: str) -> Checkpoint | None:
        """The newest checkpoint of this path that has not expired, as manifests say.

        Raises TinsmithError if the root cannot be read, or if there is none and a manifest, which may be its own, cannot be read.
        """
        with self._lock:
            unreadable = self._look()
            found = [row for row in self._rows.values() if row is not None and row.tinker_path == tinker_path]
        alive = [row for row in found if row.expires_at is None or row.expires_at > time.time()]
        if unreadable and not alive:
            raise unreadable[0]
        return max(alive, key=lambda row: row.created_at, default=None)

    def _look(self) -> list[TinsmithError]:
        """Read the manifests that are new, and forget what has been deleted. Returns why others could not be read, this time."""
        unreadable: list[TinsmithError] = []
        places = self.files.places_below_root()
        self._rows = {place: self._rows[place] for place in places if place in self._rows}
        for place in places:
            if place not in self._rows:
                try:
                    text = self.files.manifest(place)
                except TinsmithError as error:  # what is wrong with one checkpoint must not hide the others
                    unreadable.append(error)
                    continue
                if text is not None:
                    self._rows[place] = self._row(place, text)
        return unreadable

    def _row(self, place: str, text: bytes) -> Checkpoint | None:
        try:
            row = parse_manifest(text, self.files.shown(place)).row(place)
        except TinsmithError as error:
            log.warning("a checkpoint of another server is left out: %s", error)
            return None
        return row if row.kind == "sampler" else None


class SavedRows(Protocol):
    """Rows of checkpoints: a `Store`, or what asks the process that has one."""

    def require_checkpoint(self, tinker_path: str, kind: CheckpointKind | None = None) -> Checkpoint:
        """The row of a checkpoint, saved for the purpose `kind`. Raises as `Store.require_checkpoint` does."""
        ...


def require_sampled(store: SavedRows, shared: SharedCheckpoints | None, tinker_path: str) -> Checkpoint:
    """The checkpoint to sample from under this path: in the database, or else a shared one. Raises as `Store.require_checkpoint`."""
    try:
        return store.require_checkpoint(tinker_path, "sampler")
    except NotFoundError:
        found = None if shared is None else shared.find(tinker_path)
        if found is None:
            raise
        return found
