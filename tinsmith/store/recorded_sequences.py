"""What samples with record_stability_info leave for the loss stable_reinforce: tokens and log-probabilities of each sequence, by its id.

As Tinker documents it, a sequence belongs to the session that sampled it and can be trained on for one day, which begins anew with each
training request that uses it. The records are in a SQLite file of their own, so that no sample waits for the database. They survive the
death of any process, and a power cut may take the last ones. Nothing else refers to them: a file that is damaged, or of another version, is
replaced by an empty one, and backups leave it out.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.store import ids
from tinsmith.store.database import check_available
from tinsmith.store.retention import oldest_beyond

log = logging.getLogger(__name__)

FILE_NAME = "recorded_sequences.sqlite"

LIFETIME_S = 24 * 3600.0
"""How long a sequence can be trained on after it was sampled or last used, in seconds."""

_VERSION = 1
_PURGE_S = 60.0
"""Seconds between two looks for what has expired."""
_IDS_AT_A_TIME = 500
"""In one statement; SQLite takes 32,766 variables, older versions 999."""
_LEFT_SHARE = 0.9
"""How much of the limit is left when some have to go, so that this does not happen with every sample."""
_ROW_BYTES = 200
"""About what a row takes beside its arrays."""

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


@dataclass(frozen=True, eq=False)
class RecordedSequence:
    """One sequence as it was sampled."""

    prompt_length: int
    """Tokens of its prompt, image tokens included."""
    tokens: NDArray[np.int32]
    """[n] what was sampled."""
    logprobs: NDArray[np.float32]
    """[n] of each token, by the weights that sampled it and at the temperature of the request."""


class RecordedSequences:
    """The records of one data directory, for any thread of one process."""

    def __init__(self, data_dir: Path, max_bytes: float, lifetime_s: float = LIFETIME_S) -> None:
        """Beyond `max_bytes` the least recently used go first. Raises ConfigError if the file can be neither opened nor replaced."""
        self._path = data_dir / FILE_NAME
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._lock = threading.Lock()
        try:
            self._connection = self._open()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"{self._path} cannot be used: {error}; see to that, or delete it: what it records is lost then") from error
        self._purged_at = -_PURGE_S  # so that the first record looks for what has expired
        self._bytes = self._total()

    def put(self, sequences: Mapping[str, RecordedSequence]) -> None:
        """Keep sequences by id, in the place of what had these ids before. Raises StoreUnavailableError, for example for a full disk."""
        expires_at = time.time() + self._lifetime_s
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
        with self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO recorded VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._bytes += sum(row[3] for row in rows)
            self._purge(connection)

    def find(self, sequence_ids: Iterable[str]) -> dict[str, RecordedSequence]:
        """Those of these sequences that are there, which are now kept for another day. Raises StoreUnavailableError."""
        now = time.time()
        found: dict[str, RecordedSequence] = {}
        with self._transaction() as connection:
            left = iter(dict.fromkeys(sequence_ids))
            while some := tuple(islice(left, _IDS_AT_A_TIME)):
                which = f"WHERE expires_at > ? AND sequence_id IN ({', '.join('?' * len(some))})"
                rows = connection.execute(f"SELECT sequence_id, prompt_length, tokens, logprobs FROM recorded {which}", (now, *some))
                for sequence_id, prompt_length, tokens, logprobs in rows:
                    found[sequence_id] = RecordedSequence(
                        prompt_length, np.frombuffer(tokens, dtype="<i4"), np.frombuffer(logprobs, dtype="<f4")
                    )
                connection.execute(f"UPDATE recorded SET expires_at = ? {which}", (now + self._lifetime_s, now, *some))
        return found

    def forget_session(self, session_id: str) -> None:
        """Delete what an ended session sampled. Raises StoreUnavailableError."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM recorded WHERE session_id = ?", (session_id,))
            self._bytes = self._total()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    # ---- The file

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, or its disk is full: nothing is wrong with the file
                raise
            log.warning("%s is replaced by an empty file, because it is damaged or of another version: %s", self._path, error)
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(FILE_NAME + suffix).unlink(missing_ok=True)
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        """A connection in which transactions begin where the code says so."""
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=30.0)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"it has version {version}, this program writes {_VERSION}")
            connection.executescript(_TABLE)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                check_available(error)
                raise TinsmithError(
                    f"{self._path} cannot be used: {error}; stop the server, delete the file and sample again what was recorded"
                ) from error

    def _purge(self, connection: sqlite3.Connection) -> None:
        """Delete what has expired, once a minute, and what is beyond the limit."""
        now = time.monotonic()
        if now - self._purged_at >= _PURGE_S:
            self._purged_at = now
            connection.execute("DELETE FROM recorded WHERE expires_at <= ?", (time.time(),))
            self._bytes = self._total()
        if self._bytes > self._max_bytes:
            self._bytes = self._total()  # ids that were put again were counted twice
            rows: Iterable[tuple[str, int]] = connection.execute("SELECT sequence_id, size FROM recorded ORDER BY expires_at")
            most = int(self._max_bytes * _LEFT_SHARE)
            gone = list(oldest_beyond(most, self._bytes, rows)) if self._bytes > self._max_bytes else []
            connection.executemany("DELETE FROM recorded WHERE sequence_id = ?", [(sequence_id,) for sequence_id in gone])
            self._bytes = self._total()
            if gone:
                log.warning(
                    "deleted the %d least recently used recorded sequences: they take more than %.4g GiB (--recorded-sequences-gib)",
                    len(gone),
                    self._max_bytes / 2**30,
                )

    def _total(self) -> int:
        (total,) = self._connection.execute("SELECT COALESCE(SUM(size), 0) FROM recorded").fetchone()
        return int(total)
