"""Waiting for operations and samples, and giving up samples."""

from fastapi import APIRouter, Request, Response

from tinsmith.errors import NotFoundError
from tinsmith.protocol.serving import SampleDone, SampleFailed
from tinsmith.server import calls
from tinsmith.server.access import admit_still, owned, read_json, read_parsed
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import failed_reply, json_reply, protobuf_reply
from tinsmith.store.records import Outcome
from tinsmith.wire.service_requests import CancelFutureRequest, RetrieveFutureRequest, parse_poll

router = APIRouter()

_MAX_POLL_BYTES = 4 * 2**20
"""Enough to acknowledge some 50,000 samples."""


@router.post("/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """The outcome of an operation or a sample; 408 within `long_poll_s`, upon which the SDK asks again at once."""
    front = front_of(request)
    request_id = (await read_json(request, RetrieveFutureRequest)).request_id
    ended = await front.ask(calls.wait_for, request_id)
    await admit_still(request)
    if isinstance(ended, Outcome):
        return _operation_reply(front, ended)
    if ended is None:
        return json_reply({"queue_state": "active"}, 408)
    return _sample_reply(front, ended)


@router.post("/retrieve_futures")
async def retrieve_futures(request: Request) -> Response:
    """The samples of a client that have ended since it last asked, after up to `long_poll_s`. It then fetches each."""
    front = front_of(request)
    asked = await read_parsed(request, _MAX_POLL_BYTES, None, "application/json", parse_poll)
    await owned(request, asked)
    client = asked.target.sampling_session_id, asked.target.cloned_sampler_id
    reports = await front.ask(
        calls.reports_after, client, asked.retrieved_request_ids, asked.prev_cursor, asked.timeout
    )
    await admit_still(request)
    cursor = reports[-1].cursor if reports else asked.prev_cursor
    return json_reply({"completions": [report.to_json() for report in reports], "cursor": cursor})


@router.post("/cancel_future")
async def cancel_future(request: Request) -> Response:
    """Stop a sample that runs; anything else is left as it is."""
    asked = await read_json(request, CancelFutureRequest)
    await front_of(request).ask(calls.cancel_sample, asked.request_id)
    return json_reply({})


def _operation_reply(front: Front, outcome: Outcome) -> Response:
    if outcome.error is not None:
        return failed_reply(front.told(outcome.error, outcome.category), outcome.category or "unknown")
    content = outcome.result or b""
    if outcome.result_type == "protobuf":
        return protobuf_reply(content)
    return Response(content, media_type="application/json")


def _sample_reply(front: Front, ended: SampleDone | SampleFailed) -> Response:
    if isinstance(ended, SampleDone):
        return protobuf_reply(ended.payload)
    if ended.gone:
        raise NotFoundError(ended.error)
    return failed_reply(front.told(ended.error, ended.category), ended.category)
