"""Pictures as vLLM takes them."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from tests.bases import picture_chunks, renderer
from tinsmith.models.base import BaseModel
from tinsmith.sampling.vllm.connection import Connection
from tinsmith.sampling.vllm.generate import encode_picture, features_of, send_pictures
from tinsmith.sampling.vllm.instance import Instance, Slots


def test_pixel_values_travel_as_they_are(vision_base: BaseModel) -> None:
    (picture,) = renderer(vision_base).render(picture_chunks(vision_base, 1, 8)).pictures
    item = msgspec.msgpack.decode(base64.b64decode(encode_picture(picture)))
    (kind, shape, pixels), (_, _, grid) = item["pixel_values"]["data"], item["image_grid_thw"]["data"]
    assert kind == "float32"
    np.testing.assert_array_equal(np.frombuffer(pixels.data, "<f4").reshape(shape), picture.pixel_values)
    assert tuple(np.frombuffer(grid.data, "<i8")) == picture.grid_thw


def test_what_the_server_knows_travels_as_a_hash(vision_base: BaseModel) -> None:
    rendered = renderer(vision_base).render([*picture_chunks(vision_base, 1, 8), *picture_chunks(vision_base, 2, 8)])
    first, second = (picture.sha256.hex() for picture in rendered.pictures)
    features = features_of(rendered, {first})
    assert features is not None
    assert features["mm_hashes"] == {"image": [first, second]}
    assert features["mm_placeholders"]["image"] == [{"offset": span.offset, "length": 6} for span in rendered.spans]
    assert features["kwargs_data"]["image"] == [None, encode_picture(rendered.pictures[1])]
    assert features_of(rendered.part(0, 4), ()) is None


def test_a_picture_that_a_server_has_forgotten_in_its_sleep_is_sent_again_beside_a_new_one(vision_base: BaseModel, tmp_path: Path) -> None:
    """The new picture waits for a server that sleeps; what that knew before, it does not know afterwards."""
    rendered = renderer(vision_base).render([*picture_chunks(vision_base, 1, 8), *picture_chunks(vision_base, 2, 8)])
    sizes = {picture.sha256.hex(): picture.pixel_values_nbytes for picture in rendered.pictures}
    known: set[str] = set()
    """What the server remembers."""

    async def answer(request: web.Request) -> web.Response:
        features: dict[str, Any] = (await request.json())["features"]
        items = dict(zip(features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True))
        if any(value is None and name not in known for name, value in items.items()):
            return web.json_response({"error": "an unknown picture"}, status=500)
        known.update(items)
        return web.json_response({"choices": [], "model": None})

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        instance = Instance(Connection(f"unix:{tmp_path / 'socket'}"), Slots(1), 1, True, "file")
        instance.pictures[next(iter(sizes))] = 1
        try:
            await instance.nap.fall_asleep()
            sending = asyncio.create_task(send_pictures(instance, rendered, None))
            await asyncio.wait([sending], timeout=0.1)
            assert not sending.done()
            instance.wakes()
            await instance.nap.wake_up()
            await sending
            await send_pictures(instance, rendered, None)
        finally:
            await instance.connection.close()
            await runner.cleanup()

    asyncio.run(run())
    assert known == set(sizes)
