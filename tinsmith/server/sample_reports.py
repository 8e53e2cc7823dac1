"""Reports ended samples to clients that ask about all of theirs with one poll (retrieve_futures).

Each client of a sampling session has its own reports. A report's number, its cursor, only rises; the report is kept
until the client sends that cursor back. Cursors come from the clock, so that a server's are higher than those of the
server before; if the clock was set back, they go on from the cursor that the client sends. Samples that the former
server did not report are reported as failed: the client asks for the result, and then sends the sample again.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tinsmith.server.sample_journal import SampleJournal
from tinsmith.server.waiters import set_within
from tinsmith.store import ids

Client = tuple[str, int]
"""The id of a sampling session, and the number of one of its clients."""


@dataclass(frozen=True)
class Report:
    """One sample that ended."""

    cursor: int
    at: float
    """Monotonic time."""
    request_id: str
    state: Literal["finished", "failed"]
    size: int
    """Bytes of its result."""

    def to_json(self) -> dict[str, Any]:
        size = {"response_payload_uncompressed_size": self.size} if self.state == "finished" else {}
        return {"state": self.state, "request_id": self.request_id, **size}


@dataclass(eq=False)
class _Mailbox:
    reports: deque[Report] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    cursor: int = 0
    polls: int = 0
    """Polls that wait for a report."""

    def next_cursor(self) -> int:
        self.cursor = max(self.cursor + 1, time.time_ns() // 1000)
        return self.cursor

    def go_on_behind(self, seen: int) -> None:
        """Number our reports behind a cursor of a former server that is higher than ours."""
        if seen > self.cursor:
            self.cursor = seen
            self.reports = deque(replace(report, cursor=self.next_cursor()) for report in self.reports)


class SampleReports:
    """All reports that clients have not seen."""

    def __init__(self, ttl_s: float, journal: SampleJournal) -> None:
        """Reports that nobody asks for are kept for `ttl_s` seconds."""
        self._ttl_s = ttl_s
        self._journal = journal
        self._boxes: dict[Client, _Mailbox] = {}
        for request_id in journal.waiting:
            self.add(request_id, "failed")

    def expect(self, request_id: str) -> None:
        """Note that a sample is accepted. Raises StoreUnavailableError if the disk does not take it."""
        self._journal.add(request_id)

    async def settle(self) -> None:
        """Return when all that was expected before survives a power cut. Raises StoreUnavailableError."""
        await self._journal.settle()

    def refuse(self, request_id: str) -> None:
        """Note that a sample was not accepted after all."""
        self._journal.strike(request_id)

    def add(self, request_id: str, state: Literal["finished", "failed"], size: int = 0) -> None:
        """Report that a sample has ended; `size` is the bytes of its result."""
        box = self._boxes.setdefault(_client_of(request_id), _Mailbox())
        now = time.monotonic()
        while box.reports and box.reports[0].at < now - self._ttl_s:
            self._journal.strike(box.reports.popleft().request_id)
        box.reports.append(Report(box.next_cursor(), now, request_id, state, size))
        box.filled.set()

    def forget(self, session_id: str) -> None:
        for request_id in [known for known in self._journal.waiting if ids.session_of(known) == session_id]:
            self._journal.strike(request_id)
        self._boxes = {client: box for client, box in self._boxes.items() if ids.session_of(client[0]) != session_id}

    async def after(self, client: Client, cursor: int, timeout_s: float) -> list[Report]:
        """The reports after `cursor`, waited for up to `timeout_s` seconds.

        Those up to it are dropped: the client has them.

        An empty mailbox where nobody waits is dropped too: anyone can poll as any number of clients.
        """
        box = self._boxes.setdefault(client, _Mailbox())
        box.polls += 1
        try:
            return await self._waited(box, cursor, timeout_s)
        finally:
            box.polls -= 1
            if not box.polls and not box.reports and self._boxes.get(client) is box:
                del self._boxes[client]

    async def _waited(self, box: _Mailbox, cursor: int, timeout_s: float) -> list[Report]:
        box.go_on_behind(cursor)
        while box.reports and box.reports[0].cursor <= cursor:
            self._journal.strike(box.reports.popleft().request_id)
        if not box.reports and timeout_s > 0:
            box.filled.clear()
            await set_within(box.filled, timeout_s)
        return list(box.reports)


def _client_of(request_id: str) -> Client:
    owner, _, seq_id = request_id.rpartition("/")
    return owner, ids.clone_of(int(seq_id))
