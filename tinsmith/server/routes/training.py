"""Models and training operations.

An operation with a readable model_id and seq_id always gets a request_id; what else is wrong with it, its future says.
Refused here, it would leave a hole in the sequence.
"""

import hashlib
import logging
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Depends, Request, Response

from tinsmith.errors import NotBuiltError, NotFoundError, UserError, reported
from tinsmith.protocol.shapes import rank_refusal
from tinsmith.server import calls
from tinsmith.server.access import caller_of, operation_body, owned, read_parsed, require, require_base
from tinsmith.server.base_models import check_fits
from tinsmith.server.front import comes_from_here, front_of
from tinsmith.server.replies import PROTOBUF, future_reply, json_reply
from tinsmith.store import ids
from tinsmith.store.records import REJECTED, CommandKind, Model, NewCommand, SamplingSession
from tinsmith.store.store import Store
from tinsmith.wire.compression import unpacked_size
from tinsmith.wire.forward_backward import receive
from tinsmith.wire.json_body import MAX_SEQ_ID, parse_json
from tinsmith.wire.training_requests import (
    CreateFromCheckpointRequest,
    CreateModelRequest,
    GetInfoRequest,
    LoadWeightsAddress,
    LoadWeightsRequest,
    OperationKey,
    OptimizerConfig,
    SaveWeightsForSamplerRequest,
)

log = logging.getLogger(__name__)

router = APIRouter()


# As a plain function it would be called in a thread for every request
async def _require_training(request: Request) -> None:
    if not front_of(request).config.training.trains:
        raise UserError(
            "this server does not train: it was started with --train none and samples base models and checkpoints "
            "only; "
            "send training operations to a server that was started without it"
        )


_TRAINS = [Depends(_require_training)]
"""Refuse every route of training where nothing is trained, and no sequence could get a hole."""


async def _submit(request: Request, command: NewCommand, tokens: int | None = None, stores: bool = False) -> Response:
    """Append an operation to the log and tell the engine, as `calls.submit`, which this raises as."""
    front, caller = front_of(request), caller_of(request)
    model = command.model
    base = front.base_models.name_of(await front.base_of(command.model_id) if model is None else model.base_model)
    require_base(request, base)
    size = unpacked_size(command.payload, len(command.payload)) + sum(len(image) for image in command.images.values())
    if model is None:
        await front.ask(calls.submit, caller, base, command, size, tokens, stores)
    else:
        await front.ask(calls.create_model, caller, base, command, size)
    return future_reply(ids.request_id(command.model_id, command.seq_id), model_id=command.model_id)


@router.post("/create_model", dependencies=_TRAINS)
async def create_model(request: Request) -> Response:
    """A new model. Nothing waits for it yet, so a wrong request is refused at once."""
    front = front_of(request)
    body = await operation_body(request)
    asked = await owned(request, parse_json(CreateModelRequest, body))
    await front.require_open_session(asked.session_id)
    facts = front.base_models.find(asked.base_model, comes_from_here(request))
    if asked.lora_config.rank > facts.max_lora_rank:
        raise UserError(rank_refusal(asked.lora_config.rank, facts.max_lora_rank))
    model = Model(
        model_id=ids.model_id(asked.session_id, asked.model_seq_id),
        session_id=asked.session_id,
        base_model=asked.base_model,
        lora_config=asked.lora_config.model_dump(),
        optimizer_config=asked.optimizer_config.model_dump(),
        user_metadata=asked.user_metadata,
    )
    return await _submit(request, NewCommand(model.model_id, 0, "create_model", body, model=model))


@router.post("/get_info")
async def get_info(request: Request) -> Response:
    """Describe a model. Only a client on this machine gets a directory as `tokenizer_id`."""
    front = front_of(request)
    asked = await owned(request, parse_json(GetInfoRequest, await operation_body(request)))
    model = await front.model(asked.model_id)
    facts = front.base_models.find(model.base_model)
    tells = comes_from_here(request) or facts.tokenizer_id not in front.base_models.directories()
    return json_reply(
        {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": {
                "arch": facts.architecture,
                "model_name": facts.name,
                "tokenizer_id": facts.tokenizer_id if tells else None,
            },
            "is_lora": model.lora_config["rank"] > 0,
            "lora_rank": model.lora_config["rank"] or None,
            "model_name": facts.name,
            "optimizer_config": model.optimizer_config,
        }
    )


@router.post("/forward_backward", dependencies=_TRAINS)
async def forward_backward(request: Request) -> Response:
    """A forward or forward_backward pass, in protobuf."""
    front = front_of(request)
    max_bytes = front.config.server.max_body_mib * 2**20
    limits, longest = front.config.requests, front.base_models.longest
    received = await read_parsed(request, max_bytes, "max_body_mib", PROTOBUF, receive, limits, longest)
    key = received.key
    if not key.model_id or not 1 <= key.seq_id <= MAX_SEQ_ID:
        raise UserError(f"model_id={key.model_id!r}, seq_id={key.seq_id}: both are needed, and seq_id counts from 1")
    await require(request, "model", key.model_id)
    if received.refused is not None:
        refused = NewCommand(key.model_id, key.seq_id, REJECTED, received.refused.encode(), digest=received.digest)
        return await _submit(request, refused)
    stored = received.stored
    command = NewCommand(
        key.model_id,
        key.seq_id,
        "forward_backward",
        stored.payload,
        stored.image_digests,
        stored.images,
        digest=received.digest,
    )
    return await _submit(request, command, received.tokens)


@router.post("/create_custom_loss", dependencies=_TRAINS)
async def create_custom_loss() -> Response:
    """Refused: the SDK computes custom losses in the client unless client/config asks for uploads."""
    raise NotBuiltError(
        "create_custom_loss: losses are not uploaded here; pass the function itself to forward_backward_custom, "
        "and the SDK computes it in the client"
    )


@router.post("/optim_step", dependencies=_TRAINS)
async def optim_step(request: Request) -> Response:
    """A step of the optimizer."""
    return await _submit_json(request, "optim_step", await operation_body(request))


@router.post("/save_weights", dependencies=_TRAINS)
async def save_weights(request: Request) -> Response:
    """A checkpoint for training."""
    return await _submit_json(request, "save_weights", await operation_body(request))


@router.post("/save_weights_external", dependencies=_TRAINS)
async def save_weights_external(request: Request) -> Response:
    """Weights in files that other tools load, to be downloaded."""
    return await _submit_json(request, "save_weights_external", await operation_body(request))


async def _submit_json(request: Request, kind: CommandKind, body: bytes) -> Response:
    key = await owned(request, parse_json(OperationKey, body))
    stores = kind.startswith("save")
    return await _submit(request, NewCommand(key.model_id, key.seq_id, kind, body), stores=stores)


@router.post("/load_weights", dependencies=_TRAINS)
async def load_weights(request: Request) -> Response:
    """Load a checkpoint into a new model, or, as older clients ask, into one just created."""
    front = front_of(request)
    body = await operation_body(request)
    if parse_json(LoadWeightsAddress, body).model_id is not None:
        return await _load_into(request, body)
    asked = await owned(request, parse_json(CreateFromCheckpointRequest, body))
    await front.require_open_session(asked.session_id)
    checkpoint = await front.store.read(Store.require_checkpoint, asked.path, "training")
    base_model = asked.base_model or checkpoint.base_model
    check_fits(checkpoint, front.base_models.find(base_model, comes_from_here(request)))
    model = Model(
        model_id=ids.model_id(asked.session_id, asked.model_seq_id),
        session_id=asked.session_id,
        base_model=base_model,
        lora_config=checkpoint.lora_config,
        optimizer_config=(asked.optimizer_config or OptimizerConfig()).model_dump(),
        user_metadata=asked.user_metadata,
    )
    return await _submit(request, NewCommand(model.model_id, 0, "create_from_checkpoint", body, model=model))


async def _load_into(request: Request, body: bytes) -> Response:
    """Submit load_weights of a model that is there. If the checkpoint is not the caller's, its future will say so."""
    key = await owned(request, parse_json(OperationKey, body))
    refusals: list[NotFoundError] = []
    with suppress(UserError), reported(NotFoundError, refusals.append):  # what else is wrong the engine finds
        await owned(request, parse_json(LoadWeightsRequest, body))
    command = NewCommand(key.model_id, key.seq_id, "load_weights", body)
    if not refusals:
        return await _submit(request, command)
    return await _submit(request, calls.rejected(command, str(refusals[0])))


@router.post("/save_weights_for_sampler", dependencies=_TRAINS)
async def save_weights_for_sampler(request: Request) -> Response:
    """Weights to sample from: a checkpoint, or a snapshot.

    A snapshot's sampling session is created with the command, under the id of the first request. A retry asks for
    another id, and finds the first in the result.
    """
    front = front_of(request)
    body = await operation_body(request)
    key = await owned(request, parse_json(OperationKey, body))
    model = await front.model(key.model_id)
    asked = _asked_snapshot(key, body)
    if asked is None:
        return await _submit_json(request, "save_weights_for_sampler", body)
    session = SamplingSession(
        sampling_session_id=ids.sampling_session_id(model.session_id, asked.sampling_session_seq_id or 0),
        session_id=model.session_id,
        base_model=model.base_model,
        snapshot_id=ids.request_id(key.model_id, key.seq_id),
        model_id=key.model_id,
        inflight=asked.kind == "inflight",
    )
    repeated = asked.model_copy(update={"sampling_session_seq_id": 0}).model_dump_json().encode()
    digest = hashlib.sha256(repeated).digest()
    return await _submit(
        request,
        NewCommand(key.model_id, key.seq_id, "save_weights_for_sampler", body, sampling_session=session, digest=digest),
    )


def _asked_snapshot(key: OperationKey, body: bytes) -> SaveWeightsForSamplerRequest | None:
    """The request, if it is for a snapshot; None for a checkpoint, or if it is wrong, which its future will say."""
    with reported(UserError, partial(log.info, "%s will fail: %s", ids.request_id(key.model_id, key.seq_id))):
        asked = parse_json(SaveWeightsForSamplerRequest, body)
        return None if asked.sampling_session_seq_id is None else asked
    return None
