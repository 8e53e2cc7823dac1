"""The samples that clients wait for, in a file that outlives the server.

It holds a record for each that is accepted, another once its end was seen. Not in the database, for whose lock no
sample should wait. A client hears of its sample when the record is synced: those that come together share a sync.
"""

import asyncio
import logging
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError, StoreUnavailableError, reported, translated
from tinsmith.store import append_file, ids
from tinsmith.store.append_file import AppendFile
from tinsmith.store.disk import oldest_beyond

log = logging.getLogger(__name__)

_FILE_NAME = "samples.journal"
_SPARE_BYTES = 2**20
"""Bytes beyond twice its records that the file may hold before it is rewritten."""
_MOST_BYTES = 64 * 2**20
"""Beyond it the oldest samples are forgotten; their clients are long gone."""


class SampleJournal:
    """The samples that clients wait for."""

    def __init__(self, data_dir: Path) -> None:
        """Read what the server before left, and begin a new file with what is still waited for.

        Damaged parts are skipped, with one warning. Raises ConfigError for an unusable file.
        """
        self._path = data_dir / _FILE_NAME
        self.waiting: dict[str, None] = {}
        """Ids of samples, oldest first."""
        self._added = self._synced = 0
        """How many samples were added, and how many of these survive a power cut."""
        self._turn = asyncio.Lock()
        remedy = "see to that, or delete it and samples are not sent again"
        with translated(OSError, ConfigError, lambda error: f"{self._path} cannot be used: {error}; {remedy}"):
            if self._path.exists():
                self._read()
            self._file = AppendFile(self._path, self._records())

    def add(self, request_id: str) -> None:
        """Note a sample. Raises StoreUnavailableError, and notes nothing, if the disk does not take it."""
        with _available():
            self._file.append({"waits": request_id})
        self.waiting[request_id] = None
        self._added += 1

    async def settle(self) -> None:
        """Return when all samples added before survive a power cut. Raises StoreUnavailableError."""
        # Shielded: if its client goes away, nobody else may touch the file before the thread has ended
        await asyncio.shield(self._settle(self._added))

    async def _settle(self, wanted: int) -> None:
        async with self._turn:
            if self._synced < wanted:
                added = self._added
                with _available():
                    await asyncio.to_thread(self._file.syncing())
                self._synced = added
                await self._shorten()

    def strike(self, request_id: str) -> None:
        """Forget a sample: its client has seen its end, or will never ask."""
        if request_id in self.waiting:
            del self.waiting[request_id]
            # A later server may ask its client to send it again
            with self._warning(f"the end of sample {request_id} is not noted"):
                self._file.append({"seen": request_id})

    def _read(self) -> None:
        content = append_file.read(self._path.read_bytes())
        damaged = content.damaged
        for record in content.records:
            match record:
                case {"waits": str(request_id)} if _is_sample(request_id):
                    self.waiting[request_id] = None
                case {"seen": str(request_id)} if _is_sample(request_id):
                    self.waiting.pop(request_id, None)
                case _:
                    damaged += 1
        if damaged:
            log.warning(
                (
                    "%s: damaged in %d places, which are skipped; clients that wait for samples in them must send "
                    "these again themselves"
                ),
                self._path,
                damaged,
            )

    def _records(self) -> list[Any]:
        """The samples that are waited for, as many as there is room for."""
        sizes = {request_id: len(append_file.encode({"waits": request_id})) for request_id in self.waiting}
        for request_id in list(oldest_beyond(_MOST_BYTES, sum(sizes.values()), sizes.items())):
            del self.waiting[request_id]
        return [{"waits": request_id} for request_id in self.waiting]

    async def _shorten(self) -> None:
        if self._file.size > 2 * self._file.rewritten_size + _SPARE_BYTES:
            with self._warning("it is not shortened"):
                await asyncio.to_thread(self._file.rewriting(self._records()))
                self._file.switch()

    def _warning(self, what: str) -> AbstractContextManager[None]:
        return reported(OSError, partial(log.warning, "%s: %s: %s", self._path, what))


def _available() -> AbstractContextManager[None]:
    cannot = "no sample can be noted at the moment"
    return translated(OSError, StoreUnavailableError, lambda error: f"{cannot}: {error}; free space on its disk")


def _is_sample(request_id: str) -> bool:
    return ids.is_sample(request_id) and ids.parse_request_id(request_id) is not None
