"""Pictures as vLLM takes them."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from tests.bases import picture_chunks, renderer
from tests.sampling.vllm.answering import answering, in_a_loop, instance_of
from tinsmith.models.base import BaseModel
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.vllm.generate import encode_picture, features_of, send_pictures


def two_pictures(base: BaseModel) -> RenderedInput:
    return renderer(base).render([*picture_chunks(base, 1, 8), *picture_chunks(base, 2, 8)])


def test_pixel_values_travel_as_they_are_and_what_the_server_knows_as_a_hash(vision_base: BaseModel) -> None:
    rendered = two_pictures(vision_base)
    known, new = rendered.pictures
    features = features_of(rendered, {known.sha256.hex()})
    assert features is not None
    assert features["mm_hashes"] == {"image": [known.sha256.hex(), new.sha256.hex()]}
    assert features["mm_placeholders"]["image"] == [{"offset": span.offset, "length": 6} for span in rendered.spans]
    assert features["kwargs_data"]["image"] == [None, encode_picture(new)]
    assert features_of(rendered.part(0, 4), ()) is None
    item = msgspec.msgpack.decode(base64.b64decode(encode_picture(new)))
    (kind, shape, pixels), (_, _, grid) = item["pixel_values"]["data"], item["image_grid_thw"]["data"]
    assert kind == "float32"
    np.testing.assert_array_equal(np.frombuffer(pixels.data, "<f4").reshape(shape), new.pixel_values)
    assert tuple(np.frombuffer(grid.data, "<i8")) == new.grid_thw


@in_a_loop
async def test_a_picture_that_a_server_has_forgotten_in_its_sleep_is_sent_again_beside_a_new_one(
    vision_base: BaseModel, tmp_path: Path
) -> None:
    """The new picture waits for a server that sleeps; what that knew before, it does not know afterwards."""
    rendered = two_pictures(vision_base)
    names = [picture.sha256.hex() for picture in rendered.pictures]
    known: set[str] = set()
    """What the server remembers."""

    async def answer(request: web.Request) -> web.Response:
        features: dict[str, Any] = (await request.json())["features"]
        items = dict(zip(features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True))
        if any(value is None and name not in known for name, value in items.items()):
            return web.json_response({"error": "an unknown picture"}, status=500)
        known.update(items)
        return web.json_response({"choices": [], "model": None})

    async with answering(tmp_path, answer) as connection:
        instance = instance_of(connection)
        instance.pictures[names[0]] = 1
        await instance.sleep_mode.fall_asleep()
        sending = asyncio.create_task(send_pictures(instance, rendered, None))
        await asyncio.wait([sending], timeout=0.1)
        assert not sending.done()
        instance.wakes()
        await instance.sleep_mode.wake_up()
        await sending
        await send_pictures(instance, rendered, None)
    assert known == set(names)
