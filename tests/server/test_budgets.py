"""Limits of keys: what is over them waits, and what is used is counted once."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Served, forward_backward_body, refused, served
from tests.server.test_tenants import key, speaking
from tinsmith.errors import StoreUnavailableError
from tinsmith.protocol.serving import SampleDone, SampleFailed, SampleStopped
from tinsmith.server import budgets, queued_operations
from tinsmith.store.keys import add_key
from tinsmith.store.records import Outcome, Used
from tinsmith.store.usage import DAY_S, add_usage, used_between

pytestmark = pytest.mark.usefixtures("database")

NOON = 20_000 * DAY_S + 12 * 3600
"""A Unix time."""


def sample(sampler: str, seq_id: int, tokens: int = 6, count: int = 1) -> dict[str, Any]:
    """A sample that may compute four tokens of a prompt, and `tokens` for each of `count` sequences."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]}
    about = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "num_samples": count}
    return about | {"sampling_params": {"max_tokens": tokens}}


def done(server: Served, request_id: str, sampled: int) -> None:
    """End a sample as an engine does."""
    found = server.hub.samples.find(request_id)
    assert found is not None
    used = {"prefilled_tokens": 1, "cached_tokens": 3, "sampled_tokens": sampled, "gpu_seconds": 0.5}
    server.hub.take(SampleDone(request_id, found.run, b"", used))


@pytest.fixture(autouse=True)
def at_noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No day ends while a test runs."""
    began = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: NOON + time.monotonic() - began)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, server: Served) -> list[Any]:
    """What an engine that takes all messages is sent."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    monkeypatch.setattr(server.hub.engine, "send", send)
    return messages


async def test_a_budget_of_tokens_is_never_exceeded(server: Served, sent: list[Any]) -> None:
    """What is under way is reserved, what it did not use is given back, and a training step is not cut in two."""
    async with speaking(server, add_key(server.store, key("team", tokens_a_day=30))) as team:
        sampler, model = await team.new_sampler(), await team.new_run()
        for seq_id in range(3):
            await team.answer("asample", sample(sampler, seq_id))
        await team.answer("asample", sample(sampler, 2))  # a repeat takes nothing
        reply = await team.post("asample", sample(sampler, 3))
        assert "has used 0 tokens today and 30 are reserved; with 10 more that is over the 30 a day" in refused(
            reply, 429
        )
        assert "the next day begins at 2024-10-05 00:00 UTC" in reply.text
        assert reply.headers["Retry-After"] == "60"
        done(team, f"{sampler}/0", sampled=2)
        failed = team.hub.samples.find(f"{sampler}/1")
        assert failed is not None
        team.hub.take(SampleFailed(failed.request_id, failed.run, "", "user", gone=False))
        await team.answer("asample", sample(sampler, 3))
        assert (await team.post("asample", sample(sampler, 4))).status_code == 429
        assert (await team.train(forward_backward_body(model, 1))).status_code == 200  # two tokens of text
        assert (await team.train(forward_backward_body(model, 1))).status_code == 200
        for seq_id in (2, 3):
            assert (await team.train(forward_backward_body(model, seq_id))).status_code == 200
        assert (await team.train(forward_backward_body(model, 4))).status_code == 429
        await team.step(model, 4)
        assert "may use 36 tokens" in await team.refusal("asample", sample(sampler, 9, tokens=16, count=2))
        assert [message.request_id for message in sent] == [f"{sampler}/{seq_id}" for seq_id in range(4)]


async def test_an_operation_over_the_budget_of_a_whole_day_leaves_no_hole_in_the_sequence(server: Served) -> None:
    async with speaking(server, add_key(server.store, key("team", tokens_a_day=1))) as team:
        model = await team.new_run()
        assert (await team.train(forward_backward_body(model, 1))).status_code == 200
        await team.step(model, 2)
        assert [command.kind for command in team.queued()] == ["rejected", "optim_step"]
        assert b"may use 2 tokens, and key 'team' has 1 a day" in team.store.payload(team.queued()[0])


async def test_a_budget_begins_anew_with_the_day_and_outlives_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as server:
        text = add_key(server.store, key("team", gpu_seconds_a_day=10.0))
        add_usage(server.store, {("team", "tiny", "s"): Used(gpu_seconds=10.0)}, "a", 1)
        add_usage(server.store, {("other", "tiny", "s"): Used(gpu_seconds=99.0)}, "a", 2)
    async with served(tmp_path) as server, speaking(server, text) as team:
        sampler, body = await team.new_sampler(), sample("", 0)
        over = await team.refusal("asample", body | {"sampling_session_id": sampler}, 429)
        assert "has used 10.0 GPU-seconds today, and key 'team' has 10 a day" in over
        monkeypatch.setattr(time, "time", lambda: NOON + DAY_S)
        # 503: there is no engine, so it has passed
        assert (await team.post("asample", body | {"sampling_session_id": sampler})).status_code == 503


async def test_what_is_cancelled_counts_against_the_gpu_seconds_of_a_day(
    server: Served, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_FLUSH_S", 0.0)
    async with speaking(server, add_key(server.store, key("team", gpu_seconds_a_day=10.0))) as team:
        sampler = await team.new_sampler()
        for seq_id in range(2):
            await team.answer("asample", sample(sampler, seq_id))
            await team.answer("cancel_future", {"request_id": f"{sampler}/{seq_id}"})
            server.hub.take(SampleStopped("team", "tiny", sampler.partition(":")[0], 5.0))
        over = await team.refusal("asample", sample(sampler, 2), 429)
        assert "has used 10.0 GPU-seconds today" in over
    await server.hub.budgets.flush()
    assert [each.used for each in used_between(server.store, NOON, NOON + 3600)] == [Used(gpu_seconds=10.0)]


async def test_what_samples_have_used_counts_once_though_nobody_knows_whether_it_was_written(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when PostgreSQL is away for long in the middle of a commit, and samples go on."""
    owner, failing = ("team", "tiny", "s"), iter([True, True])

    def unheard(*arguments: Any) -> None:
        add_usage(*arguments)
        if next(failing, False):
            raise StoreUnavailableError("the connection broke")

    monkeypatch.setattr(budgets, "add_usage", unheard)
    for _ in range(2):
        server.hub.budgets.add(owner, Used(sampled_tokens=3))
        with pytest.raises(StoreUnavailableError):
            await server.hub.budgets.flush()
    await server.hub.budgets.flush()
    assert [each.used for each in used_between(server.store, NOON, NOON + 3600)] == [Used(sampled_tokens=6)]


async def test_a_tenant_has_so_many_sequences_operations_and_models_at_a_time(server: Served, sent: list[Any]) -> None:
    text = add_key(server.store, key("team", max_parallel=3, max_models=2))
    async with speaking(server, text) as team, speaking(server, add_key(server.store, key("b", "team"))) as mate:
        sampler, session = await team.new_sampler(), await team.new_session()
        await mate.answer("asample", sample(sampler, 0, count=2))
        assert "2 sequences of tenant 'team'" in await team.refusal("asample", sample(sampler, 1, count=2), 429)
        await team.answer("asample", sample(sampler, 1))
        done(team, f"{sampler}/0", sampled=1)
        await team.answer("asample", sample(sampler, 2, count=2))
        assert "num_samples=4 is more than" in await team.refusal("asample", sample(sampler, 3, count=4))
        models = [await team.new_run(session, model_seq_id=number) for number in range(2)]
        assert await team.new_model(session, model_seq_id=1) == models[1]
        body = {"session_id": session, "model_seq_id": 2, "base_model": "tiny", "lora_config": {"rank": 8}}
        assert "2 models in training, and key 'team' allows 2" in await team.refusal("create_model", body, 429)
        for seq_id in (2, 3, 4, 5, 1):  # the SDK sends the first part of a call last, and the others wait for it
            await team.step(models[0], seq_id)
        step = {"model_id": models[1], "seq_id": 1, "adam_params": {}}
        assert "5 operations of tenant 'team'" in await team.refusal("optim_step", step, 429)
        for seq_id in (1, 2, 3):
            team.end(f"{models[0]}/{seq_id}")
        await team.step(models[1], 1)


async def test_withholding_the_first_operation_lets_in_the_parts_of_one_call_and_no_more(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued_operations, "_PARTS", 4)
    async with speaking(server, add_key(server.store, key("team", max_parallel=3))) as team:
        model, other = await team.new_run(), await team.new_run()
        for seq_id in range(2, 9):
            await team.step(model, seq_id)
        for more, seq_id in ((model, 9), (other, 2), (other, 1)):
            step = {"model_id": more, "seq_id": seq_id, "adam_params": {}}
            assert "7 operations of tenant 'team' are unfinished" in await team.refusal("optim_step", step, 429)
        await team.step(model, 1)


async def test_a_key_names_base_models_and_limits_storage(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    texts = [add_key(server.store, key("a", "team", models=["other"], storage_bytes=20)), ""]
    texts[1] = add_key(server.store, key("b", "team"))
    async with speaking(server, texts[0]) as limited, speaking(server, texts[1]) as mate:
        model = await mate.new_run()
        session = model.partition(":")[0]
        body = {"session_id": session, "model_seq_id": 5, "base_model": "tiny"}
        for path, sent in (
            ("create_model", body),
            ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}),
            ("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}),
        ):
            assert "key 'a' allows the base models other, and not 'tiny'" in await limited.refusal(path, sent, 403)
        assert (await limited.shown("get_server_capabilities"))["supported_models"] == []
    told = [each for each in caplog.messages if each.startswith("key ")]
    assert told == ["key 'a' allows the base models other, and this server serves tiny"]
    text = add_key(server.store, key("c", "team", storage_bytes=20))
    async with speaking(server, text) as team:
        save = {"model_id": model, "path": "x"}
        for kind in ("weights", "sampler_weights"):
            await team.answer("save_weights", save | {"seq_id": 1})
            team.save(f"tinker://{model}/{kind}/kept", tenant="team")
        await team.answer("save_weights", save | {"seq_id": 1})  # a repeat
        assert "stores 20 bytes of checkpoints, and key 'c' allows 20" in await team.refusal(
            "save_weights", save | {"seq_id": 2}, 429
        )
        await team.step(model, 2)


async def test_usage_is_what_the_log_and_the_samples_add_up_to(
    server: Served, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation counts once, however often its outcome is recorded, and by tenant, base model and session."""
    monkeypatch.setattr(budgets, "_FLUSH_S", 0.0)
    expected: dict[tuple[str, str, str], Used] = {}
    for name in ("alice", "bob"):
        async with speaking(server, add_key(server.store, key(name))) as client:
            for _ in range(2):
                session = await client.new_session()
                model, sampler = await client.new_run(session), await client.new_sampler(session_id=session)
                for seq_id in (1, 2, 3):
                    await client.step(model, seq_id)
                    error = None if seq_id < 3 else "it failed"
                    tokens = seq_id if error is None else 0
                    outcome = Outcome(f"{model}/{seq_id}", b"{}", "json", error, None, None, tokens, 0.25 * seq_id)
                    for _ in range(2):
                        client.finish(outcome)
                for seq_id in range(2):
                    await client.answer("asample", sample(sampler, seq_id))
                    done(client, f"{sampler}/{seq_id}", sampled=seq_id + 1)
                expected[name, "tiny", session] = Used(3, 2, 6, 3, 1.5 + 1.0)
    await server.hub.budgets.flush()
    found = used_between(server.store, NOON, NOON + 3600)
    assert {(each.tenant, each.base_model, each.session_id): each.used for each in found} == expected
    with server.store.reading() as connection:
        logged = connection.exec_driver_sql("SELECT SUM(tokens), SUM(gpu_seconds) FROM commands").one()
    assert logged == (sum(used.trained_tokens for used in expected.values()), 4 * 1.5)


async def test_the_api_answers_what_was_used_stored_and_saved(server: Served) -> None:
    """Of its own tenant; of all to an admin."""
    window = "billing/usage/events?starting_on=2024-10-04T00:00:00Z&ending_before=2024-10-05T00:00:00%2B00:00"
    keys = [key("alice", project_id="vision"), key("bob"), key("root", role="admin")]
    texts = [add_key(server.store, each) for each in keys]
    async with (
        speaking(server, texts[0]) as alice,
        speaking(server, texts[1]) as bob,
        speaking(server, texts[2]) as root,
    ):
        session = await alice.new_session(user_metadata={"run": "7"})
        model = await alice.new_run(session)
        await alice.answer("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        row = server.save(f"tinker://{model}/weights/a", tenant="alice")
        resolved = {"directory": row.directory}
        server.finish(Outcome(f"{model}/1", b"{}", "json", None, None, resolved, tokens=7, gpu_seconds=2.0))
        await server.hub.lifetimes.note_storage()
        events = await alice.shown(window)
        kinds = [event["event_info"] for event in events["data"]]
        assert kinds == [{"type": "training", "token_count": 7}, {"type": "storage", "gigabyte_hours": 1e-8}]
        training = events["data"][0]
        assert (training["project_id"], training["user_name"], training["session_id"]) == ("vision", "alice", session)
        assert training["bucket_start"] == "2024-10-04T12:00:00+00:00"
        assert events["sessions"] == {session: {"user_metadata": {"run": "7"}}}
        stored = (await alice.shown("billing/usage/checkpoints/current?project_id=vision"))["data"]
        assert [(each["checkpoint_count"], each["size_bytes"]) for each in stored] == [(1, 10)]
        (entry,) = (await alice.shown("audit?event_type=checkpoints&day=2024-10-04"))["entries"]
        assert (entry["event"], entry["tinker_path"]) == ("checkpoint_write", f"tinker://{model}/weights/a")
        for path, name in (
            (window, "data"),
            ("billing/usage/checkpoints/current", "data"),
            ("audit?day=2024-10-04", "entries"),
        ):
            assert (await bob.shown(path))[name] == []
            assert (await root.shown(path))[name] == (await alice.shown(path))[name] != []
        assert (await alice.shown("audit?day=2024-10-03"))["entries"] == []
        assert "up to 14 days" in refused(await alice.get(window.replace("2024-10-05", "2024-11-05")))


async def test_what_an_engine_has_left_stays_reserved_and_what_ended_unheard_is_counted(server: Served) -> None:
    """Also by a server that has just started."""
    async with speaking(server, add_key(server.store, key("team", tokens_a_day=30))) as team:
        model = await team.new_run()
        for seq_id in (1, 2):
            await team.answer("optim_step", {"adam_params": {}, "model_id": model, "seq_id": seq_id})
        ended = Outcome(f"{model}/1", b"", "protobuf", None, None, tokens=12)
        server.store.record([Outcome(f"{model}/0", b"{}", "json", None, None), ended])
        for hub_budgets in (server.hub.budgets, budgets.Budgets(server.hub.store)):
            hub_budgets.replace(server.store.unfinished())
            assert hub_budgets._reserved.keys() == {f"{model}/2"}
            await hub_budgets._begin_day()
            hub_budgets.release(f"{model}/2", Used(trained_tokens=10))
            assert hub_budgets._today["team"].tokens == 22
