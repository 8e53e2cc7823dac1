"""Pages as HTTP answers them: streams that many share, who may see what, errors as pages."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.databases import running
from tests.server.serving import Served, served
from tests.server.test_tenants import belongings, key, speaking
from tinsmith.console.pages import STATIC, static_files
from tinsmith.errors import StoreUnavailableError
from tinsmith.server import console, live, tenants
from tinsmith.server.live import LivePages
from tinsmith.server.replies import UnauthorizedError
from tinsmith.server.tenants import COOKIE, Tenants
from tinsmith.store.keys import (
    LOGIN_S,
    MOST_LOGINS,
    add_key,
    begin_login,
    end_login,
    find_login,
    list_keys,
    living_logins,
    revoke_key,
)
from tinsmith.store.store import Store


def key_id_of(server: Served, name: str) -> str:
    return next(each.key_id for each in list_keys(server.store) if each.name == name)


async def allowed() -> None:
    pass


async def test_all_who_look_share_one_computation_and_get_what_changed() -> None:
    pages, count = LivePages(), 0
    go_on = asyncio.Semaphore(0)

    async def compute() -> Mapping[str, str]:
        nonlocal count
        if count:
            await go_on.acquire()
        count += 1
        return {"steps": f"<b>{count}</b>\n", "same": "text"}

    streams = [pages.follow("page", compute, allowed) for _ in range(20)]
    firsts = [await anext(stream) for stream in streams]
    assert set(firsts) == {b"event: steps\ndata: <b>1</b>\ndata: \n\nevent: same\ndata: text\n\n"}
    assert (count, pages.count) == (1, 20)
    go_on.release()
    assert {await anext(stream) for stream in streams} == {b"event: steps\ndata: <b>2</b>\ndata: \n\n"}
    assert count == 2
    for stream in streams:
        await stream.aclose()
    assert pages.count == 0
    again = pages.follow("page", compute, allowed)
    go_on.release()
    assert b"<b>3</b>" in await anext(again)
    await again.aclose()


async def test_a_stream_ends_with_the_key_and_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LOOK_S", 0.01)
    pages = LivePages()

    async def compute() -> Mapping[str, str]:
        return {"a": "1"}

    async def refused() -> None:
        raise UnauthorizedError("revoked")

    async with aclosing(pages.follow("page", compute, refused)) as stream:
        assert await anext(stream) == b"event: a\ndata: 1\n\n"
        assert [event async for event in stream] == []
    async with aclosing(pages.follow("page", compute, allowed)) as stream:
        await anext(stream)
        assert await anext(stream) == b": \n\n"
        pages.close()
        assert [event async for event in stream] in ([], [b": \n\n"])


async def test_what_somebody_wrote_begins_no_event() -> None:
    pages = LivePages()

    async def compute() -> Mapping[str, str]:
        return {"log": "boom\r\revent: health\rdata: well\r\n\nend"}

    async with aclosing(pages.follow("page", compute, allowed)) as stream:
        event = await anext(stream)
    assert b"\r" not in event
    assert [line.partition(b": ")[0] for line in event.splitlines() if line] == [b"event", *[b"data"] * 6]


async def test_all_pages_together_use_a_part_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant: Whoever watches many different pages makes each of them change more seldom."""
    pauses = list[float]()
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds:  # followers that are few do not wait
            pauses.append(seconds)
        await sleep(3600 if seconds else 0)

    pages = LivePages()

    async def compute() -> Mapping[str, str]:
        began = time.monotonic()
        while time.monotonic() < began + 0.01:
            pass
        return {"a": "1"}

    streams = [pages.follow(number, compute, allowed) for number in range(20)]
    monkeypatch.setattr("tinsmith.server.live.asyncio.sleep", note)
    firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.gather(*firsts)
    while len(pauses) < 20:
        await sleep(0)
    assert min(pauses) >= 20 * 20 * 0.01
    for stream in streams:
        await stream.aclose()


async def test_too_many_streams_are_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "MOST_STREAMS", 0)
    reply = await server.client.get("/live/runs")
    assert reply.status_code == 429
    assert "are being watched already" in reply.json()["detail"]


async def test_a_page_may_load_nothing_from_elsewhere_and_is_not_kept(server: Served) -> None:
    for path in ("/", "/runs", "/login"):
        reply = await server.client.get(path, headers={"Accept": "text/html"})
        assert reply.status_code == 200
        assert reply.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["cache-control"] == "no-store"


async def test_files_are_sent_as_they_are_and_packed(server: Served) -> None:
    for name, file in static_files().items():
        for encoding in ("identity", "gzip"):
            reply = await server.client.get(f"{STATIC}{name}", headers={"Accept-Encoding": encoding})
            assert reply.content == file.content
            assert "immutable" in reply.headers["cache-control"]
    assert (await server.client.get(f"{STATIC}..%2Fpages.py")).status_code == 404


async def test_errors_are_pages_for_people_and_json_for_programs(server: Served) -> None:
    people = {"Accept": "text/html,*/*"}
    reply = await server.client.get("/runs/x:train:0", headers=people)
    assert (reply.status_code, reply.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "x:train:0&#39; does not exist" in reply.text
    for path, headers in (
        ("/runs/x:train:0", {}),
        ("/api/v1/training_runs/x:train:0", people),
        ("/v1/models/x", people),
    ):
        reply = await server.client.get(path, headers=headers)
        assert (reply.status_code, reply.headers["content-type"]) == (404, "application/json")
    assert (await server.client.get("/runs?offset=-1")).status_code == 400
    assert (await server.client.get("/runs?compare=a,b,c,d,e")).status_code == 400


async def test_a_cookie_stands_for_its_key_on_every_route_until_that_ends(server: Served) -> None:
    """Invariant: A cookie of the console opens what its key opens, and nothing once the key is revoked."""
    text = add_key(server.store, key("alice"))
    add_key(server.store, key("bob"))
    asked = await server.client.get("/runs?project=a", headers={"Accept": "text/html"})
    assert (asked.status_code, asked.headers["location"]) == (303, "/login?next=%2Fruns%3Fproject%3Da")
    assert (await server.client.get("/runs.json")).status_code == 401
    reply = await server.client.post("/login", data={"key": text, "next": "/runs?project=a"})
    assert (reply.status_code, reply.headers["location"]) == (303, "/runs?project=a")
    said = reply.headers["set-cookie"].lower()
    assert all(part in said for part in ("httponly", "samesite=strict", "path=/"))
    value = reply.cookies[COOKIE]
    assert text not in value
    server.client.cookies.clear()
    cookie = {"Cookie": f"{COOKIE}={value}"}
    for path in ("/runs.json", "/api/v1/training_runs", "/v1/models"):
        assert (await server.client.get(path, headers=cookie)).status_code == 200
    beside = {"Cookie": f'a b=c; other={{"x": 1}}; {COOKIE}={value}'}
    assert (await server.client.get("/runs.json", headers=beside)).status_code == 200
    forged = {"Cookie": f"{COOKIE}={key_id_of(server, 'alice')}{value}"}
    assert (await server.client.get("/runs.json", headers=forged)).status_code == 401
    revoke_key(server.store, "alice")
    await server.front.tenants.caller({"x-api-key": add_key(server.store, key("carol"))})  # reads the keys again
    assert (await server.client.get("/runs.json", headers=cookie)).status_code == 401


async def test_a_copy_of_a_cookie_is_worth_nothing_after_the_logout(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant: A logout ends its cookie on the server: here at once, in other processes when they look again."""
    text = add_key(server.store, key("alice"))
    cookies = [(await server.client.post("/login", data={"key": text})).cookies[COOKIE] for _ in range(2)]
    server.client.cookies.clear()
    one, other = ({"Cookie": f"{COOKIE}={value}"} for value in cookies)
    beside = Tenants(server.front.store, list)
    for headers in (one, other):
        assert (await server.client.get("/runs.json", headers=headers)).status_code == 200
        assert (await beside.caller({"cookie": headers["Cookie"]})).tenant == "alice"
    reply = await server.client.post("/logout", headers=one)
    assert (reply.status_code, reply.headers["location"]) == (303, "/login")
    assert (await server.client.get("/runs.json", headers=one)).status_code == 401
    assert (await server.client.get("/runs.json", headers=other)).status_code == 200
    assert tenants._STALE_S <= 5
    monkeypatch.setattr(tenants, "_STALE_S", 0.0)
    with pytest.raises(UnauthorizedError):
        await beside.caller({"cookie": one["Cookie"]})
    assert (await server.client.post("/logout")).status_code == 303


async def test_keys_and_cookies_go_on_counting_while_the_database_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that need it say so and try again; others are shown.

    A cookie that nobody has seen lets nobody in, nor one whose login another process had ended.
    """
    monkeypatch.setattr(tenants, "_STALE_S", 0.0)  # every request looks again
    people = {"Accept": "text/html"}
    with running() as cluster:
        cluster.serve(tmp_path)
        opened = Store.open(tmp_path, busy_s=0.1)
        monkeypatch.setattr("tests.server.serving.Store.open", lambda data_dir: opened)
        async with served(tmp_path) as server:
            text = add_key(server.store, key("alice"))
            value, unseen, ended = (begin_login(server.store, key_id_of(server, "alice")) for _ in range(3))
            seen = ({"X-API-Key": text}, {"Cookie": f"{COOKIE}={value}"})
            for headers in ({"Cookie": f"{COOKIE}={ended}"}, *seen):
                assert (await server.client.get("/samples.json", headers=headers)).status_code == 200
            end_login(server.store, ended)
            assert (await server.client.get("/samples.json", headers=seen[0])).status_code == 200
            cluster.stop()
            for headers in seen:
                assert (await server.client.get("/samples", headers=headers | people)).status_code == 200
                reply = await server.client.get("/runs", headers=headers | people)
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
                assert "The database is away" in reply.text
                assert '<meta http-equiv="refresh" content="5">' in reply.text
            for cookie in (unseen, ended, "made-up"):
                headers = {"Cookie": f"{COOKIE}={cookie}"}
                assert (await server.client.get("/samples.json", headers=headers)).status_code == 503
            reply = await server.client.post("/login", data={"key": text}, headers=people)
            assert (reply.status_code, "The database is away" in reply.text) == (503, True)
            cluster.start()
            end_login(server.store, value)
            assert (await server.client.get("/samples.json", headers=seen[0])).status_code == 200
            assert (await server.client.get("/samples.json", headers=seen[1])).status_code == 401


async def test_a_page_that_is_watched_says_while_the_database_is_away() -> None:
    pages, away = LivePages(), False

    async def compute() -> Mapping[str, str]:
        if away:
            raise StoreUnavailableError("it is away")
        return {"a": "1"}

    async with aclosing(pages.follow("page", compute, allowed)) as stream:
        assert await anext(stream) == b"event: a\ndata: 1\n\n"
        away = True
        assert (await anext(stream)).startswith(b"event: trouble\ndata: The server cannot read its database now.")
        away = False
        assert await anext(stream) == b"event: trouble\ndata: \n\n"
        async with aclosing(pages.follow("page", compute, allowed)) as other:
            assert await anext(other) == b"event: a\ndata: 1\n\nevent: trouble\ndata: \n\n"


async def test_a_logout_without_a_login_writes_nothing(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant: Who has no key makes nobody wait for the database's only writer."""
    text, written, write = add_key(server.store, key("alice")), [], server.front.store.write

    async def noted(method: Any, *args: Any) -> Any:
        written.append(method)
        return await write(method, *args)

    monkeypatch.setattr(server.front.store, "write", noted)
    assert (await server.client.post("/logout", headers={"Cookie": f"{COOKIE}=made-up"})).status_code == 303
    assert written == []
    await server.client.post("/login", data={"key": text})
    await server.client.post("/logout")
    assert written == [begin_login, end_login]


def test_a_login_ends_after_a_month_and_when_there_are_too_many(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [begin_login(server.store, "alice") for _ in range(MOST_LOGINS + 1)]
    assert [find_login(server.store, each) for each in (texts[0], texts[1], texts[-1])] == [None, "alice", "alice"]
    other = begin_login(server.store, "bob")
    assert find_login(server.store, texts[1]) == "alice"
    assert living_logins(server.store, [texts[0], texts[1], other, "made-up"]) == {texts[1], other}
    now = time.time()
    monkeypatch.setattr("tinsmith.store.keys.time.time", lambda: now + LOGIN_S + 60)
    assert find_login(server.store, other) is None
    assert living_logins(server.store, [other]) == set()


async def test_pages_of_a_tenant_name_nothing_of_another(server: Served) -> None:
    """Invariant: No page of the console names another tenant's sessions, runs, operations, checkpoints or keys."""
    texts = [add_key(server.store, key("alice")), add_key(server.store, key("bob"))]
    async with speaking(server, texts[0]) as alice, speaking(server, texts[1]) as bob:
        foreign, own = await belongings(bob), await belongings(alice)
        await bob.step(foreign["model"], 1)
        for path in ("/overview.json", "/runs.json", "/operations.json", "/", "/runs", "/operations"):
            text = (await alice.client.get(path)).text
            assert foreign["session"] not in text, path
            assert foreign["session"][:8] not in text, path
        assert own["session"] in (await alice.client.get("/runs.json")).text
        assert foreign["session"] in (await bob.client.get("/overview.json")).text
        assert (await alice.client.get("/settings.json")).status_code == 403
        for path in ("/runs/{}.json", "/runs/{}/batches", "/live/runs/{}", "/operations/{}/0", "/curves.json?runs={}"):
            reply = await alice.client.get(path.format(foreign["model"]))
            assert reply.status_code == 404, path
        both = f"{own['model']},{foreign['model']}"
        assert (await alice.client.get(f"/runs.json?compare={both}")).status_code == 404


async def test_a_login_counts_at_once_in_a_process_that_has_old_keys(server: Served) -> None:
    add_key(server.store, key("alice"))
    assert (await server.client.get("/runs.json")).status_code == 401  # the keys are read
    text = add_key(server.store, key("bob"))
    assert text
    login = {"Cookie": f"{COOKIE}={begin_login(server.store, key_id_of(server, 'bob'))}"}
    assert (await server.client.get("/runs.json", headers=login)).status_code == 200


async def test_one_who_logs_in_is_led_nowhere_else(server: Served) -> None:
    text = add_key(server.store, key("alice"))
    for place in ("//[", "//evil.example", "/\\evil.example", "/\t/evil.example", "https://evil.example", "runs"):
        reply = await server.client.post("/login", data={"key": text, "next": place})
        assert (reply.status_code, reply.headers["location"]) == (303, "/"), place
        assert (await server.client.get("/login", params={"next": place})).status_code == 200, place
