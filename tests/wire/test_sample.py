"""asample: bodies as the SDK writes them, wrong ones, and the reply as the SDK reads it."""

import base64
import hashlib
import math
import time
from typing import Any

import numpy as np
import orjson
import pytest
from tinker import types
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types.sample_request import SampleRequest as SdkRequest

from tinsmith.errors import NotBuiltError, UserError
from tinsmith.wire.chunks import ImageChunk, TextChunk
from tinsmith.wire.sample import SampledSequence, StopRule, encode_sample_response, parse_sample_request


def sdk_body(params: types.SamplingParams, **more: Any) -> bytes:
    image = types.ImageChunk(data=b"image", format="jpeg", expected_tokens=4)
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), image])
    request = SdkRequest(prompt=prompt, sampling_params=params, sampling_session_id="s:sample:0", seq_id=3, **more)
    return request.model_dump_json(exclude_unset=False, exclude_none=True).encode()


def body(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {},
    }
    return orjson.dumps(fields | changes)


def test_a_body_of_the_sdk_is_read() -> None:
    params = types.SamplingParams(max_tokens=5, seed=2**64 - 1, temperature=0.5, top_p=0.9, top_k=7)
    request = parse_sample_request(sdk_body(params, num_samples=2, prompt_logprobs=True))
    assert (request.sampling_session_id, request.seq_id, request.num_samples, request.prompt_logprobs) == ("s:sample:0", 3, 2, True)
    ours = request.params
    assert (ours.max_tokens, ours.seed, ours.temperature, ours.top_p, ours.top_k) == (5, 2**64 - 1, 0.5, 0.9, 7)
    text, image = request.prompt
    assert isinstance(text, TextChunk)
    assert (text.tokens.tolist(), text.tokens.dtype) == ([1, 2], np.dtype(np.int32))
    assert image == ImageChunk(hashlib.sha256(b"image").digest(), b"image", "jpeg", 4)


def test_defaults_of_the_sdk() -> None:
    request = parse_sample_request(sdk_body(types.SamplingParams()))
    assert (request.num_samples, request.prompt_logprobs) == (1, False)
    params = request.params
    assert (params.max_tokens, params.seed, params.temperature, params.top_p, params.top_k) == (None, None, 1.0, 1.0, -1)


@pytest.mark.parametrize(
    ("stop", "rule"),
    [
        (None, StopRule(True, (), ())),
        ([], StopRule(False, (), ())),
        ("a", StopRule(True, ("a",), ())),
        (["a", "b"], StopRule(True, ("a", "b"), ())),
        ([0, 5], StopRule(True, (), (0, 5))),
    ],
)
def test_stop_rules(stop: Any, rule: StopRule) -> None:
    assert parse_sample_request(sdk_body(types.SamplingParams(stop=stop))).params.stop == rule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": 1}, "surprise: Extra inputs are not permitted, got 1"),
        ({"seq_id": None}, "sampling_session_id and seq_id are both needed"),
        ({"seq_id": -1}, "seq_id: .* got -1"),
        ({"num_samples": 0}, "num_samples: .* got 0"),
        ({"num_samples": 1025}, "num_samples: .* got 1025"),
        ({"num_samples": "2"}, "num_samples: .* got '2'"),
        ({"sampling_params": {"temperature": -0.1}}, "sampling_params.temperature: .* got -0.1"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p: .* got 0"),
        ({"sampling_params": {"top_p": 1.1}}, "sampling_params.top_p: .* got 1.1"),
        ({"sampling_params": {"top_k": 0}}, "top_k must be -1"),
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k: .* got -2"),
        ({"sampling_params": {"top_k": 2**63}}, "sampling_params.top_k: .* got 9223372036854775808"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens: .* got 0"),
        ({"sampling_params": {"seed": -1}}, "sampling_params.seed: .* got -1"),
        ({"sampling_params": {"stop": [""]}}, "stop must not hold an empty text"),
        ({"sampling_params": {"stop": [1, "a"]}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": [-1]}}, "sampling_params.stop"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: Extra inputs"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2.5]}]}}, "tokens.1: .* got 2.5"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [True]}]}}, "tokens.0: .* got True"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, -1]}]}}, "got values from -1 to 5"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**31]}]}}, "chunks.0.tokens must lie in"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**63]}]}}, "more than 64 bits"),
        ({"prompt": {"chunks": [{"type": "video"}]}}, "prompt.chunks.0"),
        ({"prompt": {"chunks": [{"type": "image", "data": "@@@", "format": "png"}]}}, "chunks.0.data is not base64"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "gif"}]}}, "format: .* got 'gif'"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png", "expected_tokens": 0}]}}, "expected_tokens: .* got 0"),
    ],
)
def test_wrong_fields_are_named_with_their_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_sample_request(body(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"topk_prompt_logprobs": 5},
        {"topk_sample_logprobs": 5},
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64"}},
        {"prompt_alt_tokens_k": 1},
        {"prompt_logprobs_last_n": 1},
        {"record_stability_info": True},
        {"base_model": "tiny"},
        {"model_path": "tinker://x"},
        {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "x", "format": "png"}]}},
        {"prompt": {"chunks": [{"type": "dmel", "dmel": ""}]}},
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltError, match="not built"):
        parse_sample_request(body(**changes))


def test_defaults_of_what_is_not_built_are_accepted() -> None:
    unused = {"topk_prompt_logprobs": 0, "topk_sample_logprobs": 0, "prompt_alt_tokens_k": 0, "record_stability_info": False}
    assert parse_sample_request(body(**unused)).seq_id == 0


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"sampling_params": {"temperature": NaN}}'])
def test_broken_json_is_refused(text: bytes) -> None:
    with pytest.raises(UserError):
        parse_sample_request(text)


def test_a_long_prompt_is_read_in_milliseconds() -> None:
    long = body(prompt={"chunks": [{"type": "encoded_text", "tokens": list(range(30_000))}]})
    started = time.perf_counter()
    for _ in range(5):
        parse_sample_request(long)
    assert (time.perf_counter() - started) / 5 < 0.1


def test_the_sdk_reads_our_response() -> None:
    sequences = [SampledSequence([5, 6], [-0.5, -1.0], "stop"), SampledSequence([7], [-2.0], "length")]
    prompt_logprobs = np.array([math.nan, -0.25, 0.0], dtype=np.float32)
    read = deserialize_sample_response(encode_sample_response(sequences, prompt_logprobs, 2))
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in read.sequences] == [([5, 6], [-0.5, -1.0], "stop"), ([7], [-2.0], "length")]
    assert read.prompt_logprobs == [None, -0.25, 0.0]
    assert read.prompt_cache_hit_tokens == 2
    assert deserialize_sample_response(encode_sample_response(sequences, None, 0)).prompt_logprobs is None


def test_base64_is_read_as_the_sdk_writes_it() -> None:
    data = bytes(range(256))
    chunk = {"type": "image", "data": base64.b64encode(data).decode(), "format": "png"}
    image = parse_sample_request(body(prompt={"chunks": [chunk]})).prompt[0]
    assert image == ImageChunk(hashlib.sha256(data).digest(), data, "png", None)
