"""One generate request to one vLLM server, and the pictures that it needs there.

A picture's pixel values travel to a server once, however many requests with it come together: a request for a single token, which carries
the pixels, goes ahead of the first of them. All of them then name the picture by its hash.
"""

import asyncio
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from tinsmith.errors import TinsmithError
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.vllm.connection import ServerFailedError
from tinsmith.sampling.vllm.features import features_of
from tinsmith.sampling.vllm.older import modern
from tinsmith.sampling.vllm.servers import Life

REQUEST_PREFIX = "generate-tokens-"
"""What vLLM puts before the name of a request."""
Slot = AbstractAsyncContextManager[Any]
_ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprobs": 0}


async def generate(
    life: Life, rendered: RenderedInput, params: dict[str, Any], model: str | None, answer: tuple[int, ...] = (), name: str | None = None
) -> dict[str, Any]:
    """The reply to a prompt, followed by `answer`, for one sample, when there is a slot for it. Raises as `Connection.post`.

    With a `name` vLLM can be told to give it up while that is among `life.begun`.
    """
    await introduce(life, rendered, model)
    async with life.slots.some(1):
        if name is None:
            return await ask(life, rendered, params, model, answer)
        life.begun.add(name)
        try:
            return await ask(life, rendered, params, model, answer, request_id=name)
        finally:
            life.begun.discard(name)


async def score(life: Life, rendered: RenderedInput, params: dict[str, Any], model: str | None) -> dict[str, Any]:
    """The reply to a prompt, in a slot that samples never take: for what those that fill all others may have to wait for."""
    await _introduce(life, rendered, model, life.spare_slot)
    async with life.spare_slot:
        return await ask(life, rendered, params, model)


async def introduce(life: Life, rendered: RenderedInput, model: str | None) -> None:
    """Return when the server knows the prompt's pictures. Raises as `Connection.post` if it is this request that brings them."""
    await _introduce(life, rendered, model, life.slots.some(1))


async def ask(
    life: Life, rendered: RenderedInput, params: dict[str, Any], model: str | None, answer: tuple[int, ...] = (), **more: str
) -> dict[str, Any]:
    """The reply to a request that has its slots, and whose pictures the server was sent.

    It may have forgotten one, which it answers with an error: then that is sent again.
    """
    body = {"token_ids": [*rendered.token_ids.tolist(), *answer], "sampling_params": params, "model": model} | more
    known = _known(life, rendered)
    try:
        return await _post(life, rendered, body, known)
    except ServerFailedError:
        if not known:
            raise
        return await _post(life, rendered, body, ())


async def _post(life: Life, rendered: RenderedInput, body: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Raises TinsmithError if the reply names another adapter, and so other weights, than it was asked for."""
    reply = modern(await life.connection.post("/inference/v1/generate", body | {"features": features_of(rendered, known)}))
    if body["model"] is not None and reply["model"] not in (body["model"], None):
        raise TinsmithError(f"vLLM was asked for the adapter {body['model']} and answered with {reply['model']}")
    return reply


def _known(life: Life, rendered: RenderedInput) -> set[str]:
    """Hashes of the prompt's pictures that the server has seen, and is not known to have forgotten."""
    return {key for key in _keepable(life, rendered) if life.pictures.get(key) is not None}


def _keepable(life: Life, rendered: RenderedInput) -> dict[str, int]:
    """Hash and size of the prompt's pictures that are not too large to be remembered."""
    sizes = {picture.sha256.hex(): picture.pixel_values.nbytes for picture in rendered.pictures}
    return {key: size for key, size in sizes.items() if size <= life.pictures.maxsize}


async def _introduce(life: Life, rendered: RenderedInput, model: str | None, slot: Slot) -> None:
    """See `introduce`; `slot` is what the request that brings them runs in."""
    sizes = _keepable(life, rendered)
    while arriving := {life.arriving[key] for key in sizes if key in life.arriving}:
        await asyncio.wait(arriving)  # if one fails, the first who waited brings its pictures
    if new := sizes.keys() - _known(life, rendered):
        task = asyncio.create_task(_bring(life, rendered, model, {key: sizes[key] for key in new}, slot))
        life.arriving |= dict.fromkeys(new, task)
        task.add_done_callback(partial(_arrived, life, new))
        await asyncio.shield(task)


async def _bring(life: Life, rendered: RenderedInput, model: str | None, new: dict[str, int], slot: Slot) -> None:
    body = {"token_ids": rendered.token_ids.tolist(), "sampling_params": _ONE_TOKEN, "model": model}
    async with slot:
        await _post(life, rendered, body, _known(life, rendered))
    life.pictures.update(new)


def _arrived(life: Life, keys: Collection[str], task: "asyncio.Task[None]") -> None:
    for key in keys:
        if life.arriving.get(key) is task:
            del life.arriving[key]
    if not task.cancelled():
        task.exception()  # whoever brought them has it
