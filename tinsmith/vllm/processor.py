"""Pictures processed by vLLM: what its render endpoint makes of them, for `Renderer` to work with as with its own (`--renderer vllm`).

Text needs no call: tokens come from the client. vLLM is asked about each picture once, and its placeholders are checked against its
features.
"""

import base64
import io
from typing import Any

from PIL.Image import Image

from tinsmith.errors import TinsmithError
from tinsmith.models.base import BaseModel, PictureInput
from tinsmith.vllm.client import VLLMClient
from tinsmith.vllm.features import decode_picture


class VLLMProcessor:
    """See `Processor` (`rendering/renderer.py`). Waits for vLLM's answer, and for a server if one is being started."""

    def __init__(self, base: BaseModel, client: VLLMClient) -> None:
        self.merge_size = base.merge_size
        self.placeholder = int(base.config.image_token_id)
        self.client = client

    def __call__(self, sha256: bytes, image: Image) -> PictureInput:
        """Raises TinsmithError if vLLM refuses, or if what it answers does not fit together."""
        return self._picture(sha256, self.client.run(self.client.render(_chat(image))).result())

    def _picture(self, sha256: bytes, reply: dict[str, Any]) -> PictureInput:
        features = reply["features"]
        picture = decode_picture(features["kwargs_data"]["image"][0], sha256, self.merge_size)
        (span,) = features["mm_placeholders"]["image"]
        ids = reply["token_ids"][span["offset"] : span["offset"] + span["length"]]
        if ids != [self.placeholder] * picture.rows.stop or reply["token_ids"].count(self.placeholder) != len(ids):
            raise TinsmithError(
                f"vLLM rendered an image of {picture.rows.stop} tokens (a grid of {picture.grid_thw}) with {span['length']} placeholders, "
                f"{reply['token_ids'].count(self.placeholder)} tokens of id {self.placeholder} in all"
            )
        return picture


def _chat(image: Image) -> dict[str, Any]:
    """A chat of one picture, as PNG: decoded again it has the same pixels, whatever the original was."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
