"""Bad samples and steps: a table of JSON requests that are refused, each with the words of its refusal.

What belongs to a model's sequence fails through its future, everything else is refused at once.
"""

import base64
import json
from collections.abc import Callable
from typing import Any

from tests.acceptance.bad_target import Case, Target, detail_of, refused
from tests.acceptance.bad_training import NAN, png_that_claims
from tests.bases import png

HUGE = 2**70


def post(path: str, /, status: int = 400, method: str = "POST", **body: Any) -> Callable[[Target], str]:
    """A JSON body that is refused at once."""
    return refused(path, status, json.dumps(body), method=method)


def operation(kind: str, **body: Any) -> Callable[[Target], str]:
    """An operation of the model that fails through its future."""

    def send(target: Target) -> str:
        whole = {"model_id": target.model.model_id, "seq_id": target.next()} | body
        reply = target.http.post(kind, content=json.dumps(whole), headers={"Content-Type": "application/json"})
        assert reply.status_code == 200, reply.text
        return target.failure(reply.json()["request_id"])

    return send


def sample(
    *chunks: dict[str, Any], status: int = 400, params: dict[str, Any] | None = None, **fields: Any
) -> Callable[[Target], str]:
    """A sample of three tokens, if not of these chunks. `status` 200 means that it fails through its future."""
    prompt = {"chunks": chunks or [words(5, 6, 7)]}

    def send(target: Target) -> str:
        body = {"sampling_session_id": target.sampler, "seq_id": target.next_sample(), "prompt": prompt}
        whole = json.dumps(body | {"sampling_params": {"max_tokens": 2} | (params or {})} | fields)
        reply = target.http.post("asample", content=whole, headers={"Content-Type": "application/json"})
        assert reply.status_code == status, reply.text
        return detail_of(reply) if status != 200 else target.failure(reply.json()["request_id"])

    return send


def words(*tokens: int) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": tokens}


def photo(data: bytes, format: str = "png", **fields: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": format, **fields}


PROMPTS = [
    Case("prompt without chunks", sample(prompt={"chunks": []}), "the prompt is empty; send at least one token"),
    Case(
        "prompt token too large",
        sample(words(5, 2048)),
        "prompt.chunks.0.tokens at position 1 is 2048 ... ends at 2047",
    ),
    Case(
        "audio prompt",
        sample({"type": "dmel", "dmel": "AAAA"}),
        "prompt.chunks.0: type='dmel' ... send encoded_text and image",
    ),
    Case("prompt longer than the context", sample(words(*[1] * 32769)), "context window of text: 32769 + 2 > 32768"),
    Case(
        "answer beyond the context", sample(params={"max_tokens": 32766}), "context window of text: 3 + 32766 > 32768"
    ),
    Case(
        "sampled images of too many pixels together",
        sample(*[photo(png_that_claims(7000, 7000 - number)) for number in range(5)]),
        "have 244930000 pixels together ... max_input_pixels allows 200000000",
        "vision",
    ),
    Case(
        "sampled images without end",
        sample(*[photo(b"counted, not read")] * 4097),
        "holds 4097 images, max_images allows 4096",
        "vision",
    ),
    Case(
        "sampled chunks without end", sample(*[words(1)] * 8200), "at least 8199 chunks, max_prompt_chunks allows 8192"
    ),
    Case(
        "sampled image for a text model", sample(photo(png(0))), "prompt.chunks.0 is an image, but text takes text only"
    ),
    *(
        Case(
            f"sampled {name}",
            sample(words(1), chunk, status=status),
            f"{'chunks.1' if status == 400 else 'chunk 1'} ... {says}",
            "vision",
        )
        for name, status, chunk, says in (
            ("truncated image", 200, photo(png(0)[:300]), "png image of 96 x 64 pixels is broken"),
            ("image of too many bytes", 400, photo(png(0) + bytes(20 * 2**20)), "max_image_mib allows 20"),
            (
                "image of too many pixels",
                400,
                photo(png_that_claims(30000, 30000)),
                "30000 x 30000 ... max_image_pixels",
            ),
            ("other count", 200, photo(png(0), expected_tokens=7), "expected_tokens is 7 ... takes 6 tokens in vision"),
        )
    ),
]

# Words of other wrong fields are in tests/wire/test_sample.py and test_requests.py.
SAMPLING = [
    Case(
        "num_samples", sample(num_samples=HUGE), f"num_samples: Input should be less than or equal to 1024, got {HUGE}"
    ),
    Case("temperature", sample(params={"temperature": NAN}), "sampling_params.temperature: ... finite number, got nan"),
    Case(
        "unknown parameter", sample(params={"min_p": 0.1}), "sampling_params.min_p: ... Extra inputs are not permitted"
    ),
    Case(
        "last_n beyond the prompt",
        sample(prompt_logprobs=True, prompt_logprobs_last_n=3),
        "last_n is 3 ... between 1 and 2",
    ),
    Case(
        "sample of an unknown session",
        sample(sampling_session_id="a:sample:0", status=404),
        "'a:sample:0' does not exist",
    ),
]

STEPS = [
    *(
        Case(
            f"{name}={value}",
            operation("optim_step", adam_params={name: value}),
            f"adam_params.{name}: ... got {value!r}",
        )
        for name, value in (("learning_rate", NAN), ("grad_clip_norm", NAN), ("momentum", 0.9))
    ),
    Case("no hyper-parameters", operation("optim_step"), "adam_params: Field required"),
    Case(
        "step of an unknown model",
        post("optim_step", 404, model_id="a:train:0", seq_id=1, adam_params={}),
        "'a:train:0' does",
    ),
    Case("seq_id", post("optim_step", model_id="{model}", seq_id=HUGE, adam_params={}), f"seq_id: ... got {HUGE}"),
]

SAMPLES_AND_STEPS = [*PROMPTS, *SAMPLING, *STEPS]
