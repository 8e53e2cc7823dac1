"""Counting a request in its bytes: what the SDK encodes, what is too much, and what is no protobuf.

Invariant: A request is refused by its counts before it is parsed, by its pixels and length before an image is decoded.
Also: `tests/server/test_http_protocol.py`, `tests/rendering/test_renderer.py`, `tests/engine/test_passes.py`.
"""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.config import RequestsConfig
from tinsmith.errors import UserError
from tinsmith.wire import tinker_pb2 as pb
from tinsmith.wire.compression import decompress
from tinsmith.wire.inspection import Inspection, LimitError, RequestKey

LIMITS = RequestsConfig(max_datums=3, max_chunks=5, max_images=2)
TEXT = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\1\0\0\0"))
IMAGE = pb.Chunk(image=pb.ImageChunk(data=b"x", format="png"))


def request(*data: pb.Datum, seq_id: int = 7) -> bytes:
    return pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=seq_id, data=data, loss_fn="ppo").SerializeToString()


@given(
    st.lists(st.lists(st.sampled_from([TEXT, IMAGE]), max_size=5), max_size=4),
    st.sampled_from([1, 127, 128, 300, 2**31 - 1]),
)
def test_key_and_counts_are_those_of_the_parsed_message(data: list[list[pb.Chunk]], seq_id: int) -> None:
    inspection = Inspection(
        request(*[pb.Datum(model_input=chunks) for chunks in data], seq_id=seq_id), RequestsConfig()
    )
    assert inspection.key == RequestKey("s:train:0", seq_id)
    assert inspection.counts["datums"] == len(data)
    assert inspection.counts["chunks"] == sum(len(chunks) for chunks in data)
    assert inspection.counts["images"] == sum(chunk is IMAGE for chunks in data for chunk in chunks)


def test_what_the_sdk_may_put_into_one_request_is_taken() -> None:
    """It cuts a call at 1,024 datums or 5 MB, whatever is in them: small images, or the four provenance spans of each
    short turn."""
    turn = pb.ProvenanceSpan(prompt_tokens=pb.PromptProvenanceSpan(sequence_id="a", offset=0, length=1))
    datum = pb.Datum(
        model_input=[TEXT, IMAGE, TEXT, IMAGE], model_input_spans=[turn] * 40, loss_fn_input_spans=[turn] * 40
    )
    inspection = Inspection(request(*[datum] * 1024), RequestsConfig())
    assert (inspection.counts["datums"], inspection.counts["images"]) == (1024, 2048)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([pb.Datum()] * 4, "datum 3: the request holds more than 3 datums (max_datums)"),
        ([pb.Datum(model_input=[TEXT] * 3)] * 2, "datum 1: the request holds more than 5 chunks (max_chunks)"),
        ([pb.Datum(model_input=[IMAGE] * 3)], "datum 0: the request holds more than 2 images (max_images)"),
        (
            [pb.Datum(loss_fn_inputs={str(n): pb.Tensor() for n in range(33)})],
            "datum 0: loss_fn_inputs has more than 32 entries",
        ),
    ],
    ids=["datums", "chunks", "images", "tensors"],
)
def test_more_than_the_limits_allow_is_refused_by_number_and_setting(data: list[pb.Datum], says: str) -> None:
    with pytest.raises(LimitError) as refused:
        Inspection(request(*data), LIMITS)
    assert str(refused.value).startswith(says)
    assert refused.value.key == RequestKey("s:train:0", 7)


def test_more_tokens_than_any_model_takes_are_refused_and_as_many_are_taken() -> None:
    def text(count: int) -> pb.Chunk:
        return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(4 * count)))

    fits, long = pb.Datum(model_input=[text(500), text(500)]), pb.Datum(model_input=[text(500), text(510)])
    assert Inspection(request(fits, fits), LIMITS, longest=1000).counts["datums"] == 2
    assert Inspection(request(long), LIMITS).counts["datums"] == 1
    with pytest.raises(
        LimitError, match="datum 1: the model input holds more than 1000 tokens, the longest context window"
    ) as refused:
        Inspection(request(fits, long), LIMITS, longest=1000)
    assert refused.value.key == RequestKey("s:train:0", 7)


def test_counting_ends_at_the_limit() -> None:
    """Eight kilobytes on the wire: parsed, they are gigabytes."""
    packed = zstandard.ZstdCompressor().compress(request() + b"\x1a\x00" * 4_000_000)
    assert len(packed) < 8192
    body = decompress(packed, 2**24)
    with pytest.raises(LimitError, match="more than 4096 datums"):
        Inspection(body, RequestsConfig())
    assert Inspection(body[:8000], RequestsConfig()).counts["fields"] < 4096
    for many in (b"\x30\x01", b"\x9a\x06\x00"):  # forward_only, and a field that nobody knows
        with pytest.raises(LimitError, match="more than 524288 protobuf fields"):
            Inspection(request() + many * 600_000, RequestsConfig())


@pytest.mark.parametrize(
    "body", [b"\xff\xff", b"\x0a\x05ab", b"\x1a\x03\x0a\x05a", b"\x0b", b"\x08", b"\x0a\x01\xff", b"\xff" * 20]
)
def test_what_is_no_protobuf_is_refused(body: bytes) -> None:
    with pytest.raises(UserError, match="not a protobuf ForwardBackwardRequest"):
        Inspection(body, RequestsConfig())


def test_an_id_longer_than_any_that_was_given_is_refused() -> None:
    body = pb.ForwardBackwardRequest(model_id="x" * 301, seq_id=1).SerializeToString()
    with pytest.raises(UserError, match="model_id has 301 bytes; no id of this server has more than 300"):
        Inspection(body, LIMITS)
