"""Deleting what nobody can reach any more: checkpoints whose time is over, and files that belong to none.

It may run beside a server and more than once at a time: rows go first, and only files that no row can come to have are deleted. That a row
is gone is on the disk before its files go, so no power cut brings back a checkpoint without files. Complete files that the database does
not know are deleted only if a person asks for it: the database may be an old copy, and `tinsmith recover` registers them.
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
    """What a `sweep` would delete now."""
    unused = [(place, "no checkpoint has them any more") for place in store.discarded_directories()]
    unfinished = [(entry.name, "they were never finished") for entry in _strays(store, files) if not entry.finished]
    left = [Garbage(f"files of {place}", reason, files.remaining_bytes(place)) for place, reason in unused + unfinished]
    return [*_expired(store), *left]


def find_unknown(store: Store, files: CheckpointFiles) -> list[Garbage]:
    """Complete files in the data directory that the database does not know: what a `sweep` deletes only with `unknown`."""
    places = [entry.name for entry in _strays(store, files) if entry.finished]
    return [Garbage(f"files of {place}", "the database does not know them", files.remaining_bytes(place)) for place in places]


def unknown_places(store: Store, files: CheckpointFiles) -> list[str]:
    """Where complete files lie that the database does not know: in the data directory, and below the root of `files`."""
    places = files.finished_places()  # before the rows: whatever comes into being is noted first
    known = _known(store)
    return [place for place in places if place.rpartition("/")[2] not in known]


def sweep(store: Store, files: CheckpointFiles, unknown: bool = False) -> None:
    """Delete what nobody can reach; complete files that the database does not know only with `unknown`."""
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
    """What lies in the data directory and is neither a checkpoint's nor noted as discarded or being written."""
    entries = files.entries()  # before the rows: whatever comes into being is noted first
    known = _known(store)
    before = time.time() - WRITING_S
    for entry in entries:
        if entry.place not in known and (entry.finished or entry.modified_at < before):
            yield entry


def _known(store: Store) -> set[str]:
    """The last parts of all directories that the database knows. They are unique, and a root may be another way to write a directory."""
    return {place.rpartition("/")[2] for place in store.known_directories()}
