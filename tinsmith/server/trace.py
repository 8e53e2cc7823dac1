"""Writes a session's history as a trace for ui.perfetto.dev or chrome://tracing.

It comes from the command log: one span for each training operation, from its arrival to its end. The operations of a model overlap if its
client sends the next before the last has ended. Samples are not in the log.
"""

from collections.abc import Sequence
from typing import Any

from tinsmith.store.catalog import LoggedOperation


def trace_of(operations: Sequence[LoggedOperation]) -> dict[str, Any]:
    """The trace of these operations, in microseconds. An operation that is still running has no end."""
    tracks = {model_id: number for number, model_id in enumerate(dict.fromkeys(o.model_id for o in operations), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": model_id}} for model_id, number in tracks.items()
    ]
    for operation in operations:
        span = {
            "name": operation.kind,
            "cat": operation.status,
            "id": f"{operation.model_id}/{operation.seq_id}",
            "pid": tracks[operation.model_id],
            "tid": 1,
        }
        arguments = {"seq_id": operation.seq_id, "status": operation.status}
        events.append(span | {"ph": "b", "ts": operation.created_at * 1e6, "args": arguments})
        if operation.finished_at is not None:
            events.append(span | {"ph": "e", "ts": operation.finished_at * 1e6})
    return {"displayTimeUnit": "ms", "traceEvents": events}
