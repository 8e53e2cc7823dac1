"""Token ids and pixel values are the Hugging Face processor's, also in a packed row; what does not fit is refused.

Patches of bytes, and the table of what a processor makes of each byte, are the model's own processor to the bit.

Invariant: Token ids and pixel values equal the HF processor's; a placeholder that arrives as text stays text.
"""

import io
import itertools
import json
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from tests.bases import image, image_chunks, png, random_tokens, renderer, text
from tests.extent import amount
from tinsmith.config import ImagesConfig
from tinsmith.errors import ConfigError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.vision_tower import ImageInput
from tinsmith.protocol.facts import ModelFacts
from tinsmith.rendering import renderer as rendering
from tinsmith.rendering.packing import pack
from tinsmith.rendering.processor import LocalProcessor
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Renderer
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.images import ImageHeader

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("width", "height"), [(33, 200), (500, 333)])
def test_ids_and_pixels_equal_the_processors(
    vision_base: BaseModel, family_dir: Callable[[str], Path], width: int, height: int
) -> None:
    directory = family_dir("qwen3_vl")
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(directory),
        AutoImageProcessor.from_pretrained(directory, backend="pil"),
    )
    given = Image.open(io.BytesIO(png(7, width, height)))
    processed = processor(images=[given], return_tensors="pt")
    count = int(processed["image_grid_thw"].prod()) // 4
    expected = tokenizer(PROMPT.replace("<|image_pad|>", "<|image_pad|>" * count))["input_ids"]

    before, after = PROMPT.split("<|image_pad|>")
    chunks: list[Chunk] = [
        text(*tokenizer(before)["input_ids"]),
        image(7, width, height, count),
        text(*tokenizer(after)["input_ids"]),
    ]
    rendered = renderer(vision_base).render(chunks)
    assert rendered.token_ids.tolist() == expected
    assert torch.equal(rendered.images[0].pixel_values, processed["pixel_values"])
    assert list(rendered.images[0].grid_thw) == processed["image_grid_thw"][0].tolist()
    assert (rendered.spans[0].offset, rendered.spans[0].length) == (len(tokenizer(before)["input_ids"]), count)


@settings(max_examples=amount(8, 20), deadline=None)
@given(cuts=st.lists(st.integers(0, 12), max_size=6))
def test_text_cut_anywhere_is_the_same_text(vision_base: BaseModel, cuts: list[int]) -> None:
    render, tokens = renderer(vision_base), random_tokens(1, 12).tokens
    pieces = [TextChunk(tokens[a:b]) for a, b in itertools.pairwise([0, *sorted(cuts), 12])]
    whole, cut = (render.render([*own, image(0)]) for own in ([TextChunk(tokens)], pieces))
    np.testing.assert_array_equal(cut.token_ids, whole.token_ids)
    assert cut.spans == whole.spans
    assert torch.equal(cut.positions, whole.positions)


def test_a_placeholder_that_arrives_as_text_stays_text(vision_base: BaseModel) -> None:
    placeholder = vision_base.config.image_token_id
    rendered = renderer(vision_base).render([text(5, placeholder, placeholder, 6)])
    assert rendered.token_ids.tolist() == [5, placeholder, placeholder, 6]
    assert (rendered.spans, rendered.images) == ((), ())
    assert rendered.positions.tolist() == [[0, 1, 2, 3]] * 3


def test_threads_render_as_one_would_and_decode_each_image_once(
    vision_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread wants the same images in the same order, from a cache that holds few of them, so that they meet at
    each."""
    prompts: list[list[Chunk]] = [
        [text(number), image(number, 200 + number, 150), text(number)] for number in range(12)
    ]
    alone = [renderer(vision_base).render(prompt) for prompt in prompts]
    shared, decoded, together = renderer(vision_base, image_cache_mib=1), Counter[bytes](), threading.Barrier(4)
    process = LocalProcessor.__call__

    def count(processor: LocalProcessor, sha256: bytes, image: Image.Image) -> ImageInput:
        decoded[sha256] += 1
        return process(processor, sha256, image)

    def render(prompt: list[Chunk]) -> RenderedInput:
        together.wait()
        return shared.render(prompt)

    monkeypatch.setattr(LocalProcessor, "__call__", count)
    with ThreadPoolExecutor(4) as threads:
        for prompt, expected in zip(prompts, alone, strict=True):
            for rendered in threads.map(render, [prompt] * 4):
                assert torch.equal(rendered.images[0].pixel_values, expected.images[0].pixel_values)
                assert torch.equal(rendered.positions, expected.positions)
                np.testing.assert_array_equal(rendered.token_ids, expected.token_ids)
    assert list(decoded.values()) == [1] * 12
    assert len(shared.cache) < 12


def test_a_image_that_fails_in_one_thread_fails_in_each_by_itself(vision_base: BaseModel) -> None:
    good = image(0)
    assert good.data is not None
    broken = ImageChunk(good.sha256, good.data[:-200], "png", None)
    shared = renderer(vision_base)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(shared.render, [*[text(1)] * place, broken]) for place in range(8)]
        for place, rendering_ in enumerate(waiting):
            with pytest.raises(UserError, match=f"^chunk {place}: "):
                rendering_.result()
    assert len(shared.render([good])) == 6


def test_bytes_in_the_store_are_read_by_their_hash_once(vision_base: BaseModel) -> None:
    asked: list[bytes] = []

    def read(sha256: bytes) -> bytes:
        asked.append(sha256)
        return png(3)

    render, chunk = Renderer(vision_base, ImagesConfig(), read), image(3)
    first, again = (render.render([replace(chunk, data=None)]).images[0] for _ in range(2))
    assert first is again
    assert torch.equal(first.pixel_values, renderer(vision_base).render([chunk]).images[0].pixel_values)
    assert asked == [chunk.sha256]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([text()], "the model input holds no token"),
        ([text(1, 2), text(3, 2048)], "chunk 1: token at position 1 is 2048, which is not in the vocabulary of 2048"),
        ([text(-1)], "chunk 0: token at position 0 is -1"),
        ([image(0)], "chunk 0 is an image, but tiny takes text only"),
        ([random_tokens(0, 40000)], "the model input holds 40000 tokens, the context window of tiny is 32768"),
    ],
)
def test_what_a_text_model_cannot_take_is_refused(text_base: BaseModel, chunks: list[Chunk], message: str) -> None:
    with pytest.raises(UserError, match=message):
        renderer(text_base).render(chunks)


@pytest.mark.parametrize(
    ("wrong", "limits", "message"),
    [
        (image(3, expected_tokens=7), {}, "chunk 1: expected_tokens is 7, but the image takes 6 tokens"),
        (replace(image(3), format="jpeg"), {}, "labelled 'jpeg' but is 'png'"),
        (image(3), {"max_image_pixels": 100}, "chunk 1: "),
    ],
)
def test_a_image_that_is_not_as_it_should_be_is_refused_also_if_it_is_known(
    vision_base: BaseModel, wrong: ImageChunk, limits: dict[str, int], message: str
) -> None:
    render = renderer(vision_base, **limits)
    if not limits:
        assert len(render.render([image(3, expected_tokens=6)])) == 6
    with pytest.raises(UserError, match=message):
        render.render([text(1), wrong])


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_the_header_alone_tells_how_many_tokens_a_image_takes(
    family_base: Callable[[str], BaseModel], model_type: str
) -> None:
    render = renderer(family_base(model_type))
    for width, height in [(96, 64), (33, 200), (1, 200), (500, 333), (3, 3)]:
        measured = render.measure([image(7, width, height)])
        assert len(measured) == len(render.render_measured(measured))
        assert measured.pixels == {image(7, width, height).sha256: width * height}


def test_the_server_counts_an_image_as_the_processor_does(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    changed: dict[str, Any] = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    chance = random.Random(0)
    sides = [(1, 1), (1, 200), (8000, 40), (4096, 4096), *((chance.randint(1, 6000), 999) for _ in range(300))]
    for source in (str(family_dir("qwen3_vl")), str(written(tmp_path, family_dir("qwen3_vl"), changed))):
        processor = LocalProcessor(source)
        facts = ModelFacts("a", source, "b", 1, 1, 1, 1, True, 1, *processor.sizes)
        for width, height in sides:
            header = ImageHeader(width, height)
            assert facts.image_tokens(header) == processor.tokens(header), header
        with pytest.raises(UserError, match="is too narrow"):
            facts.image_tokens(ImageHeader(1, 201))


def test_images_beyond_the_context_or_the_limit_are_refused_before_any_is_decoded(
    vision_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "decode", None)
    large = [image(seed, 1000, 750) for seed in range(3)]
    with pytest.raises(UserError, match="the context window of tiny is"):
        renderer(vision_base).render([*large, random_tokens(0, 31_000)])
    with pytest.raises(
        UserError, match="have 2250000 pixels together; max_input_pixels allows 2000000: scale them down"
    ):
        renderer(vision_base, max_input_pixels=2_000_000).render([*large])


def test_tokens_and_positions_are_those_of_each_sequence_alone(vision_base: BaseModel) -> None:
    """Rotary positions that went on from one sequence to the next would change no result but for rounding, which grows
    with them."""
    render = renderer(vision_base)
    chunks = (
        [random_tokens(1, 5)],
        image_chunks(vision_base, 2, 4),
        [random_tokens(3, 1)],
        image_chunks(vision_base, 4, 3, width=64),
    )
    sequences = [render.render(own) for own in chunks]
    row = pack(sequences, [None] * len(sequences), torch.device("cpu"))
    parts = zip(sequences, row.token_ids.split(row.lengths), row.positions.split(row.lengths, dim=1), strict=True)
    for sequence, token_ids, positions in parts:
        np.testing.assert_array_equal(token_ids.numpy(), sequence.token_ids)
        assert torch.equal(positions, sequence.positions)
        assert (positions[:, 0] == 0).all()
    assert (row.token_ids[row.image_index] == render.placeholder).all()
    assert len(row.image_index) == int((row.token_ids == render.placeholder).sum())
    assert [image.sha256 for image in row.images] == [image.sha256 for each in sequences for image in each.images]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
    {"do_normalize": False},
    {"do_rescale": False, "do_normalize": False},
    {"resample": 2, "rescale_factor": 1 / 127.5},
    {
        "patch_size": 14,
        "merge_size": 3,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": 42 * 42, "longest_edge": 420 * 420},
    },
]


def written(directory: Path, source: Path, settings: dict[str, Any]) -> Path:
    """A copy of a model's directory whose image processor has other settings."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


def drawn(width: int, height: int) -> Image.Image:
    """Random pixels."""
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "usual")
def test_values_are_the_processor_s_to_the_bit(
    family_dir: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    source = str(written(tmp_path, family_dir("qwen3_vl"), settings))
    ours, theirs = LocalProcessor(source), AutoImageProcessor.from_pretrained(source, backend="pil")
    for width, height in [(96, 64), (33, 200), (500, 333), (3, 3), (700, 640)]:
        made, expected = ours(b"", drawn(width, height)), theirs(images=[drawn(width, height)], return_tensors="pt")
        assert torch.equal(made.pixel_values, expected["pixel_values"])
        assert made.pixel_values_nbytes == expected["pixel_values"].nbytes
        assert [*made.grid_thw] == expected["image_grid_thw"][0].tolist()
        halves = made.levels.values(made.pixels, torch.bfloat16)
        assert torch.equal(halves, expected["pixel_values"].to(torch.bfloat16))


@pytest.mark.parametrize("settings", [{"do_resize": False}, {"image_processor_type": "CLIPImageProcessor"}])
def test_a_processor_that_computes_something_else_is_refused(
    family_dir: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    source = written(tmp_path, family_dir("qwen3_vl"), settings)
    with pytest.raises(
        ConfigError, match=r"its image processor, \w+, does not compute what Qwen2VLImageProcessor computes"
    ):
        LocalProcessor(str(source))
