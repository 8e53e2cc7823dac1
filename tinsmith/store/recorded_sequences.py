"""Records samples with record_stability_info, for the loss stable_reinforce.

As Tinker documents it, a sequence belongs to its session and can be trained on for a day, which begins anew with each
use. The records have a SQLite file of their own, so that no sample waits for the database; a power cut may take the
last ones. A file that is damaged, or of another version, is replaced by an empty one, and backups leave it out.
"""

import fcntl
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import numpy as np

from tinsmith.errors import ConfigError, TinsmithError, translated
from tinsmith.store import ids
from tinsmith.store.disk import oldest_beyond, open_lock
from tinsmith.store.records import RecordedSequence
from tinsmith.store.sqlite import DAMAGED, available

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE_NAME = "recorded_sequences.sqlite"

LIFETIME_S = 24 * 3600.0
"""Seconds that a sequence can be trained on."""

_VERSION = 1
_PURGE_S = 60.0
_LEFT_SHARE = 0.9
"""Share of the limit that a purge leaves, so that not every sample purges."""
_ROW_BYTES = 200
"""Roughly, beside the arrays."""

_TABLE = """
CREATE TABLE IF NOT EXISTS recorded (
    sequence_id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL,
    expires_at REAL NOT NULL,
    size INTEGER NOT NULL,
    prompt_length INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS recorded_age ON recorded (expires_at, size);
CREATE INDEX IF NOT EXISTS recorded_session ON recorded (session_id);
"""


class RecordedSequences:
    """The records of one data directory, for any thread of one process."""

    def __init__(self, data_dir: Path, max_bytes: float) -> None:
        """The least recently used go first. Raises ConfigError for a file that cannot be replaced."""
        self._path = data_dir / FILE_NAME
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        trouble = self._named(ConfigError, "see to that, or delete it: what it records is lost then")
        with trouble, open_lock(data_dir / f"{FILE_NAME}.lock") as lock:  # several workers open it at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._connection, self._bytes = self._open()
        self._purged_at = -_PURGE_S  # so that the first record looks for what has expired

    def put(self, sequences: Mapping[str, RecordedSequence]) -> None:
        """Keep sequences by id. Raises StoreUnavailableError."""
        expires_at = time.time() + LIFETIME_S
        rows = [
            (
                sequence_id,
                ids.session_of(sequence_id),
                expires_at,
                _ROW_BYTES + sequence.tokens.nbytes + sequence.logprobs.nbytes,
                sequence.prompt_length,
                sequence.tokens.astype("<i4").tobytes(),
                sequence.logprobs.astype("<f4").tobytes(),
            )
            for sequence_id, sequence in sequences.items()
        ]

        def insert(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT OR REPLACE INTO recorded VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._bytes += sum(row[3] for row in rows)
            self._purge(connection)

        self._transact(insert)

    def find(self, sequence_ids: Iterable[str]) -> dict[str, RecordedSequence]:
        """Those of these sequences that are there; they are kept for another day. Raises StoreUnavailableError."""
        named = json.dumps(list(sequence_ids))
        which = "WHERE expires_at > ? AND sequence_id IN (SELECT value FROM json_each(?))"

        def look(connection: sqlite3.Connection) -> dict[str, RecordedSequence]:
            now = time.time()
            rows = connection.execute(
                f"SELECT sequence_id, prompt_length, tokens, logprobs FROM recorded {which}", (now, named)
            )
            found = {
                sequence_id: RecordedSequence(
                    prompt_length, np.frombuffer(tokens, dtype="<i4"), np.frombuffer(logprobs, dtype="<f4")
                )
                for sequence_id, prompt_length, tokens, logprobs in rows
            }
            connection.execute(f"UPDATE recorded SET expires_at = ? {which}", (now + LIFETIME_S, now, named))
            return found

        return self._transact(look)

    def forget_session(self, session_id: str) -> None:
        """Delete what an ended session sampled. Raises StoreUnavailableError."""

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM recorded WHERE session_id = ?", (session_id,))
            self._bytes = _total(connection)

        self._transact(delete)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # ---- The file

    def _open(self) -> tuple[sqlite3.Connection, int]:
        """A connection to the file, or an empty one in its place, and the size of its rows."""
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            # Locked, or its disk is full: nothing is wrong with the file
            if isinstance(error, sqlite3.OperationalError):
                raise
            return self._replace(error)

    def _replace(self, error: sqlite3.Error) -> tuple[sqlite3.Connection, int]:
        log.warning(
            "%s is replaced by an empty file, because it is damaged or of another version: %s", self._path, error
        )
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(FILE_NAME + suffix).unlink(missing_ok=True)
        return self._connect()

    def _connect(self) -> tuple[sqlite3.Connection, int]:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=30.0)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"it has version {version}, this program writes {_VERSION}")
            connection.executescript(_TABLE)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            return connection, _total(connection)
        except sqlite3.Error:
            connection.close()
            raise

    def _transact(self, use: Callable[[sqlite3.Connection], T]) -> T:
        """Run `use` in a transaction; again on an empty file, if this one is damaged."""
        with (
            self._lock,
            self._named(TinsmithError, "stop the server, delete the file and sample again what was recorded"),
            available(),
        ):
            try:
                return self._attempt(use)
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in DAMAGED:  # missing if the connection is closed
                    raise
                self._connection.close()
                self._connection, self._bytes = self._replace(error)
                return self._attempt(use)

    def _attempt(self, use: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection:  # which commits, or rolls back
            self._connection.execute("BEGIN IMMEDIATE")
            return use(self._connection)

    def _named(self, ours: type[TinsmithError], remedy: str) -> AbstractContextManager[None]:
        """Turn errors of the file into `ours`, with its name."""
        return translated(
            (sqlite3.Error, OSError), ours, lambda error: f"{self._path} cannot be used: {error}; {remedy}"
        )

    def _purge(self, connection: sqlite3.Connection) -> None:
        """Delete what has expired, once a minute, and what is over the limit."""
        now = time.monotonic()
        if now - self._purged_at >= _PURGE_S:
            self._purged_at = now
            connection.execute("DELETE FROM recorded WHERE expires_at <= ?", (time.time(),))
            self._bytes = _total(connection)
        if self._bytes > self._max_bytes:
            self._bytes = _total(connection)  # ids that were put again were counted twice
            rows: Iterable[tuple[str, int]] = connection.execute(
                "SELECT sequence_id, size FROM recorded ORDER BY expires_at"
            )
            most = int(self._max_bytes * _LEFT_SHARE)
            gone = list(oldest_beyond(most, self._bytes, rows)) if self._bytes > self._max_bytes else []
            connection.executemany(
                "DELETE FROM recorded WHERE sequence_id = ?", [(sequence_id,) for sequence_id in gone]
            )
            self._bytes = _total(connection)
            if gone:
                log.warning(
                    (
                        "deleted the %d least recently used recorded sequences: "
                        "they take more than %.4g GiB (--recorded-sequences-gib)"
                    ),
                    len(gone),
                    self._max_bytes / 2**30,
                )


def _total(connection: sqlite3.Connection) -> int:
    (total,) = connection.execute("SELECT COALESCE(SUM(size), 0) FROM recorded").fetchone()
    return int(total)
