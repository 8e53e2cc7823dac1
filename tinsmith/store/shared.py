"""Checkpoints that another server writes below our root, found by their manifests.

A server that only samples looks there for what its database does not know. It keeps what it finds in memory, lists do
not show it, and only the other server deletes it.
"""

import logging
import time
from functools import partial
from threading import Lock
from typing import Protocol

from tinsmith.errors import NotFoundError, TinsmithError, reported
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.manifest import parse_manifest
from tinsmith.store.records import Checkpoint
from tinsmith.wire.paths import CheckpointKind

log = logging.getLogger(__name__)


class SharedCheckpoints:
    """Checkpoints to sample below the root of `files`, for any thread."""

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self._lock = Lock()
        self._rows: dict[str, Checkpoint | None] = {}
        """All manifests that were read, by place; None for no checkpoint to sample."""

    def find(self, tinker_path: str) -> Checkpoint | None:
        """The newest living checkpoint of this path.

        Raises TinsmithError if the root is unreadable, or there is none and a manifest, perhaps its own, is unreadable.
        """
        with self._lock:
            unreadable = self._look()
            found = [row for row in self._rows.values() if row is not None and row.tinker_path == tinker_path]
        alive = [row for row in found if row.expires_at is None or row.expires_at > time.time()]
        if unreadable and not alive:
            raise unreadable[0]
        return max(alive, key=lambda row: row.created_at, default=None)

    def _look(self) -> list[TinsmithError]:
        """Read new manifests and forget deleted ones; returns errors of others."""
        unreadable: list[TinsmithError] = []
        places = self.files.places_below_root()
        self._rows = {place: self._rows[place] for place in places if place in self._rows}
        for place in places:
            if place not in self._rows:
                # What is wrong with one checkpoint must not hide the others
                with reported(TinsmithError, unreadable.append):
                    text = self.files.at(place).manifest()
                    if text is not None:
                        self._rows[place] = self._row(place, text)
        return unreadable

    def _row(self, place: str, text: bytes) -> Checkpoint | None:
        with reported(TinsmithError, partial(log.warning, "a checkpoint of another server is left out: %s")):
            row = parse_manifest(text, self.files.shown(place)).row(place)
            return row if row.kind == "sampler" else None
        return None


class SavedRows(Protocol):
    """A `Store`, or what asks the process that has one."""

    def require_checkpoint(self, tinker_path: str, kind: CheckpointKind | None = None) -> Checkpoint:
        """The row of a checkpoint. Raises as `Store.require_checkpoint`."""
        ...


def require_sampled(store: SavedRows, shared: SharedCheckpoints | None, tinker_path: str) -> Checkpoint:
    """The checkpoint of a path, in the database, or else a shared one. Raises as `Store.require_checkpoint`."""
    try:
        return store.require_checkpoint(tinker_path, "sampler")
    except NotFoundError:
        found = None if shared is None else shared.find(tinker_path)
        if found is None:
            raise
        return found
