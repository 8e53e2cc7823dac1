"""The one place where a request is let in: its key, its role, and the owner of every id that it names.

`admit` runs before each route, and knows the ids in its path. `owned` knows those of a body, whose model marks them
(`Names`). A foreign id takes the same way as one that does not exist: the same query, which finds neither, and the
same error.
"""

from collections.abc import Callable, Iterator

from fastapi import Request
from pydantic import BaseModel

from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.server.body import Result, read_body
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import ForbiddenError, GoneError
from tinsmith.server.tenants import Caller
from tinsmith.store import ids
from tinsmith.store.keys import retention_of
from tinsmith.store.store import Store
from tinsmith.wire.json_body import ModelT, Named, Names, parse_json
from tinsmith.wire.paths import parse_path

PREFIX = "/api/v1"

OPEN = {"/livez", "/readyz", "/healthz", "/download/{run_id}/{name}/{file:path}", "/trace/{session_id}"}
OPEN |= {"/upload/{upload_id}/{file}"}
"""Routes below PREFIX that need no key: for probes, or with a signed URL."""
_LOOKS = {
    *("/client/config", "/client/dynamic_config", "/telemetry"),
    *("/get_info", "/weights_info", "/sessions/search", "/checkpoints/search", "/retrieve_future"),
    "/anthropic/api/v1/messages/count_tokens",
}
"""POST routes that change nothing."""
_JSON_BYTES = 64 * 1024

_ABSENT: dict[Named, Callable[[str], TinsmithError]] = {
    "session": lambda found: NotFoundError(f"session {found!r} does not exist"),
    "living session": lambda found: GoneError(f"session {found!r} is finished or does not exist"),
    "model": lambda found: NotFoundError(f"model {found!r} does not exist"),
    "run": lambda found: NotFoundError(f"training run {found!r} does not exist"),
    "sampling session": lambda found: NotFoundError(f"sampling session {found!r} does not exist"),
    "request": lambda found: NotFoundError(f"request_id={found!r} does not exist"),
    "checkpoint": lambda found: NotFoundError(
        f"{found} does not exist: there is no model {parse_path(found).model_id!r} here; "
        "correct the path, or ask its server"
    ),
}
_ABSENT["readable checkpoint"] = _ABSENT["checkpoint"]
"""The errors for ids of nothing that is the caller's."""


async def admit(request: Request) -> None:
    """Let a request in, or raise UnauthorizedError, ForbiddenError, or the error for an id that does not exist."""
    path = request.scope["route"].path.removeprefix(PREFIX)
    if path in OPEN:
        return
    request.state.caller = caller = await front_of(request).tenants.caller(request.headers)
    if caller.role == "read-only" and request.method != "GET" and path not in _LOOKS:
        raise ForbiddenError(
            f"{request.method} {request.url.path} needs a key of a member, and this one is read-only; "
            "`tinsmith keys add --role member` makes one"
        )
    for named, found in _in_path(request):
        await require(request, named, found)


def _in_path(request: Request) -> Iterator[tuple[Named, str]]:
    given = request.path_params
    if "session_id" in given:
        yield "session", given["session_id"]
    if "sampling_session_id" in given:
        yield "sampling session", given["sampling_session_id"]
    if "segment" in given:
        reads = request.method == "GET"
        path = f"tinker://{given['run_id']}/{given['segment']}/{given['name']}"
        yield "readable checkpoint" if reads else "checkpoint", path
    elif "run_id" in given:
        yield "run", given["run_id"]


def caller_of(request: Request) -> Caller:
    """The client that `admit` has let in."""
    caller: Caller = request.state.caller
    return caller


async def admit_still(request: Request) -> None:
    """Raise UnauthorizedError if the key has ended since `admit`: a slow body takes hours, and a poll half a minute."""
    await front_of(request).tenants.caller(request.headers)


async def read_json(request: Request, model_cls: type[ModelT]) -> ModelT:
    """A JSON body of a few fields, whose ids are the caller's. Raises as `read_body`, `parse_json` and `require`."""
    body = await read_body(request, _JSON_BYTES)
    await admit_still(request)
    return await owned(request, parse_json(model_cls, body))


async def operation_body(request: Request) -> bytes:
    """A JSON body up to `max_json_kib`, to be parsed and given to `owned`. Raises as `read_body` and `admit_still`."""
    body = await read_body(request, front_of(request).config.requests.max_json_kib * 1024, "max_json_kib")
    await admit_still(request)
    return body


async def read_parsed(
    request: Request, max_bytes: int, setting: str | None, media_type: str, parse: Callable[..., Result], *args: object
) -> Result:
    """A large body as `LargeBodies.read_parsed` gives it. Raises as that and `admit_still`."""
    parsed = await front_of(request).bodies.read_parsed(request, max_bytes, setting, media_type, parse, *args)
    await admit_still(request)
    return parsed


async def owned(request: Request, asked: ModelT) -> ModelT:
    """`asked`, all ids of which are the caller's. Raises as `require`."""
    for named, found in _in_body(asked):
        await require(request, named, found)
    return asked


def _in_body(asked: BaseModel) -> Iterator[tuple[Named, str]]:
    for name, field in type(asked).model_fields.items():
        value = getattr(asked, name)
        if isinstance(value, BaseModel):
            yield from _in_body(value)
        elif value is not None:
            yield from ((mark.kind, value) for mark in field.metadata if isinstance(mark, Names))


def require_base(request: Request, name: str) -> None:
    """Raise ForbiddenError if the caller's key does not allow this base model."""
    key = caller_of(request).key
    if key is not None and key.models is not None and name not in key.models:
        raise ForbiddenError(f"key {key.name!r} allows the base models {', '.join(key.models)}, and not {name!r}")


async def allowed_ttl(request: Request, ttl_s: float | None) -> float | None:
    """The seconds that a checkpoint lives, as `Retention.ttl_s`. Raises UserError."""
    allowed = await front_of(request).store.read(retention_of, caller_of(request).tenant)
    return allowed.ttl_s(ttl_s)


async def require(request: Request, named: Named, found: str) -> None:
    """Raise the error for an id that does not exist, unless it is the caller's, or may be read by all.

    Raises UserError for a path that is malformed.
    """
    await require_of(front_of(request), caller_of(request), named, found)


async def require_of(front: Front, caller: Caller, named: Named, found: str) -> None:
    """Raise as `require`, for this caller."""
    if not await _is_theirs(front, caller, named, found):
        raise _ABSENT[named](found)


async def _is_theirs(front: Front, caller: Caller, named: Named, found: str) -> bool:
    if named == "request":
        key = ids.parse_request_id(found)
        return await front.tenants.owns(caller, found if key is None else key[0])
    if named not in ("checkpoint", "readable checkpoint"):
        return await front.tenants.owns(caller, found)
    if await front.tenants.owns(caller, parse_path(found).model_id):
        return True
    return named == "readable checkpoint" and (
        await front.store.read(Store.is_public, found) or await _is_shared(front, caller, found)
    )


async def _is_shared(front: Front, caller: Caller, path: str) -> bool:
    """Whether another server has written this checkpoint for the caller, or for all."""
    shared = front.shared
    row = None if shared is None else await front.store.read(lambda _: shared.find(path))
    return row is not None and (row.public or caller.sees in (None, row.tenant))
