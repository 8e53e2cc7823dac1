"""Images as vLLM takes them, and a sample whose parts came from several versions."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from tests.bases import image_chunks, new_ref, random_tokens, renderer
from tests.sampling.vllm.answering import answering, in_a_loop, instance_of
from tinsmith.models.base import BaseModel
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.vllm.generate import encode_image, features_of, send_images
from tinsmith.sampling.vllm.job import Draft, Job, joined
from tinsmith.sampling.vllm.verify import Expectation, PublishedWeights
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SampleRequest, SamplingParams, StopRule, VersionSpan


def two_images(base: BaseModel) -> RenderedInput:
    return renderer(base).render([*image_chunks(base, 1, 8), *image_chunks(base, 2, 8)])


def test_pixel_values_travel_as_they_are_and_what_the_server_knows_as_a_hash(vision_base: BaseModel) -> None:
    rendered = two_images(vision_base)
    known, new = rendered.images
    features = features_of(rendered, {known.sha256.hex()})
    assert features is not None
    assert features["mm_hashes"] == {"image": [known.sha256.hex(), new.sha256.hex()]}
    assert features["mm_placeholders"]["image"] == [{"offset": span.offset, "length": 6} for span in rendered.spans]
    assert features["kwargs_data"]["image"] == [None, encode_image(new)]
    assert features_of(rendered.part(0, 4), ()) is None
    item = msgspec.msgpack.decode(base64.b64decode(encode_image(new)))
    (kind, shape, pixels), (_, _, grid) = item["pixel_values"]["data"], item["image_grid_thw"]["data"]
    assert kind == "float32"
    np.testing.assert_array_equal(np.frombuffer(pixels.data, "<f4").reshape(shape), new.pixel_values)
    assert tuple(np.frombuffer(grid.data, "<i8")) == new.grid_thw


@in_a_loop
async def test_a_image_that_a_server_forgot_in_its_sleep_is_sent_again_beside_a_new_one(
    vision_base: BaseModel, tmp_path: Path
) -> None:
    """The new image waits for a server that sleeps; what that knew before, it does not know afterwards."""
    rendered = two_images(vision_base)
    names = [image.sha256.hex() for image in rendered.images]
    known: set[str] = set()
    """What the server remembers."""

    async def answer(request: web.Request) -> web.Response:
        features: dict[str, Any] = (await request.json())["features"]
        items = dict(zip(features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True))
        if any(value is None and name not in known for name, value in items.items()):
            return web.json_response({"error": "an unknown image"}, status=500)
        known.update(items)
        return web.json_response({"choices": [], "model": None})

    async with answering(tmp_path, answer) as connection:
        instance = instance_of(connection)
        instance.images[names[0]] = 1
        await instance.sleep_mode.fall_asleep()
        sending = asyncio.create_task(send_images(instance, rendered, None))
        await asyncio.wait([sending], timeout=0.1)
        assert not sending.done()
        instance.wakes()
        await instance.sleep_mode.wake_up()
        await sending
        await send_images(instance, rendered, None)
    assert known == set(names)


# Parts of a sample


def job_of(base: BaseModel, *stop: str) -> Job:
    rule = StopRule(eos=True, strings=stop, token_ids=())
    return Job(
        request_id="x",
        request=SampleRequest("s", 0, 1, [], SamplingParams(50, 1.0, 1.0, -1, None, rule), PromptQuestions()),
        rendered=renderer(base).render([random_tokens(1, 4)]),
        published=PublishedWeights(None, Expectation(np.zeros(1, dtype=np.float32), 0.001), new_ref("m/1", "m")),
        max_tokens=50,
        base=base,
        answers=PromptAnswers(),
        tell=None,
    )


def segment(version: str, tokens: list[int], reason: Any = "length") -> SampledSequence:
    top = TopLogprobs(np.array(tokens, dtype=np.int32)[:, None], -np.array(tokens, dtype=np.float32)[:, None])
    return SampledSequence(
        tokens, [-float(token) for token in tokens], reason, top, (VersionSpan(version, 0, len(tokens)),)
    )


def test_a_stop_string_that_two_versions_wrote_ends_the_sample(text_base: BaseModel) -> None:
    """vLLM sees only what it writes itself, so it went on behind it. Pieces of one version are one span."""
    ids = text_base.tokenizer.encode("one two three four", add_special_tokens=False)
    cut = len(ids) // 2
    stop = text_base.tokenizer.decode(ids[: cut + 1])[-2:]
    assert stop not in text_base.tokenizer.decode(ids[:cut])
    draft = Draft([segment("m/1", ids[:2]), segment("m/1", ids[2:cut]), segment("m/3", ids[cut:])])
    whole: Any = joined(job_of(text_base, stop), draft)
    assert (whole.tokens, whole.stop_reason) == (ids[: cut + 1], "stop")
    assert whole.logprobs == [-float(token) for token in ids[: cut + 1]]
    assert whole.versions == (VersionSpan("m/1", 0, cut), VersionSpan("m/3", cut, cut + 1))
    assert whole.topk.token_ids.tolist() == [[token] for token in ids[: cut + 1]]
    assert joined(job_of(text_base, "never"), draft).tokens == ids
