"""asample: bodies as the SDK writes them, wrong ones, and the reply as the SDK reads it."""

import base64
import hashlib
import math
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from tinker import types
from tinker.lib.public_interfaces.sampling_client import _tensor_data_to_model
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types.sample_request import SampleRequest as SdkRequest

from tinsmith.config import RequestsConfig
from tinsmith.errors import NotBuiltError, UserError
from tinsmith.wire import sample, tinker_pb2
from tinsmith.wire.chunks import ImageChunk, TextChunk
from tinsmith.wire.prompt_scores import (
    Alternatives,
    PromptAnswers,
    PromptQuestions,
    TargetIds,
    TargetLogprobs,
    TopLogprobs,
)
from tinsmith.wire.sample import (
    SampledSequence,
    StopRule,
    VersionSpan,
    check_size,
    encode_sample_response,
    parse_sample_request,
)


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


def test_a_body_of_the_sdk_is_read_with_its_defaults() -> None:
    params = types.SamplingParams(max_tokens=5, seed=2**64 - 1, temperature=0.5, top_p=0.9, top_k=7)
    read = parse_sample_request(sdk_body(params, num_samples=2, prompt_logprobs=True, record_stability_info=True))
    assert (read.sampling_session_id, read.seq_id) == ("s:sample:0", 3)
    assert (read.num_samples, read.questions.logprobs, read.record_stability_info) == (2, True, True)
    ours = read.params
    assert (ours.max_tokens, ours.seed, ours.temperature, ours.top_p, ours.top_k) == (5, 2**64 - 1, 0.5, 0.9, 7)
    text, image = read.prompt
    assert isinstance(text, TextChunk)
    assert (text.tokens.tolist(), text.tokens.dtype) == ([1, 2], np.dtype(np.int32))
    assert image == ImageChunk(hashlib.sha256(b"image").digest(), b"image", "jpeg", 4)
    read = parse_sample_request(sdk_body(types.SamplingParams()))
    assert (read.num_samples, read.questions.logprobs, read.record_stability_info) == (1, False, False)
    ours = read.params
    assert (ours.max_tokens, ours.seed, ours.temperature, ours.top_p, ours.top_k) == (None, None, 1.0, 1.0, -1)


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


def csr(data: list[int], crow: list[int], col: list[int] | None) -> dict[str, Any]:
    """A matrix [2, 3] in JSON."""
    return {"data": data, "dtype": "int64", "shape": [2, 3], "sparse_crow_indices": crow, "sparse_col_indices": col}


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
        ({"sampling_params": {"top_k": 0}}, r"top_k: .* send -1 \(all tokens\) or at least 1, got 0"),
        ({"sampling_params": {"top_k": 2**63}}, "sampling_params.top_k: .* got 9223372036854775808"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens: .* got 0"),
        ({"sampling_params": {"seed": -1}}, "sampling_params.seed: .* got -1"),
        ({"sampling_params": {"stop": [""]}}, r"sampling_params.stop: .* no text may be empty, got \[''\]"),
        ({"sampling_params": {"stop": [1, "a"]}}, r"sampling_params.stop: .* got \[1, 'a'\]"),
        ({"sampling_params": {"stop": [-1]}}, r"sampling_params.stop: .* got \[-1\]"),
        (
            {"sampling_params": {"stop": ["x"] * 257}},
            r"sampling_params.stop: .* at most 256 texts, .* these are 257 of 257 characters",
        ),
        (
            {"sampling_params": {"stop": ["x" * 2**11, "y" * 2**11, "z"]}},
            r"sampling_params.stop: .* these are 3 of 4097 characters",
        ),
        (
            {"sampling_params": {"stop": [7] * (2**14 + 1)}},
            r"sampling_params.stop: .* at most 16384 token ids; these are 16385,",
        ),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: Extra inputs"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2.5]}]}}, "tokens.1: .* got 2.5"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [True]}]}}, "tokens.0: .* got True"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, -1]}]}}, "chunks.0.tokens at position 1 is -1"),
        (
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**31]}]}},
            "chunks.0.tokens at position 0 is 2147483648",
        ),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**63]}]}}, "more than 64 bits"),
        ({"prompt": {"chunks": [{"type": "video"}]}}, "prompt.chunks.0"),
        ({"prompt": {"chunks": [{"type": "image", "data": "@@@", "format": "png"}]}}, "chunks.0.data is not base64"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "gif"}]}}, "format: .* got 'gif'"),
        (
            {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png", "expected_tokens": 0}]}},
            "expected_tokens: .* got 0",
        ),
        ({"base_model": "tiny"}, "fixed by the sampling session"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs: .* got -1"),
        ({"topk_sample_logprobs": 5000}, "topk_sample_logprobs: .* got 5000"),
        ({"prompt_logprobs_last_n": 1}, "set prompt_logprobs"),
        ({"prompt_logprobs_last_n": 0, "prompt_logprobs": True}, "prompt_logprobs_last_n: .* got 0"),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64"}},
            r"shape must be \[prompt length - 1, K\], got None",
        ),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "float32", "shape": [1, 1]}},
            "target_prompt_logprobs.dtype",
        ),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1]}}, "has 1 ids"),
        (
            {"target_prompt_logprobs": {"data": [2**63], "dtype": "int64", "shape": [1, 1]}},
            "data holds a number of more than 64 bits",
        ),
        (
            {"target_prompt_logprobs": csr([5], [0, 1, 1], [3])},
            r"target_prompt_logprobs: col_indices at position 0 is 3; .* \[0, 3\)",
        ),
        ({"target_prompt_logprobs": csr([5], [0, 2, 1], [1])}, "target_prompt_logprobs: crow_indices must rise"),
        ({"target_prompt_logprobs": csr([5], [0, 1, 1], None)}, "all indices of a CSR matrix"),
    ],
)
def test_wrong_fields_are_named_with_their_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_sample_request(body(**changes))


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        (
            PromptQuestions(logprobs=True, last_n=4),
            "prompt_logprobs_last_n is 4; for this prompt it must be between 1 and 3",
        ),
        (PromptQuestions(topk=101), "topk_prompt_logprobs is 101; the vocabulary has 100"),
        (
            PromptQuestions(targets=TargetIds((2, 1), np.array([0, 1]), np.array([5, 6]))),
            "has 2 rows; a prompt of 4 tokens needs 3",
        ),
        (
            PromptQuestions(targets=TargetIds((3, 1), np.arange(3), np.array([5, 100, 6]))),
            "holds 100 in row 1; send ids below 100",
        ),
        (PromptQuestions(targets=TargetIds((3, 1), np.arange(3), np.array([5, -2, 6]))), "holds -2 in row 1"),
    ],
)
def test_questions_are_checked_against_the_prompt(questions: PromptQuestions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        questions.check(4, 100)


def test_what_is_not_built_or_no_json_is_refused() -> None:
    for chunk in ({"type": "image_asset_pointer", "location": "x", "format": "png"}, {"type": "dmel", "dmel": ""}):
        with pytest.raises(NotBuiltError, match="not built"):
            parse_sample_request(body(prompt={"chunks": [chunk]}))
    for text in (b"", b"[]", b"{", b'{"sampling_params": {"temperature": NaN}}'):
        with pytest.raises(UserError):
            parse_sample_request(text)


def test_the_sdk_reads_our_response() -> None:
    top = TopLogprobs(
        np.array([[5, 3], [6, 5]], dtype=np.int32), np.array([[-0.5, -2.0], [-1.0, -1.5]], dtype=np.float32)
    )
    spans = (VersionSpan("m/3", 0, 1), VersionSpan("m/5", 1, 2))
    sequences = [SampledSequence([5, 6], [-0.5, -1.0], "stop", top, spans), SampledSequence([7], [-2.0], "length")]
    logprobs = np.array([math.nan, -0.25, 0.0], dtype=np.float32)
    prompt_top = TopLogprobs.empty(3, 1)
    prompt_top.token_ids[1], prompt_top.logprobs[1] = 9, -0.125
    alternatives = Alternatives(np.array([[4], [8]], dtype=np.int32), np.array([[-3.0], [-4.0]], dtype=np.float32))
    dense = TargetLogprobs(
        TargetIds((2, 2), np.array([0, 0, 1, 1]), np.array([1, -1, 2, 3])), np.array([-1, 0, -2, -3], dtype=np.float32)
    )
    encoded = encode_sample_response(
        sequences, PromptAnswers(logprobs, prompt_top, dense, alternatives), prompt_cache_hit_tokens=2
    )
    read = deserialize_sample_response(encoded)
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in read.sequences] == [
        ([5, 6], [-0.5, -1.0], "stop"),
        ([7], [-2.0], "length"),
    ]
    assert [s.topk_logprobs for s in read.sequences] == [[[(5, -0.5), (3, -2.0)], [(6, -1.0), (5, -1.5)]], None]
    assert read.prompt_logprobs == [None, -0.25, 0.0]
    assert read.topk_prompt_logprobs == [None, [(9, -0.125)], None]
    assert read.target_prompt_logprobs is not None
    assert read.target_prompt_logprobs.to_torch().tolist() == [[-1, 0], [-2, -3]]
    assert read.prompt_alt_tokens is not None
    assert read.prompt_alt_tokens.tokens.tolist() == [[4], [8]]
    assert read.prompt_alt_tokens.logprobs.tolist() == [[-3.0], [-4.0]]
    assert read.prompt_cache_hit_tokens == 2
    ours = tinker_pb2.SampleResponse.FromString(encoded)  # what the SDK does not know it leaves out
    assert [[(span.version, span.start, span.end) for span in s.versions] for s in ours.sequences] == [
        [("m/3", 0, 1), ("m/5", 1, 2)],
        [],
    ]


def test_the_sdk_reads_target_logprobs_in_the_layout_it_sent() -> None:
    ids = torch.full((3, 5), -1)
    ids[1, 2], ids[2, 0], ids[2, 3] = 7, 8, 9
    sent = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    request = parse_sample_request(sdk_body(types.SamplingParams(), target_prompt_logprobs=_tensor_data_to_model(sent)))
    asked = request.questions.targets
    assert asked is not None
    assert (asked.rows.tolist(), asked.ids.tolist(), asked.first_row) == ([1, 2, 2], [7, 8, 9], 1)
    answers = PromptAnswers(targets=TargetLogprobs(asked, np.array([-1, -2, -3], dtype=np.float32)))
    read = deserialize_sample_response(encode_sample_response([], answers, 0))
    assert read.prompt_logprobs is None
    assert read.target_prompt_logprobs is not None
    assert read.target_prompt_logprobs.to_torch().to_dense().tolist() == [[0] * 5, [0, 0, -1, 0, 0], [-2, 0, 0, -3, 0]]


def test_a_body_that_would_take_long_to_parse_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = RequestsConfig(max_sample_values=1024, max_prompt_chunks=8)
    monkeypatch.setattr(sample, "_SampleBody", None)  # it is not even tried
    with pytest.raises(UserError, match="the body holds 2003 values, max_sample_values allows 1024"):
        check_size(body(prompt={"chunks": [{"type": "encoded_text", "tokens": [1] * 2000}]}), limits)
    with pytest.raises(
        UserError, match="the prompt holds at least 9 chunks, max_prompt_chunks allows 8; join neighbouring texts"
    ):
        check_size(body(prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}] * 10}), limits)
    check_size(body(prompt={"chunks": [{"type": "encoded_text", "tokens": [1] * 100}] * 8}), limits)


def test_a_large_image_is_decoded_as_it_was_sent() -> None:
    data = np.random.default_rng(0).bytes(3_000_001)
    text = base64.b64encode(data).decode()
    image = {"type": "image", "format": "png", "data": text}
    (chunk,) = parse_sample_request(body(prompt={"chunks": [image]})).prompt
    assert isinstance(chunk, ImageChunk)
    assert chunk.data == data
    for wrong in (text[: 2**20 - 1] + "=" + text[2**20 :], text + "=", text[:-1]):
        with pytest.raises(UserError, match=r"prompt\.chunks\.0\.data is not base64"):
            parse_sample_request(body(prompt={"chunks": [image | {"data": wrong}]}))
