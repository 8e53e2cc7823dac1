"""Pictures as vLLM takes them."""

import base64

import msgspec
import numpy as np

from tests.bases import picture_chunks, renderer
from tinsmith.models.base import BaseModel
from tinsmith.sampling.vllm.generate import encode_picture, features_of


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
