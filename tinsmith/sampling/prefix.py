"""Keys of cache blocks: sequences that begin alike have equal keys for the blocks that they have in common.

A block's key hashes the key of the block before it, its tokens, and the content of images that reach into it. The first
block follows the key of the weights and the tenant, so nothing is shared between two versions of a model, and nobody
finds out what another tenant's prompts are.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from tinsmith.memory.budget import BLOCK
from tinsmith.protocol.shapes import WeightsRef
from tinsmith.rendering.rendered import RenderedInput


def first_key(ref: WeightsRef, tenant: str) -> bytes:
    """Return the key [32 bytes] that stands for weights and tenant, which the first block of a sequence follows."""
    return hashlib.blake2b(f"{tenant}\n{ref.key}".encode(), digest_size=32).digest()


def images_in(rendered: RenderedInput, start: int) -> bytes:
    """Return content hash and offset, relative to `start`, of the images that reach into the block at `start`."""
    parts = [
        image.sha256 + struct.pack("<q", span.offset - start)
        for span, image in zip(rendered.spans, rendered.images, strict=True)
        if span.offset < start + BLOCK and span.offset + span.length > start
    ]
    return b"".join(parts)


def prompt_keys(
    first: bytes, rendered: RenderedInput, answer: Sequence[int], known: list[bytes], blocks: int
) -> list[bytes]:
    """Return the keys of the first `blocks` full blocks of a prompt and `answer`; the first keys are `known`."""
    keys = list(known)
    prompt = len(rendered)
    for block in range(len(keys), blocks):
        start, end = block * BLOCK, (block + 1) * BLOCK
        tokens = rendered.token_ids[start:end]
        if end > prompt:
            tokens = np.concatenate([tokens, np.array(answer[max(0, start - prompt) : end - prompt], dtype=np.int32)])
        images = images_in(rendered, start) if rendered.spans else b""
        keys.append(hashlib.blake2b((keys[-1] if keys else first) + tokens.tobytes() + images, digest_size=32).digest())
    return keys
