"""Chunks of a ModelInput -> RenderedInput. The only place where text and pictures become token ids.

A picture is decoded and processed once, by the model's own Hugging Face image processor on its Pillow backend (or by vLLM's, see
`vllm/processor.py`), and remembered by the hash of its bytes. Placeholders are expanded here; a placeholder id that arrives as a text token
stays text.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from PIL.Image import Image
from transformers import AutoImageProcessor

from tinsmith.config import ImagesConfig
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel, PictureInput
from tinsmith.models.families import ImageSpan, positions
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.images import decode

Processor = Callable[[bytes, Image], PictureInput]
"""The SHA-256 of a picture's bytes, and the picture in RGB -> what the vision tower takes."""


class LocalProcessor:
    """The model's own Hugging Face image processor, in this process."""

    def __init__(self, base: BaseModel) -> None:
        self.merge_size = base.merge_size
        self.processor: Any = AutoImageProcessor.from_pretrained(base.tokenizer_id, backend="pil")

    def __call__(self, sha256: bytes, image: Image) -> PictureInput:
        """See `Processor`."""
        output = self.processor(images=[image], return_tensors="pt")
        time, height, width = output["image_grid_thw"][0].tolist()
        tokens = time * height * width // self.merge_size**2
        return PictureInput(sha256, output["pixel_values"].to(torch.float32), (time, height, width), slice(0, tokens))


class Renderer:
    """Renders for one base model. `read_blob` fetches image bytes that are in the store, by SHA-256."""

    def __init__(
        self, base: BaseModel, limits: ImagesConfig, read_blob: Callable[[bytes], bytes], processor: Processor | None = None
    ) -> None:
        """Without a `processor` the model's own is loaded, if it takes pictures."""
        self.base = base
        self.limits = limits
        self.read_blob = read_blob
        self.processor = processor or LocalProcessor(base) if base.family.takes_images else None
        self.placeholder = int(base.config.image_token_id) if base.family.takes_images else -1
        self.cache: LRUCache[tuple[bytes, str], PictureInput] = LRUCache(
            maxsize=limits.image_cache_mib * 2**19, getsizeof=lambda picture: picture.pixel_values.nbytes
        )

    def render(self, chunks: Sequence[Chunk]) -> RenderedInput:
        """The sequence that `chunks` describe.

        Raises UserError: nothing in it, a token outside the vocabulary, an image that is broken, too large or not wanted by this model, a
        count that differs from `expected_tokens`, or a sequence longer than the context.
        """
        parts, spans, pictures, length = [], [], [], 0
        for index, chunk in enumerate(chunks):
            if isinstance(chunk, TextChunk):
                tokens = self._checked_tokens(index, chunk)
            else:
                picture = self._picture(index, chunk)
                count = self._count(index, chunk, picture)
                tokens = np.full(count, self.placeholder, dtype=np.int32)
                spans.append(ImageSpan(length, count, picture.grid_thw))
                pictures.append(picture)
            parts.append(tokens)
            length += len(tokens)
        self._check_length(length)
        where = positions(self.base.family, length, tuple(spans), self.base.merge_size)
        return RenderedInput(np.concatenate(parts), tuple(spans), tuple(pictures), where)

    def _checked_tokens(self, index: int, chunk: TextChunk) -> "np.ndarray[Any, np.dtype[np.int32]]":
        check_token_ids(chunk.tokens, self.base.vocab_size, f"chunk {index}: token")
        return chunk.tokens

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise UserError("the model input holds no token; send at least one")
        if length > self.base.max_context:
            raise UserError(f"the model input holds {length} tokens, the context window of {self.base.name} is {self.base.max_context}")

    def _picture(self, index: int, chunk: ImageChunk) -> PictureInput:
        if self.processor is None:
            raise UserError(f"chunk {index} is an image, but {self.base.name} takes text only")
        key = chunk.sha256, chunk.format  # the same bytes under a wrong label are refused, whether they are known or not
        if key not in self.cache:
            picture = self._process(index, chunk, self.processor)
            if picture.pixel_values.nbytes > self.cache.maxsize:
                return picture
            self.cache[key] = picture
        return self.cache[key]

    def _process(self, index: int, chunk: ImageChunk, processor: Processor) -> PictureInput:
        data = chunk.data if chunk.data is not None else self.read_blob(chunk.sha256)
        try:
            image = decode(data, chunk.format, self.limits)
        except UserError as error:
            raise UserError(f"chunk {index}: {error}") from error
        return processor(chunk.sha256, image)

    def _count(self, index: int, chunk: ImageChunk, picture: PictureInput) -> int:
        count: int = picture.rows.stop
        if chunk.expected_tokens is not None and chunk.expected_tokens != count:
            raise UserError(
                f"chunk {index}: expected_tokens is {chunk.expected_tokens}, but the image takes {count} tokens in {self.base.name}; "
                "count with the processor configuration of the served model"
            )
        return count


def check_token_ids(ids: "np.ndarray[Any, Any]", vocab_size: int, what: str) -> None:
    """Raise UserError naming position and value if an id is not in [0, vocab_size)."""
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        where = position_of(wrong[0], ids.shape)
        raise UserError(f"{what} at position {where} is {ids.flat[wrong[0]]}, which is not in the vocabulary of {vocab_size}")


def position_of(index: int, shape: tuple[int, ...]) -> int | tuple[int, ...]:
    """Where a flat index lies in an array of that shape, for people: a number, or one for each dimension."""
    place = tuple(int(i) for i in np.unravel_index(index, shape))
    return place[0] if len(place) == 1 else place
