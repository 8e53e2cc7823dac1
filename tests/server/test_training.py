"""Training routes: keys, repeats, order, and what is refused at once.

Invariant: A key belongs to one operation or sample; a repeat is recognised, whichever sampling session its snapshot
gets. Also: `tests/server/test_sampling.py`.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from tests.server.serving import ZSTD, Served, forward_backward_body, parsers, refused
from tinsmith.store.records import REJECTED
from tinsmith.wire import tinker_pb2

pytestmark = pytest.mark.usefixtures("database")


async def test_a_retried_snapshot_gets_the_request_and_session_of_the_first_and_takes_over_no_other(
    server: Served,
) -> None:
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    save = {"model_id": model_id, "seq_id": 1, "type": "save_weights_for_sampler"}
    first, again = [
        await server.answer("save_weights_for_sampler", save | {"sampling_session_seq_id": number}) for number in (4, 5)
    ]
    assert first == again
    created = server.store.sampling_session(f"{session_id}:sample:4")
    assert created is not None
    assert (created.snapshot_id, created.model_id) == (f"{model_id}/1", model_id)
    assert server.store.sampling_session(f"{session_id}:sample:5") is None
    await server.new_sampler(session_id=session_id)
    await server.answer("save_weights_for_sampler", save | {"seq_id": 2, "sampling_session_seq_id": 3})
    assert server.queued()[-1].kind == REJECTED


STEP: dict[str, Any] = {"adam_params": {"learning_rate": 0.1}, "type": "optim_step"}
INFLIGHT = {"sampling_session_seq_id": 4, "kind": "inflight"}
LOAD: dict[str, Any] = {"path": "tinker://x/weights/a", "optimizer": True}


OTHER_OPERATIONS: list[tuple[tuple[str, Any], tuple[str, Any]]] = [
    (("optim_step", STEP), ("optim_step", STEP | {"adam_params": {"learning_rate": 0.2}})),
    (("optim_step", {}), ("save_weights", {})),
    (("save_weights", {"path": "a"}), ("save_weights", {"path": "b"})),
    (("save_weights_external", {"path": "a"}), ("save_weights", {"path": "a"})),
    (("save_weights_for_sampler", {"path": "a"}), ("save_weights_for_sampler", {"sampling_session_seq_id": 3})),
    (
        ("save_weights_for_sampler", {"sampling_session_seq_id": 4, "kind": "snapshot"}),
        ("save_weights_for_sampler", INFLIGHT),
    ),
    (("load_weights", LOAD), ("load_weights", LOAD | {"optimizer": False})),
    (("forward_backward", b""), ("forward_backward", b"\x30\x01")),
    (("forward_backward", b""), ("optim_step", STEP)),
    (("forward_backward", b"\x1a\x00" * 5000), ("forward_backward", b"\x1a\x00" * 5001)),
]
"""What is sent first, and what comes with the same key."""


@pytest.mark.parametrize("ended", [False, True], ids=["queued", "done"])
async def test_a_key_belongs_to_one_operation(server: Served, ended: bool) -> None:
    server.save(LOAD["path"])

    async def post(model_id: str, path: str, body: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return await server.train(forward_backward_body(model_id, 1) + body)
        return await server.post(path, {"model_id": model_id, "seq_id": 1} | body)

    for first, second in OTHER_OPERATIONS:
        model_id = await server.new_model()
        accepted = await post(model_id, *first)
        if ended:
            server.end(f"{model_id}/1")
        logged = "rejected" if b"\x1a\x00" * 2 in (first[1] or b"") else first[0]
        reason = refused(await post(model_id, *second))  # 400, which the SDK raises at once
        assert all(part in reason for part in (f"{model_id}/1 is {logged}", "came as")), (first, second)
        repeated = await post(model_id, *first)
        assert (repeated.status_code, repeated.json()) == (200, accepted.json()), first


async def test_a_model_seq_id_belongs_to_one_model(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    assert await server.new_model(session_id) == model_id
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert f"{model_id}/0 is create_model" in await server.refusal("create_model", body)
    await server.end_session(session_id)
    assert "is finished" in await server.refusal("create_model", body | {"model_seq_id": 1})
    failed = await server.result(await server.step(model_id, 1))
    assert (failed["category"], "session is finished" in failed["error"]) == ("user", True)


async def test_zeros_that_came_as_kilobytes_are_stored_as_kilobytes(server: Served) -> None:
    """Tokens beyond every context not at all. What is stored counts as what it is for whoever unpacks it."""
    model_id = await server.new_model()
    zeros = tinker_pb2.Chunk(encoded_text=tinker_pb2.EncodedTextChunk(tokens=bytes(2**24)))
    tensor = tinker_pb2.Tensor(dtype=tinker_pb2.DTYPE_INT64, dense=bytes(2**24))
    for seq_id, datum in (
        (1, tinker_pb2.Datum(model_input=[zeros])),
        (2, tinker_pb2.Datum(loss_fn_inputs={"weights": tensor})),
    ):
        message = tinker_pb2.ForwardBackwardRequest(
            model_id=model_id, seq_id=seq_id, data=[datum], loss_fn="cross_entropy"
        )
        body = message.SerializeToString()
        assert (await server.train(zstandard.compress(body), **ZSTD)).status_code == 200
    _, tokens, tensors = server.queued()
    assert (tokens.kind, server.store.payload(tokens)[:56]) == (
        REJECTED,
        b"datum 0: the model input holds more than 32 tokens, the ",
    )
    assert (tensors.payload_bytes, len(server.store.payload(tensors)) < 2**14) == (len(body), True)
    assert server.hub.queued._of_session.total() > len(body)


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


async def test_of_many_compressed_bodies_one_is_unpacked_at_a_time(server: Served) -> None:
    """A few kilobytes each, 64 MiB when unpacked: all at once they would take the memory of the machine."""
    unpacked_mib, count = 64, 6
    model_id = await server.new_model()

    async def post(seq_id: int, rest: bytes) -> int:
        return (
            await server.train(zstandard.compress(forward_backward_body(model_id, seq_id) + rest), **ZSTD)
        ).status_code

    assert await post(1, b"\x2a\x00" * 10_000) == 200
    (parser,) = parsers()
    before = parser.memory_info().rss
    too_many = b"\x1a\x00" * (unpacked_mib * 2**19)
    assert await asyncio.gather(*(post(seq_id, too_many) for seq_id in range(2, 2 + count))) == [200] * count
    assert parsers() == [parser]
    assert peak_bytes(parser.pid) - before < 3 * unpacked_mib * 2**20  # the pieces and the whole of one


async def test_a_json_body_is_not_parsed_beyond_its_limit(server: Served) -> None:
    for path in ("create_session", "create_model", "optim_step", "save_weights", "get_info", "session_heartbeat"):
        reason = await server.refusal(path, {"user_metadata": {"x": "a" * 2**17}}, 413)
        assert reason == "the body is larger than 131072 bytes (max_json_kib); send smaller requests", path
