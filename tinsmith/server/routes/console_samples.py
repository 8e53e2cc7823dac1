"""The console's pages on samples and rollouts, and the playground."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from tinsmith.chat.template import ChatFormat
from tinsmith.console.rollouts import IMAGE_PATH, PAGES
from tinsmith.console.run_files import RunFiles
from tinsmith.console.samples import MOST_LISTED, MOST_LISTED_BYTES, image_of, label_of, sample_page, samples_page
from tinsmith.errors import NotFoundError, UserError
from tinsmith.server import calls
from tinsmith.server.access import caller_of
from tinsmith.server.console import Asked, Data, add_page
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import ForbiddenError
from tinsmith.server.tenants import Caller
from tinsmith.store import catalog, ids

log = logging.getLogger(__name__)

router = APIRouter()

_MOST_OFFERED = 300
"""Checkpoints that the playground offers, the newest."""
_IMAGE_HEADERS = {
    "Cache-Control": "private, max-age=86400",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'",
}


# ---- Samples


async def show_samples(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """The newest samples."""
    async with front.searching:
        kept = await front.ask(calls.newest_samples, caller.sees, MOST_LISTED, MOST_LISTED_BYTES)
        formats = await _formats(front, {each.base_model for each in kept})
        return await asyncio.to_thread(samples_page, kept, formats, asked, front.config.server.kept_sample_mib)


async def show_sample(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """One sample. Raises NotFoundError."""
    kept = await front.ask(calls.kept_sample, caller.sees, f"{asked['owner']}/{asked['number']}")
    formats = await _formats(front, {kept.base_model})
    return await asyncio.to_thread(sample_page, kept, formats.get(kept.base_model))


async def _formats(front: Front, names: Iterable[str]) -> dict[str, ChatFormat]:
    """The tokenizers of base models, as far as they can be read."""
    found = {}
    for facts in front.base_models.all():
        if facts.name in names:
            with suppress(UserError):
                found[facts.name] = await front.applications.format_of(facts)
    return found


@router.get("/sample-images/{owner}/{number}/{image}")
async def sample_image(request: Request, owner: str, number: str, image: str) -> Response:
    """A picture of a sample's prompt."""
    front, caller = front_of(request), caller_of(request)
    kept = await front.ask(calls.kept_sample, caller.sees, ids.request_id(owner, _number(number)))
    data, kind = await asyncio.to_thread(image_of, kept, image)
    return Response(data, 200, _IMAGE_HEADERS, f"image/{kind}")


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 19:
        raise NotFoundError(f"there is no sample {text[:40]!r}")
    return int(text)


add_page(router, "/samples", "samples.html.jinja", show_samples)
add_page(router, "/samples/{owner}/{number}", "sample.html.jinja", show_sample)


# ---- Rollouts


def _run_files(front: Front, caller: Caller) -> RunFiles:
    """Raises ForbiddenError for a tenant: files have no owner that a server knows."""
    if caller.sees is not None:
        raise ForbiddenError("the episodes of runs are shown to admins; `tinsmith view DIR` shows those of your own")
    if front.run_files is None:
        raise NotFoundError(
            "this server was started without --run-files DIR, which names the directory that `tinsmith rl` writes; "
            "`tinsmith view DIR` shows the same pages without it"
        )
    return front.run_files


def _of_files(data: Callable[[RunFiles, Asked], dict[str, Any]]) -> Data:
    async def show(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
        return await asyncio.to_thread(data, _run_files(front, caller), asked)

    return show


for _path, _template, _data in PAGES:
    add_page(router, _path, _template, _of_files(_data))


@router.get(IMAGE_PATH)
async def rollout_image(request: Request, run: str, name: str) -> Response:
    """A picture of an episode."""
    files = _run_files(front_of(request), caller_of(request))
    return FileResponse(files.run(run).image(name), headers=_IMAGE_HEADERS)


# ---- Playground


async def show_playground(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """Partners for a chat: base models, checkpoints for sampling, and runs that train."""
    allowed = None if caller.key is None else caller.key.models
    bases = [
        {"name": facts.name, "label": facts.name, "takes_images": facts.takes_images}
        for facts in front.base_models.all()
        if allowed is None or facts.name in allowed
    ]
    saved, _ = await front.store.read(catalog.list_checkpoints, catalog.Page(_MOST_OFFERED, 0), caller.sees)
    checkpoints = [
        {
            "name": row.tinker_path,
            "label": label_of(row.tinker_path),
            "base_model": row.base_model,
            "created_at": row.created_at,
        }
        for row in saved
        if row.kind == "sampler"
    ]
    living = (await front.ask(calls.status)).get("models", [])
    live = [
        {
            "name": f"live:{each['model_id']}",
            "label": label_of(f"live:{each['model_id']}"),
            "base_model": each["base_model"],
        }
        for each in living
        if await front.tenants.owns(caller, each["model_id"])
    ]
    return {
        "bases": bases,
        "checkpoints": checkpoints,
        "live_runs": live,
        "model": asked.get("model", ""),
        "beside": asked.get("beside", ""),
        "samples": front.config.sampling.sampler != "none",
    }


add_page(router, "/playground", "playground.html.jinja", show_playground)
