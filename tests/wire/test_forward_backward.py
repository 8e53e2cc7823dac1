"""forward_backward against the SDK's own encoder and decoder."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types.forward_backward_request import ForwardBackwardRequest as SdkRequest
from tinker.types.model_input_chunk import ModelInputChunk
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from tinsmith.errors import NotBuiltError, TinsmithError, UserError
from tinsmith.wire import tinker_pb2
from tinsmith.wire.chunks import ImageChunk, TextChunk
from tinsmith.wire.forward_backward import (
    ForwardBackwardRequest,
    ProvenanceSpan,
    decode_stored,
    encode_output,
    move_images_out,
    parse,
)

text_chunks = st.builds(
    lambda tokens: types.EncodedTextChunk(tokens=tokens), st.lists(st.integers(0, 2**31 - 1), max_size=5)
)
image_chunks = st.builds(
    lambda data, format, count: types.ImageChunk(data=data, format=format, expected_tokens=count),
    st.binary(max_size=8),
    st.sampled_from(["png", "jpeg"]),
    st.none() | st.integers(1, 2**31 - 1),
)
loss_inputs = st.dictionaries(
    st.sampled_from(["target_tokens", "weights", "advantages"]),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(lambda values: np.array(values, dtype=np.float32)),
)
datums = st.tuples(st.lists(text_chunks | image_chunks, max_size=4), loss_inputs)
configs = st.none() | st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False) | st.text(max_size=5), max_size=3)


def encode(request: SdkRequest, forward_only: bool = False) -> bytes:
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def sdk_request(data: list[types.Datum], loss_fn_config: dict[str, float | str] | None = None) -> SdkRequest:
    content = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy", loss_fn_config=loss_fn_config)
    return SdkRequest(forward_backward_input=content, model_id="s:train:0", seq_id=7)


def sdk_datum(chunks: list[ModelInputChunk], inputs: dict[str, NDArray[Any]] | None = None) -> types.Datum:
    tensors = {name: types.TensorData.from_numpy(array) for name, array in (inputs or {}).items()}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=tensors)


def decode(body: bytes) -> ForwardBackwardRequest:
    stored = move_images_out(parse(body))
    return decode_stored(stored.payload, stored.image_digests)


@given(st.lists(datums, max_size=3), configs, st.booleans())
def test_what_the_sdk_encodes_comes_back(
    data: list[Any], config: dict[str, float | str] | None, forward_only: bool
) -> None:
    body = encode(sdk_request([sdk_datum(chunks, inputs) for chunks, inputs in data], config), forward_only)
    stored = move_images_out(parse(body))
    decoded = decode_stored(stored.payload, stored.image_digests)
    assert (decoded.model_id, decoded.seq_id, decoded.loss_fn) == ("s:train:0", 7, "cross_entropy")
    assert (decoded.loss_fn_config, decoded.forward_only) == (config or {}, forward_only)
    assert len(decoded.data) == len(data)
    for datum, (chunks, inputs) in zip(decoded.data, data, strict=True):
        assert datum.loss_fn_inputs.keys() == inputs.keys()
        for name, array in inputs.items():
            np.testing.assert_array_equal(datum.loss_fn_inputs[name], array)
        for ours, sent in zip(datum.chunks, chunks, strict=True):
            if isinstance(ours, TextChunk):
                assert ours.tokens.tolist() == list(sent.tokens)
            else:
                assert (ours.data, ours.format, ours.expected_tokens) == (None, sent.format, sent.expected_tokens)
                assert stored.images[ours.sha256] == sent.data


def test_one_image_is_moved_out_once() -> None:
    image = types.ImageChunk(data=b"bytes", format="png", expected_tokens=3)
    other = types.ImageChunk(data=b"other", format="jpeg", expected_tokens=3)
    stored = move_images_out(parse(encode(sdk_request([sdk_datum([image, other, image]), sdk_datum([image])]))))
    digests = [hashlib.sha256(data).digest() for data in (b"bytes", b"other")]
    assert stored.images == dict(zip(digests, (b"bytes", b"other"), strict=True))
    assert b"bytes" not in stored.payload
    first, second = (datum.chunks for datum in decode_stored(stored.payload, stored.image_digests).data)
    one, two = ImageChunk(digests[0], None, "png", 3), ImageChunk(digests[1], None, "jpeg", 3)
    assert (first, second) == ([one, two, one], [one])


def test_an_image_that_was_not_stored_is_named() -> None:
    image = types.ImageChunk(data=b"bytes", format="png", expected_tokens=3)
    stored = move_images_out(parse(encode(sdk_request([sdk_datum([image]), sdk_datum([image])]))))
    with pytest.raises(TinsmithError, match=r"datum 1: chunk 0: the image is not stored"):
        decode_stored(stored.payload, stored.image_digests[:1])


def test_numbers_of_an_older_sdk_are_read_from_the_legacy_map() -> None:
    message = tinker_pb2.ForwardBackwardRequest(loss_fn_config={"clip_low": 0.5})
    assert decode_stored(message.SerializeToString()).loss_fn_config == {"clip_low": 0.5}


def test_provenance_spans_are_read() -> None:
    datum = types.Datum(
        model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2])]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([2, 3]))},
    ).with_provenance(
        [PromptProvenanceSpan(sequence_id="p", length=2), SampledProvenanceSpan(sequence_id="s", length=0)],
        [
            PromptProvenanceSpan(sequence_id="p", offset=1, length=1),
            SampledProvenanceSpan(sequence_id="s", offset=4, length=1),
        ],
    )
    (read,) = decode(encode(sdk_request([datum]))).data
    assert read.model_input_spans == (ProvenanceSpan("p", 0, 2, sampled=False), ProvenanceSpan("s", 0, 0, sampled=True))
    assert read.target_spans == (ProvenanceSpan("p", 1, 1, sampled=False), ProvenanceSpan("s", 4, 1, sampled=True))


def of_datums(*data: tinker_pb2.Datum) -> bytes:
    return tinker_pb2.ForwardBackwardRequest(model_id="m", data=data).SerializeToString()


def second_datum(**chunk: Any) -> bytes:
    return of_datums(tinker_pb2.Datum(), tinker_pb2.Datum(model_input=[tinker_pb2.Chunk(**chunk)]))


def sparse_datum() -> tinker_pb2.Datum:
    """Small on the wire: three of them are too large together."""
    sparse = tinker_pb2.SparseCsr(crow_indices=np.zeros(2**13 + 1, dtype="<i8").tobytes())
    tensor = tinker_pb2.Tensor(sparse_csr=sparse, dtype=tinker_pb2.DTYPE_INT64, shape=[2**13, 2**12])
    return tinker_pb2.Datum(loss_fn_inputs={"target_tokens": tensor})


CUT = tinker_pb2.Datum(loss_fn_inputs={"weights": tinker_pb2.Tensor(dense=b"1", dtype=tinker_pb2.DTYPE_FLOAT32)})
RESIZED = tinker_pb2.ImageChunk(format="png", override_dimensions=tinker_pb2.ImageDimensions(width=1))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (b"\xff\xff\xff", UserError, "not a protobuf ForwardBackwardRequest"),
        (of_datums() + b"\x9a\x06\x01x", NotBuiltError, "does not know"),  # a field 99
        (second_datum(), UserError, "datum 1: chunk 0: the chunk is empty"),
        (
            second_datum(encoded_text=tinker_pb2.EncodedTextChunk(tokens=b"12345")),
            UserError,
            "datum 1: chunk 0: tokens has 5 bytes",
        ),
        (second_datum(dmel=tinker_pb2.DmelChunk(dmel=b"x")), NotBuiltError, "datum 1: chunk 0: audio"),
        (second_datum(image=tinker_pb2.ImageChunk(format="gif")), UserError, "datum 1: chunk 0: image format 'gif'"),
        (second_datum(image=tinker_pb2.ImageChunk(format="png", expected_tokens=0)), UserError, "expected_tokens=0"),
        (second_datum(image=RESIZED), NotBuiltError, "datum 1: chunk 0: override_dimensions"),
        (of_datums(CUT), UserError, r"datum 0: loss_fn_inputs\['weights'\]: dense has 1 bytes"),
        (of_datums(*[sparse_datum()] * 3), UserError, r"datum 2: .* the request has room for 0"),
    ],
)
def test_errors_name_datum_and_chunk_or_tensor(body: bytes, error: type[UserError], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(body)


arrays = st.tuples(st.integers(0, 4), st.sampled_from([(), (2,), (3,)])).map(
    lambda shape: np.arange(shape[0] * int(np.prod(shape[1])), dtype=np.float32).reshape(shape[0], *shape[1])
)


@given(
    st.lists(arrays, max_size=6),
    st.dictionaries(st.sampled_from(["loss:sum", "tokens:sum"]), st.floats(allow_nan=False)),
)
def test_the_sdk_reads_our_output_in_order(logprobs: list[NDArray[Any]], metrics: dict[str, float]) -> None:
    outputs = [{"logprobs": array, "length": np.array([len(array)], dtype=np.int64)} for array in logprobs]
    read = deserialize_forward_backward_output(encode_output(outputs, metrics))
    assert read.loss_fn_output_type == "ArrayRecord"
    assert read.metrics == metrics
    assert len(read.loss_fn_outputs) == len(logprobs)
    for output, array in zip(read.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), array)
        assert output["length"].to_numpy().tolist() == [len(array)]
