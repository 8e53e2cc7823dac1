"""The last minutes of all processes, as a file for ui.perfetto.dev, and as spans for a collector of OpenTelemetry.

What comes in is bounded, and the oldest goes first: watching a server takes no memory from it.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from tinsmith.errors import ConfigError
from tinsmith.observing.spans import DEVICE, OPERATIONS, PASSES, SAMPLES, Span

KEPT_S = 600.0
"""Seconds for which spans are kept."""
MOST = 100_000
"""Spans that are kept; some 50 MiB."""
APART_S = 0.01
"""A worker's activity goes on if the same begins so many seconds after it has ended."""


class Trace:
    """The spans of the last minutes."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MOST)

    def take(self, spans: Sequence[Span]) -> None:
        """Take spans in, and forget those that ended long ago."""
        self._spans.extend(spans)
        before = time.time() - KEPT_S
        while self._spans and self._spans[0][2] + self._spans[0][3] < before:
            self._spans.popleft()

    def since(self, seconds: float) -> list[Span]:
        """Return the spans that ended in the last `seconds`; a worker's equal activities in a row are one."""
        after = time.time() - seconds
        return list(_joined(span for span in self._spans if span[2] + span[3] >= after))

    def of(self, request_id: str) -> list[Span]:
        """Return the spans of one request, and of the passes that computed it."""
        return [
            span
            for span in self._spans
            if span[4].get("request") == request_id or (span[1] == PASSES and request_id in span[4]["requests"])
        ]


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    last: dict[int, Span] = {}
    for span in spans:
        name, track, began, seconds, facts = span
        if track != DEVICE:
            yield span
            continue
        before = last.get(facts["worker"])
        if before is not None and before[0] == name and began - (before[2] + before[3]) < APART_S:
            span = name, track, before[2], began + seconds - before[2], facts
        elif before is not None:
            yield before
        last[facts["worker"]] = span
    yield from last.values()


def perfetto(spans: Sequence[Span]) -> dict[str, Any]:
    """Return a trace in the format of Chrome: a row for each worker, model, and session that samples."""
    tracks: defaultdict[tuple[int, str], int] = defaultdict(lambda: len(tracks) + 1)
    processes = {DEVICE: 1, PASSES: 1, OPERATIONS: 2, SAMPLES: 3}
    events: list[dict[str, Any]] = []
    for name, track, began, seconds, facts in spans:
        pid = processes[track]
        of = f"worker {facts['worker']}, {track}" if pid == 1 else str(facts.get("model") or facts.get("session"))
        event = {"name": name, "cat": track, "pid": pid, "tid": tracks[pid, of], "ts": began * 1e6}
        if pid == 1:
            events.append(event | {"ph": "X", "dur": seconds * 1e6, "args": facts})
        else:  # they overlap
            event["id"] = facts["request"]
            events.append(event | {"ph": "b", "args": facts})
            events.append(event | {"ph": "e", "ts": (began + seconds) * 1e6})
    named = [_named("process_name", pid, 0, name) for pid, name in ((1, "workers"), (2, OPERATIONS), (3, SAMPLES))]
    named += [_named("thread_name", pid, number, of) for (pid, of), number in tracks.items()]
    return {"displayTimeUnit": "ms", "traceEvents": [*named, *events]}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


# OpenTelemetry

SEND_S = 5.0
"""Seconds that a collector may take to take spans."""
WAITING = 4096
"""Requests whose passes are known and that have not ended."""


class Exporter:
    """Sends spans to a collector, in a thread of the library that drops what is too much.

    An operation is a trace: the time that it was queued, the time that it ran, and the passes that computed it. A
    sample is one too.
    """

    def __init__(self, endpoint: str) -> None:
        """Send to `endpoint`, by OTLP over HTTP. Raises ConfigError if that is no URL, or the packages are missing."""
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint={endpoint!r} is no URL; give one such as http://127.0.0.1:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"--otlp-endpoint needs packages: pip install 'tinsmith[otel]' ({error})") from error
        self._provider: TracerProvider = TracerProvider(resource=Resource.create({"service.name": "tinsmith"}))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tinsmith")
        self._passes: dict[str, list[Span]] = {}
        """Passes of each request that has not ended, oldest request first."""

    def take(self, spans: Sequence[Span]) -> None:
        """Send what has ended."""
        for span in spans:
            _, track, began, seconds, facts = span
            if track == PASSES:
                for request in facts["requests"]:
                    self._passes.setdefault(request, []).append(span)
            elif track == OPERATIONS:
                queued_s = facts["queued_s"]
                queued: Span = "queued", track, began, queued_s, {}
                ran: Span = "run", track, began + queued_s, seconds - queued_s, {}
                self._send(span, [queued, ran, *self._passes.pop(facts["request"], [])])
            elif track == SAMPLES:
                self._send(span, [])
        while len(self._passes) > WAITING:
            del self._passes[next(iter(self._passes))]

    def _send(self, span: Span, parts: Sequence[Span]) -> None:
        from opentelemetry.trace import set_span_in_context

        def sent(each: Span, context: Any) -> Any:
            name, track, began, _, facts = each
            told = {f"tinsmith.{fact}": value for fact, value in facts.items()}
            return self._tracer.start_span(f"{track} {name}", context, attributes=told, start_time=int(began * 1e9))

        whole = sent(span, None)
        for part in parts:
            sent(part, set_span_in_context(whole)).end(int((part[2] + part[3]) * 1e9))
        whole.end(int((span[2] + span[3]) * 1e9))

    def close(self) -> None:
        """Send what is left, for at most some seconds."""
        self._provider.shutdown()
