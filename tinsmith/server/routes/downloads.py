"""Files to download by signed URLs, without an API key: external weights, and traces of sessions.

A signature covers the directory of the files, so a URL is no longer valid once its checkpoint is deleted, even if another gets the same
name.
"""

import asyncio
import time
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from tinsmith.errors import NotBuiltError, NotFoundError
from tinsmith.server.descriptions import timestamp
from tinsmith.server.hub import Hub, hub_of
from tinsmith.server.ranges import wanted_bytes
from tinsmith.server.replies import json_reply
from tinsmith.server.routes.checkpoints import CHECKPOINT, path_of
from tinsmith.server.trace import trace_of
from tinsmith.store.catalog import session_operations
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store
from tinsmith.wire.catalog_requests import DownloadQuery, Query
from tinsmith.wire.json_body import parse_query

router = APIRouter()

_TRACE = "trace"


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(request: Request, run_id: str, segment: str, name: str) -> Response:
    """A URL for each file of external weights."""
    hub = hub_of(request)
    parse_query(Query, request.query_params)
    checkpoint = await _external(hub, path_of(run_id, segment, name))
    sizes = await asyncio.to_thread(hub.files.sizes, checkpoint.directory)
    expires = int(time.time()) + hub.config.server.download_ttl_s
    urls = {}
    for file in sizes:
        signature = hub.signer.sign(expires, checkpoint.directory, file)
        place = f"download/{quote(run_id)}/{quote(name)}/{quote(file)}"
        urls[file] = _url(request, place, expires, signature)
    return json_reply({"urls": urls, "expires": timestamp(expires)})


@router.get(f"{CHECKPOINT}/archive")
async def archive(run_id: str, segment: str, name: str) -> Response:
    """Refused: SDKs before 0.36 ask for all files of a checkpoint as one archive, newer ones download external weights."""
    path = path_of(run_id, segment, name)
    raise NotBuiltError(
        f"{path} cannot be downloaded as an archive; run `tinsmith export {path} DIRECTORY` beside the server, "
        "or download it with `tinker checkpoint download` of tinker 0.36.0 or newer"
    )


@router.get("/download/{run_id}/{name}/{file:path}")
async def download(request: Request, run_id: str, name: str, file: str) -> Response:
    """One file, or the part of it that the Range header asks for."""
    hub = hub_of(request)
    asked = parse_query(DownloadQuery, request.query_params)
    checkpoint = await _external(hub, path_of(run_id, "external_weights", name))
    hub.signer.check(asked.signature, asked.expires, checkpoint.directory, file)
    sizes = await asyncio.to_thread(hub.files.sizes, checkpoint.directory)
    if file not in sizes:
        raise NotFoundError(f"{checkpoint.tinker_path} has no file {file!r}")
    return _part(hub, checkpoint, file, sizes[file], wanted_bytes(request.headers, sizes[file]))


def _part(hub: Hub, checkpoint: Checkpoint, file: str, size: int, wanted: range) -> Response:
    """These bytes of a file of `size` bytes."""
    if size and not wanted:
        detail = f"{file} has {size} bytes, and the Range asks for none of them"
        return json_reply({"detail": detail}, 416, {"Content-Range": f"bytes */{size}"})
    headers = {"Content-Length": str(len(wanted)), "Accept-Ranges": "bytes"}
    if len(wanted) < size:
        headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{size}"
    # An iterator that is not asynchronous is run in a thread.
    blocks = hub.files.read(checkpoint.directory, file, wanted)
    return StreamingResponse(blocks, 206 if len(wanted) < size else 200, headers, "application/octet-stream")


async def _external(hub: Hub, path: str) -> Checkpoint:
    return await hub.store.read(Store.require_checkpoint, path, "external")


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(request: Request, session_id: str) -> Response:
    """A URL of the session's trace, which is computed when it is fetched."""
    hub = hub_of(request)
    parse_query(Query, request.query_params)
    if await hub.store.read(Store.session, session_id) is None:
        raise NotFoundError(f"session {session_id!r} does not exist")
    expires = int(time.time()) + hub.config.server.download_ttl_s
    signature = hub.signer.sign(expires, _TRACE, session_id)
    url = _url(request, f"trace/{quote(session_id)}", expires, signature)
    return json_reply({"status": "ready", "url": url})


@router.get("/trace/{session_id}")
async def trace(request: Request, session_id: str) -> Response:
    """Send the history of a session, for ui.perfetto.dev."""
    hub = hub_of(request)
    asked = parse_query(DownloadQuery, request.query_params)
    hub.signer.check(asked.signature, asked.expires, _TRACE, session_id)
    operations = await hub.store.read(session_operations, session_id)
    return await asyncio.to_thread(lambda: json_reply(trace_of(operations)))


def _url(request: Request, place: str, expires: int, signature: str) -> str:
    """A URL with the host by which this client reaches the server, also through a proxy that keeps the Host header."""
    return f"{request.base_url}api/v1/{place}?expires={expires}&signature={signature}"
