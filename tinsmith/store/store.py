"""All that survives the death of a process or a power cut, and what deletes the unused part of it.

Each method is one transaction; any thread may call it.

A method that returns has committed, and the disk has it (`database.py`). Images are files (`blobs.py`): written before
the transaction that needs them, deleted after the one that releases them.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from tinsmith.errors import StoreUnavailableError, reported
from tinsmith.store import commands, histories, sessions
from tinsmith.store.blobs import BlobFile, BlobFiles
from tinsmith.store.checkpoints import CheckpointStore, put
from tinsmith.store.database import Database, open_database, require_data
from tinsmith.store.fence import BUSY_S
from tinsmith.store.files import ABOUT_FILE, OPTIMIZER_FILE, WRITING_S, CheckpointFiles, Entry
from tinsmith.store.manifest import read_manifest, verify_files
from tinsmith.store.records import Checkpoint, Command, HistoryChange, NewCommand, Outcome

log = logging.getLogger(__name__)

_KEEP_AFTER_DROP = 0.95
"""Share of the limit that is left when some has to go."""
_DELETED_AT_ONCE = 64
"""Images deleted in one transaction, for which others wait."""
_SOON_COMPARED = 2**30
"""Bytes of a file that a second or two compares with its digest."""


class Store(commands.CommandStore, sessions.SessionStore, CheckpointStore):
    """The methods here also write or delete images."""

    def __init__(self, database: Database, blobs: BlobFiles, keep_bytes: int, first_requests: int) -> None:
        """Use `Store.open`."""
        super().__init__(database)
        self.blobs = blobs
        """Images. They may be written ahead of the `append` of their command."""
        self._keep_bytes = keep_bytes
        self._first_requests = first_requests
        self._kept_bytes: int | None = None
        """Bytes kept of finished operations, as counted here; None before that."""
        self._unused: set[bytes] = set()
        """Images to be deleted, if unused."""

    @classmethod
    def open(
        cls,
        data_dir: Path,
        busy_s: float = BUSY_S,
        keep_bytes: int = 0,
        first_requests: int = commands.FIRST_REQUESTS,
    ) -> Self:
        """The store in `data_dir`, made if there is none. Raises ConfigError as `open_database`.

        Payloads and images of finished operations stay up to `keep_bytes`; the oldest go first. Payloads of each run's
        `first_requests` passes stay with it. Methods raise StoreUnavailableError, and change nothing, if the database
        is locked for `busy_s` seconds or its disk is full or fails.
        """
        return cls(open_database(data_dir, busy_s), BlobFiles(data_dir), keep_bytes, first_requests)

    def append(self, new: Sequence[NewCommand]) -> list[bool]:
        """Append commands; True for each that is queued. If its (model_id, seq_id) is in the log, nothing changes.

        On a model that has ended it is recorded as failed. Raises NotFoundError, appending none, if a model is missing.
        """
        now = time.time()
        with_images = [command for command in new if command.images]
        for command in with_images:
            self.blobs.write(command.images)  # before the database is locked: it may take a while
        with self.writing() as connection:
            queued = [commands.append(connection, command, now) for command in new]
            for command in with_images:
                # again: while there was no row, one may have been deleted with its last other row
                self.blobs.write(command.images)
        if with_images and not all(queued):
            self.delete_unused_blobs(digest for command in with_images for digest in command.images)
        return queued

    def record(self, outcomes: Sequence[Outcome | HistoryChange]) -> None:
        """Finish commands; a second outcome of one is ignored. What changes in histories is written with them.

        The model notes the highest seq_id that succeeded; that of seq_id 0 makes it ready or failed. Payloads and
        images are dropped, or kept up to the limit, or left for a replay until they are released. Raises NotFoundError
        for a malformed request id, and EngineUnavailableError for an engine that is not the newest.
        """
        now, keep = time.time(), self._keep_bytes > 0
        with self.writing() as connection:
            released = commands.record(connection, outcomes, now, keep, self._first_requests)
        self._release(released)

    def put_saved(self, checkpoint: Checkpoint, command: Command | None, kept: int | None = None) -> None:
        """Add the checkpoint of a save as `put_checkpoint`; the save finds it with `saved` if it is run again."""
        with self.writing_if_there() as connection:
            put(connection, checkpoint, kept)
            if command is not None:
                saved = {"directory": checkpoint.directory, "size_bytes": checkpoint.size_bytes}
                commands.note_saved(connection, command, saved)

    def end_history(self, model_id: str) -> None:
        """Forget what a model could be restored from, and drop its requests, or keep them up to the limit."""
        with self.writing() as connection:
            histories.forget(connection, [model_id])
            released = commands.release(connection, model_id, -1, 2**62, keep=self._keep_bytes > 0)
        self._release(released)

    def _release(self, released: commands.Released) -> None:
        if self._keep_bytes > 0:
            self._count_kept(released.kept_bytes)
        self.delete_unused_blobs(released.digests)

    def _count_kept(self, more: int) -> None:
        """Count what is kept, and drop the oldest beyond the limit."""
        # The outcomes are recorded; the next ones try again
        with _logged("finished operations are kept beyond their limit for now: %s"):
            if self._kept_bytes is None:
                with self.reading() as connection:
                    self._kept_bytes = commands.kept_bytes(connection)
            else:
                self._kept_bytes += more
            if self._kept_bytes > self._keep_bytes:
                self._drop_kept()

    def _drop_kept(self) -> None:
        """Drop a little more than has to go: adding up all that is kept takes time."""
        with self.writing() as connection:
            left = commands.drop_kept(connection, int(self._keep_bytes * _KEEP_AFTER_DROP))
        self._kept_bytes = left.kept_bytes
        self.delete_unused_blobs(left.digests)

    def delete_unused_blobs(self, digests: Iterable[bytes]) -> None:
        """Delete these blobs if no command refers to them, and those that could not be deleted before.

        The transactions exclude those of `append`, which looks for its images in its own.
        """
        self._unused.update(digests)
        waiting = list(self._unused)
        with _logged("images that no operation needs are deleted later: %s"):
            for first in range(0, len(waiting), _DELETED_AT_ONCE):
                some = waiting[first : first + _DELETED_AT_ONCE]
                with self.writing() as connection:
                    for digest in commands.unused(connection, some):
                        self.blobs.remove(digest)
                self._unused.difference_update(some)

    def copy_blobs_from(self, original: "Store") -> None:
        """Copy the images of commands from another store, for `tinsmith backup`. Raises OSError.

        If an image was released there meanwhile, finished operations here lose what is kept of them. Queued ones are
        never run here.
        """
        with self.reading() as connection:
            needed = commands.used(connection)
        gone = [digest for digest in needed if not original.blobs.copy(digest, self.blobs)]
        with self.writing() as connection:
            for digest in gone:
                commands.drop_kept_with(connection, digest)
        self.sweep_blobs()

    def unused_blobs(self) -> list[BlobFile]:
        """Files of images that no command refers to, perhaps because it is just being appended."""
        found = list(self.blobs.files())
        with self.reading() as connection:
            needed = commands.used(connection)
        return [file for file in found if file.sha256 not in needed]

    def forget_ended(self, before: float) -> int:
        """Delete sessions finished before then (Unix time), but for runs with checkpoints; returns how many rows."""
        with self.writing() as connection:
            digests = sessions.images_of_ended(connection, before)
            forgotten = sessions.forget_ended(connection, before)
        self.delete_unused_blobs(digests)
        return forgotten

    def fail_unfinished(self, reason: str, place: str = "", former: str = "") -> set[str]:
        """Give up what the next engine, at this `place`, cannot bring back; returns the models that it can.

        A model can be brought back that has a history, whose files are at that place, and that has not ended engines
        again and again. The place may have had a `former` name. All others are lost, with their operations and
        snapshots; models that were just being made are made anew.

        Raises StoreUnavailableError if the database's file is gone: the next engine would make a new one beside the one
        open here.
        """
        self.require_there()
        with self.writing() as connection:
            left = commands.fail_unfinished(connection, reason, place, former, time.time(), keep=self._keep_bytes > 0)
        self._drop_kept()
        self.sweep_blobs()
        return left

    def note_begun(self) -> None:
        """Note that the engine begins its first operation: if it ends before any is done, that may be the reason."""
        with self.writing() as connection:
            histories.note_begun(connection)

    def sweep_blobs(self) -> None:
        """Delete images that no command refers to, and unfinished files."""
        unused = self.unused_blobs()
        self.delete_unused_blobs(file.sha256 for file in unused if file.sha256 is not None)
        for file in unused:
            if file.sha256 is None:
                file.path.unlink(missing_ok=True)

    def lose_models(self, lost: Mapping[str, str]) -> list[Outcome]:
        """Note that models ended with a worker, and why; returns the outcomes of what was queued for them."""
        with self.writing() as connection:
            failed, released = commands.lose_models(connection, lost, time.time(), keep=self._keep_bytes > 0)
        self._release(released)
        return failed


def _logged(message: str) -> AbstractContextManager[None]:
    return reported(StoreUnavailableError, partial(log.warning, message))


@contextmanager
def opened(data_dir: Path) -> Iterator[Store]:
    """The store of a data directory. Raises ConfigError if no server has made one."""
    require_data(data_dir)
    with closing(Store.open(data_dir)) as store:
        yield store


def base_of_saved(data_dir: Path, tinker_path: str) -> str | None:
    """The source of a checkpoint's base model; None if its files do not say.

    Raises as `require_checkpoint`, ConfigError if there is no database, and TinsmithError for weights on this machine
    that are damaged. Large ones are not compared, because the export compares all of them.
    """
    with opened(data_dir) as store:
        files = CheckpointFiles(data_dir).at(store.require_checkpoint(tinker_path).directory)
    if files.is_local:
        manifest = read_manifest(Path(files.path), files.path)
        small = [name for name, file in manifest.files.items() if file.size <= _SOON_COMPARED]
        verify_files(
            manifest, Path(files.path), files.path, [name for name in small if name not in (ABOUT_FILE, OPTIMIZER_FILE)]
        )
    with suppress(OSError, ValueError, KeyError, TypeError):  # the export reads it again and says what is wrong
        source = json.loads(b"".join(files.read(ABOUT_FILE, range(files.sizes().get(ABOUT_FILE, 0)))))["base_source"]
        return source if isinstance(source, str) else None
    return None


# Deletes checkpoints that have expired or were deleted a day ago, and files of checkpoints that no row names.
#
# It may run beside a server, and several times at once: rows are deleted first, durably, and then files that no row can
# ever name. Complete files without a row are deleted only on request: the database may be an old copy, and `tinsmith
# recover` adds them.


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
    return [*_gone(store), *left]


def find_unknown(store: Store, files: CheckpointFiles) -> list[Garbage]:
    """Complete files that the database does not know, which only `unknown` deletes."""
    places = [entry.name for entry in _strays(store, files) if entry.finished]
    return [
        Garbage(f"files of {place}", "the database does not know them", files.remaining_bytes(place))
        for place in places
    ]


def unknown_places(store: Store, files: CheckpointFiles) -> list[str]:
    """Places of complete files that the database does not know, below the root too."""
    # Listed before the rows are read: a save is noted in the database before it writes
    places = files.finished_places()
    known = _known(store)
    return [place for place in places if place.rpartition("/")[2] not in known]


def sweep(store: Store, files: CheckpointFiles, unknown: bool = False) -> None:
    """Delete what is unused; with `unknown` also complete files without a row."""
    for checkpoint in store.drop_gone_checkpoints():
        log.info("%s %s, and goes", checkpoint.tinker_path, _why_gone(checkpoint))
    for directory in store.discarded_directories():
        files.remove(directory)
        store.forget_directory(directory)
        log.info("the files of %s are deleted: no checkpoint has them", directory)
    for entry in _strays(store, files):
        if unknown or not entry.finished:
            files.remove(entry.name)
            log.info(
                "the files of %s are deleted: %s",
                entry.name,
                "asked for" if entry.finished else "a process that died left them",
            )


def _gone(store: Store) -> Iterator[Garbage]:
    counted = store.stored_directories()
    for checkpoint in store.gone_checkpoints():
        size = 0 if checkpoint.directory in counted else checkpoint.size_bytes
        yield Garbage(checkpoint.tinker_path, _why_gone(checkpoint), size)
        counted.add(checkpoint.directory)


def _why_gone(checkpoint: Checkpoint) -> str:
    return "has expired" if checkpoint.deleted_at is None else "was deleted"


def _strays(store: Store, files: CheckpointFiles) -> Iterator[Entry]:
    """Directories in the data directory without a row, but for young unfinished ones."""
    entries = files.entries()  # listed before the rows are read: a save is noted in the database before it writes
    known, living = _known(store), {place.rpartition("/")[2] for place in store.stored_directories()}
    before = time.time() - WRITING_S
    for entry in entries:
        # What is left beside a checkpoint that is complete, of the same name, is nobody's either.
        unknown = entry.place not in known or (entry.place in living and not entry.finished)
        if unknown and (entry.finished or entry.modified_at < before):
            yield entry


def _known(store: Store) -> set[str]:
    """Last parts of all directories in the database: unique, while a directory may be written in several ways."""
    return {place.rpartition("/")[2] for place in store.known_directories()}
