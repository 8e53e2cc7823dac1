"""Pictures as vLLM's generate endpoint takes them: our pixel values in MessagePack, in base64. vLLM processes no picture itself.

The format is that of vLLM's `MultiModalKwargsItem`: for each name a tensor (dtype, shape, bytes) and how items are put together.
"""

import base64
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np

from tinsmith.models.base import PictureInput
from tinsmith.rendering.rendered import RenderedInput

_RAW = 3
"""vLLM's MessagePack extension for bytes."""


def features_of(rendered: RenderedInput, known: Collection[str]) -> dict[str, Any] | None:
    """The pictures of a prompt; of those whose hash is `known` to the server only the hash. None without any."""
    if not rendered.pictures:
        return None
    hashes = [picture.sha256.hex() for picture in rendered.pictures]
    return {
        "mm_hashes": {"image": hashes},
        "mm_placeholders": {"image": [{"offset": span.offset, "length": span.length} for span in rendered.spans]},
        "kwargs_data": {
            "image": [None if key in known else encode_picture(picture) for key, picture in zip(hashes, rendered.pictures, strict=True)]
        },
    }


def encode_picture(picture: PictureInput) -> str:
    """One processed picture, normalized and in float32."""
    pixels = np.ascontiguousarray(picture.pixel_values.numpy())
    grid = np.array(picture.grid_thw, dtype=np.int64)
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
