"""Deletes expired checkpoints, and files of checkpoints that no row names.

It may run beside a server, and several times at once: rows are deleted first, durably, and then files that no row can ever name. Complete
files without a row are deleted only on request: the database may be an old copy, and `tinsmith recover` adds them.
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
    """Something unused, as `tinsmith gc` lists it."""

    what: str
    reason: str
    size_bytes: int
    """Bytes that deleting it frees; 0 if another checkpoint uses them."""


def find_garbage(store: Store, files: CheckpointFiles) -> list[Garbage]:
    """List what `sweep` would delete now."""
    unused = [(place, "no checkpoint has them any more") for place in store.discarded_directories()]
    unfinished = [(entry.name, "they were never finished") for entry in _strays(store, files) if not entry.finished]
    left = [Garbage(f"files of {place}", reason, files.remaining_bytes(place)) for place, reason in unused + unfinished]
    return [*_expired(store), *left]


def find_unknown(store: Store, files: CheckpointFiles) -> list[Garbage]:
    """Complete files that the database does not know, which only `unknown` deletes."""
    places = [entry.name for entry in _strays(store, files) if entry.finished]
    return [Garbage(f"files of {place}", "the database does not know them", files.remaining_bytes(place)) for place in places]


def unknown_places(store: Store, files: CheckpointFiles) -> list[str]:
    """Places of complete files that the database does not know, below the root too."""
    places = files.finished_places()  # listed before the rows are read: a save is noted in the database before it writes
    known = _known(store)
    return [place for place in places if place.rpartition("/")[2] not in known]


def sweep(store: Store, files: CheckpointFiles, unknown: bool = False) -> None:
    """Delete what is unused; with `unknown` also complete files without a row."""
    for checkpoint in store.drop_expired_checkpoints():
        log.info("%s has expired and is deleted", checkpoint.tinker_path)
    for directory in store.discarded_directories():
        files.remove(directory)
        store.forget_directory(directory)
        log.info("the files of %s are deleted: no checkpoint has them", directory)
    for entry in _strays(store, files):
        if unknown or not entry.finished:
            files.remove(entry.name)
            log.info("the files of %s are deleted: %s", entry.name, "asked for" if entry.finished else "a process that died left them")


def _expired(store: Store) -> Iterator[Garbage]:
    counted = store.living_directories()
    for checkpoint in store.expired_checkpoints():
        yield Garbage(checkpoint.tinker_path, "has expired", 0 if checkpoint.directory in counted else checkpoint.size_bytes)
        counted.add(checkpoint.directory)


def _strays(store: Store, files: CheckpointFiles) -> Iterator[Entry]:
    """Directories in the data directory without a row, but for young unfinished ones."""
    entries = files.entries()  # listed before the rows are read: a save is noted in the database before it writes
    known, living = _known(store), {place.rpartition("/")[2] for place in store.living_directories()}
    before = time.time() - WRITING_S
    for entry in entries:
        # What is left beside a checkpoint that is complete, of the same name, is nobody's either.
        unknown = entry.place not in known or (entry.place in living and not entry.finished)
        if unknown and (entry.finished or entry.modified_at < before):
            yield entry


def _known(store: Store) -> set[str]:
    """Last parts of all directories in the database: unique, while a directory may be written in several ways."""
    return {place.rpartition("/")[2] for place in store.known_directories()}
