"""Training routes: keys, repeats, order, and what is refused at once.

Invariant: A key belongs to one operation or sample; a repeat is recognised, whichever sampling session its snapshot gets.
Also: `tests/server/test_sampling.py`.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_request import ForwardBackwardRequest

from tests.server.serving import Served, parsers, served
from tinsmith.config import Config, ServerConfig
from tinsmith.store.records import REJECTED, Outcome
from tinsmith.wire import tinker_pb2
from tinsmith.wire.chunks import ImageChunk
from tinsmith.wire.forward_backward import decode_stored

PROTOBUF = {"Content-Type": "application/x-protobuf"}


def forward_backward_body(model_id: str, seq_id: int) -> bytes:
    image = types.ImageChunk(data=b"not decoded here", format="png", expected_tokens=1)
    datum = types.Datum(
        model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), image]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([2, 3, 4]))},
    )
    content = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = ForwardBackwardRequest(forward_backward_input=content, model_id=model_id, seq_id=seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


async def detail_of(server: Served, path: str, body: Any, status: int) -> str:
    reply = await server.post(path, body)
    assert reply.status_code == status, reply.text
    detail: str = reply.json()["detail"]
    return detail


async def test_operations_are_logged_under_their_key_whatever_order_they_come_in(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    assert model_id == f"{session_id}:train:0"
    step = {"model_id": model_id, "seq_id": 2, "adam_params": {}, "type": "optim_step"}
    assert (await server.post("optim_step", step)).json() == {"request_id": f"{model_id}/2", "model_id": model_id}
    body = forward_backward_body(model_id, 1)
    reply = await server.client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)
    assert reply.json()["request_id"] == f"{model_id}/1"
    kinds = [(c.seq_id, c.kind) for c in server.queued()]
    assert kinds == [(0, "create_model"), (2, "optim_step"), (1, "forward_backward")]
    command = server.queued()[2]
    chunk = decode_stored(server.store.payload(command), command.image_digests).data[0].chunks[1]
    assert isinstance(chunk, ImageChunk)
    assert server.store.read_blob(chunk.sha256) == b"not decoded here"


async def test_the_same_post_twice_is_one_operation(server: Served) -> None:
    model_id = await server.new_model(await server.new_session())
    body = forward_backward_body(model_id, 1)
    packed = zstandard.ZstdCompressor().compress(body)
    plain = server.client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)
    zstd = server.client.post("/api/v1/forward_backward", content=packed, headers=PROTOBUF | {"Content-Encoding": "zstd"})
    first, second = await asyncio.gather(plain, zstd)
    assert first.json() == second.json()
    assert [c.seq_id for c in server.queued()] == [0, 1]


async def test_many_operations_at_once_are_all_logged(server: Served) -> None:
    model_id = await server.new_model(await server.new_session())
    steps = [{"model_id": model_id, "seq_id": n, "adam_params": {}} for n in range(1, 65)]
    replies = await asyncio.gather(*(server.post("optim_step", step) for step in steps))
    assert [reply.json()["request_id"] for reply in replies] == [f"{model_id}/{n}" for n in range(1, 65)]
    assert sorted(c.seq_id for c in server.queued()) == list(range(65))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1}}),
        ("optim_step", {"unknown": 1}),
        ("save_weights", {"path": "x", "type": "save_weights"}),
        ("save_weights", {"path": "a/b", "type": "save_weights"}),
        ("load_weights", {"path": "tinker://x", "optimizer": True, "type": "load_weights"}),
        ("save_weights_for_sampler", {"kind": "inflight", "sampling_session_seq_id": 0}),
    ],
)
async def test_a_wrong_operation_keeps_its_place_in_the_sequence(server: Served, path: str, body: dict[str, Any]) -> None:
    model_id = await server.new_model(await server.new_session())
    reply = await server.post(path, {"model_id": model_id, "seq_id": 1} | body)
    assert reply.json()["request_id"] == f"{model_id}/1"
    command = server.queued()[-1]
    assert (command.seq_id, command.kind) == (1, path)
    assert json.loads(server.store.payload(command)) == {"model_id": model_id, "seq_id": 1} | body


async def test_a_retried_snapshot_gets_the_request_and_session_of_the_first(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    save = {"model_id": model_id, "seq_id": 1, "type": "save_weights_for_sampler"}
    first = await server.post("save_weights_for_sampler", save | {"sampling_session_seq_id": 4})
    again = await server.post("save_weights_for_sampler", save | {"sampling_session_seq_id": 5})
    assert first.json() == again.json()
    created = server.store.sampling_session(f"{session_id}:sample:4")
    assert created is not None
    assert (created.snapshot_id, created.model_id) == (f"{model_id}/1", model_id)
    assert server.store.sampling_session(f"{session_id}:sample:5") is None


STEP: dict[str, Any] = {"adam_params": {"learning_rate": 0.1}, "type": "optim_step"}
INFLIGHT = {"sampling_session_seq_id": 4, "kind": "inflight"}
LOAD = {"path": "tinker://x/weights/a", "optimizer": True}


@pytest.mark.parametrize("ended", [False, True], ids=["queued", "done"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("optim_step", STEP), ("optim_step", STEP | {"adam_params": {"learning_rate": 0.2}})),
        (("optim_step", {}), ("save_weights", {})),
        (("save_weights", {"path": "a"}), ("save_weights", {"path": "b"})),
        (("save_weights_external", {"path": "a"}), ("save_weights", {"path": "a"})),
        (("save_weights_for_sampler", {"path": "a"}), ("save_weights_for_sampler", {"sampling_session_seq_id": 3})),
        (("save_weights_for_sampler", {"sampling_session_seq_id": 4, "kind": "snapshot"}), ("save_weights_for_sampler", INFLIGHT)),
        (("load_weights", LOAD), ("load_weights", LOAD | {"optimizer": False})),
        (("forward_backward", b""), ("forward_backward", b"\x30\x01")),
        (("forward_backward", b""), ("optim_step", STEP)),
        (("forward_backward", b"\x1a\x00" * 5000), ("forward_backward", b"\x1a\x00" * 5001)),
    ],
)
async def test_a_key_belongs_to_one_operation(server: Served, first: tuple[str, Any], second: tuple[str, Any], ended: bool) -> None:
    model_id = await server.new_model(await server.new_session())

    async def post(path: str, body: Any) -> httpx.Response:
        if isinstance(body, bytes):
            content = forward_backward_body(model_id, 1) + body
            return await server.client.post(f"/api/v1/{path}", content=content, headers=PROTOBUF)
        return await server.post(path, {"model_id": model_id, "seq_id": 1} | body)

    accepted = await post(*first)
    if ended:
        server.finish(Outcome(f"{model_id}/1", b"{}", "json", None, None))
    refused = await post(*second)
    assert refused.status_code == 400  # which the SDK raises at once
    logged = "rejected" if b"\x1a\x00" * 2 in (first[1] or b"") else first[0]
    assert all(kind in refused.json()["detail"] for kind in (f"{model_id}/1 is {logged}", "came as"))
    repeated = await post(*first)
    assert (repeated.status_code, repeated.json()) == (200, accepted.json())


async def test_a_model_seq_id_belongs_to_one_model(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    assert await server.new_model(session_id) == model_id
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert f"{model_id}/0 is create_model" in await detail_of(server, "create_model", body, 400)


async def test_a_snapshot_cannot_take_over_a_sampling_session(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    base = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    assert (await server.post("create_sampling_session", base)).status_code == 200
    await server.post("save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0})
    assert server.queued()[-1].kind == REJECTED


async def test_operations_of_a_finished_session_fail_through_their_future(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    server.store.record([Outcome(f"{model_id}/0", b"{}", "json", None, None)])
    await server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    await server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    failed = (await server.post("retrieve_future", {"request_id": f"{model_id}/1"})).json()
    assert failed["category"] == "user"
    assert "session is finished" in failed["error"]
    body = {"session_id": session_id, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 8}}
    assert "is finished" in await detail_of(server, "create_model", body, 400)


async def test_bodies_are_limited_before_and_after_decompression(tmp_path: Path) -> None:
    async with served(tmp_path, Config(server=ServerConfig(max_body_mib=1))) as server:
        big = b"\0" * (2**20 + 1)
        plain = await server.client.post("/api/v1/forward_backward", content=big, headers=PROTOBUF)
        assert plain.status_code == 413
        packed = zstandard.ZstdCompressor().compress(big)
        zstd = await server.client.post("/api/v1/forward_backward", content=packed, headers=PROTOBUF | {"Content-Encoding": "zstd"})
        assert zstd.status_code == 413
        gzip = await server.client.post("/api/v1/forward_backward", content=b"", headers={"Content-Encoding": "gzip"})
        assert gzip.status_code == 400


async def test_a_request_of_too_many_datums_keeps_its_place_in_the_sequence(server: Served) -> None:
    """Its bytes are counted and not parsed, however few they are when they come."""
    model_id = await server.new_model(await server.new_session())
    body = forward_backward_body(model_id, 1) + b"\x1a\x00" * 4_000_000
    headers = PROTOBUF | {"Content-Encoding": "zstd"}
    reply = await server.client.post("/api/v1/forward_backward", content=zstandard.compress(body), headers=headers)
    assert reply.json() == {"request_id": f"{model_id}/1", "model_id": model_id}
    command = server.queued()[-1]
    assert (command.seq_id, command.kind) == (1, REJECTED)
    assert server.store.payload(command) == b"datum 4096: the request holds more than 4096 datums (max_datums); send smaller ones"
    nameless = await server.client.post("/api/v1/forward_backward", content=b"\x1a\x00" * 5000, headers=PROTOBUF)
    assert (nameless.status_code, "model_id=''" in nameless.text) == (400, True)


async def test_zeros_that_came_as_kilobytes_are_stored_as_kilobytes(server: Served) -> None:
    """Tokens beyond every context not at all. What is stored counts as what it is for whoever unpacks it."""
    model_id = await server.new_model(await server.new_session())
    headers = PROTOBUF | {"Content-Encoding": "zstd"}
    zeros = tinker_pb2.Chunk(encoded_text=tinker_pb2.EncodedTextChunk(tokens=bytes(2**24)))
    tensor = tinker_pb2.Tensor(dtype=tinker_pb2.DTYPE_INT64, dense=bytes(2**24))
    for seq_id, datum in ((1, tinker_pb2.Datum(model_input=[zeros])), (2, tinker_pb2.Datum(loss_fn_inputs={"weights": tensor}))):
        message = tinker_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=[datum], loss_fn="cross_entropy")
        body = message.SerializeToString()
        assert (await server.client.post("/api/v1/forward_backward", content=zstandard.compress(body), headers=headers)).status_code == 200
    _, tokens, tensors = server.queued()
    assert (tokens.kind, server.store.payload(tokens)[:56]) == (REJECTED, b"datum 0: the model input holds more than 32 tokens, the ")
    assert (tensors.payload_bytes, len(server.store.payload(tensors)) < 2**14) == (len(body), True)
    assert server.hub.queued._of_session.total() > len(body)


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


async def test_of_many_compressed_bodies_one_is_unpacked_at_a_time(server: Served) -> None:
    """A few kilobytes each, 64 MiB when unpacked: all at once they would take the memory of the machine."""
    unpacked_mib, count = 64, 12

    model_id = await server.new_model(await server.new_session())
    headers = PROTOBUF | {"Content-Encoding": "zstd"}

    async def post(seq_id: int, rest: bytes) -> int:
        body = zstandard.compress(forward_backward_body(model_id, seq_id) + rest)
        return (await server.client.post("/api/v1/forward_backward", content=body, headers=headers)).status_code

    assert await post(1, b"\x2a\x00" * 10_000) == 200
    (parser,) = parsers()
    before = parser.memory_info().rss
    too_many = b"\x1a\x00" * (unpacked_mib * 2**19)
    assert await asyncio.gather(*(post(seq_id, too_many) for seq_id in range(2, 2 + count))) == [200] * count
    assert parsers() == [parser]
    assert peak_bytes(parser.pid) - before < 3 * unpacked_mib * 2**20  # the pieces and the whole of one


@pytest.mark.parametrize("path", ["create_session", "create_model", "optim_step", "save_weights", "get_info", "session_heartbeat"])
async def test_a_json_body_is_not_parsed_beyond_its_limit(server: Served, path: str) -> None:
    reply = await server.post(path, {"user_metadata": {"x": "a" * 2**17}})
    assert reply.status_code == 413
    assert reply.json()["detail"] == "the body is larger than 131072 bytes (max_json_kib); send smaller requests"
