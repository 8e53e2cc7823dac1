"""Downloads by signed URLs, without an API key: external weights, and traces of sessions.

A signature covers the files' directory: a deleted checkpoint's URL stays invalid even if another gets its name.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from tinsmith.errors import NotBuiltError, NotFoundError
from tinsmith.server.descriptions import timestamp
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import json_reply
from tinsmith.server.routes.checkpoints import CHECKPOINT, path_of
from tinsmith.store.catalog import LoggedOperation, session_operations
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store
from tinsmith.wire.json_body import parse_query
from tinsmith.wire.service_requests import DownloadQuery, Query

router = APIRouter()

_TRACE = "trace"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(request: Request, run_id: str, segment: str, name: str) -> Response:
    """A URL for each file of external weights."""
    front = front_of(request)
    parse_query(Query, request.query_params)
    checkpoint = await _external(front, path_of(run_id, segment, name))
    sizes = await _sizes(front, checkpoint)
    expires = int(time.time()) + front.config.server.download_ttl_s
    urls = {}
    for file in sizes:
        place = f"download/{quote(run_id)}/{quote(name)}/{quote(file)}"
        urls[file] = signed_url(request, place, expires, checkpoint.directory, file)
    return json_reply({"urls": urls, "expires": timestamp(expires)})


@router.get(f"{CHECKPOINT}/archive")
async def archive(run_id: str, segment: str, name: str) -> Response:
    """Refused: only SDKs before 0.36 ask for a checkpoint as one archive."""
    path = path_of(run_id, segment, name)
    raise NotBuiltError(
        f"{path} cannot be downloaded as an archive; run `tinsmith export {path} DIRECTORY` beside the server, "
        "or download it with `tinker checkpoint download` of tinker 0.36.0 or newer"
    )


@router.get("/download/{run_id}/{name}/{file:path}")
async def download(request: Request, run_id: str, name: str, file: str) -> Response:
    """One file, or the part of it that the Range header asks for."""
    front = front_of(request)
    asked = parse_query(DownloadQuery, request.query_params)
    path = path_of(run_id, "external_weights", name)
    found = await front.store.read(Store.checkpoint, path)
    # One that does not exist is told to nobody without a signature
    front.signer.check(asked.signature, asked.expires, "" if found is None else found.directory, file)
    checkpoint = await _external(front, path)
    sizes = await _sizes(front, checkpoint)
    if file not in sizes:
        raise NotFoundError(f"{checkpoint.tinker_path} has no file {file!r}")
    return _part(front, checkpoint, file, sizes[file], wanted_bytes(request.headers, sizes[file]))


async def _sizes(front: Front, checkpoint: Checkpoint) -> dict[str, int]:
    return await asyncio.to_thread(lambda: front.files.at(checkpoint.directory).sizes())


def _part(front: Front, checkpoint: Checkpoint, file: str, size: int, wanted: range) -> Response:
    if size and not wanted:
        detail = f"{file} has {size} bytes, and the Range asks for none of them"
        return json_reply({"detail": detail}, 416, {"Content-Range": f"bytes */{size}"})
    headers = {"Content-Length": str(len(wanted)), "Accept-Ranges": "bytes"}
    if len(wanted) < size:
        headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{size}"

    def blocks() -> Iterator[bytes]:  # one that is not asynchronous is run in a thread
        yield from front.files.at(checkpoint.directory).read(file, wanted)

    return StreamingResponse(blocks(), 206 if len(wanted) < size else 200, headers, "application/octet-stream")


def wanted_bytes(headers: Mapping[str, str], size: int) -> range:
    """The bytes to send of a file of `size` bytes (RFC 9110, section 14); empty if the range lies outside of it.

    The whole file for anything but a single range, and with If-Range: our replies have nothing that it could compare.
    """
    asked = _RANGE.fullmatch(headers.get("range", "").strip())
    if asked is None or "if-range" in headers or asked.group(1, 2) == ("", ""):
        return range(size)
    first, last = asked.groups()
    if not first:
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return range(size)
    return range(min(int(first), size), min(int(last) + 1, size) if last else size)


async def _external(front: Front, path: str) -> Checkpoint:
    return await front.store.read(Store.require_checkpoint, path, "external")


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(request: Request, session_id: str) -> Response:
    """A URL of the session's trace, which is computed when fetched."""
    front = front_of(request)
    parse_query(Query, request.query_params)
    await front.session(session_id)
    expires = int(time.time()) + front.config.server.download_ttl_s
    url = signed_url(request, f"trace/{quote(session_id)}", expires, _TRACE, session_id)
    return json_reply({"status": "ready", "url": url})


@router.get("/trace/{session_id}")
async def trace(request: Request, session_id: str) -> Response:
    """Send the history of a session, for ui.perfetto.dev."""
    front = front_of(request)
    asked = parse_query(DownloadQuery, request.query_params)
    front.signer.check(asked.signature, asked.expires, _TRACE, session_id)
    operations = await front.store.read(session_operations, session_id)
    return await asyncio.to_thread(lambda: json_reply(trace_of(operations)))


def signed_url(request: Request, place: str, expires: int, *parts: str) -> str:
    """A URL with the host by which this client reaches the server, through a proxy too."""
    signature = front_of(request).signer.sign(expires, *parts)
    return f"{request.base_url}api/v1/{place}?expires={expires}&signature={signature}"


def trace_of(operations: Sequence[LoggedOperation]) -> dict[str, Any]:
    """A trace for ui.perfetto.dev or chrome://tracing: a span for each operation, from arrival to end.

    Samples are not in the log.
    """
    tracks = {model_id: number for number, model_id in enumerate(dict.fromkeys(o.model_id for o in operations), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": model_id}}
        for model_id, number in tracks.items()
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
