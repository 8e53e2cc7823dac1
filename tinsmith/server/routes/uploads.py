"""Uploads of adapters: files to signed URLs, of which a checkpoint is made, complete or not at all."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from tinsmith.errors import NotFoundError, ParameterError, UserError
from tinsmith.protocol.shapes import LoraShape, rank_refusal
from tinsmith.server.access import allowed_ttl, caller_of, read_json, require_base
from tinsmith.server.descriptions import timestamp
from tinsmith.server.front import Front, comes_from_here, front_of
from tinsmith.server.replies import json_reply
from tinsmith.server.routes.downloads import signed_url
from tinsmith.server.tenants import Caller, require_storage
from tinsmith.store import catalog, ids
from tinsmith.store.records import Checkpoint, Model
from tinsmith.store.store import Store
from tinsmith.store.uploads import UPLOAD_FILES, Upload
from tinsmith.wire.compression import TooLargeError
from tinsmith.wire.json_body import parse_query
from tinsmith.wire.paths import CheckpointPath
from tinsmith.wire.service_requests import CreateSessionRequest, DownloadQuery, UploadFinishRequest, UploadStartRequest
from tinsmith.worker.imports import ImportAsked, import_upload

router = APIRouter()

Result = TypeVar("Result")

_UPLOAD = "upload"
_NAME = "uploaded"
_UPLOADED = uuid.UUID("0d0c6f0a-6c5e-4a1c-9d0e-5b7c4a7b1f55")
"""UUID namespace of sessions that hold what was uploaded."""
_CONFIG_BYTES = 2**20
_PART_BYTES = 2**20


@router.post("/external_weights_upload_start")
async def external_weights_upload_start(request: Request) -> Response:
    """A URL for each file of an adapter that the client is going to upload."""
    front, caller = front_of(request), caller_of(request)
    asked = await read_json(request, UploadStartRequest)
    if not front.config.training.trains:
        raise UserError("this server only samples the checkpoints of another one; upload to that one")
    facts = front.base_models.find(asked.base_model, comes_from_here(request))
    require_base(request, facts.name)
    rank = asked.lora_config.rank
    if rank == 0:
        raise ParameterError("lora_config.rank: 0 is of no adapter, and full weights are not taken; send 1 or more")
    if rank > facts.max_lora_rank:
        raise UserError(rank_refusal(rank, facts.max_lora_rank))
    allowed = await require_storage(front.store, caller)
    expires = int(time.time()) + front.config.server.download_ttl_s
    project = asked.destination_project_id
    if caller.key is not None and project is None:
        project = caller.key.project_id
    described = asked.lora_config.model_dump(), project
    upload = await asyncio.to_thread(front.uploads.begin, caller.tenant, facts.name, *described, expires, allowed)
    urls = {
        file: signed_url(
            request, f"{_UPLOAD}/{upload.upload_id}/{quote(file)}", expires, _UPLOAD, upload.upload_id, file
        )
        for file in UPLOAD_FILES
    }
    return json_reply({"upload_id": upload.upload_id, "urls": urls, "expires": timestamp(expires)})


@router.put("/upload/{upload_id}/{file}")
async def upload_file(request: Request, upload_id: str, file: str) -> Response:
    """Take one file, which replaces one of the same name.

    If its client goes away or stalls (`connection_idle_s`), or its upload expires, nothing of it is kept.
    """
    front = front_of(request)
    asked = parse_query(DownloadQuery, request.query_params)
    front.signer.check(asked.signature, asked.expires, _UPLOAD, upload_id, file)
    upload = await asyncio.to_thread(front.uploads.require, upload_id)
    size = _checked_size(front, request, file)
    async with _beside(front.uploads.receiving(upload, file, size)) as written:
        received, part = 0, bytearray()
        async for sent in request.stream():
            received += len(sent)
            if received > size:
                break
            if upload.expires <= time.time():
                raise UserError(
                    f"{file}: the upload has expired while this came; start another one, and send it faster"
                )
            part += sent
            if len(part) >= _PART_BYTES:
                await asyncio.to_thread(written.write, part)
                part = bytearray()
        if received != size:
            raise UserError(f"{file}: Content-Length is {size}, and the body has another length; send it again")
        await asyncio.to_thread(written.write, part)
    return Response(status_code=200)


@asynccontextmanager
async def _beside(managed: AbstractContextManager[Result]) -> AsyncIterator[Result]:
    """Enter and leave in threads: the disk may take seconds, and the event loop serves everybody."""
    entered = await asyncio.to_thread(managed.__enter__)
    try:
        yield entered
    except BaseException as error:
        if not await asyncio.to_thread(managed.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(managed.__exit__, None, None, None)


def _checked_size(front: Front, request: Request, file: str) -> int:
    """The bytes that a request is going to send. Raises UserError if it does not tell, TooLargeError."""
    told, encoding = request.headers.get("content-length", ""), request.headers.get("content-encoding", "identity")
    if not (told.isascii() and told.isdigit() and len(told) < 20) or encoding != "identity":
        raise UserError(f"{file}: send it with its Content-Length, and without Content-Encoding")
    most = _CONFIG_BYTES if file.endswith(".json") else front.config.requests.max_upload_mib * 2**20
    if int(told) > most:
        raise TooLargeError(f"{file} has {told} bytes, and {most} are allowed (max_upload_mib); send a smaller adapter")
    return int(told)


@router.post("/external_weights_upload_finish")
async def external_weights_upload_finish(request: Request) -> Response:
    """Make a checkpoint to sample, and one to train on, of what was uploaded. A repeat gets the same."""
    front, caller = front_of(request), caller_of(request)
    upload_id = (await read_json(request, UploadFinishRequest)).upload_id
    path = CheckpointPath(ids.model_id(str(uuid.uuid5(_UPLOADED, upload_id)), 0), "sampler", _NAME)
    try:
        upload = await asyncio.to_thread(front.uploads.require, upload_id, caller.sees)
        with front.uploads.importing():
            await asyncio.to_thread(front.uploads.require, upload_id)  # another process may have finished it meanwhile
            await _import(request, front, caller, upload, path)
            await asyncio.to_thread(front.uploads.end, upload)
    except NotFoundError:
        made = await front.store.read(Store.checkpoint, str(path))
        if made is None or caller.sees not in (None, made.tenant):
            raise
    return json_reply({"tinker_path": str(path)})


async def _import(request: Request, front: Front, caller: Caller, upload: Upload, path: CheckpointPath) -> None:
    await require_storage(front.store, caller)
    await asyncio.to_thread(front.uploads.require_whole, upload)
    facts, session_id = front.base_models.find(upload.base_model), ids.session_of(path.model_id)
    ttl_s, now, directory = await allowed_ttl(request, None), time.time(), front.files.new_place()
    shape = asdict(LoraShape(**upload.lora_config | {"seed": upload.lora_config["seed"] or 0}))
    row: dict[str, Any] = {
        "tinker_path": str(path),
        "model_id": path.model_id,
        "kind": path.kind,
        "name": path.name,
        "directory": directory,
        "base_model": facts.name,
        "architecture": facts.architecture,
        "lora_config": shape,
        "user_metadata": None,
        "created_at": now,
        "expires_at": None if ttl_s is None else now + ttl_s,
        "tenant": upload.tenant,
    }
    await front.store.write(Store.announce_checkpoint, directory)
    asked = ImportAsked(
        str(front.uploads.directory(upload)),
        facts.tokenizer_id,
        shape,
        str(front.data_dir),
        front.config.checkpoint_root,
        row,
    )
    found = await asyncio.to_thread(import_upload, asked)
    sampled = Checkpoint(**row, **found)
    trained = Checkpoint(**row | {"kind": "training", "tinker_path": str(path._replace(kind="training"))}, **found)
    run = Model(path.model_id, session_id, facts.name, shape, {"type": "adamw"}, None, "copied")
    description = CreateSessionRequest(project_id=upload.project_id).model_dump()
    await front.store.write(catalog.put_uploaded, run, description, [sampled, trained])
