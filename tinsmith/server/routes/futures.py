"""Waiting for operations and samples, and giving up samples."""

import asyncio
import logging
import random
from functools import partial

from fastapi import APIRouter, Request, Response

from tinsmith.errors import NotFoundError, StoreUnavailableError, reported
from tinsmith.protocol.serving import CancelSample, SampleDone, SampleFailed
from tinsmith.server.access import admit_still, owned, read_json, read_parsed
from tinsmith.server.hub import Hub, hub_of
from tinsmith.server.replies import GoneError, failed_reply, json_reply, protobuf_reply
from tinsmith.store import ids
from tinsmith.store.records import Outcome
from tinsmith.wire.service_requests import CancelFutureRequest, RetrieveFutureRequest, parse_poll

log = logging.getLogger(__name__)

router = APIRouter()

_MAX_POLL_BYTES = 4 * 2**20
"""Enough to acknowledge some 50,000 samples."""
_SHORTEST = 0.5
"""Part of `long_poll_s` that a poll waits at least: those that came together are not to be sent again together."""
_FORGOTTEN_AT_A_TIME = 100
"""Samples that are forgotten before other requests have their turn."""


@router.post("/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """The outcome of an operation or a sample; 408 within `long_poll_s`, upon which the SDK asks again at once."""
    hub = hub_of(request)
    request_id = (await read_json(request, RetrieveFutureRequest)).request_id
    hub.lifetimes.saw(request_id)

    look = partial(_look_for_sample if ids.is_sample(request_id) else _look_for_operation, hub, request_id)
    ended = await hub.waiters.wait_for(request_id, look, _long_poll_s(hub))
    await admit_still(request)
    if isinstance(ended, Outcome):
        return _operation_reply(hub, ended)
    if ended is None:
        return json_reply({"queue_state": "active"}, 408)
    hub.samples.fetched(request_id)
    return _sample_reply(hub, ended)


@router.post("/retrieve_futures")
async def retrieve_futures(request: Request) -> Response:
    """The samples of a client that have ended since it last asked, after up to `long_poll_s`. It then fetches each."""
    hub = hub_of(request)
    asked = await read_parsed(request, _MAX_POLL_BYTES, None, "application/json", parse_poll)
    await owned(request, asked)
    client = asked.target.sampling_session_id, asked.target.cloned_sampler_id
    hub.lifetimes.saw(client[0])
    await hub.sampling_sessions.find(client[0])
    for number, request_id in enumerate(asked.retrieved_request_ids):
        await _forget(hub, request_id)
        if number % _FORGOTTEN_AT_A_TIME == 0:
            await asyncio.sleep(0)
    longest = _long_poll_s(hub)
    reports = await hub.sample_reports.after(
        client, asked.prev_cursor, longest if asked.timeout is None else min(asked.timeout, longest)
    )
    await admit_still(request)
    cursor = reports[-1].cursor if reports else asked.prev_cursor
    return json_reply({"completions": [report.to_json() for report in reports], "cursor": cursor})


@router.post("/cancel_future")
async def cancel_future(request: Request) -> Response:
    """Stop a sample that runs; anything else is left as it is."""
    hub = hub_of(request)
    request_id = (await read_json(request, CancelFutureRequest)).request_id
    sample = hub.samples.find(request_id)
    if sample is not None and sample.outcome is None:
        hub.take(SampleFailed(request_id, sample.run, "it was cancelled by its client", "user", gone=False))
        await hub.engine.notify(CancelSample(request_id, sample.run))
    return json_reply({})


def _long_poll_s(hub: Hub) -> float:
    """Seconds for one poll to wait."""
    return hub.config.server.long_poll_s * random.uniform(_SHORTEST, 1.0)


async def _forget(hub: Hub, request_id: str) -> None:
    """Forget a sample that its client no longer needs; cancel it if it runs."""
    sample = hub.samples.remove(request_id)
    if sample is not None and sample.outcome is None:
        hub.budgets.release(request_id)
        hub.waiters.look_again(request_id)
        await hub.engine.notify(CancelSample(request_id, sample.run))


async def _look_for_operation(hub: Hub, request_id: str) -> Outcome | None:
    # Reported, and the poll waits for the engine: answered 503, the SDK would ask again without a pause.
    with reported(StoreUnavailableError, partial(log.warning, "%s cannot be looked up: %s", request_id)):
        found = await hub.store.look_up(request_id)
        if found is None:
            raise NotFoundError(f"request_id={request_id!r} does not exist")
        status, outcome = found
        if status == "dropped":
            raise GoneError(
                f"the result of {request_id} is not kept any more: its session is finished, or it is older than "
                "result_ttl_s"
            )
        return outcome
    return None


def _operation_reply(hub: Hub, outcome: Outcome) -> Response:
    if outcome.error is not None:
        return failed_reply(hub.told(outcome.error, outcome.category), outcome.category or "unknown")
    content = outcome.result or b""
    if outcome.result_type == "protobuf":
        return protobuf_reply(content)
    return Response(content, media_type="application/json")


async def _look_for_sample(hub: Hub, request_id: str) -> SampleDone | SampleFailed | None:
    sample = hub.samples.find(request_id)
    if sample is None:
        raise await _reason_unknown(hub, request_id)
    return sample.outcome


def _sample_reply(hub: Hub, ended: SampleDone | SampleFailed) -> Response:
    if isinstance(ended, SampleDone):
        return protobuf_reply(ended.payload)
    if ended.gone:
        raise NotFoundError(ended.error)
    return failed_reply(hub.told(ended.error, ended.category), ended.category)


async def _reason_unknown(hub: Hub, request_id: str) -> Exception:
    """The error for an unknown sample. If its weights are gone, a 404: after a 410 the SDK would submit it for ever."""
    key = ids.parse_request_id(request_id)
    if key is None:
        return NotFoundError(f"request_id={request_id!r} does not exist")
    await hub.sampling_sessions.find(key[0])
    return GoneError(
        f"sample {request_id} is not known any more: it was lost with its engine, or fetched too late; send it again"
    )
