"""Sampling routes as far as they need no engine, and the book of samples.

Invariant: A session that ends cancels its samples; limits hold for all and for each session; an answer reaches its own run only.
Also: `tests/worker/test_samples.py`.

Invariant: A streamed sample's tokens reach each reader once, in order and from the first; results that nobody fetches stay within their
limit.
"""

import asyncio
import gc
import hashlib
import resource
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.server.serving import Served, served
from tinsmith.config import Config, SamplingConfig, ServerConfig
from tinsmith.errors import BackpressureError, ConfigError, NotFoundError, UserError
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import SampleDone, SampleEvents, SampleFailed
from tinsmith.server.replies import GoneError
from tinsmith.server.sample_journal import SampleJournal
from tinsmith.server.samples import PendingSample, SampleBook, StreamedTokens
from tinsmith.store.append_file import encode
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


def run_of(server: Served, request_id: str) -> int:
    sample = server.hub.samples.find(request_id)
    assert sample is not None
    return sample.run


def done(server: Served, request_id: str, payload: bytes) -> SampleDone:
    """As the engine says it of the sample that runs under this id."""
    return SampleDone(request_id, run_of(server, request_id), payload)


def failed(server: Served, request_id: str, error: str, gone: bool) -> SampleFailed:
    """As the engine says it of the sample that runs under this id."""
    return SampleFailed(request_id, run_of(server, request_id), error, "user", gone)


async def test_a_base_model_is_sampled_under_its_name_with_any_suffix(server: Served) -> None:
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


async def test_a_sample_without_an_engine_is_not_kept(server: Served) -> None:
    sampler = await new_sampler(server)
    assert (await server.post("asample", sample_body(sampler, [1]))).status_code == 503
    assert (await server.post("retrieve_future", {"request_id": f"{sampler}/0"})).status_code == 410


@contextmanager
def full_disk(file: Path, room: int) -> Iterator[None]:
    """No file grows beyond the size of this one and `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.alone
@pytest.mark.parametrize("room", [0, 5])
async def test_a_full_disk_takes_no_sample_and_loses_no_result(tmp_path: Path, room: int) -> None:
    async with served(tmp_path) as server:
        journal, sampler = tmp_path / "samples.journal", await new_sampler(server)
        server.hub.sample_reports.expect(f"{sampler}/7")
        server.hub.samples.add(f"{sampler}/7", 1, 0)
        server.hub.take(done(server, f"{sampler}/7", b"12345"))
        before = journal.read_bytes()
        with full_disk(journal, room):
            refused = await server.post("asample", sample_body(sampler, [1]))
            seen = await server.post("retrieve_futures", {"target": {"sampling_session_id": sampler}})
            poll = {"target": {"sampling_session_id": sampler}, "prev_cursor": seen.json()["cursor"], "timeout": 0}
            assert (await server.post("retrieve_futures", poll)).json()["completions"] == []
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "no sample can be noted at the moment: " in refused.json()["detail"]
        assert server.hub.samples.find(f"{sampler}/0") is None
        assert journal.read_bytes() == before
        server.hub.sample_reports.expect(f"{sampler}/8")
    assert list(SampleJournal(tmp_path).waiting) == [f"{sampler}/7", f"{sampler}/8"]


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "scored", "status"),
    [(32, 1, True, 503), (31, 1, False, 503), (32, 1, False, 400), (32, 2, True, 400), (33, 1, True, 400)],
)
async def test_a_prompt_that_fills_the_context_can_be_scored(
    server: Served, tokens: int, max_tokens: int, scored: bool, status: int
) -> None:
    """A request that is right goes to an engine, which is not there."""
    body = sample_body(await new_sampler(server), [1] * tokens, max_tokens) | {"prompt_logprobs": scored}
    reply = await server.post("asample", body)
    assert (reply.status_code, "exceeds the context window of tiny" in reply.text) == (status, status == 400)


async def test_a_server_without_a_sampler_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, Config(sampling=SamplingConfig(sampler="none"))) as server:
        reply = await server.post("asample", sample_body("x:sample:0", [1]))
        assert reply.status_code == 400
        assert "sampler=none" in reply.json()["detail"]


async def test_a_snapshot_can_be_sampled_once_it_is_saved_and_until_its_engine_is_gone(server: Served) -> None:
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
    assert "are gone: the engine died; publish weights again (save_weights_and_get_sampling_client)" in gone.json()["detail"]
    assert (await server.post("retrieve_future", {"request_id": f"{session_id}:sample:0/0"})).status_code == 404


async def test_samples_are_answered_from_memory(server: Served) -> None:
    sampler = await new_sampler(server)
    sent = orjson.dumps(sample_body(sampler, [1]))
    for seq_id in (0, 1, 2):
        server.hub.samples.add(f"{sampler}/{seq_id}", 2, 0, digest=hashlib.sha256(sent).digest())
    headers = {"Content-Type": "application/json"}
    again = await server.client.post("/api/v1/asample", content=sent, headers=headers)
    assert again.json()["sample_sequence_ids"] == [f"{sampler}/0/0", f"{sampler}/0/1"]
    other = await server.client.post("/api/v1/asample", content=orjson.dumps(sample_body(sampler, [2])), headers=headers)
    assert other.status_code == 400
    assert hashlib.sha256(sent).hexdigest()[:12] in other.json()["detail"]
    server.hub.samples.finish(done(server, f"{sampler}/0", b"\x0a\x00"))
    server.hub.samples.finish(failed(server, f"{sampler}/1", "bad", gone=False))
    server.hub.samples.finish(failed(server, f"{sampler}/2", "dropped", gone=True))
    replies = [await server.post("retrieve_future", {"request_id": f"{sampler}/{n}"}) for n in (0, 1, 2)]
    assert [reply.status_code for reply in replies] == [200, 200, 404]
    assert (replies[0].content, replies[0].headers["content-type"]) == (b"\x0a\x00", "application/x-protobuf")
    assert replies[1].json() == {"error": "bad", "category": "user"}


def book_of(**settings: Any) -> SampleBook:
    return SampleBook(ServerConfig(**settings))


def end(book: SampleBook, sample: PendingSample) -> None:
    assert book.finish(SampleDone(sample.request_id, sample.run, b""))


def test_the_book_counts_sequences_and_bytes_of_all_and_of_each_session() -> None:
    book = book_of(
        max_pending_samples=10, max_pending_samples_per_session=6, max_pending_sample_mib=3, max_pending_sample_mib_per_session=2
    )
    mib = 2**20
    first = book.add("a:sample:0/0", 5, mib)
    message = r"^5 sequences of session a are unfinished, and the limit is 6 \(max_pending_samples_per_session\); send this sample later$"
    with pytest.raises(BackpressureError, match=message):
        book.add("a:sample:1/0", 2, 0)
    message = r"^1048576 bytes of session a are unfinished, and the limit is 2097152 \(max_pending_sample_mib_per_session\)"
    with pytest.raises(BackpressureError, match=message):
        book.add("a:sample:0/1", 1, mib + 1)
    book.add("b:sample:0/0", 5, mib + 1)
    with pytest.raises(
        BackpressureError, match=r"^10 sequences of all sessions are unfinished, and the limit is 10 \(max_pending_samples\)"
    ):
        book.add("c:sample:0/0", 1, 0)
    end(book, first)
    book.add("c:sample:0/0", 1, mib)
    with pytest.raises(BackpressureError, match=r"^2097153 bytes of all sessions .* 3145728 \(max_pending_sample_mib\)"):
        book.add("c:sample:0/1", 1, mib)
    assert book.lose_running() == ["b:sample:0/0", "c:sample:0/0"]
    book.add("d:sample:0/0", 6, 2 * mib)


def test_a_sample_that_is_too_much_alone_is_refused_for_good() -> None:
    """With 429 its client would send it for ever."""
    book = book_of(max_pending_samples_per_session=6, max_pending_sample_mib_per_session=2)
    message = r"^the request has 7 sequences; more than 6 are not taken at a time \(max_pending_samples_per_session\): split the request$"
    with pytest.raises(UserError, match=message):
        book.add("a:sample:0/0", 7, 0)
    with pytest.raises(UserError, match="has 2097153 bytes; more than 2097152"):
        book.add("a:sample:0/0", 1, 2**21 + 1)
    book.add("a:sample:0/0", 6, 2**21)


def test_the_book_loses_what_runs_and_keeps_what_is_finished() -> None:
    book = book_of()
    first, second = (book.add(f"s:sample:0/{number}", 1, 0) for number in range(2))
    end(book, first)
    book.lose_running()
    assert book.find("s:sample:0/0") is not None
    assert book.find("s:sample:0/1") is None
    assert not book.finish(SampleDone("s:sample:0/1", second.run, b""))
    assert book.find("s:sample:0/1") is None


def test_the_book_counts_only_what_runs_and_forgets_what_was_fetched() -> None:
    book = book_of(max_pending_samples=1)
    for request_id in "abc":
        end(book, book.add(request_id, 1, 0))
    book.remove("a")
    book.remove("a")
    assert book.find("a") is None
    book.add("a", 1, 0)  # sent again: it runs, whatever became of the first
    book.remove("a")
    book.add("d", 1, 0)
    assert book.lose_running() == ["d"]
    book.add("e", 1, 0)


def test_the_result_of_a_sample_that_its_client_has_is_not_kept() -> None:
    """Until now it stayed in memory for `sample_result_ttl_s` after it had been acknowledged."""
    book = book_of(sample_result_ttl_s=600.0)
    sample = book.add("s:sample:0/0", 1, 0)
    result = SampleDone("s:sample:0/0", sample.run, b"answer")
    kept = weakref.ref(result)
    book.finish(result)
    book.remove("s:sample:0/0")
    del sample, result
    gc.collect()
    assert kept() is None


def test_a_fetched_result_stays_for_a_minute_in_case_the_reply_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    book = book_of(sample_result_ttl_s=600.0)
    for request_id in ("s:sample:0/0", "s:sample:0/1"):
        end(book, book.add(request_id, 1, 0))
    book.fetched("s:sample:0/1")
    book.fetched("s:sample:0/1")
    now = 1060.0
    assert book.find("s:sample:0/1") is not None
    now = 1060.5
    assert book.find("s:sample:0/1") is None
    assert book.find("s:sample:0/0") is not None
    now = 1600.5
    assert book.find("s:sample:0/0") is None


def test_an_answer_reaches_only_the_run_that_it_belongs_to() -> None:
    """A client may give a sample up and send its id again with another prompt, while the answer to the first is on its way."""
    book = book_of()
    first = book.add("s:sample:0/0", 1, 0)
    book.remove("s:sample:0/0")
    second = book.add("s:sample:0/0", 1, 0)
    assert not book.finish(SampleDone("s:sample:0/0", first.run, b"to the first"))
    assert second.outcome is None
    assert book.finish(SampleDone("s:sample:0/0", second.run, b"to the second"))
    assert not book.finish(SampleFailed("s:sample:0/0", second.run, "again", "server", gone=False))
    assert second.outcome == SampleDone("s:sample:0/0", second.run, b"to the second")


async def test_too_much_is_answered_429_with_the_time_to_come_again(tmp_path: Path) -> None:
    async with served(tmp_path, Config(server=ServerConfig(max_pending_samples_per_session=3))) as server:
        sampler = await new_sampler(server)
        server.hub.samples.add(f"{sampler}/7", 2, 0)
        reply = await server.post("asample", sample_body(sampler, [1]))
        assert (reply.status_code, reply.headers["Retry-After"]) == (429, "1")
        session_id = sampler.partition(":")[0]
        assert reply.json()["detail"] == (
            f"2 sequences of session {session_id} are unfinished, and the limit is 3 (max_pending_samples_per_session); "
            "send this sample later"
        )
        other = await server.post("asample", sample_body(await new_sampler(server), [1]))
        assert other.status_code == 503  # accepted, but there is no engine here


async def test_a_session_that_ends_takes_its_samples_along(tmp_path: Path) -> None:
    """Who waits for one hears at once that its session is over; others' samples stay."""
    async with served(tmp_path, Config(server=ServerConfig(max_pending_samples=4))) as server:
        sampler, other = await new_sampler(server), await new_sampler(server)
        for seq_id in range(2):
            server.hub.samples.add(f"{sampler}/{seq_id}", 1, 0)
        server.hub.take(done(server, f"{sampler}/1", b"never fetched"))
        server.hub.samples.add(f"{other}/0", 1, 0)
        poll = asyncio.create_task(server.post("retrieve_future", {"request_id": f"{sampler}/0"}))
        await asyncio.sleep(0)
        await server.post(f"sessions/{sampler.partition(':')[0]}/finish", {"reason": {"type": "success"}})
        reply = await poll
        assert (reply.status_code, "its session is finished" in reply.json()["detail"]) == (404, True)
        assert server.hub.samples.find(f"{sampler}/1") is None
        assert run_of(server, f"{other}/0")
        server.hub.samples.add(f"{other}/1", 3, 0)  # the places are free again


async def test_a_client_gives_up_only_samples_of_its_own_session(server: Served) -> None:
    mine, other = await new_sampler(server), await new_sampler(server)
    for sampler in (mine, other):
        for seq_id in range(2):
            server.hub.samples.add(f"{sampler}/{seq_id}", 1, 0)
    named = [f"{mine}/0", f"{other}/0", "nonsense"]
    body = {"target": {"sampling_session_id": mine}, "timeout": 0, "retrieved_request_ids": named}
    poll = asyncio.create_task(server.post("retrieve_future", {"request_id": f"{mine}/0"}))
    await asyncio.sleep(0)
    assert (await server.post("retrieve_futures", body)).status_code == 200
    assert (await poll).status_code == 410
    kept = [request_id for request_id in (*named, f"{mine}/1", f"{other}/1") if server.hub.samples.find(request_id)]
    assert kept == [f"{other}/0", f"{mine}/1", f"{other}/1"]


async def test_a_cancelled_sample_ends_and_takes_no_place(tmp_path: Path) -> None:
    async with served(tmp_path, Config(server=ServerConfig(max_pending_samples=1))) as server:
        sampler = await new_sampler(server)
        server.hub.samples.add(f"{sampler}/0", 1, 0)
        assert (await server.post("cancel_future", {"request_id": f"{sampler}/0"})).status_code == 200
        reply = await server.post("retrieve_future", {"request_id": f"{sampler}/0"})
        assert reply.json() == {"error": "it was cancelled by its client", "category": "user"}
        server.hub.samples.add(f"{sampler}/1", 1, 0)
        server.hub.take(done(server, f"{sampler}/1", b"done"))
        for request_id in (f"{sampler}/1", f"{sampler}/7", "nonsense"):
            assert (await server.post("cancel_future", {"request_id": request_id})).status_code == 200
        assert (await server.post("retrieve_future", {"request_id": f"{sampler}/1"})).content == b"done"


async def test_each_client_that_joins_gets_a_number(server: Served) -> None:
    sampler = await new_sampler(server)
    replies = [await server.post("join_sampling_session", {"sampling_session_id": sampler}) for _ in range(2)]
    assert [reply.json()["client_counter"] for reply in replies] == [1, 2]
    assert (await server.post("join_sampling_session", {"sampling_session_id": "x:sample:0"})).status_code == 404


async def test_a_client_polls_for_all_of_its_samples(server: Served) -> None:
    sampler = await new_sampler(server)

    async def poll(cursor: int = 0, clone: int = 0, **more: Any) -> Any:
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
        reply = await server.post("retrieve_futures", {"target": target, "prev_cursor": cursor, **more})
        return reply.json() if reply.status_code == 200 else reply.status_code

    def accept(seq_id: int) -> str:
        request_id = f"{sampler}/{seq_id}"
        server.hub.samples.add(request_id, 1, 0)
        server.hub.sample_reports.expect(request_id)
        return request_id

    ended, wrong, lost, other = accept(0), accept(1), accept(2), accept(10**9)
    assert await poll(timeout=0) == {"completions": [], "cursor": 0}
    waiting = asyncio.create_task(poll())
    await asyncio.sleep(0.05)
    server.hub.take(done(server, ended, b"12345"))
    first = await waiting
    assert first["completions"] == [{"state": "finished", "request_id": ended, "response_payload_uncompressed_size": 5}]
    server.hub.take(failed(server, wrong, "bad", gone=False))
    assert (await poll(first["cursor"]))["completions"] == [{"state": "failed", "request_id": wrong}]
    again = await poll(0, timeout=0, retrieved_request_ids=[ended])
    assert [report["request_id"] for report in again["completions"]] == [wrong]  # what was seen is gone
    assert server.hub.samples.find(ended) is None
    for request_id in server.hub.samples.lose_running():
        server.hub.sample_reports.add(request_id, "failed")
    assert [r["request_id"] for r in (await poll(again["cursor"]))["completions"]] == [lost]
    assert [r["request_id"] for r in (await poll(0, clone=1))["completions"]] == [other]
    for clone in (2, 3, 2**63 - 1):
        assert await poll(2**62, clone, timeout=0) == {"completions": [], "cursor": 2**62}
    assert set(server.hub.sample_reports._boxes) == {(sampler, 0), (sampler, 1)}  # nothing is kept for numbers that anyone can make up
    assert (await server.post("retrieve_futures", {"target": {"sampling_session_id": "x:sample:0"}})).status_code == 404


async def test_what_a_former_server_was_asked_for_is_reported_until_it_was_seen(tmp_path: Path) -> None:
    """Its clients then ask for the results, hear 410 and send the samples again."""
    async with served(tmp_path) as server:
        sampler = await new_sampler(server)
        for seq_id in range(3):
            server.hub.samples.add(f"{sampler}/{seq_id}", 1, 0)
            server.hub.sample_reports.expect(f"{sampler}/{seq_id}")
        server.hub.take(done(server, f"{sampler}/0", b"1"))
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


async def test_reports_reach_a_client_that_knows_a_later_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was set back by an hour between two servers, and cursors are counted from it: the client waits for higher ones."""
    clock = time.time_ns

    async with served(tmp_path) as server:
        sampler = await new_sampler(server)
        target = {"target": {"sampling_session_id": sampler}}
        for seq_id in range(3):
            server.hub.samples.add(f"{sampler}/{seq_id}", 1, 0)
            server.hub.sample_reports.expect(f"{sampler}/{seq_id}")
        server.hub.take(done(server, f"{sampler}/0", b"1"))
        cursor = (await server.post("retrieve_futures", target)).json()["cursor"]
    monkeypatch.setattr(time, "time_ns", lambda: clock() - 3600 * 10**9)
    async with served(tmp_path) as server:
        reply = (await server.post("retrieve_futures", target | {"prev_cursor": cursor, "timeout": 0})).json()
        lost = [{"state": "failed", "request_id": f"{sampler}/{seq_id}"} for seq_id in range(3)]
        assert (reply["completions"], reply["cursor"] > cursor) == (lost, True)
        server.hub.samples.add(f"{sampler}/3", 1, 0)
        server.hub.take(done(server, f"{sampler}/3", b"1"))
        reply = (await server.post("retrieve_futures", target | {"prev_cursor": reply["cursor"], "timeout": 0})).json()
        assert [report["request_id"] for report in reply["completions"]] == [f"{sampler}/3"]


def test_the_journal_of_samples_stays_short_and_ignores_a_record_that_was_cut_off(tmp_path: Path) -> None:
    journal = SampleJournal(tmp_path)
    journal.add("s:sample:0/0")
    for number in range(1, 30_000):
        journal.add(f"s:sample:0/{number}")
        for _ in range(2):
            journal.strike(f"s:sample:0/{number}")
    file = tmp_path / "samples.journal"
    assert file.stat().st_size < 1.1 * 2**20  # all records together have 2.2 MiB
    with file.open("ab") as half:
        half.write(encode({"seen": "s:sample:0/0"})[:-1])
    assert list(SampleJournal(tmp_path).waiting) == ["s:sample:0/0"]
    assert file.read_bytes() == encode({"waits": "s:sample:0/0"})


def test_of_samples_that_nobody_asks_for_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SampleJournal(tmp_path)
    for number in range(10):
        journal.add(f"s:sample:0/{number}")
    monkeypatch.setattr("tinsmith.server.sample_journal._MOST_BYTES", 3 * len(encode({"waits": "s:sample:0/0"})))
    assert list(SampleJournal(tmp_path).waiting) == [f"s:sample:0/{number}" for number in (7, 8, 9)]


@pytest.mark.parametrize(
    "garbage", [b"\xff\x00\xfe" * 100, encode("text"), encode({"waits": "nobody"}), encode({"waits": "s:sample:0/x"}), encode({"seen": 1})]
)
def test_a_damaged_journal_is_passed_over_with_one_warning(tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    records = [encode({"waits": f"s:sample:0/{number}"}) for number in (1, 2)]
    (tmp_path / "samples.journal").write_bytes(garbage.join(records))
    assert list(SampleJournal(tmp_path).waiting) == ["s:sample:0/1", "s:sample:0/2"]
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/samples.journal: damaged in 1 places, which are skipped")
    assert "clients that wait for samples in them must send these again themselves" in message
    caplog.clear()
    assert list(SampleJournal(tmp_path).waiting) == ["s:sample:0/1", "s:sample:0/2"]
    assert caplog.messages == []


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples.journal").mkdir()
    with pytest.raises(ConfigError, match=r"samples\.journal cannot be used: .*; see to that, or delete it"):
        SampleJournal(tmp_path)


def finish_with(book: SampleBook, request_id: str, size: int) -> None:
    sample = book.add(request_id, 1, 0)
    assert book.finish(SampleDone(request_id, sample.run, bytes(size)))


def test_results_over_the_limit_are_dropped_from_the_session_that_has_most() -> None:
    """Until now results that nobody fetched counted toward no limit for `sample_result_ttl_s`."""
    book = book_of(max_finished_sample_mib=1)
    quarter = 2**18
    for request_id in ("a:sample:0/0", "b:sample:0/0", "b:sample:0/1", "b:sample:0/2"):
        finish_with(book, request_id, quarter)
    finish_with(book, "a:sample:0/1", quarter)
    assert [book.find(f"b:sample:0/{n}") is None for n in range(3)] == [True, False, False]
    assert book.find("a:sample:0/0") is not None
    book.fetched("a:sample:0/1")
    finish_with(book, "c:sample:0/0", quarter)
    assert book.find("a:sample:0/1") is None  # what its client has seen goes first
    assert [book.find(f"b:sample:0/{n}") is None for n in range(3)] == [True, False, False]
    finish_with(book, "d:sample:0/0", 2**21)  # alone more than the limit: it is kept, until others come
    assert [request_id for request_id in ("a:sample:0/0", "c:sample:0/0", "d:sample:0/0") if book.find(request_id)] == [
        "a:sample:0/0",
        "c:sample:0/0",
        "d:sample:0/0",
    ]
    finish_with(book, "d:sample:0/1", 1)
    assert (book.find("d:sample:0/0"), book.find("d:sample:0/1") is None) == (None, False)


async def test_a_result_that_was_dropped_is_answered_as_lost(tmp_path: Path) -> None:
    async with served(tmp_path, Config(server=ServerConfig(max_finished_sample_mib=1))) as server:
        sampler = await new_sampler(server)
        for seq_id in (0, 1):
            server.hub.samples.add(f"{sampler}/{seq_id}", 1, 0)
            server.hub.take(done(server, f"{sampler}/{seq_id}", bytes(700_000)))
        lost, kept = [await server.post("retrieve_future", {"request_id": f"{sampler}/{seq_id}"}) for seq_id in (0, 1)]
        assert (lost.status_code, kept.status_code, len(kept.content)) == (410, 200, 700_000)


def sent(message: Message) -> Message:
    """The message as it arrives."""
    return Message.from_frames(message.to_frames())


async def test_the_tokens_of_a_streamed_sample_are_read_while_it_runs_and_from_its_beginning(server: Served) -> None:
    request_id, other = "s:sample:0/1", "s:sample:0/2"
    sample = server.hub.samples.add(request_id, 2, 0, stream=True)
    silent = server.hub.samples.add(other, 1, 0)
    early = server.hub.samples.follow(request_id, sample.run)
    first = [
        (request_id, sample.run, 0, [5], [-0.5]),
        (other, silent.run, 0, [9], [-0.9]),
        (request_id, sample.run, 1, [7], [-0.7]),
    ]
    server.hub.take(sent(SampleEvents(first)))
    assert [await anext(early), await anext(early)] == [StreamedTokens(0, [5], [-0.5]), StreamedTokens(1, [7], [-0.7])]
    waiting = asyncio.ensure_future(anext(early))
    await asyncio.sleep(0)
    assert not waiting.done()
    last = [(request_id, sample.run, 0, [6, 2], [-0.6, -0.2]), (request_id, sample.run + 100, 0, [1], [-1.0])]
    server.hub.take(sent(SampleEvents(last)))
    assert await waiting == StreamedTokens(0, [6, 2], [-0.6, -0.2])
    server.hub.take(sent(SampleDone(request_id, sample.run, b"")))
    server.hub.take(sent(SampleEvents([(request_id, sample.run, 0, [3], [-0.3])])))  # too late
    assert [event async for event in early] == []
    assert [event.tokens async for event in server.hub.samples.follow(request_id, sample.run)] == [[5], [7], [6, 2]]


async def test_what_ends_a_streamed_sample_ends_its_readers(server: Served) -> None:
    book = server.hub.samples
    failing, cancelled, lost = (book.add(f"s:sample:0/{n}", 1, 0, stream=True) for n in range(3))
    readers = [asyncio.ensure_future(anext(book.follow(sample.request_id, sample.run))) for sample in (failing, cancelled, lost)]
    await asyncio.sleep(0)
    server.hub.take(sent(SampleFailed(failing.request_id, failing.run, "no such token", "user", gone=False)))
    book.remove(cancelled.request_id)
    book.lose_running()
    with pytest.raises(UserError, match="no such token"):
        await readers[0]
    for reader in readers[1:]:
        with pytest.raises(GoneError, match="is not known any more"):
            await reader


async def test_only_a_sample_that_is_streamed_can_be_followed(server: Served) -> None:
    sample = server.hub.samples.add("s:sample:0/0", 1, 0)
    with pytest.raises(UserError, match="was started without stream"):
        server.hub.samples.follow("s:sample:0/0", sample.run)
    with pytest.raises(NotFoundError, match="send it again"):
        server.hub.samples.follow("s:sample:0/0", sample.run + 1)
