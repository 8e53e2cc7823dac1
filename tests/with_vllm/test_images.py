"""Images of both families that have to be resized: vLLM computes with our pixel values, whatever its own processor
makes of them.

Invariant: The pixel values that vLLM computes with are the trainer's, for PNG and JPEG of any size.
"""

import io
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import tinker
from PIL import Image
from tinker import types
from transformers import AutoImageProcessor

from tests.acceptance.talking import numbers
from tests.bases import write_family
from tests.extent import slow
from tests.running import Server
from tests.with_vllm.serving import sampling_with_vllm, wait_for_vllm, write_changed
from tests.with_vllm.talking import FREE, learn, sample, snapshot, text_logprobs, worst_difference

IMAGES: list[tuple[Literal["png", "jpeg"], str, tuple[int, int]]] = [
    ("jpeg", "RGB", (97, 131)),
    ("jpeg", "L", (333, 517)),
    ("png", "RGB", (41, 199)),
    ("png", "RGBA", (260, 33)),
]
"""Format, mode, width and height."""


@pytest.fixture(params=["qwen3_vl", *slow("qwen2_5_vl")])  # another start; its images are placed by the same code
def family(
    request: pytest.FixtureRequest, server: Server, vision_dir: Path, tmp_path: Path
) -> Iterator[tuple[Server, Path]]:
    """A server that samples a tiny model of the family with vLLM, and the model's directory."""
    with ExitStack() as stack:
        if request.param != "qwen3_vl":
            vision_dir = tmp_path / "model"
            write_family("qwen2_5_vl", vision_dir)  # with heads of 16, which vLLM's attention on a CPU does not take
            write_changed(
                vision_dir, num_attention_heads=2, num_key_value_heads=2, rope_parameters={"mrope_section": [4, 6, 6]}
            )
            server = stack.enter_context(sampling_with_vllm(tmp_path, "--base-model", f"tiny={vision_dir}"))
        wait_for_vllm(server)
        yield server, vision_dir


def image_of(kind: str, mode: str, size: tuple[int, int]) -> bytes:
    """Noise in blocks, which every way of resizing makes something else of."""
    blocks = np.random.default_rng(sum(size)).integers(
        0, 256, (size[1] // 5 + 1, size[0] // 5 + 1, len(mode)), dtype=np.uint8
    )
    pixels = blocks.repeat(5, 0).repeat(5, 1)[: size[1], : size[0]]
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(), mode).save(file, kind)
    return file.getvalue()


def test_images_that_are_resized(family: tuple[Server, Path]) -> None:
    server, directory = family
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    with tinker.ServiceClient(base_url=server.url, api_key="tml-images") as service:
        # vLLM applies adapters on the output projection for some families only, and Qwen2.5-VL is none of them.
        if '"qwen2_5_vl"' in (directory / "config.json").read_text():
            with pytest.raises(tinker.TinkerError, match="applies no adapters to lm_head of tiny"):
                service.create_lora_training_client(base_model="tiny", rank=8).result()
        client = service.create_lora_training_client(base_model="tiny", rank=8, seed=3, train_unembed=False).result()
        learn(client)
        sampler = snapshot(client)
        for kind, mode, size in IMAGES:
            data = image_of(kind, mode, size)
            grid = processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt")[
                "image_grid_thw"
            ][0]
            image = types.ImageChunk(
                data=data, format=kind, expected_tokens=int(grid.prod()) // processor.merge_size**2
            )
            before, after = (types.EncodedTextChunk(tokens=tokens) for tokens in ([7, 8], [*range(50, 70)]))
            prompt = types.ModelInput(chunks=[before, image, after])
            reply = sample(sampler, prompt, FREE, include_prompt_logprobs=True)
            assert worst_difference(client, prompt, reply) < 1e-4
            np.testing.assert_allclose(numbers(reply.prompt_logprobs), text_logprobs(client, prompt), atol=1e-4)
