"""Models and training operations.

An operation with a readable model_id and seq_id always gets a request_id; what else is wrong with it, its future says.
Refused here, it would leave a hole in the sequence.
"""

import hashlib
import logging
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Depends, Request, Response

from tinsmith.errors import BackpressureError, NotBuiltError, NotFoundError, UserError, reported
from tinsmith.protocol.serving import Wake
from tinsmith.protocol.shapes import rank_refusal
from tinsmith.server.access import caller_of, operation_body, owned, read_parsed, require, require_base, require_storage
from tinsmith.server.hub import check_fits, comes_from_here, hub_of
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
    if not hub_of(request).config.training.trains:
        raise UserError(
            "this server does not train: it was started with --train none and samples base models and checkpoints "
            "only; "
            "send training operations to a server that was started without it"
        )


_TRAINS = [Depends(_require_training)]
"""Refuse every route of training where nothing is trained, and no sequence could get a hole."""


def _rejected(command: NewCommand, reason: str) -> NewCommand:
    """The same operation, which ends in an error."""
    digest = command.digest or hashlib.sha256(command.payload).digest()
    return NewCommand(command.model_id, command.seq_id, REJECTED, reason.encode(), digest=digest)


async def _submit(request: Request, command: NewCommand, tokens: int | None = None, stores: bool = False) -> Response:
    """Append an operation to the log and tell the engine. Raises UserError if its key belongs to another operation.

    One of so many `tokens` is held to the budgets of the caller's key, and one that `stores` to its storage. Raises
    BackpressureError beyond its limits.
    """
    hub, caller = hub_of(request), caller_of(request)
    hub.lifetimes.saw(command.model_id)
    asked = await hub.base_of(command.model_id) if command.model is None else command.model.base_model
    base = hub.base_models.name_of(asked)
    require_base(request, base)
    request_id = ids.request_id(command.model_id, command.seq_id)
    size = unpacked_size(command.payload, len(command.payload)) + sum(len(image) for image in command.images.values())
    counted = reserved = queued = False
    try:
        owner = caller.tenant, base, ids.session_of(command.model_id)
        try:
            if stores:
                await require_storage(request)
            reserved = await hub.budgets.reserve(request_id, caller, owner, tokens or 0, binds=tokens is not None)
        except BackpressureError:
            if await hub.store.read(Store.status, request_id) is None:
                raise  # else it is a repeat, which uses nothing
        except UserError as error:  # no later time would do, and the sequence must get no hole
            command = _rejected(command, str(error))
        counted = hub.queued.admit(command.model_id, command.seq_id, size, caller.key)
        # Before it is in the log: the engine may be done with it, or dead, before we hear that it is
        hub.waiters.expect(request_id)
        queued = await hub.store.append(command)
    finally:
        if counted and not queued:
            hub.queued.end(request_id)
        if reserved and not queued:
            hub.budgets.release(request_id)
    # A repeat too: the database may have taken the first one without being able to say so
    await hub.engine.notify(Wake([command.model_id]))
    if not queued:
        hub.waiters.look_again(request_id)
        await hub.store.read(Store.check_repeat, command)
    return future_reply(request_id, model_id=command.model_id)


@router.post("/create_model", dependencies=_TRAINS)
async def create_model(request: Request) -> Response:
    """A new model. Nothing waits for it yet, so a wrong request is refused at once."""
    hub = hub_of(request)
    body = await operation_body(request)
    asked = await owned(request, parse_json(CreateModelRequest, body))
    await hub.require_open_session(asked.session_id)
    facts = hub.base_models.find(asked.base_model, comes_from_here(request))
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
    return await _create(request, model, NewCommand(model.model_id, 0, "create_model", body, model=model))


async def _create(request: Request, model: Model, command: NewCommand) -> Response:
    """Submit the operation that makes a model. Raises BackpressureError if the caller's key allows no more."""
    hub, key = hub_of(request), caller_of(request).key
    if key is None or key.max_models is None:
        return await _submit(request, command)
    async with hub.creating:
        living = await hub.store.read(Store.living_models, key.tenant)
        if len(set(living) - {model.model_id}) >= key.max_models:
            raise BackpressureError(
                f"tenant {key.tenant!r} has {len(living)} models in training, and key {key.name!r} allows "
                f"{key.max_models}; end a session whose model is not needed"
            )
        return await _submit(request, command)


@router.post("/get_info")
async def get_info(request: Request) -> Response:
    """Describe a model. Only a client on this machine gets a directory as `tokenizer_id`."""
    hub = hub_of(request)
    asked = await owned(request, parse_json(GetInfoRequest, await operation_body(request)))
    model = await hub.model(asked.model_id)
    facts = hub.base_models.find(model.base_model)
    tells = comes_from_here(request) or facts.tokenizer_id not in hub.base_models.directories()
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
    hub = hub_of(request)
    max_bytes = hub.config.server.max_body_mib * 2**20
    limits, longest = hub.config.requests, hub.base_models.longest
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
    hub = hub_of(request)
    body = await operation_body(request)
    if parse_json(LoadWeightsAddress, body).model_id is not None:
        return await _load_into(request, body)
    asked = await owned(request, parse_json(CreateFromCheckpointRequest, body))
    await hub.require_open_session(asked.session_id)
    checkpoint = await hub.store.read(Store.require_checkpoint, asked.path, "training")
    base_model = asked.base_model or checkpoint.base_model
    check_fits(checkpoint, hub.base_models.find(base_model, comes_from_here(request)))
    model = Model(
        model_id=ids.model_id(asked.session_id, asked.model_seq_id),
        session_id=asked.session_id,
        base_model=base_model,
        lora_config=checkpoint.lora_config,
        optimizer_config=(asked.optimizer_config or OptimizerConfig()).model_dump(),
        user_metadata=asked.user_metadata,
    )
    return await _create(request, model, NewCommand(model.model_id, 0, "create_from_checkpoint", body, model=model))


async def _load_into(request: Request, body: bytes) -> Response:
    """Submit load_weights of a model that is there. If the checkpoint is not the caller's, its future will say so."""
    key = await owned(request, parse_json(OperationKey, body))
    refusals: list[NotFoundError] = []
    with suppress(UserError), reported(NotFoundError, refusals.append):  # what else is wrong the engine finds
        await owned(request, parse_json(LoadWeightsRequest, body))
    command = NewCommand(key.model_id, key.seq_id, "load_weights", body)
    if not refusals:
        return await _submit(request, command)
    return await _submit(request, _rejected(command, str(refusals[0])))


@router.post("/save_weights_for_sampler", dependencies=_TRAINS)
async def save_weights_for_sampler(request: Request) -> Response:
    """Weights to sample from: a checkpoint, or a snapshot.

    A snapshot's sampling session is created with the command, under the id of the first request. A retry asks for
    another id, and finds the first in the result.
    """
    hub = hub_of(request)
    body = await operation_body(request)
    key = await owned(request, parse_json(OperationKey, body))
    model = await hub.model(key.model_id)
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
