"""Reports of ended samples for clients that poll for all of theirs at once (retrieve_futures) instead of for each one.

A client is one of those that share a sampling session. Its reports are numbered by a cursor that only rises, and are kept until the client
has seen them. A new server takes the cursor from its clock, so that it goes on behind its predecessor's; should that clock have been set
back, the client's own cursor tells. What a former server was asked for and did not report is reported as failed: the client then asks for
the result, hears that the sample is not known, and sends it again.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tinsmith.server.sample_journal import SampleJournal
from tinsmith.store import ids

Client = tuple[str, int]
"""Sampling session, and which of its clients."""


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
        """As the client reads it."""
        size = {"response_payload_uncompressed_size": self.size} if self.state == "finished" else {}
        return {"state": self.state, "request_id": self.request_id, **size}


@dataclass(eq=False)
class _Mailbox:
    reports: deque[Report] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    cursor: int = 0
    """Of the newest report."""

    def next_cursor(self) -> int:
        self.cursor = max(self.cursor + 1, time.time_ns() // 1000)
        return self.cursor

    def go_on_behind(self, seen: int) -> None:
        """Number the reports from `seen` on if the client has a higher cursor than any given out here: it comes from a former server."""
        if seen > self.cursor:
            self.cursor = seen
            self.reports = deque(replace(report, cursor=self.next_cursor()) for report in self.reports)


class SampleReports:
    """All reports that clients have not seen yet."""

    def __init__(self, ttl_s: float, journal: SampleJournal) -> None:
        """A report that nobody asks for is kept for `ttl_s` seconds."""
        self._ttl_s = ttl_s
        self._journal = journal
        self._boxes: dict[Client, _Mailbox] = {}
        for request_id in journal.waiting:
            self.add(request_id, "failed")

    def expect(self, request_id: str) -> None:
        """A client has sent this sample."""
        self._journal.add(request_id)

    def add(self, request_id: str, state: Literal["finished", "failed"], size: int = 0) -> None:
        """A sample has ended."""
        box = self._boxes.setdefault(_client_of(request_id), _Mailbox())
        now = time.monotonic()
        while box.reports and box.reports[0].at < now - self._ttl_s:
            self._journal.strike(box.reports.popleft().request_id)
        box.reports.append(Report(box.next_cursor(), now, request_id, state, size))
        box.filled.set()

    def forget(self, session_id: str) -> None:
        """The session is over."""
        for request_id in [known for known in self._journal.waiting if ids.session_of(known) == session_id]:
            self._journal.strike(request_id)
        self._boxes = {client: box for client, box in self._boxes.items() if ids.session_of(client[0]) != session_id}

    async def after(self, client: Client, cursor: int, timeout_s: float) -> list[Report]:
        """The reports behind `cursor`, waited for up to `timeout_s` seconds. Those up to it have been seen and are dropped."""
        box = self._boxes.setdefault(client, _Mailbox())
        box.go_on_behind(cursor)
        while box.reports and box.reports[0].cursor <= cursor:
            self._journal.strike(box.reports.popleft().request_id)
        if not box.reports and timeout_s > 0:
            box.filled.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await box.filled.wait()
            except TimeoutError:
                return []
        return list(box.reports)


def _client_of(request_id: str) -> Client:
    owner, _, seq_id = request_id.rpartition("/")
    return owner, ids.clone_of(int(seq_id))
