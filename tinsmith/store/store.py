"""The store as every process sees it: each method is one transaction. It may be used from several threads.

A method that returns has committed. What concerns checkpoints is on the disk then, also if the power fails; other commits survive the death
of any process (`database.py`). Images are files (`blobs.py`): they are written before the transaction that needs them and deleted after the
one that releases them.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Self

from tinsmith.errors import StoreUnavailableError
from tinsmith.store import commands, sessions
from tinsmith.store.blobs import BlobFile, BlobFiles
from tinsmith.store.checkpoints import CheckpointStore
from tinsmith.store.database import BUSY_S, Database, check, give_back, open_database, require_data
from tinsmith.store.files import ABOUT_FILE, CheckpointFiles
from tinsmith.store.records import NewCommand, Outcome

log = logging.getLogger(__name__)

_KEEP_AFTER_DROP = 0.95
"""The part of its limit that is left of what is kept when it was more."""
_DELETED_AT_ONCE = 64
"""Images deleted in one transaction: others wait for it."""


class Store(commands.CommandStore, sessions.SessionStore, CheckpointStore):
    """Storage of all that must survive the death of a process. The methods here also write or delete images."""

    def __init__(self, database: Database, blobs: BlobFiles, keep_bytes: int) -> None:
        """Use `Store.open`."""
        super().__init__(database)
        self._blobs = blobs
        self._keep_bytes = keep_bytes
        self._kept_bytes: int | None = None
        """Bytes that are kept of finished operations, as this process counts them; None before it has counted."""
        self._unused: set[bytes] = set()
        """Digests of images that may be unused and are still to be deleted."""

    @classmethod
    def open(cls, data_dir: Path, busy_s: float = BUSY_S, keep_bytes: int = 0) -> Self:
        """The store in `data_dir`, made if there is none. Raises ConfigError: unusable directory, or a newer schema version.

        Payloads and images of finished operations stay as long as they take at most `keep_bytes`; the oldest go first. Every method raises
        StoreUnavailableError, and changes nothing, if the database is locked for `busy_s` seconds, its disk is full or fails.
        """
        return cls(open_database(data_dir, busy_s), BlobFiles(data_dir), keep_bytes)

    def close(self) -> None:
        """Close all connections."""
        self._database.dispose()

    def check(self) -> None:
        """Read the whole file. Raises ConfigError if it is damaged, StoreUnavailableError if it is gone, both with the remedy."""
        check(self._database)

    def require_there(self) -> None:
        """Raise StoreUnavailableError if the database's file is not in its directory any more. Checkpoints are not added then."""
        self._database.file.require_there()

    def append(self, new: Sequence[NewCommand]) -> list[bool]:
        """Append commands in one transaction; True for each that is queued now. One whose (model_id, seq_id) is in the log changes nothing.

        An operation on a model that has ended is recorded as failed, not queued (`sessions.refusal`).
        Raises NotFoundError, and appends none, if a model does not exist.
        """
        now = time.time()
        with_images = [command for command in new if command.images]
        for command in with_images:
            self._blobs.write(command.images)  # before the database is locked: it may take a while
        with self.writing() as connection:
            queued = [commands.append(connection, command, now) for command in new]
            for command in with_images:
                self._blobs.write(command.images)  # again: while there was no row, one may have been deleted with its last other row
        if with_images and not all(queued):
            self.delete_unused_blobs(digest for command in with_images for digest in command.images)
        return queued

    def write_blobs(self, images: Mapping[bytes, bytes]) -> None:
        """Write images, given by digest, ahead of the `append` of their command, in another thread for example. It then finds them."""
        self._blobs.write(images)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Finish commands in one transaction. A second outcome of a command is ignored.

        The results stay, and the model notes the highest seq_id that succeeded. Payloads and images are dropped, or kept up to the limit
        given to `Store.open`. The outcome of seq_id 0 makes its model ready or failed. Raises NotFoundError for a malformed request id.
        """
        now, keep = time.time(), self._keep_bytes > 0
        with self.writing() as connection:
            released = commands.record(connection, outcomes, now, keep)
        self._release(released)

    def _release(self, released: commands.Released) -> None:
        """Count what finished commands keep, and delete the images that none needs any more."""
        if self._keep_bytes > 0:
            self._count_kept(released.kept_bytes)
        self.delete_unused_blobs(released.digests)

    def _count_kept(self, more: int) -> None:
        """Count what is kept now, and drop the oldest of it if it is too much. Raises nothing that the database raises."""
        try:
            if self._kept_bytes is None:
                with self.reading() as connection:
                    self._kept_bytes = commands.kept_bytes(connection)
            else:
                self._kept_bytes += more
            if self._kept_bytes > self._keep_bytes:
                self._drop_kept()
        except StoreUnavailableError as error:  # the outcomes are recorded; the next ones try again
            log.warning("finished operations are kept beyond their limit for now: %s", error)

    def _drop_kept(self) -> None:
        """Drop the oldest of what is kept, a little more than has to go: each time all that is kept is added up."""
        with self.writing() as connection:
            left = commands.drop_kept(connection, int(self._keep_bytes * _KEEP_AFTER_DROP))
        self._kept_bytes = left.kept_bytes
        self.delete_unused_blobs(left.digests)

    def delete_unused_blobs(self, digests: Iterable[bytes]) -> None:
        """Delete those of these blobs that no command refers to. Others that could not be deleted before are tried again.

        It is done in transactions that write, one after the other with `append`, which looks for its images in its own.
        """
        self._unused.update(digests)
        waiting = list(self._unused)
        for first in range(0, len(waiting), _DELETED_AT_ONCE):
            some = waiting[first : first + _DELETED_AT_ONCE]
            try:
                with self.writing() as connection:
                    for digest in commands.unused(connection, some):
                        self._blobs.remove(digest)
            except StoreUnavailableError as error:
                log.warning("images that no operation needs are deleted later: %s", error)
                return
            self._unused.difference_update(some)

    def copy_blobs_from(self, original: "Store") -> None:
        """Copy the images that commands here refer to, which the other store has: `tinsmith backup`. Raises OSError.

        Operations go on there meanwhile. If one has released an image, what is kept here of finished operations that have it is dropped;
        those that are queued here are never run, because no engine takes over the queue of another.
        """
        with self.reading() as connection:
            needed = commands.used(connection)
        gone = [digest for digest in needed if not original._blobs.copy(digest, self._blobs)]
        with self.writing() as connection:
            for digest in gone:
                commands.drop_kept_with(connection, digest)
        self.sweep_blobs()

    def unused_blobs(self) -> list[BlobFile]:
        """Files of images that no command refers to: what a process that died left. One that is just being appended may be among them."""
        found = list(self._blobs.files())
        with self.reading() as connection:
            needed = commands.used(connection)
        return [file for file in found if file.sha256 not in needed]

    def give_back_space(self, spare_pages: int = 2**14, most_pages: int = 2**12) -> None:
        """Shorten the database's file by a few MiB of what is deleted, if more than `spare_pages` of 4 KiB are free."""
        give_back(self._database, spare_pages, most_pages)

    def forget_ended(self, before: float) -> int:
        """Delete rows of sessions that were finished before then (Unix time); returns how many. Checkpoints and their runs stay."""
        with self.writing() as connection:
            digests = sessions.images_of_ended(connection, before)
            forgotten = sessions.forget_ended(connection, before)
        self.delete_unused_blobs(digests)
        return forgotten

    def fail_unfinished(self, reason: str) -> list[str]:
        """Give up what a dead engine left: queued commands fail (category server), models are lost, snapshots gone.

        Returns the request ids that failed. Called while no engine runs. What is kept of finished operations is brought under its limit,
        which may be another since the last time, and images that nothing refers to are deleted. Raises StoreUnavailableError where a file
        of the database is gone: the next engine would make a new one beside the one that is open here.
        """
        self.require_there()
        with self.writing() as connection:
            failed = commands.fail_unfinished(connection, reason, time.time(), keep=self._keep_bytes > 0)
        self._drop_kept()
        self.sweep_blobs()
        return failed

    def sweep_blobs(self) -> None:
        """Delete images that no command refers to, and files of images that were never finished."""
        unused = self.unused_blobs()
        self.delete_unused_blobs(file.sha256 for file in unused if file.sha256 is not None)
        for file in unused:
            if file.sha256 is None:
                file.path.unlink(missing_ok=True)

    def lose_models(self, lost: Mapping[str, str], returning: Mapping[str, str]) -> list[Outcome]:
        """Note what ended with a worker, each with its reason: models, and the snapshots of models that come `returning`.

        What is queued for models that are lost fails (category server); returns the outcomes.
        """
        with self.writing() as connection:
            failed, released = commands.lose_models(connection, lost, time.time(), keep=self._keep_bytes > 0)
            commands.lose_snapshots(connection, returning)
        self._release(released)
        return failed

    def read_blob(self, sha256: bytes) -> bytes | None:
        """The encoded image with this digest; None if no command has it.

        Raises TinsmithError if its file is damaged.
        """
        return self._blobs.read(sha256)


@contextmanager
def opened(data_dir: Path) -> Iterator[Store]:
    """The store of a data directory that a server has made, for the time of the body. Raises ConfigError if there is none."""
    require_data(data_dir)
    with closing(Store.open(data_dir)) as store:
        yield store


def base_of_saved(data_dir: Path, tinker_path: str) -> str | None:
    """The directory or Hub id of the base model that a checkpoint of a data directory was trained on; None if its files do not say.

    Raises as `require_checkpoint` if there is none of this path, ConfigError if there is no database.
    """
    with opened(data_dir) as store:
        place = store.require_checkpoint(tinker_path).directory
    files = CheckpointFiles(data_dir)
    with suppress(OSError, ValueError, KeyError, TypeError):  # the export reads it again and says what is wrong
        source = json.loads(b"".join(files.read(place, ABOUT_FILE, range(files.sizes(place).get(ABOUT_FILE, 0)))))["base_source"]
        return source if isinstance(source, str) else None
    return None
