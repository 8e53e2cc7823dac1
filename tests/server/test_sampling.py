"""Sampling routes as far as they need no engine, and the book of samples.

Invariant: A session that ends cancels its samples; limits hold for all and for each session; an answer reaches its own
run only. Also: `tests/worker/test_samples.py`.

Invariant: A streamed sample's tokens reach each reader once, in order and from the first; results that nobody fetches
stay within their limit.
"""

import asyncio
import hashlib
import random
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.server.serving import Served, refused, served
from tests.store.power_cut import recorded
from tinsmith.config import ServerConfig
from tinsmith.errors import BackpressureError, ConfigError, EngineUnavailableError, UserError
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import SampleDone, SampleEvents, SampleFailed
from tinsmith.server import calls
from tinsmith.server.sample_journal import SampleJournal
from tinsmith.server.samples import PendingSample, SampleBook, StreamedTokens
from tinsmith.store.append_file import encode


def sample_body(sampler: str, tokens: list[int], max_tokens: int = 4) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    return {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": prompt,
        "sampling_params": {"max_tokens": max_tokens},
    }


class Client:
    """A sampling session on a server, and what an engine says of its samples."""

    def __init__(self, server: Served, sampler: str) -> None:
        self.server, self.sampler = server, sampler

    def id_of(self, number: int) -> str:
        return f"{self.sampler}/{number}"

    def accept(self, number: int, count: int = 1, digest: bytes = b"") -> str:
        """A sample of so many sequences runs; returns its id."""
        self.server.hub.samples.add(self.id_of(number), count, 0, digest=digest)
        self.server.hub.sample_reports.expect(self.id_of(number))
        return self.id_of(number)

    def runs(self, number: int) -> PendingSample | None:
        return self.server.hub.samples.find(self.id_of(number))

    def run_of(self, number: int) -> int:
        sample = self.runs(number)
        assert sample is not None
        return sample.run

    def done(self, number: int, payload: bytes = b"1") -> None:
        self.server.hub.take(SampleDone(self.id_of(number), self.run_of(number), payload))

    def failed(self, number: int, error: str, gone: bool = False) -> None:
        self.server.hub.take(SampleFailed(self.id_of(number), self.run_of(number), error, "user", gone))

    async def fetch(self, number: int) -> httpx.Response:
        return await self.server.post("retrieve_future", {"request_id": self.id_of(number)})

    async def poll(self, cursor: int = 0, clone: int = 0, **more: Any) -> Any:
        """What has come to an end since that cursor."""
        target = {"type": "sampling_session", "sampling_session_id": self.sampler, "cloned_sampler_id": clone}
        return await self.server.answer("retrieve_futures", {"target": target, "prev_cursor": cursor, **more})

    def lost(self, *numbers: int) -> list[dict[str, str]]:
        """The reports of samples that have to be sent again."""
        return [{"state": "failed", "request_id": self.id_of(number)} for number in numbers]

    async def finish_session(self) -> None:
        await self.server.end_session(self.sampler.partition(":")[0])


@pytest.fixture
async def client(server: Served) -> Client:
    return await new_client(server)


async def new_client(server: Served) -> Client:
    return Client(server, await server.new_sampler())


async def test_a_base_model_is_sampled_under_its_name_with_any_suffix(server: Served) -> None:
    session_id = await server.new_session()
    sampler, again = [await server.new_sampler("tiny:long", session_id) for _ in range(2)]
    assert sampler == again == f"{session_id}:sample:3"
    assert await server.shown(f"samplers/{sampler}") == {"sampler_id": sampler, "base_model": "tiny:long"}
    assert (await server.get("samplers/x:sample:0")).status_code == 404
    body = {"session_id": session_id, "sampling_session_seq_id": 0}
    saved = {"model_path": "tinker://m/sampler_weights/x"}
    for asked, status, reason in (
        ({"base_model": "big"}, 404, "big"),
        (saved, 404, f"{saved['model_path']} does not exist"),
        ({}, 400, ""),
    ):
        assert reason in await server.refusal("create_sampling_session", body | asked, status)
    for counter in (1, 2):  # each client that joins gets a number
        assert (await server.answer("join_sampling_session", {"sampling_session_id": sampler}))[
            "client_counter"
        ] == counter
    await server.refusal("join_sampling_session", {"sampling_session_id": "x:sample:0"}, 404)


async def test_a_sampling_session_seq_id_belongs_to_one_session(server: Served) -> None:
    """Else a client would sample from other weights than it asked for."""
    path = "tinker://m/sampler_weights/x"
    server.save(path)
    sampler = await server.new_sampler()
    session_id = sampler.partition(":")[0]
    for asked in ({"base_model": "tiny:long"}, {"model_path": path}):
        body = {"session_id": session_id, "sampling_session_seq_id": 3} | asked
        assert f"{sampler} exists already for other weights" in await server.refusal("create_sampling_session", body)
        await server.answer(
            "create_sampling_session", body | {"sampling_session_seq_id": 4 + len(asked.get("model_path", ""))}
        )
    assert await server.shown(f"samplers/{sampler}") == {"sampler_id": sampler, "base_model": "tiny"}


@contextmanager
def full_disk(file: Path, room: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.alone
async def test_a_full_disk_takes_no_sample_and_loses_no_result(tmp_path: Path) -> None:
    journal = tmp_path / "samples.journal"
    async with served(tmp_path) as server:
        client = await new_client(server)
        for number, room in ((6, 0), (7, 5)):
            client.accept(number)
            client.done(number, b"12345")
            before = journal.read_bytes()
            with full_disk(journal, room):
                reply = await server.post("asample", sample_body(client.sampler, [1]))
                seen = await client.poll()
                assert (await client.poll(seen["cursor"], timeout=0))["completions"] == []
            assert reply.headers["retry-after"] == "1"
            assert "no sample can be noted at the moment: " in refused(reply, 503)
            assert (client.runs(0), journal.read_bytes()) == (None, before)
        client.accept(8)
    assert list(SampleJournal(tmp_path).waiting) == [client.id_of(number) for number in (6, 7, 8)]


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "scored", "status"),
    [(32, 1, True, 503), (31, 1, False, 503), (32, 1, False, 400), (32, 2, True, 400), (33, 1, True, 400)],
)
async def test_a_prompt_that_fills_the_context_can_be_scored(
    client: Client, tokens: int, max_tokens: int, scored: bool, status: int
) -> None:
    """A request that is right goes to an engine, which is not there."""
    body = sample_body(client.sampler, [1] * tokens, max_tokens) | {"prompt_logprobs": scored}
    assert ("exceeds the context window of tiny" in await client.server.refusal("asample", body, status)) == (
        status == 400
    )
    assert (await client.fetch(0)).status_code == 410  # it is not kept


async def test_a_repeated_sample_is_known_and_another_under_its_number_refused(client: Client) -> None:
    sent = orjson.dumps(sample_body(client.sampler, [1]))
    client.accept(0, 2, hashlib.sha256(sent).digest())
    again, other = [
        await client.server.client.post(
            "/api/v1/asample", content=content, headers={"Content-Type": "application/json"}
        )
        for content in (sent, orjson.dumps(sample_body(client.sampler, [2])))
    ]
    assert again.json()["sample_sequence_ids"] == [f"{client.id_of(0)}/0", f"{client.id_of(0)}/1"]
    assert hashlib.sha256(sent).hexdigest()[:12] in refused(other)
    client.failed(0, "dropped", gone=True)
    assert (await client.fetch(0)).status_code == 404


def book_of(**settings: Any) -> SampleBook:
    return SampleBook(ServerConfig(**settings))


def end(book: SampleBook, sample: PendingSample, payload: bytes = b"") -> bool:
    return book.finish(SampleDone(sample.request_id, sample.run, payload))


def test_the_book_counts_sequences_and_bytes_of_all_and_of_each_session() -> None:
    mib, all_mib, session_mib = 2**20, "max_pending_sample_mib", "max_pending_sample_mib_per_session"
    book = book_of(max_pending_samples=10, max_pending_samples_per_session=6, **{all_mib: 3, session_mib: 2})

    def refuse(request_id: str, count: int, size: int, message: str) -> None:
        with pytest.raises(BackpressureError, match=f"^{message}"):
            book.add(request_id, count, size)

    first = book.add("a:sample:0/0", 5, mib)
    unfinished = (
        r"5 sequences of session a are unfinished, and the limit is 6 \(max_pending_samples_per_session\); "
        r"send this sample later$"
    )
    refuse("a:sample:1/0", 2, 0, unfinished)
    refuse(
        "a:sample:0/1",
        1,
        mib + 1,
        rf"1048576 bytes of session a are unfinished, and the limit is 2097152 \({session_mib}\)",
    )
    book.add("b:sample:0/0", 5, mib + 1)
    refuse(
        "c:sample:0/0",
        1,
        0,
        r"10 sequences of all sessions are unfinished, and the limit is 10 \(max_pending_samples\)",
    )
    end(book, first)
    book.add("c:sample:0/0", 1, mib)
    refuse("c:sample:0/1", 1, mib, rf"2097153 bytes of all sessions .* 3145728 \({all_mib}\)")
    assert book.lose_running() == ["b:sample:0/0", "c:sample:0/0"]
    book.add("d:sample:0/0", 6, 2 * mib)


def test_a_sample_that_is_too_much_alone_is_refused_for_good() -> None:
    """With 429 its client would send it for ever."""
    book = book_of(max_pending_samples_per_session=6, max_pending_sample_mib_per_session=2)
    message = (
        r"^the request has 7 sequences; more than 6 are not taken at a time \(max_pending_samples_per_session\): "
        r"split the request$"
    )
    with pytest.raises(UserError, match=message):
        book.add("a:sample:0/0", 7, 0)
    with pytest.raises(UserError, match="has 2097153 bytes; more than 2097152"):
        book.add("a:sample:0/0", 1, 2**21 + 1)
    book.add("a:sample:0/0", 6, 2**21)


def test_a_fetched_result_stays_for_a_minute_in_case_the_reply_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    book, ids = book_of(sample_result_ttl_s=600.0), ["s:sample:0/0", "s:sample:0/1"]
    for request_id in ids:
        end(book, book.add(request_id, 1, 0))
    for _ in range(2):
        book.fetched(ids[1])
    for later, expected in ((1060.0, ids), (1060.5, ids[:1]), (1600.5, [])):
        now = later
        assert [request_id for request_id in ids if book.find(request_id) is not None] == expected


def test_an_answer_reaches_only_the_run_that_it_belongs_to() -> None:
    """A client may give a sample up and send its id again with another prompt, while the answer to the first is on its
    way."""
    book = book_of()
    first = book.add("s:sample:0/0", 1, 0)
    book.remove("s:sample:0/0")
    second = book.add("s:sample:0/0", 1, 0)
    assert not end(book, first, b"to the first")
    assert second.outcome is None
    assert end(book, second, b"to the second")
    assert not book.finish(SampleFailed("s:sample:0/0", second.run, "again", "server", gone=False))
    assert second.outcome == SampleDone("s:sample:0/0", second.run, b"to the second")


async def test_a_session_that_ends_takes_its_samples_along(tmp_path: Path) -> None:
    """Who waits for one hears at once that its session is over; others' samples stay."""
    async with served(tmp_path, max_pending_samples=4) as server:
        client, other = await new_client(server), await new_client(server)
        for owner, number in ((client, 0), (client, 1), (other, 0)):
            owner.accept(number)
        client.done(1, b"never fetched")
        poll = asyncio.create_task(client.fetch(0))
        await asyncio.sleep(0)
        await client.finish_session()
        assert "its session is finished" in refused(await poll, 404)
        assert (client.runs(1), other.runs(0) is None) == (None, False)
        other.accept(1, 3)  # the places are free again


async def test_a_client_gives_up_only_samples_of_its_own_session(server: Served) -> None:
    mine, other = await new_client(server), await new_client(server)
    for client in (mine, other):
        for number in range(2):
            client.accept(number)
    poll = asyncio.create_task(mine.fetch(0))
    await asyncio.sleep(0)
    await mine.poll(timeout=0, retrieved_request_ids=[mine.id_of(0), other.id_of(0), "nonsense"])
    assert (await poll).status_code == 410
    assert [client.runs(number) is not None for client in (mine, other) for number in range(2)] == [
        False,
        True,
        True,
        True,
    ]


async def test_a_cancelled_sample_ends_and_takes_no_place(tmp_path: Path) -> None:
    async with served(tmp_path, max_pending_samples=1) as server:
        client = await new_client(server)
        await server.answer("cancel_future", {"request_id": client.accept(0)})
        assert (await client.fetch(0)).json() == {"error": "it was cancelled by its client", "category": "user"}
        client.accept(1)
        client.done(1, b"done")
        client.accept(2)  # what has ended takes no place either, and what was running ends with its engine
        assert server.hub.samples.lose_running() == [client.id_of(2)]
        client.accept(2)
        assert (await server.post("cancel_future", {"request_id": "nonsense"})).status_code == 404
        for request_id in (client.id_of(1), client.id_of(7)):
            await server.answer("cancel_future", {"request_id": request_id})
        assert (await client.fetch(1)).content == b"done"


async def test_a_client_polls_for_all_of_its_samples(client: Client) -> None:
    hub = client.server.hub
    ended, wrong, lost, other = [client.accept(number) for number in (0, 1, 2, 10**9)]
    assert await client.poll(timeout=0) == {"completions": [], "cursor": 0}
    waiting = asyncio.create_task(client.poll())
    await asyncio.sleep(0.05)
    client.done(0, b"12345")
    first = await waiting
    assert first["completions"] == [{"state": "finished", "request_id": ended, "response_payload_uncompressed_size": 5}]
    client.failed(1, "bad")
    assert (await client.poll(first["cursor"]))["completions"] == [{"state": "failed", "request_id": wrong}]
    again = await client.poll(0, timeout=0, retrieved_request_ids=[ended])
    assert [report["request_id"] for report in again["completions"]] == [wrong]  # what was seen is gone
    assert client.runs(0) is None
    for request_id in hub.samples.lose_running():
        hub.sample_reports.add(request_id, "failed")
    assert [report["request_id"] for report in (await client.poll(again["cursor"]))["completions"]] == [lost]
    assert [report["request_id"] for report in (await client.poll(0, clone=1))["completions"]] == [other]
    for clone in (2, 3, 2**63 - 1):
        assert await client.poll(2**62, clone, timeout=0) == {"completions": [], "cursor": 2**62}
    # None for numbers that anyone can make up
    assert set(hub.sample_reports._boxes) == {(client.sampler, 0), (client.sampler, 1)}
    await client.server.refusal("retrieve_futures", {"target": {"sampling_session_id": "x:sample:0"}}, 404)


async def test_what_a_former_server_was_asked_for_is_reported_until_it_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients then ask for the results, hear 410 and send the samples again.

    They know a cursor, and cursors are counted from the clock. That it is set back between two servers keeps no report
    from them.
    """
    clock = time.time_ns
    async with served(tmp_path) as server:
        client = await new_client(server)
        for number in range(3):
            client.accept(number)
        client.done(0)
        cursor = (await client.poll())["cursor"]
        await client.poll(cursor, timeout=0)
    for hours in (0, 1):
        monkeypatch.setattr(time, "time_ns", lambda back=hours: clock() - back * 3600 * 10**9)
        async with served(tmp_path) as server:
            client.server = server
            reply = await client.poll(cursor, timeout=0)
            assert (reply["completions"], reply["cursor"] > cursor) == (client.lost(1, 2), True)
            assert (await client.fetch(1)).status_code == 410
            if hours:
                client.accept(3)
                client.done(3)
                reply = await client.poll(reply["cursor"], timeout=0)
                assert [report["request_id"] for report in reply["completions"]] == [client.id_of(3)]
                await client.finish_session()
    assert SampleJournal(tmp_path).waiting == {}


async def test_the_journal_of_samples_stays_short_and_ignores_a_record_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.server.sample_journal._SPARE_BYTES", 2**14)
    journal = SampleJournal(tmp_path)
    journal.add("s:sample:0/0")
    for number in range(1, 1000):
        journal.add(f"s:sample:0/{number}")
        for _ in range(2):
            journal.strike(f"s:sample:0/{number}")
        await journal.settle()
    file = tmp_path / "samples.journal"
    assert file.stat().st_size < 1.1 * 2**14  # all records together have 70 KiB
    with file.open("ab") as half:
        half.write(encode({"seen": "s:sample:0/0"})[:-1])
    journal = SampleJournal(tmp_path)
    assert (list(journal.waiting), file.read_bytes()) == (["s:sample:0/0"], encode({"waits": "s:sample:0/0"}))
    for number in range(1, 10):
        journal.add(f"s:sample:0/{number}")
    monkeypatch.setattr("tinsmith.server.sample_journal._MOST_BYTES", 3 * len(encode({"waits": "s:sample:0/0"})))
    assert list(SampleJournal(tmp_path).waiting) == [f"s:sample:0/{number}" for number in (7, 8, 9)]  # the newest


async def test_samples_that_were_acknowledged_are_in_the_journal_after_a_power_cut(tmp_path: Path) -> None:
    """Those that come together share a sync; one that comes while another syncs has the next."""
    with recorded() as disk:
        (tmp_path / "data").mkdir()
        journal = SampleJournal(tmp_path / "data")
        synced: list[None] = []
        disk.before_each = lambda: synced.append(None)
        for numbers in (range(1, 4), range(4, 6)):
            for number in numbers:
                journal.add(f"s:sample:0/{number}")
            await asyncio.gather(*(journal.settle() for _ in numbers))
            disk.cut(tmp_path / "data", left := tmp_path / str(numbers[-1]))
            waiting = [f"s:sample:0/{number}" for number in range(1, numbers[-1] + 1)]
            assert list(SampleJournal(left).waiting) == waiting
    assert len([*synced]) == 2 + 2 * 2  # and two for each of the journals that were read here


async def test_the_journal_of_samples_is_shortened_beside_the_event_loop_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the power fails meanwhile, or clients go away."""
    monkeypatch.setattr("tinsmith.server.sample_journal._SPARE_BYTES", 0)
    settled, cuts, threads = set[str](), list[tuple[Path, set[str]]](), set[threading.Thread]()
    (tmp_path / "data").mkdir()

    def cut() -> None:
        threads.add(threading.current_thread())
        disk.cut(tmp_path / "data", left := tmp_path / str(len(cuts)), chance)
        cuts.append((left, set(settled)))

    async def add(name: str, late_s: float) -> None:
        await asyncio.sleep(late_s)
        journal.add(name)
        await journal.settle()
        settled.add(name)

    chance = random.Random(0)
    with recorded() as disk:
        journal = SampleJournal(tmp_path / "data")
        disk.before_each = cut
        for number in range(40):
            tasks = [asyncio.create_task(add(f"s:sample:{number}/{each}", 0.001 * each)) for each in range(6)]
            await asyncio.sleep(0.002 * (number % 3))
            tasks[number % 3].cancel()
            for _ in range(9):  # those of no sample that is waited for take room
                journal._file.append({"seen": "s:sample:0/9"})
            await asyncio.gather(*tasks, return_exceptions=True)
        disk.before_each = lambda: None
    assert len(cuts) > 40
    assert threading.current_thread() not in threads
    for left, known in cuts:
        assert known <= SampleJournal(left).waiting.keys()
    assert settled <= SampleJournal(tmp_path / "data").waiting.keys()


@pytest.mark.parametrize(
    "garbage", [b"\xff\x00\xfe" * 100, encode("text"), encode({"waits": "s:sample:0/x"}), encode({"seen": 1})]
)
def test_a_damaged_journal_is_passed_over_with_one_warning_and_one_that_cannot_be_read_is_named(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "samples.journal"
    file.write_bytes(garbage.join(encode({"waits": f"s:sample:0/{number}"}) for number in (1, 2)))
    for _ in range(2):  # once it was read, it is sound
        assert list(SampleJournal(tmp_path).waiting) == ["s:sample:0/1", "s:sample:0/2"]
    (message,) = caplog.messages
    assert message.startswith(f"{file}: damaged in 1 places, which are skipped")
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=r"samples\.journal cannot be used: .*; see to that, or delete it"):
        SampleJournal(tmp_path)


async def test_results_over_the_limit_are_dropped_from_the_session_that_has_most_and_answered_as_lost(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, max_finished_sample_mib=1) as server:
        ids = {
            f"{owner}{number}": f"{sampler}/{number}"
            for owner in "abcd"
            for sampler in [await server.new_sampler()]
            for number in range(3)
        }
        book = server.hub.samples

        def finish(name: str, size: int) -> str:
            """What is there when this one has ended, too."""
            end(book, book.add(ids[name], 1, 0), bytes(size))
            return " ".join(each for each in ids if book.find(ids[each]))

        quarter = 2**18
        for name in ("a0", "b0", "b1", "b2"):
            finish(name, quarter)
        assert finish("a1", quarter) == "a0 a1 b1 b2"
        book.fetched(ids["a1"])
        assert finish("c0", quarter) == "a0 b1 b2 c0"  # what its client has seen goes first
        assert finish("d0", 2**21) == "a0 b1 b2 c0 d0"  # alone more than the limit: it is kept, until others come
        assert finish("d1", 1) == "a0 b2 c0 d1"
        lost, kept = [await server.post("retrieve_future", {"request_id": ids[name]}) for name in ("d0", "d1")]
        assert (lost.status_code, kept.status_code, kept.content) == (410, 200, b"\0")


def sent(message: Message) -> Message:
    return Message.from_frames(message.to_frames())


async def test_the_tokens_of_a_streamed_sample_are_read_while_it_runs_and_from_its_beginning(server: Served) -> None:
    hub, request_id = server.hub, "s:sample:0/1"
    sample, silent = hub.samples.add(request_id, 2, 0, stream=True), hub.samples.add("s:sample:0/2", 1, 0)
    run = sample.run
    hub.take(sent(SampleEvents([(request_id, run, 0, [5], [-0.5]), (silent.request_id, silent.run, 0, [9], [-0.9])])))
    assert await calls.answer_tokens(hub, request_id, 0) == ([StreamedTokens(0, [5], [-0.5])], None)
    waiting = asyncio.ensure_future(calls.answer_tokens(hub, request_id, 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    hub.take(sent(SampleEvents([(request_id, run, 1, [6, 2], [-0.6, -0.2]), (request_id, run + 100, 0, [1], [-1.0])])))
    assert await waiting == ([StreamedTokens(1, [6, 2], [-0.6, -0.2])], None)
    ended = SampleDone(request_id, run, b"")
    hub.take(sent(ended))
    hub.take(sent(SampleEvents([(request_id, run, 0, [3], [-0.3])])))  # too late
    assert await calls.answer_tokens(hub, request_id, 2) == ([], ended)
    events, end = await calls.answer_tokens(hub, request_id, 0)
    assert ([event.tokens for event in events], end) == ([[5], [6, 2]], ended)
    for other in (silent.request_id, "s:sample:0/3"):
        with pytest.raises(EngineUnavailableError, match="send the request again"):
            await calls.answer_tokens(hub, other, 0)


async def test_what_ends_a_streamed_sample_ends_its_readers(server: Served) -> None:
    hub, book = server.hub, server.hub.samples
    samples = failing, cancelled, _ = [book.add(f"s:sample:0/{number}", 1, 0, stream=True) for number in range(3)]
    readers = [asyncio.ensure_future(calls.answer_tokens(hub, each.request_id, 0)) for each in samples]
    await asyncio.sleep(0)
    hub.take(sent(SampleFailed(failing.request_id, failing.run, "no such token", "user", gone=False)))
    book.remove(cancelled.request_id)
    book.lose_running()
    gone = (EngineUnavailableError, "was lost with its engine")
    for reader, (error, message) in zip(readers, ((UserError, "no such token"), gone, gone), strict=True):
        with pytest.raises(error, match=message):
            await reader
