"""One generate request to one vLLM server, and the images that it needs there.

vLLM gets our pixel values in MessagePack, in base64, as it writes its own `MultiModalKwargsItem`: for each name a
tensor (dtype, shape, bytes) and how items are concatenated. An image travels to a server once, in a request for a
single token ahead of the first that needs it; all others name it by its hash.
"""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np

from tinsmith.errors import TinsmithError
from tinsmith.models.vision_tower import ImageInput
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.protocol import ServerFailedError, in_new_form
from tinsmith.store.records import LOCAL

REQUEST_PREFIX = "generate-tokens-"
Slot = AbstractAsyncContextManager[Any]
_PATH = "/inference/v1/generate"
_ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "logprobs": 0}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_RAW = 3
"""vLLM's MessagePack extension for bytes."""


async def generate(
    instance: Instance,
    rendered: RenderedInput,
    params: dict[str, Any],
    model: str | None,
    answer: tuple[int, ...] = (),
    name: str | None = None,
    tenant: str = LOCAL,
) -> dict[str, Any]:
    """Return the reply to a prompt followed by `answer`, for one sample in a slot of its own.

    Raises as `Connection.post`. With a `name` vLLM can be told to abort the request while `instance.running` has it.
    """
    await send_images(instance, rendered, model)
    async with instance.slots.reserve(1), _named(instance, name):
        named = {} if name is None else {"request_id": name}
        return await ask(instance, rendered, params, model, answer, tenant, **named)


async def generate_stream(
    instance: Instance,
    rendered: RenderedInput,
    params: dict[str, Any],
    model: str | None,
    answer: tuple[int, ...],
    name: str,
    tenant: str = LOCAL,
) -> AsyncGenerator[dict[str, Any], None]:
    """Stream the reply: chunks with new tokens, and at last one with the usage only. They do not name the adapter."""
    await send_images(instance, rendered, model)
    async with instance.slots.reserve(1), _named(instance, name):
        known = _known(instance, rendered)
        body = _body(rendered, params, model, answer, tenant) | _STREAM | {"request_id": name}
        for retry in (False, True):
            begun = False
            await instance.sleep_mode.until_awake()
            try:
                stream = instance.connection.stream(
                    _PATH, body | {"features": features_of(rendered, () if retry else known)}
                )
                async with aclosing(stream):
                    async for chunk in stream:
                        begun = True
                        yield chunk
            except ServerFailedError:
                if begun or retry or not known:  # else it may have forgotten an image
                    raise
            else:
                return


async def score(
    instance: Instance, rendered: RenderedInput, params: dict[str, Any], model: str | None
) -> dict[str, Any]:
    """Return the reply to a prompt, in the spare slot: samples that wait for the reply may hold all others."""
    await send_images(instance, rendered, model, instance.spare_slot)
    async with instance.spare_slot:
        return await ask(instance, rendered, params, model)


async def ask(
    instance: Instance,
    rendered: RenderedInput,
    params: dict[str, Any],
    model: str | None,
    answer: tuple[int, ...] = (),
    tenant: str = LOCAL,
    **more: str,
) -> dict[str, Any]:
    """Return the reply to a request that has its slots, and whose images were sent.

    If the server has forgotten one, it answers with an error, and they are sent again with the request.
    """
    body = _body(rendered, params, model, answer, tenant) | more
    known = _known(instance, rendered)
    try:
        return await _post(instance, rendered, body, known)
    except ServerFailedError:
        if not known:
            raise
        return await _post(instance, rendered, body, ())


@asynccontextmanager
async def _named(instance: Instance, name: str | None) -> AsyncIterator[None]:
    if name is not None:
        instance.running.add(name)
    try:
        yield
    finally:
        instance.running.discard(name or "")


def _body(
    rendered: RenderedInput, params: dict[str, Any], model: str | None, answer: tuple[int, ...], tenant: str
) -> dict[str, Any]:
    body = {"token_ids": [*rendered.token_ids.tolist(), *answer], "sampling_params": params, "model": model}
    return body if tenant == LOCAL else body | {"cache_salt": tenant}


async def _post(
    instance: Instance, rendered: RenderedInput, body: dict[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """Return the reply; raises TinsmithError if it names another adapter, and so other weights, than the request."""
    await instance.sleep_mode.until_awake()
    reply = in_new_form(await instance.connection.post(_PATH, body | {"features": features_of(rendered, known)}))
    if body["model"] is not None and reply["model"] not in (body["model"], None):
        raise TinsmithError(f"vLLM was asked for the adapter {body['model']} and answered with {reply['model']}")
    return reply


# Images


def features_of(rendered: RenderedInput, known: Collection[str]) -> dict[str, Any] | None:
    """Return the images of a prompt, without pixel values for `known` hashes; None if there are no images."""
    if not rendered.images:
        return None
    hashes = [image.sha256.hex() for image in rendered.images]
    return {
        "mm_hashes": {"image": hashes},
        "mm_placeholders": {"image": [{"offset": span.offset, "length": span.length} for span in rendered.spans]},
        "kwargs_data": {
            "image": [
                None if key in known else encode_image(image)
                for key, image in zip(hashes, rendered.images, strict=True)
            ]
        },
    }


def encode_image(image: ImageInput) -> str:
    """Encode a processed image, normalized and in float32."""
    pixels = np.ascontiguousarray(image.pixel_values.numpy())  # [patches, values of a patch]
    grid = np.array(image.grid_thw, dtype=np.int64)
    item = {
        "image_grid_thw": {"data": _tensor(grid), "field": ("batched", {"keep_on_cpu": True})},
        "pixel_values": {
            "data": _tensor(pixels),
            "field": ("flat", {"keep_on_cpu": False, "slices": [[[0, len(pixels), None]]], "dim": 0}),
        },
    }
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()


def _tensor(array: "np.ndarray[Any, Any]") -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    return str(array.dtype), array.shape, msgspec.msgpack.Ext(_RAW, array.tobytes())


def _known(instance: Instance, rendered: RenderedInput) -> set[str]:
    """Return the hashes of the prompt's images that the server has seen, and should still have."""
    return {key for key in _sizes(instance, rendered) if instance.images.get(key) is not None}


def _sizes(instance: Instance, rendered: RenderedInput) -> dict[str, int]:
    """Return hash and size in bytes of the prompt's images that are not too large for the server to remember."""
    sizes = {image.sha256.hex(): image.pixel_values_nbytes for image in rendered.images}
    return {key: size for key, size in sizes.items() if size <= instance.images.maxsize}


async def send_images(instance: Instance, rendered: RenderedInput, model: str | None, slot: Slot | None = None) -> None:
    """Return when the server knows the prompt's images.

    A request that carries some runs in `slot`, or in one of the samples'. Raises as `Connection.post` for the caller
    that sends them.
    """
    sizes = _sizes(instance, rendered)
    while arriving := {instance.arriving[key] for key in sizes if key in instance.arriving}:
        await asyncio.wait(arriving)  # if one fails, the first caller that waited sends its images
    if new := sizes.keys() - _known(instance, rendered):
        task = asyncio.create_task(
            _send_with_one_token(
                instance, rendered, model, {key: sizes[key] for key in new}, slot or instance.slots.reserve(1)
            )
        )
        instance.arriving |= dict.fromkeys(new, task)
        task.add_done_callback(partial(_arrived, instance, new))
        await asyncio.shield(task)


async def _send_with_one_token(
    instance: Instance, rendered: RenderedInput, model: str | None, new: dict[str, int], slot: Slot
) -> None:
    async with slot:
        await ask(instance, rendered, _ONE_TOKEN, model)
    instance.images.update(new)


def _arrived(instance: Instance, keys: Collection[str], task: "asyncio.Task[None]") -> None:
    for key in keys:
        if instance.arriving.get(key) is task:
            del instance.arriving[key]
    if not task.cancelled():
        task.exception()  # the caller that sent them has it
