"""Deleting what nobody can reach any more: checkpoints whose time is over, and files that belong to none.

It may run beside a server and more than once at a time: rows go first, and only files that no row can come to have are deleted.
"""

import logging
from dataclasses import dataclass

from tinsmith.store.files import CheckpointFiles
from tinsmith.store.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Garbage:
    """Something that a sweep deletes."""

    what: str
    reason: str
    size_bytes: int


def find_garbage(store: Store, files: CheckpointFiles) -> list[Garbage]:
    """What a sweep would delete now."""
    expired = [Garbage(c.tinker_path, "has expired", c.size_bytes) for c in store.expired_checkpoints()]
    left = [(directory, sum(files.sizes(directory).values())) for directory in store.discarded_directories()]
    return expired + [Garbage(f"files of {directory}", "no checkpoint has them", size) for directory, size in left]


def sweep(store: Store, files: CheckpointFiles) -> None:
    """Delete it."""
    for checkpoint in store.drop_expired_checkpoints():
        log.info("%s has expired and is deleted", checkpoint.tinker_path)
    for directory in store.discarded_directories():
        files.remove(directory)
        store.forget_directory(directory)
        log.info("the files of %s are deleted: no checkpoint has them", directory)
