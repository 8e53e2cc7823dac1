"""Pictures as vLLM takes and gives them."""

from dataclasses import replace

import numpy as np
import pytest

from tests.bases import picture_chunks, renderer
from tinsmith.errors import TinsmithError
from tinsmith.models.base import BaseModel
from tinsmith.vllm.features import decode_picture, encode_picture, features_of


def test_a_picture_survives_the_way_there_and_back(vision_base: BaseModel) -> None:
    (picture,) = renderer(vision_base).render(picture_chunks(vision_base, 1, 8)).pictures
    again = decode_picture(encode_picture(picture), picture.sha256, vision_base.merge_size)
    np.testing.assert_array_equal(again.pixel_values, picture.pixel_values)
    assert (again.sha256, again.grid_thw, again.rows) == (picture.sha256, picture.grid_thw, picture.rows)


def test_pixel_values_and_grid_must_fit(vision_base: BaseModel) -> None:
    (picture,) = renderer(vision_base).render(picture_chunks(vision_base, 1, 8)).pictures
    with pytest.raises(TinsmithError, match="24 patches for a grid of 1 x 4 x 8"):
        decode_picture(encode_picture(replace(picture, grid_thw=(1, 4, 8))), picture.sha256, vision_base.merge_size)


def test_what_the_server_knows_travels_as_a_hash(vision_base: BaseModel) -> None:
    rendered = renderer(vision_base).render([*picture_chunks(vision_base, 1, 8), *picture_chunks(vision_base, 2, 8)])
    first, second = (picture.sha256.hex() for picture in rendered.pictures)
    features = features_of(rendered, {first})
    assert features is not None
    assert features["mm_hashes"] == {"image": [first, second]}
    assert features["mm_placeholders"]["image"] == [{"offset": span.offset, "length": 6} for span in rendered.spans]
    assert features["kwargs_data"]["image"] == [None, encode_picture(rendered.pictures[1])]
    assert features_of(rendered.part(0, 4), ()) is None
