"""forward_backward on the wire: the request as it arrives, as it is stored, and as it is read; and the reply.

The stored form is the received protobuf, compressed if large, without the bytes of its images. These are stored once
each by their SHA-256; the digests are kept beside it, in order.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tinsmith.config import RequestsConfig
from tinsmith.errors import NotBuiltError, TinsmithError, UserError, located, translated
from tinsmith.wire import tinker_pb2
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.compression import packed, unpacked
from tinsmith.wire.inspection import Inspection, LimitError, RequestKey
from tinsmith.wire.tensors import Array, from_bytes, to_dense

MAX_TENSOR_ELEMENTS = 2**26
"""Most dense elements of a request's tensors: 256 MiB in float32. The SDK's largest, of 5 MB, has some 2**24."""

IMAGE_FORMATS = ("png", "jpeg")

_TOKEN = np.dtype("<i4")

_REPLY_DTYPES = {
    np.dtype(np.float32): tinker_pb2.DTYPE_FLOAT32,
    np.dtype(np.int64): tinker_pb2.DTYPE_INT64,
    np.dtype(np.int32): tinker_pb2.DTYPE_INT32,
}


@dataclass(frozen=True)
class ProvenanceSpan:
    """Origin of a run of tokens: positions [offset, offset + length) of a sampled sequence, or of its prompt."""

    sequence_id: str
    offset: int
    length: int
    sampled: bool
    """Whether the tokens are the sequence's own, not those of its prompt."""


@dataclass(frozen=True, eq=False)
class Datum:
    """One training sequence."""

    chunks: list[Chunk]
    loss_fn_inputs: dict[str, Array]
    """Dense float32 or int64 arrays by name, such as target_tokens [n] or [n, k]."""
    model_input_spans: tuple[ProvenanceSpan, ...] = ()
    """Origins of the model input's tokens, in order; empty if not given."""
    target_spans: tuple[ProvenanceSpan, ...] = ()
    """The same of target_tokens (loss_fn_input_spans on the wire)."""


@dataclass(frozen=True, eq=False)
class ForwardBackwardRequest:
    """A decoded request. What its loss function needs is not checked yet."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    forward_only: bool
    """Compute no gradients."""
    data: list[Datum]


@dataclass(frozen=True)
class StoredRequest:
    """A request as it is stored."""

    payload: bytes
    """The `packed` protobuf, in which images have no bytes."""
    image_digests: list[bytes]
    """SHA-256 of each image, in the order of the payload."""
    images: dict[bytes, bytes]


@dataclass(frozen=True)
class ReceivedRequest:
    """A request body as it came in."""

    key: RequestKey
    stored: StoredRequest
    digest: bytes
    refused: str | None = None
    """The limit that it exceeds, if it does. Nothing is stored of it then."""
    tokens: int = 0
    """The most tokens that its texts have."""


def receive(body: bytes, limits: RequestsConfig, longest: int | None = None) -> ReceivedRequest:
    """Count what a body holds, and move its images out. A small body without images is its own payload.

    A datum of more than `longest` tokens fits into no model. Raises UserError for what is no such protobuf.
    """
    digest = hashlib.sha256(body).digest()
    try:
        inspection = Inspection(body, limits, longest)
    except LimitError as error:
        return ReceivedRequest(error.key, StoredRequest(b"", [], {}), digest, refused=str(error))
    stored = move_images_out(parse(body)) if inspection.counts["images"] else StoredRequest(packed(body), [], {})
    return ReceivedRequest(inspection.key, stored, digest, tokens=inspection.counts["tokens"])


def parse(body: bytes) -> tinker_pb2.ForwardBackwardRequest:
    """The protobuf message of a body. Raises UserError."""
    message = tinker_pb2.ForwardBackwardRequest()
    with translated(
        DecodeError, UserError, lambda error: f"the body is not a protobuf ForwardBackwardRequest: {error}"
    ):
        message.ParseFromString(body)
    return message


def move_images_out(message: tinker_pb2.ForwardBackwardRequest) -> StoredRequest:
    """The request as it is stored. The images of `message` lose their bytes."""
    digests: list[bytes] = []
    images: dict[bytes, bytes] = {}
    for datum in message.data:
        for chunk in datum.model_input:
            if chunk.HasField("image"):
                digest = hashlib.sha256(chunk.image.data).digest()
                digests.append(digest)
                images[digest] = chunk.image.data
                chunk.image.data = b""
    return StoredRequest(packed(message.SerializeToString()), digests, images)


def decode_stored(payload: bytes, image_digests: Sequence[bytes] = ()) -> ForwardBackwardRequest:
    """The request of a stored payload. Its images have no data, to be read by digest.

    Raises UserError and NotBuiltError naming datum and chunk or tensor, and TinsmithError if an image has no digest.
    """
    message = parse(unpacked(payload))
    _refuse_unknown_fields(message)
    elements_left = MAX_TENSOR_ELEMENTS
    digests = iter(image_digests)
    data: list[Datum] = []
    with located(lambda: f"datum {len(data)}"):
        for datum in message.data:
            chunks = _decode_chunks(datum.model_input, digests)
            tensors = _decode_tensors(datum.loss_fn_inputs, elements_left)
            elements_left -= sum(array.size for array in tensors.values())
            spans = (tuple(map(_decode_span, each)) for each in (datum.model_input_spans, datum.loss_fn_input_spans))
            data.append(Datum(chunks, tensors, *spans))
    return ForwardBackwardRequest(
        message.model_id, message.seq_id, message.loss_fn, _decode_config(message), message.forward_only, data
    )


def _refuse_unknown_fields(message: tinker_pb2.ForwardBackwardRequest) -> None:
    """Raise NotBuiltError for unknown fields: ignoring one might change the meaning."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise NotBuiltError(
            "the request holds protobuf fields that this version does not know; is the SDK newer than the server?"
        )


def _decode_config(message: tinker_pb2.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise UserError(f"loss_fn_config[{name!r}] has no value")
        config[name] = value.text if kind == "text" else value.number
    return config


def _decode_chunks(chunks: Sequence[tinker_pb2.Chunk], digests: Iterator[bytes]) -> list[Chunk]:
    decoded: list[Chunk] = []
    with located(lambda: f"chunk {len(decoded)}"):
        for chunk in chunks:
            decoded += [_decode_chunk(chunk, digests)]
    return decoded


def _decode_chunk(chunk: tinker_pb2.Chunk, digests: Iterator[bytes]) -> Chunk:
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        return TextChunk(from_bytes(chunk.encoded_text.tokens, _TOKEN, "tokens"))
    if kind == "image":
        return _decode_image(chunk.image, next(digests, None))
    if kind == "dmel":
        raise NotBuiltError("audio (dmel) is not built yet; send text and images")
    raise UserError("the chunk is empty; send encoded_text or image")


def _decode_image(image: tinker_pb2.ImageChunk, sha256: bytes | None) -> ImageChunk:
    if sha256 is None:
        raise TinsmithError("the image is not stored: the operation came with fewer images than its payload names")
    if image.HasField("override_dimensions"):
        raise NotBuiltError(
            "override_dimensions of an image is not built yet; send the image in the size that it should have"
        )
    if image.format not in IMAGE_FORMATS:
        raise UserError(f"image format {image.format!r} is not supported; send one of {', '.join(IMAGE_FORMATS)}")
    expected_tokens = image.expected_tokens if image.HasField("expected_tokens") else None
    if expected_tokens is not None and expected_tokens < 1:
        raise UserError(f"expected_tokens={expected_tokens} of an image must be at least 1")
    return ImageChunk(sha256=sha256, data=None, format=image.format, expected_tokens=expected_tokens)


def _decode_span(span: tinker_pb2.ProvenanceSpan) -> ProvenanceSpan:
    kind = span.WhichOneof("span")
    named = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
    return ProvenanceSpan(named.sequence_id, named.offset, named.length, kind == "sampled_tokens")


def _decode_tensors(tensors: Mapping[str, tinker_pb2.Tensor], max_elements: int) -> dict[str, Array]:
    decoded: dict[str, Array] = {}
    with located(lambda: f"loss_fn_inputs[{name!r}]"):
        for name, tensor in tensors.items():
            decoded[name] = to_dense(tensor, max_elements)
            max_elements -= decoded[name].size
    return decoded


def encode_output(loss_fn_outputs: Sequence[Mapping[str, NDArray[Any]]], metrics: Mapping[str, float]) -> bytes:
    """The protobuf ForwardBackwardOutput: arrays by name for each datum, in order.

    They are float32, int64 or int32, of at least one dimension. All datums have the same names. Neighbours of equal
    dtypes and equal shapes after the first dimension share a record.
    """
    output = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for _, group in groupby(loss_fn_outputs, key=_layout):
        datums = list(group)
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(datums))
        for name in datums[0]:
            _fill_batched(record.fields[name], [datum[name] for datum in datums])
    return output.SerializeToString()


def _layout(datum: Mapping[str, NDArray[Any]]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    return {name: (array.dtype, array.shape[1:]) for name, array in datum.items()}


def _fill_batched(batched: tinker_pb2.BatchedTensor, arrays: Sequence[NDArray[Any]]) -> None:
    batched.data = b"".join(array.tobytes() for array in arrays)
    batched.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
    batched.dtype = _REPLY_DTYPES[arrays[0].dtype]
    batched.trailing_shape.extend(arrays[0].shape[1:])
