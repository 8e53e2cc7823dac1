"""Deleting what nobody can reach any more: checkpoints whose time is over, and files that belong to none.

It may run beside a server and more than once at a time: rows go first, and only files that no row can come to have are deleted. Complete
files that the database does not know are not taken by a server, only by a person who asks for it: the database may be an old copy.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith.store.files import WRITING_S, CheckpointFiles, Entry
from tinsmith.store.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Garbage:
    """Something that can be deleted."""

    what: str
    reason: str
    size_bytes: int
    """What it frees; 0 for a checkpoint whose files another one has, too."""


def find_garbage(store: Store, files: CheckpointFiles) -> list[Garbage]:
    """What a `sweep` with `orphans` would delete now."""
    unused = [(place, "no checkpoint has them any more") for place in store.discarded_directories()]
    strays = [(e.name, "the database does not know them" if e.finished else "they were never finished") for e in _strays(store, files)]
    left = [Garbage(f"files of {place}", reason, files.remaining_bytes(place)) for place, reason in unused + strays]
    return [*_expired(store), *left]


def sweep(store: Store, files: CheckpointFiles, orphans: bool = False) -> None:
    """Delete it; complete files that the database does not know only with `orphans`."""
    for checkpoint in store.drop_expired_checkpoints():
        log.info("%s has expired and is deleted", checkpoint.tinker_path)
    for directory in store.discarded_directories():
        files.remove(directory)
        store.forget_directory(directory)
        log.info("the files of %s are deleted: no checkpoint has them", directory)
    for entry in _strays(store, files):
        if orphans or not entry.finished:
            files.remove(entry.name)
            log.info("the files of %s are deleted: a process that died left them", entry.name)


def _expired(store: Store) -> Iterator[Garbage]:
    counted = store.living_directories()
    for checkpoint in store.expired_checkpoints():
        yield Garbage(checkpoint.tinker_path, "has expired", 0 if checkpoint.directory in counted else checkpoint.size_bytes)
        counted.add(checkpoint.directory)


def _strays(store: Store, files: CheckpointFiles) -> Iterator[Entry]:
    """What lies in the data directory and is neither a checkpoint's nor noted as discarded or being written."""
    entries = files.entries()  # before the rows: whatever comes into being is noted first
    # By their last parts, which are unique: a root may be another way to write the data directory.
    known = {place.rpartition("/")[2] for place in store.known_directories()}
    before = time.time() - WRITING_S
    for entry in entries:
        if entry.place not in known and (entry.finished or entry.modified_at < before):
            yield entry
