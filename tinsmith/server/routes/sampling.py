"""Sampling sessions and samples. A wrong sample is refused at once: it has no place in a sequence."""

from fastapi import APIRouter, Request, Response

from tinsmith.errors import UserError
from tinsmith.protocol.serving import Sample
from tinsmith.server import calls
from tinsmith.server.access import caller_of, read_json, read_parsed, require, require_base
from tinsmith.server.base_models import check_fits
from tinsmith.server.front import Front, comes_from_here, front_of
from tinsmith.server.replies import future_reply, json_reply
from tinsmith.server.sample_checks import check_sample, receive_sample
from tinsmith.store import ids
from tinsmith.store.records import SamplingSession
from tinsmith.store.shared import require_sampled
from tinsmith.store.store import Store
from tinsmith.wire.service_requests import CreateSamplingSessionRequest, JoinSamplingSessionRequest

router = APIRouter()


def _require_sampler(front: Front) -> None:
    if front.config.sampling.sampler == "none":
        raise UserError("this server does not sample: it was started with sampler=none")


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> Response:
    """A new sampling session of a base model or a checkpoint. A repeat gets the same."""
    front = front_of(request)
    asked = await read_json(request, CreateSamplingSessionRequest)
    _require_sampler(front)
    await front.require_open_session(asked.session_id)
    session = SamplingSession(
        sampling_session_id=ids.sampling_session_id(asked.session_id, asked.sampling_session_seq_id),
        session_id=asked.session_id,
        base_model=await _base_model_of(request, asked),
        model_path=asked.model_path,
    )
    if not await front.store.write(Store.create_sampling_session, session):
        await _check_repeat(front, session)
    return json_reply({"type": "create_sampling_session", "sampling_session_id": session.sampling_session_id})


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request) -> Response:
    """A number for one more client of a sampling session; ids of its samples count from it."""
    front = front_of(request)
    asked = await read_json(request, JoinSamplingSessionRequest)
    await front.ask(calls.sampling_session, asked.sampling_session_id)
    client = await front.store.write(Store.join_sampling_session, asked.sampling_session_id)
    return json_reply({"type": "join_sampling_session", "client_counter": client})


async def _base_model_of(request: Request, asked: CreateSamplingSessionRequest) -> str:
    """The base model that the request or its checkpoint names.

    Raises UserError, NotFoundError or ForbiddenError if it cannot be sampled.
    """
    front = front_of(request)
    checkpoint = (
        None if asked.model_path is None else await front.store.read(require_sampled, front.shared, asked.model_path)
    )
    name = asked.base_model or (checkpoint.base_model if checkpoint else "")
    facts = front.base_models.find(name, comes_from_here(request))
    require_base(request, facts.name)
    if checkpoint is not None:
        check_fits(checkpoint, facts)
    return name


async def _check_repeat(front: Front, session: SamplingSession) -> None:
    first = await front.store.read(Store.sampling_session, session.sampling_session_id)
    if first is None or (first.base_model, first.weights_id) != (session.base_model, session.weights_id):
        raise UserError(
            f"sampling session {session.sampling_session_id} exists already for other weights; "
            "use another sampling_session_seq_id"
        )


@router.get("/samplers/{sampling_session_id}")
async def get_sampler(request: Request, sampling_session_id: str) -> Response:
    """The weights that a sampling session samples from."""
    session = await front_of(request).ask(calls.sampling_session, sampling_session_id)
    path = {} if session.model_path is None else {"model_path": session.model_path}
    return json_reply({"sampler_id": sampling_session_id, "base_model": session.base_model, **path})


@router.post("/asample")
async def asample(request: Request) -> Response:
    """Start a sample.

    A repeat with the same key gets the same answer and starts nothing; another sample of that key is refused.
    """
    front = front_of(request)
    _require_sampler(front)
    limits = front.config.requests
    max_bytes = limits.max_sample_mib * 2**20
    received = await read_parsed(
        request, max_bytes, "max_sample_mib", "application/json", receive_sample, limits, front.config.images
    )
    asked = received.request
    await require(request, "sampling session", asked.sampling_session_id)
    request_id = ids.request_id(asked.sampling_session_id, asked.seq_id)
    session = await front.ask(calls.sampling_session, asked.sampling_session_id)
    if session.model_path is not None and caller_of(request).sees is not None:
        # Another tenant may have withdrawn it, or saved something else under its name
        await require(request, "readable checkpoint", session.model_path)
    caller, facts = caller_of(request), front.base_models.find(session.base_model)
    require_base(request, facts.name)
    tokens, count = check_sample(received, facts, front.config.images), asked.num_samples
    message = Sample(
        *(request_id, 0, facts.name, session.weights_id, count),
        stream=False,
        payload=received.body,
        tenant=caller.tenant,
    )
    sequences = await front.ask(
        calls.start_sample, caller, message, session.session_id, len(received.body), tokens, received.digest
    )
    return future_reply(request_id, sample_sequence_ids=sequences)
