"""Functions that HTTP routes call in the hub: each runs where the hub is, for any HTTP server (`Front.ask`).

Arguments and results may cross processes. What has to be consistent is in one function: no other request comes between
two steps of it that do not wait.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import orjson

from tinsmith.console.samples import KeptSample
from tinsmith.errors import (
    BackpressureError,
    EngineUnavailableError,
    NotFoundError,
    StoreUnavailableError,
    TinsmithError,
    UserError,
    reported,
)
from tinsmith.observing.metrics import (
    ENGINE_READY,
    PENDING_SAMPLE_AGE,
    PENDING_SAMPLES,
    POLLS,
    QUEUED_BYTES,
    REFUSALS,
)
from tinsmith.observing.spans import Span
from tinsmith.protocol.serving import CancelSample, ForgetCheckpoint, Sample, SampleDone, SampleFailed, Wake
from tinsmith.server.hub import Hub
from tinsmith.server.kept_samples import CANCELLED, LEFT
from tinsmith.server.replies import GoneError
from tinsmith.server.sample_reports import Client, Report
from tinsmith.server.samples import StreamedTokens, error_of
from tinsmith.server.tenants import Caller, require_storage
from tinsmith.server.trace import perfetto
from tinsmith.store import ids
from tinsmith.store.records import REJECTED, NewCommand, Outcome, SamplingSession, Used
from tinsmith.store.store import Store

log = logging.getLogger(__name__)

Params = ParamSpec("Params")
Result = TypeVar("Result")

_FORGOTTEN_AT_A_TIME = 100
"""Samples that are forgotten before other requests have their turn."""


async def write(
    hub: Hub, method: Callable[Concatenate[Store, Params], Result], /, *args: Params.args, **kwargs: Params.kwargs
) -> Result:
    """A writing method of Store."""
    return await hub.store.write(method, *args, **kwargs)


async def count_refusal(hub: Hub, reason: str, status: int) -> None:
    """Count a request that was answered with an error."""
    REFUSALS.labels(reason, str(status)).inc()


# ---- HTTP servers in processes of their own


async def alive(hub: Hub) -> None:
    """Hear that an HTTP server runs."""


async def until_stop(hub: Hub) -> None:
    """Wait until HTTP servers are to end."""
    await hub.stopping.wait()


async def base_models_beside(hub: Hub, known: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The base models, as soon as they are others than those `known`; with None at once."""
    return await hub.base_models.others_than(known)


# ---- Training


def rejected(command: NewCommand, reason: str) -> NewCommand:
    """The same operation, which ends in an error."""
    digest = command.digest or hashlib.sha256(command.payload).digest()
    return NewCommand(command.model_id, command.seq_id, REJECTED, reason.encode(), digest=digest)


async def submit(
    hub: Hub,
    caller: Caller,
    base: str,
    command: NewCommand,
    size: int,
    tokens: int | None = None,
    stores: bool = False,
) -> None:
    """Append an operation of `size` bytes on this base model to the log, and tell the engine.

    Raises UserError if its key belongs to another operation. One of so many `tokens` is held to the budgets of the
    caller's key, and one that `stores` to its storage. Raises BackpressureError beyond its limits.
    """
    hub.lifetimes.saw(command.model_id)
    request_id = ids.request_id(command.model_id, command.seq_id)
    counted = is_reserved = queued = False
    try:
        owner = caller.tenant, base, ids.session_of(command.model_id)
        try:
            if stores:
                await require_storage(hub.store, caller)
            is_reserved = await hub.budgets.reserve(request_id, caller, owner, tokens or 0, binds=tokens is not None)
        except BackpressureError:
            if await hub.store.read(Store.status, request_id) is None:
                raise  # else it is a repeat, which uses nothing
        except UserError as error:  # no later time would do, and the sequence must get no hole
            command = rejected(command, str(error))
        counted = hub.queued.admit(command.model_id, command.seq_id, size, caller.key)
        # Before it is in the log: the engine may be done with it, or dead, before we hear that it is
        hub.waiters.expect(request_id)
        queued = await hub.store.append(command)
    finally:
        if counted and not queued:
            hub.queued.end(request_id)
        if is_reserved and not queued:
            hub.budgets.release(request_id)
    # A repeat too: the database may have taken the first one without being able to say so
    await hub.engine.notify(Wake([command.model_id]))
    if not queued:
        hub.waiters.look_again(request_id)
        await hub.store.read(Store.check_repeat, command)


async def create_model(hub: Hub, caller: Caller, base: str, command: NewCommand, size: int) -> None:
    """Submit the operation that makes a model. Raises BackpressureError if the caller's key allows no more."""
    key = caller.key
    if key is None or key.max_models is None:
        return await submit(hub, caller, base, command, size)
    async with hub.creating:
        living = await hub.store.read(Store.living_models, key.tenant)
        if len(set(living) - {command.model_id}) >= key.max_models:
            raise BackpressureError(
                f"tenant {key.tenant!r} has {len(living)} models in training, and key {key.name!r} allows "
                f"{key.max_models}; end a session whose model is not needed"
            )
        return await submit(hub, caller, base, command, size)


# ---- Samples


async def sampling_session(hub: Hub, sampling_session_id: str) -> SamplingSession:
    """A session whose weights exist. Raises NotFoundError with the reason."""
    hub.lifetimes.saw(sampling_session_id)
    return await hub.sampling_sessions.find(sampling_session_id)


async def start_sample(
    hub: Hub, caller: Caller, message: Sample, tokens: int, in_text: int, digest: bytes, only_scores: bool = False
) -> None:
    """Start a sample whose body has this digest.

    It may use so many `tokens`; so many of its prompt are `in_text`. One that `only_scores` its prompt is no sample
    that the console would show. A repeat starts nothing. Raises UserError if its id belongs to a body of another
    digest, and BackpressureError beyond a limit.
    """
    request_id, count = message.request_id, message.num_samples
    hub.lifetimes.saw(request_id)
    sample = hub.samples.find(request_id)
    if sample is None:
        sample = hub.samples.add(request_id, count, len(message.payload), message.stream, digest)
        sample.prompt_tokens = in_text
        try:
            owner = caller.tenant, message.base_model, ids.session_of(request_id)
            await hub.budgets.reserve(request_id, caller, owner, tokens, count)
            if ids.is_sample(request_id):
                hub.sample_reports.expect(request_id)
            message = replace(message, run=sample.run)
            if not only_scores:
                hub.kept_samples.begin(message)
            await hub.engine.send(message)
        except TinsmithError:
            hub.samples.remove(request_id)
            hub.budgets.release(request_id)
            hub.sample_reports.refuse(request_id)
            raise
    else:
        sample.check_repeat(digest)
    await hub.sample_reports.settle()
    if hub.samples.find(request_id) is not sample:  # given up before the engine had it
        await hub.engine.notify(CancelSample(request_id, sample.run))


async def reports_after(
    hub: Hub, client: Client, seen: Collection[str], cursor: int, timeout_s: float | None
) -> list[Report]:
    """The reports of a client's samples after `cursor`; those that it has `seen` are forgotten."""
    hub.lifetimes.saw(client[0])
    await hub.sampling_sessions.find(client[0])
    for number, request_id in enumerate(seen):
        await _forget(hub, request_id)
        if number % _FORGOTTEN_AT_A_TIME == 0:
            await asyncio.sleep(0)
    longest = _long_poll_s(hub)
    return await hub.sample_reports.after(client, cursor, longest if timeout_s is None else min(timeout_s, longest))


async def _forget(hub: Hub, request_id: str) -> None:
    """Forget a sample that its client no longer needs; cancel it if it runs."""
    sample = hub.samples.remove(request_id)
    if sample is not None and sample.outcome is None:
        hub.budgets.release(request_id)
        hub.waiters.look_again(request_id)
        await hub.engine.notify(CancelSample(request_id, sample.run))


async def cancel_sample(hub: Hub, request_id: str) -> None:
    """Stop a sample that runs; anything else is left as it is."""
    sample = hub.samples.find(request_id)
    if sample is not None and sample.outcome is None:
        hub.take(SampleFailed(request_id, sample.run, CANCELLED, "user", gone=False))
        await hub.engine.notify(CancelSample(request_id, sample.run))


async def newest_samples(hub: Hub, tenant: str | None, most: int, most_bytes: int) -> list[KeptSample]:
    """The newest finished samples of a tenant, or of all; so many, and of this size together."""
    return hub.kept_samples.newest(tenant, most, most_bytes)


async def kept_sample(hub: Hub, tenant: str | None, request_id: str) -> KeptSample:
    """One of them. Raises NotFoundError."""
    return hub.kept_samples.find(tenant, request_id)


# ---- Answers to applications, which are samples whose client waits on one connection

_LOST = "the sample was lost with its engine, or the server stops; send the request again"
_LOOK_S = 30.0
"""Seconds after which a request that waits looks whether its sample is still there."""


async def answer_end(hub: Hub, request_id: str) -> SampleDone:
    """The end of a sample. Raises its error, or EngineUnavailableError if it is lost."""

    async def look() -> SampleDone | SampleFailed | None:
        sample = hub.samples.find(request_id)
        if sample is None:
            raise EngineUnavailableError(_LOST)
        return sample.outcome

    while True:
        waiting = hub.waiters.wait_for(request_id, look, _LOOK_S)
        ended = await _given_up_if_cancelled(hub, request_id, waiting)
        if isinstance(ended, SampleDone):
            return ended
        if isinstance(ended, SampleFailed):
            raise error_of(ended)
        if hub.waiters.is_closed:
            raise EngineUnavailableError("the server stops; send the request again when it is back")


async def answer_tokens(
    hub: Hub, request_id: str, seen: int, pause_s: float = 0.0
) -> tuple[Sequence[StreamedTokens], SampleDone | None]:
    """The tokens of a streamed sample behind the `seen` first events, and its end as soon as it has ended.

    Until then it waits for tokens, and for `pause_s`. Raises the sample's error behind its last tokens, or
    EngineUnavailableError if it is lost.
    """
    sample = hub.samples.find(request_id)
    if sample is None or sample.stream is None:
        raise EngineUnavailableError(_LOST)
    events = await _given_up_if_cancelled(hub, request_id, sample.stream.after(seen, pause_s))
    if isinstance(sample.outcome, SampleDone):
        return events, sample.outcome
    if events:
        return events, None
    raise EngineUnavailableError(_LOST) if sample.outcome is None else error_of(sample.outcome)


async def _given_up_if_cancelled(hub: Hub, request_id: str, waiting: Awaitable[Result]) -> Result:
    """Wait for a sample, and give it up if the client goes away, or the HTTP server that asks for it."""
    try:
        return await waiting
    except asyncio.CancelledError:
        _give_up(hub, request_id)
        raise


async def give_up_answer(hub: Hub, request_id: str) -> None:
    """Forget a sample; cancel it if it runs. What its client has been told of it is metered."""
    _give_up(hub, request_id)


def _give_up(hub: Hub, request_id: str) -> None:
    sample = hub.samples.find(request_id)
    if sample is None:
        return
    if sample.outcome is None:
        if told := sample.streamed_tokens:
            hub.budgets.sampled(request_id, vars(Used(prefilled_tokens=sample.prompt_tokens, sampled_tokens=told)))
        hub.take(SampleFailed(request_id, sample.run, LEFT, "user", gone=False))
        # Not awaited: where a request is cancelled, whatever it waits for is cancelled too
        cancelling = asyncio.ensure_future(hub.engine.notify(CancelSample(request_id, sample.run)))
        _cancelling.add(cancelling)
        cancelling.add_done_callback(_cancelling.discard)
    hub.samples.remove(request_id)


_cancelling: set[asyncio.Future[None]] = set()
"""Kept until they are done: the event loop itself does not keep them."""


# ---- Polls

_SHORTEST = 0.5
"""Part of `long_poll_s` that a poll waits at least: those that came together are not to be sent again together."""


async def wait_for(hub: Hub, request_id: str) -> Outcome | SampleDone | SampleFailed | None:
    """The outcome of an operation or a sample; None if it has none within `long_poll_s`.

    Raises NotFoundError for one that does not exist, and GoneError for one that is not kept any more.
    """
    hub.lifetimes.saw(request_id)
    look = partial(_look_for_sample if ids.is_sample(request_id) else _look_for_operation, hub, request_id)
    ended = await hub.waiters.wait_for(request_id, look, _long_poll_s(hub))
    if isinstance(ended, SampleDone | SampleFailed):
        hub.samples.fetched(request_id)
    return ended


WAITS: frozenset[Callable[..., Any]] = frozenset({until_stop, base_models_beside, wait_for, answer_end, answer_tokens})
"""Calls that change nothing while they wait: they are given up with the process that has made them."""


def _long_poll_s(hub: Hub) -> float:
    """Seconds for one poll to wait."""
    return hub.config.server.long_poll_s * random.uniform(_SHORTEST, 1.0)


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


async def _look_for_sample(hub: Hub, request_id: str) -> SampleDone | SampleFailed | None:
    sample = hub.samples.find(request_id)
    if sample is None:
        raise await _reason_unknown(hub, request_id)
    return sample.outcome


async def _reason_unknown(hub: Hub, request_id: str) -> Exception:
    """The error for an unknown sample. If its weights are gone, a 404: after a 410 the SDK would submit it for ever."""
    key = ids.parse_request_id(request_id)
    if key is None:
        return NotFoundError(f"request_id={request_id!r} does not exist")
    await hub.sampling_sessions.find(key[0])
    return GoneError(
        f"sample {request_id} is not known any more: it was lost with its engine, or fetched too late; send it again"
    )


# ---- Sessions and checkpoints


async def begin_session(hub: Hub, session_id: str, about: dict[str, Any], tenant: str) -> None:
    """Note a new session."""
    await hub.store.write(Store.create_session, session_id, about, tenant)
    hub.lifetimes.began(session_id)


async def heartbeat(hub: Hub, session_id: str) -> bool:
    """Note a heartbeat; returns whether the session goes on."""
    is_open = await hub.lifetimes.is_open(session_id)
    if is_open:
        hub.lifetimes.saw_session(session_id)
    return is_open


async def finish_session(hub: Hub, session_id: str, reason: str, detail: str | None) -> bool:
    """End a session: unload its models, drop its snapshots. False if it has ended before."""
    ended = await hub.store.write(Store.finish_session, session_id, reason, detail)
    if ended:
        await hub.end_session(session_id, save=False)
    return ended


async def forget_checkpoint(hub: Hub, path: str) -> None:
    """Tell the engine that a checkpoint was deleted, or expires at another time."""
    await hub.engine.notify(ForgetCheckpoint(path))


# ---- How the server is


async def unready(hub: Hub) -> str:
    """Why the server can take no work; empty if it can."""
    return hub.store.missing() or hub.lifetimes.damage or ("" if hub.engine.is_ready else hub.engine.reason)


async def status(hub: Hub) -> dict[str, Any]:
    """Describe what engine and workers do."""
    engine = {"state": hub.engine.state, "reason": hub.told(hub.engine.reason), "busy_s": hub.engine.busy_s}
    return {"engine": engine, "has_engine": hub.engine.takes_messages, **hub.activity.describe()}


async def overview(hub: Hub, tenant: str | None) -> dict[str, Any]:
    """Describe what engine and workers do and did in the last minutes, for the first page of a tenant, or of all."""
    sequences, since = hub.samples.unfinished
    return await status(hub) | {
        "unready": hub.told(await unready(hub)),
        "gpus": hub.activity.gpus(),
        "phases": hub.phases.describe(time.time()),
        "pending_samples": {"sequences": sequences, "age_s": 0.0 if since is None else time.monotonic() - since},
        "queued_bytes": hub.queued.size,
        "started_at": hub.started_at,
        "failed_samples": hub.kept_samples.failed(tenant),
    }


async def spans_of(hub: Hub, request_id: str) -> list[Span]:
    """The spans of one operation, or sample, and of the passes that computed it, as far as they are kept."""
    return hub.trace.of(request_id)


async def metrics(hub: Hub) -> bytes:
    """All numbers, for Prometheus."""
    sequences, since = hub.samples.unfinished
    ENGINE_READY.set(hub.engine.is_ready)
    POLLS.set(hub.waiters.count)
    PENDING_SAMPLES.set(sequences)
    PENDING_SAMPLE_AGE.set(0.0 if since is None else time.monotonic() - since)
    QUEUED_BYTES.set(hub.queued.size)
    return hub.activity.text()


async def trace(hub: Hub, seconds: float) -> bytes:
    """The spans of all processes in the last seconds, as JSON for ui.perfetto.dev: to pickle them would take long."""
    spans = hub.trace.since(seconds)
    return await asyncio.to_thread(lambda: orjson.dumps(perfetto(spans)))
