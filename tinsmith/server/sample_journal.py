"""The samples that clients wait for, kept beyond the server's death: a line in a file when one is accepted, another when its end was seen.

Nothing is flushed to the disk: the file has to survive the death of the process, and no client waits on when the whole machine is down.
"""

import logging
import os
from pathlib import Path

from tinsmith.errors import ConfigError
from tinsmith.store import ids

log = logging.getLogger(__name__)

_FILE_NAME = "samples.journal"
_WAITS, _SEEN = "+", "-"
_SPARE_LINES = 10_000


class SampleJournal:
    """Which samples are waited for."""

    def __init__(self, data_dir: Path) -> None:
        """Read what a former server left, and begin a new file with what of it is still waited for.

        Damaged lines are passed over, with one warning. Raises ConfigError for a file that cannot be read or written.
        """
        self._path = data_dir / _FILE_NAME
        self.waiting: dict[str, None] = {}
        """Ids of samples, in the order they came in."""
        try:
            if self._path.exists():
                self._read()
            self._begin_anew()
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be used: {error}; see to that, or delete it and samples are not sent again") from error

    def add(self, request_id: str) -> None:
        """A client sent this sample."""
        self.waiting[request_id] = None
        self._append(_WAITS + request_id)

    def strike(self, request_id: str) -> None:
        """Nobody waits for this sample any more."""
        if request_id in self.waiting:
            del self.waiting[request_id]
            self._append(_SEEN + request_id)

    def _read(self) -> None:
        *lines, _cut_off = self._path.read_text(errors="replace").split("\n")
        damaged = 0
        for line in lines:
            mark, request_id = line[:1], line[1:]
            if mark not in (_WAITS, _SEEN) or not ids.is_sample(request_id) or ids.parse_request_id(request_id) is None:
                damaged += 1
            elif mark == _WAITS:
                self.waiting[request_id] = None
            else:
                self.waiting.pop(request_id, None)
        if damaged:
            log.warning(
                "%s: %d of %d lines are damaged and passed over; clients that wait for samples in them must send these again themselves",
                self._path,
                damaged,
                len(lines),
            )

    def _begin_anew(self) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text("".join(f"{_WAITS}{request_id}\n" for request_id in self.waiting))
        temporary.rename(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._lines = len(self.waiting)

    def _append(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())
        self._lines += 1
        if self._lines > 2 * len(self.waiting) + _SPARE_LINES:
            os.close(self._file)
            self._begin_anew()
