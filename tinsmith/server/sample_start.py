"""Starts samples: the weights that a request names, and the way of a checked sample to the engine."""

from dataclasses import dataclass

from fastapi import Request

from tinsmith.errors import NotFoundError, ParameterError, UserError, quoted
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.serving import Sample
from tinsmith.server import calls
from tinsmith.server.access import caller_of, require, require_base
from tinsmith.server.base_models import check_fits
from tinsmith.server.front import Front, comes_from_here, front_of
from tinsmith.server.sample_checks import ReceivedSample, check_sample
from tinsmith.store.newest_weights import newest_weights
from tinsmith.store.shared import require_sampled
from tinsmith.wire.chunks import TextChunk
from tinsmith.wire.paths import is_path

_LIVE = "live:"
"""Begins the name of a training run's newest weights."""


@dataclass(frozen=True)
class SampledWeights:
    """Weights to sample, which the caller may use."""

    facts: ModelFacts
    """Those of the base model."""
    weights_id: str | None
    """The identity of the weights, as in `Sample`."""


def require_sampler(front: Front) -> None:
    """Raise UserError on a server that does not sample."""
    if front.config.sampling.sampler == "none":
        raise UserError("this server does not sample: it was started with sampler=none")


async def checked_base(request: Request, base_model: str | None, path: str | None) -> tuple[str, ModelFacts]:
    """The name under which a base model is asked for, or that of a checkpoint's, and its facts.

    Raises UserError, NotFoundError or ForbiddenError if it cannot be sampled. The path's owner is to be checked before.
    """
    front = front_of(request)
    checkpoint = None if path is None else await front.store.read(require_sampled, front.shared, path)
    name = base_model or (checkpoint.base_model if checkpoint else "")
    facts = front.base_models.find(name, comes_from_here(request))
    require_base(request, facts.name)
    if checkpoint is not None:
        check_fits(checkpoint, facts)
    return name, facts


async def weights_named(request: Request, name: str) -> SampledWeights:
    """The weights that an application's `model` means.

    BASE, BASE:suffix, tinker://RUN/sampler_weights/NAME, BASE;PATH, or live:MODEL_ID for the newest weights that a
    training run has saved for sampling. Raises as `require` and `checked_base`.
    """
    if name.startswith(_LIVE):
        return await _live(request, name.removeprefix(_LIVE))
    base, semicolon, path = name.partition(";")
    if is_path(name):
        base, path = "", name
    elif semicolon and not is_path(path):
        raise ParameterError(f"model: behind the semicolon stands a path of sampler weights, and not {quoted(path)}")
    if path:
        await require(request, "readable checkpoint", path)
    _, facts = await checked_base(request, base or None, path or None)
    return SampledWeights(facts, path or None)


async def _live(request: Request, model_id: str) -> SampledWeights:
    front = front_of(request)
    await require(request, "model", model_id)
    found = await front.store.read(newest_weights, model_id)
    if found is None:
        raise NotFoundError(
            f"model {model_id} has no weights for sampling yet; call save_weights_for_sampler in its training, "
            "or save_weights_and_get_sampling_client"
        )
    if is_path(found):
        _, facts = await checked_base(request, None, found)
        return SampledWeights(facts, found)
    session = await front.ask(calls.sampling_session, found)
    _, facts = await checked_base(request, session.base_model, None)
    return SampledWeights(facts, session.weights_id)


async def start_sample(
    request: Request, request_id: str, weights: SampledWeights, received: ReceivedSample, stream: bool = False
) -> None:
    """Let the engine sample; with `stream` the tokens can be followed.

    Raises UserError for what cannot be sampled, BackpressureError beyond a limit, and EngineUnavailableError.
    """
    front, caller, facts = front_of(request), caller_of(request), weights.facts
    tokens = check_sample(received, facts, front.config.images)
    in_text = sum(len(chunk.tokens) for chunk in received.request.prompt if isinstance(chunk, TextChunk))
    message = Sample(
        *(request_id, 0, facts.name, weights.weights_id, received.request.num_samples),
        stream=stream,
        payload=received.body,
        tenant=caller.tenant,
    )
    only_scores = received.request.only_scores
    await front.ask(calls.start_sample, caller, message, tokens, in_text, received.digest, only_scores)
