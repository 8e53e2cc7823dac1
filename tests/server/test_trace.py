"""The last minutes of a server: kept, shown to admins, and sent to a collector."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.serving import Served, refused
from tests.server.test_tenants import key, speaking
from tinsmith.errors import ConfigError
from tinsmith.observing.spans import DEVICE, OPERATIONS, PASSES, SAMPLES, Span
from tinsmith.protocol.serving import Status
from tinsmith.server.trace import KEPT_S, Exporter, Trace, perfetto
from tinsmith.store.keys import add_key

NOW = time.time()
FACTS = {"request": "s:train:0/4", "model": "s:train:0", "seq_id": 4, "queued_s": 1.0, "outcome": "ok"}
OPERATION: Span = ("forward_backward", OPERATIONS, NOW - 4, 3.0, FACTS)
PASS: Span = ("backward", PASSES, NOW - 2.5, 1.0, {"requests": ["s:train:0/4"], "tokens": 70, "worker": 0})
SAMPLE: Span = ("sample", SAMPLES, NOW - 2, 1.5, {"request": "s:sample:1/0", "session": "s", "outcome": "ok"})


def activity(name: str, began: float, seconds: float, worker: int = 0) -> Span:
    return name, DEVICE, NOW + began, seconds, {"worker": worker}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is `NOW`, however long the tests before have taken."""
    monkeypatch.setattr("time.time", lambda: NOW)


@pytest.mark.usefixtures("now")
def test_a_trace_keeps_some_minutes_and_joins_what_reports_have_cut() -> None:
    trace = Trace()
    trace.take([activity("sampling", -KEPT_S - 20, 5.0)])
    trace.take([activity("sampling", -9, 1.0), activity("sampling", -9, 1.0, worker=1), PASS])
    trace.take([activity("sampling", -8.0, 1.0), activity("backward", -7, 2.0), activity("sampling", -3.0, 1.0)])
    told = [(span[0], round(span[2] - NOW, 3), round(span[3], 3), span[4]["worker"]) for span in trace.since(KEPT_S)]
    assert sorted(told, key=lambda each: (each[3], each[1])) == [
        ("sampling", -9.0, 2.0, 0),
        ("backward", -7.0, 2.0, 0),
        ("sampling", -3.0, 1.0, 0),
        ("backward", -2.5, 1.0, 0),
        ("sampling", -9.0, 1.0, 1),
    ]
    assert [span[0] for span in trace.since(2.9)] == ["backward", "sampling"]


def test_a_file_for_perfetto_has_a_row_for_each_worker_and_pairs_of_what_overlaps() -> None:
    events = perfetto([activity("sampling", -9, 1.0), PASS, OPERATION, SAMPLE])["traceEvents"]
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    shown = [(rows[event["pid"], event["tid"]], event["ph"], event["name"]) for event in events if event["ph"] != "M"]
    assert shown == [
        ("worker 0, device", "X", "sampling"),
        ("worker 0, passes", "X", "backward"),
        ("s:train:0", "b", "forward_backward"),
        ("s:train:0", "e", "forward_backward"),
        ("s", "b", "sample"),
        ("s", "e", "sample"),
    ]
    begin, end = (next(event for event in events if event["ph"] == each) for each in "be")
    assert (end["ts"] - begin["ts"], begin["id"], begin["args"]) == (pytest.approx(3e6, abs=1), FACTS["request"], FACTS)


@pytest.mark.usefixtures("now")
async def test_a_trace_is_for_admins(server: Served) -> None:
    """It names the models of all tenants."""
    member, root = add_key(server.store, key("bob")), add_key(server.store, key("root", role="admin"))
    server.hub.take(Status([], [], [], [OPERATION]))
    async with speaking(server, member) as bob, speaking(server, root) as admin:
        assert "needs a key of an admin" in refused(await bob.client.get("/api/v1/trace"), 403)
        for seconds, found in (("60", True), ("0.5", False)):
            events = (await admin.client.get(f"/api/v1/trace?seconds={seconds}")).json()["traceEvents"]
            assert any(event["name"] == "forward_backward" for event in events) == found
        assert "seconds" in refused(await admin.client.get("/api/v1/trace?seconds=-1"), 400)


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A collector of OpenTelemetry, and the spans that it gets."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                sent = ExportTraceServiceRequest.FromString(body)
                got.extend(span for of in sent.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


def test_an_operation_is_a_trace_with_its_wait_its_run_and_its_passes() -> None:
    with collector() as (url, got):
        exporter = Exporter(url)
        exporter.take([PASS, SAMPLE])
        exporter.take([OPERATION])
        exporter.close()
    spans = {span.name: span for span in got}
    assert len(got) == len(spans) == 5
    whole = spans["operations forward_backward"]
    parts = {"operations queued": (-4, -3), "operations run": (-3, -1), "passes backward": (-2.5, -1.5)}
    for name, (began, ended) in parts.items():
        part = spans[name]
        assert (part.trace_id, part.parent_span_id) == (whole.trace_id, whole.span_id)
        assert part.start_time_unix_nano / 1e9 - NOW == pytest.approx(began, abs=1e-3)
        assert part.end_time_unix_nano / 1e9 - NOW == pytest.approx(ended, abs=1e-3)
    facts = {each.key: each.value.string_value for each in whole.attributes}
    assert (facts["tinsmith.request"], facts["tinsmith.outcome"]) == ("s:train:0/4", "ok")
    assert spans["samples sample"].trace_id != whole.trace_id


def test_a_collector_that_has_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"otlp_endpoint='127\.0\.0\.1:4318' is no URL; give one such as http://"):
        Exporter("127.0.0.1:4318")


def test_a_collector_that_does_not_answer_stops_nobody_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.server.trace.SEND_S", 0.1)  # each batch of the library is tried for so long
    waiting = 512
    monkeypatch.setattr("tinsmith.server.trace.WAITING", waiting)  # three times as many overflow the library's queue
    exporter = Exporter("http://127.0.0.1:9")
    started = time.monotonic()
    for number in range(3 * waiting):
        exporter.take([("backward", PASSES, NOW, 1.0, {"requests": [f"s:train:0/{number}"], "tokens": 1})])
        exporter.take([OPERATION])
    assert len(exporter._passes) == waiting
    assert time.monotonic() - started < 60
    exporter.close()
