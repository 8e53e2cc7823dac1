"""Sampling routes as far as they need no engine, and the book of samples."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Served, served
from tinsmith.config import Config
from tinsmith.engine.messages import SampleDone, SampleFailed
from tinsmith.errors import BackpressureError
from tinsmith.server.sample_journal import SampleJournal
from tinsmith.server.samples import SampleBook
from tinsmith.store.records import Outcome


def sample_body(sampler: str, tokens: list[int], max_tokens: int | None = 4) -> dict[str, Any]:
    params = {"max_tokens": max_tokens} if max_tokens else {}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    return {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "prompt": prompt, "sampling_params": params}


async def new_sampler(server: Served, base_model: str = "tiny") -> str:
    body = {"session_id": await server.new_session(), "sampling_session_seq_id": 3, "base_model": base_model}
    first, again = await server.post("create_sampling_session", body), await server.post("create_sampling_session", body)
    assert first.json() == again.json()
    sampler: str = first.json()["sampling_session_id"]
    return sampler


def test_a_base_model_is_sampled_under_its_name_with_any_suffix(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            sampler = await new_sampler(server, "tiny:long")
            assert sampler.endswith(":sample:3")
            reply = await server.client.get(f"/api/v1/samplers/{sampler}")
            assert reply.json() == {"sampler_id": sampler, "base_model": "tiny:long"}
            assert (await server.client.get("/api/v1/samplers/x:sample:0")).status_code == 404
            body = {"session_id": await server.new_session(), "sampling_session_seq_id": 0}
            assert (await server.post("create_sampling_session", body | {"base_model": "big"})).status_code == 404
            saved = await server.post("create_sampling_session", body | {"model_path": "tinker://m/sampler_weights/x"})
            assert saved.status_code == 404
            assert "tinker://m/sampler_weights/x does not exist" in saved.json()["detail"]
            assert (await server.post("create_sampling_session", body)).status_code == 400

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "message"),
    [
        ([], 4, "the prompt is empty"),
        ([1, 100], 4, "at position 1 is 100; the vocabulary of tiny ends at 99"),
        ([1] * 30, 3, "30 + 3 > 32"),
        ([1] * 32, None, "32 + 1 > 32"),
    ],
)
def test_a_wrong_sample_is_refused_at_once(tmp_path: Path, tokens: list[int], max_tokens: int | None, message: str) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            reply = await server.post("asample", sample_body(await new_sampler(server), tokens, max_tokens))
            assert reply.status_code == 400
            assert message in reply.json()["detail"]

    asyncio.run(run())


def test_an_image_for_a_text_model_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            body = sample_body(await new_sampler(server), [1])
            body["prompt"]["chunks"].append({"type": "image", "data": "AAAA", "format": "png", "expected_tokens": 4})
            reply = await server.post("asample", body)
            assert (reply.status_code, reply.json()["detail"]) == (400, "prompt.chunks.1 is an image, but tiny takes text only")

    asyncio.run(run())


def test_a_sample_without_an_engine_is_not_kept(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            sampler = await new_sampler(server)
            assert (await server.post("asample", sample_body(sampler, [1]))).status_code == 503
            assert (await server.post("retrieve_future", {"request_id": f"{sampler}/0"})).status_code == 410

    asyncio.run(run())


def test_a_server_without_a_sampler_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        config = Config()
        config.sampling.sampler = "none"
        async with served(tmp_path, config) as server:
            reply = await server.post("asample", sample_body("x:sample:0", [1]))
            assert reply.status_code == 400
            assert "sampler=none" in reply.json()["detail"]

    asyncio.run(run())


def test_a_snapshot_can_be_sampled_once_it_is_saved_and_until_its_engine_is_gone(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            session_id = await server.new_session()
            model_id = await server.new_model(session_id)
            await server.post("save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0})
            body = sample_body(f"{session_id}:sample:0", [1])
            early = await server.post("asample", body)
            assert early.status_code == 404
            assert "are being saved" in early.json()["detail"]
            server.store.record([Outcome(f"{model_id}/1", b"{}", "json", None, None)])
            assert (await server.post("asample", body)).status_code == 503
            server.store.fail_unfinished("the engine died")
            server.hub.sampling_sessions.forget_snapshots()
            gone = await server.post("asample", body)
            assert gone.status_code == 404
            assert "are gone: the engine died" in gone.json()["detail"]
            assert (await server.post("retrieve_future", {"request_id": f"{session_id}:sample:0/0"})).status_code == 404

    asyncio.run(run())


def test_samples_are_answered_from_memory(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            sampler = await new_sampler(server)
            for seq_id in (0, 1, 2):
                server.hub.samples.add(f"{sampler}/{seq_id}", 2)
            again = await server.post("asample", sample_body(sampler, [1]))
            assert again.json()["sample_sequence_ids"] == [f"{sampler}/0/0", f"{sampler}/0/1"]
            server.hub.samples.finish(SampleDone(f"{sampler}/0", b"\x0a\x00"))
            server.hub.samples.finish(SampleFailed(f"{sampler}/1", "bad", "user", gone=False))
            server.hub.samples.finish(SampleFailed(f"{sampler}/2", "dropped", "user", gone=True))
            replies = [await server.post("retrieve_future", {"request_id": f"{sampler}/{n}"}) for n in (0, 1, 2)]
            assert [reply.status_code for reply in replies] == [200, 200, 404]
            assert (replies[0].content, replies[0].headers["content-type"]) == (b"\x0a\x00", "application/x-protobuf")
            assert replies[1].json() == {"error": "bad", "category": "user"}

    asyncio.run(run())


def test_the_book_limits_what_runs_and_forgets_what_is_old() -> None:
    book = SampleBook(max_pending=2, ttl_s=0.0)
    book.add("a", 1)
    book.add("b", 1)
    with pytest.raises(BackpressureError, match="max_pending_samples=2"):
        book.add("c", 1)
    book.finish(SampleDone("a", b""))
    book.add("c", 1)
    assert book.find("a") is None
    assert book.find("b") is not None


def test_the_book_loses_what_runs_and_keeps_what_is_finished() -> None:
    book = SampleBook(max_pending=2, ttl_s=60.0)
    book.add("a", 1)
    book.add("b", 1)
    book.finish(SampleDone("a", b""))
    book.lose_running()
    assert book.find("a") is not None
    assert book.find("b") is None
    book.finish(SampleDone("b", b""))
    assert book.find("b") is None


def test_the_book_counts_only_what_runs_and_forgets_what_was_fetched() -> None:
    book = SampleBook(max_pending=1, ttl_s=60.0)
    for request_id in "abc":
        book.add(request_id, 1)
        book.finish(SampleDone(request_id, b""))
    book.remove("a")
    book.remove("a")
    assert book.find("a") is None
    book.add("a", 1)  # sent again: it runs, whatever became of the first
    book.remove("a")
    book.add("d", 1)
    assert book.lose_running() == ["d"]
    book.add("e", 1)


def test_a_cancelled_sample_ends_and_takes_no_place(tmp_path: Path) -> None:
    async def run() -> None:
        config = Config()
        config.server.max_pending_samples = 1
        async with served(tmp_path, config) as server:
            sampler = await new_sampler(server)
            server.hub.samples.add(f"{sampler}/0", 1)
            assert (await server.post("cancel_future", {"request_id": f"{sampler}/0"})).status_code == 200
            reply = await server.post("retrieve_future", {"request_id": f"{sampler}/0"})
            assert reply.json() == {"error": "it was cancelled by its client", "category": "user"}
            server.hub.samples.add(f"{sampler}/1", 1)
            server.hub.take(SampleDone(f"{sampler}/1", b"done"))
            for request_id in (f"{sampler}/1", f"{sampler}/7", "nonsense"):
                assert (await server.post("cancel_future", {"request_id": request_id})).status_code == 200
            assert (await server.post("retrieve_future", {"request_id": f"{sampler}/1"})).content == b"done"

    asyncio.run(run())


def test_each_client_that_joins_gets_a_number(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            sampler = await new_sampler(server)
            replies = [await server.post("join_sampling_session", {"sampling_session_id": sampler}) for _ in range(2)]
            assert [reply.json()["client_counter"] for reply in replies] == [1, 2]
            assert (await server.post("join_sampling_session", {"sampling_session_id": "x:sample:0"})).status_code == 404

    asyncio.run(run())


def test_a_client_polls_for_all_of_its_samples(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            sampler = await new_sampler(server)

            async def poll(cursor: int = 0, clone: int = 0, **more: Any) -> Any:
                target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
                reply = await server.post("retrieve_futures", {"target": target, "prev_cursor": cursor, **more})
                return reply.json() if reply.status_code == 200 else reply.status_code

            def accept(seq_id: int) -> str:
                request_id = f"{sampler}/{seq_id}"
                server.hub.samples.add(request_id, 1)
                server.hub.sample_reports.expect(request_id)
                return request_id

            done, failed, lost, other = accept(0), accept(1), accept(2), accept(10**9)
            assert await poll(timeout=0) == {"completions": [], "cursor": 0}
            waiting = asyncio.create_task(poll())
            await asyncio.sleep(0.05)
            server.hub.take(SampleDone(done, b"12345"))
            first = await waiting
            assert first["completions"] == [{"state": "finished", "request_id": done, "response_payload_uncompressed_size": 5}]
            server.hub.take(SampleFailed(failed, "bad", "user", gone=False))
            assert (await poll(first["cursor"]))["completions"] == [{"state": "failed", "request_id": failed}]
            again = await poll(0, timeout=0, retrieved_request_ids=[done])
            assert [report["request_id"] for report in again["completions"]] == [failed]  # what was seen is gone
            assert server.hub.samples.find(done) is None
            for request_id in server.hub.samples.lose_running():
                server.hub.sample_reports.add(request_id, "failed")
            assert [r["request_id"] for r in (await poll(again["cursor"]))["completions"]] == [lost]
            assert [r["request_id"] for r in (await poll(0, clone=1))["completions"]] == [other]
            assert (await server.post("retrieve_futures", {"target": {"sampling_session_id": "x:sample:0"}})).status_code == 404

    asyncio.run(run())


def test_what_a_former_server_was_asked_for_is_reported_until_it_was_seen(tmp_path: Path) -> None:
    """Its clients then ask for the results, hear 410 and send the samples again."""

    async def run() -> None:
        async with served(tmp_path) as server:
            sampler = await new_sampler(server)
            for seq_id in range(3):
                server.hub.samples.add(f"{sampler}/{seq_id}", 1)
                server.hub.sample_reports.expect(f"{sampler}/{seq_id}")
            server.hub.take(SampleDone(f"{sampler}/0", b"1"))
            seen = await server.post("retrieve_futures", {"target": {"sampling_session_id": sampler}})
            cursor = seen.json()["cursor"]
            await server.post("retrieve_futures", {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor, "timeout": 0})
        for _ in range(2):
            async with served(tmp_path) as server:
                reply = await server.post("retrieve_futures", {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor})
                assert reply.json()["completions"] == [{"state": "failed", "request_id": f"{sampler}/{seq_id}"} for seq_id in (1, 2)]
                assert (await server.post("retrieve_future", {"request_id": f"{sampler}/1"})).status_code == 410
        async with served(tmp_path) as server:
            await server.post(f"sessions/{sampler.partition(':')[0]}/finish", {"reason": {"type": "success"}})
        assert SampleJournal(tmp_path).waiting == {}


def test_the_journal_of_samples_stays_short_and_ignores_a_cut_line(tmp_path: Path) -> None:
    journal = SampleJournal(tmp_path)
    journal.add("waits")
    for number in range(20_000):
        journal.add(str(number))
        journal.strike(str(number))
        journal.strike(str(number))
    file = tmp_path / "samples.journal"
    assert len(file.read_text().splitlines()) < 20_000
    with file.open("a") as half:
        half.write("-waits")
    assert list(SampleJournal(tmp_path).waiting) == ["waits"]
    assert file.read_text() == "+waits\n"
